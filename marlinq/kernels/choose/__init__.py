"""Which variant runs a problem, and why: decided without a GPU."""

from __future__ import annotations

# Registers the kernels that decisions choose from.
import marlinq.kernels.variants  # noqa: F401
