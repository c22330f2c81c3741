"""Fixtures that tests of quantising share."""

from __future__ import annotations

import pytest

from marlinq.operations.quantize import estimate


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it writes text, a run measures for a fifth of a second how fast products are, which for a toy is
    a good part of its time."""
    monkeypatch.setattr(estimate, "_PROBE_SECONDS", 0.02)
