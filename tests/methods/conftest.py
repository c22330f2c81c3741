"""Layers to quantise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from tests.testing import layers

MakeLayer = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def make_layer() -> MakeLayer:
    """:func:`tests.testing.layers.make_layer`."""
    return layers.make_layer
