"""The layouts of integers, by the names of their formats: what tests of integer weights go through."""

from __future__ import annotations

from marlinq.formats import LAYOUTS

INTEGERS = {name: LAYOUTS[name] for name in ("gptq", "gptq-v2", "awq", "marlin", "compressed-tensors")}
