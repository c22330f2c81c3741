"""Which kernel and configuration run a product, and why: decided without a GPU."""

from __future__ import annotations

# Importing the package registers the kernels that decisions choose from.
import marlinq.kernels.variants  # noqa: F401
