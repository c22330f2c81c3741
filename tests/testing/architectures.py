"""Which architectures `make test` compiles kernels for; `make test-all` compiles them for all."""

from __future__ import annotations

import pytest

from marlinq.kernels import ARCHITECTURES

# Without clusters of blocks; the one that kernels are written for; clusters without wgmma and with little
# shared memory. Every condition on the architecture in the sources tells some of these three apart.
QUICK = ("sm_80", "sm_90a", "sm_120a")
EVERY_ARCHITECTURE = [
    pytest.param(architecture, marks=[] if architecture in QUICK else pytest.mark.slow)
    for architecture in ARCHITECTURES
]
"""Parameters: all architectures, those outside of :data:`QUICK` marked slow."""
