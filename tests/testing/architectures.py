"""Which architectures `make test` compiles kernels for; `make test-all` compiles them for all."""

from __future__ import annotations

from marlinq.kernels import ARCHITECTURES
from tests.testing.pairs import slow_but

MAIN = "sm_90a"
"""The architecture that all kernels run on."""
QUICK = ("sm_80", MAIN, "sm_120a")
"""Architectures below, at and above compute capability 9.0, the only one that kernel sources test for."""
QUICK_FIRST = slow_but(ARCHITECTURES, *QUICK)
"""Test parameters: all architectures; those outside :data:`QUICK` are marked slow."""
MAIN_FIRST = slow_but(ARCHITECTURES, MAIN)
"""Test parameters: all architectures; all except :data:`MAIN` are marked slow."""
