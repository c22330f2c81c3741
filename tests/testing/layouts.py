"""The layouts of integer weights by the names of their formats, as parameters of tests."""

from __future__ import annotations

from marlinq.formats import LAYOUTS

INTEGERS = {name: LAYOUTS[name] for name in ("gptq", "gptq-v2", "awq", "marlin", "compressed-tensors")}
