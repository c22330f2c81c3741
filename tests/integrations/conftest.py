"""Every test here runs with marlinq registered in transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import marlinq


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    marlinq.register()
    yield
    marlinq.unregister()
