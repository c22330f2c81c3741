"""Which architectures `make test` compiles kernels for; `make test-all` compiles them for all."""

from __future__ import annotations

from marlinq.kernels import ARCHITECTURES
from tests.testing.pairs import slow_but

MAIN = "sm_90a"
"""The architecture that kernels are written for: all of them run on it."""
QUICK = ("sm_80", MAIN, "sm_120a")
"""Architectures before, of and after compute capability 9.0, the only one that sources ask about."""
QUICK_FIRST = slow_but(ARCHITECTURES, *QUICK)
"""Parameters: all architectures, those outside of :data:`QUICK` marked slow."""
MAIN_FIRST = slow_but(ARCHITECTURES, MAIN)
"""Parameters: all architectures, all but :data:`MAIN` marked slow."""
