"""The activations between two products on the emulation."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from emulation.build import Builder
from marlinq.kernels.step import activate
from tests.emulation.step import DTYPES, given, results, start, strided
from tests.kernels.step_problems import BOUND, expected_activation, relative_error
from tests.testing.pairs import every_pair

NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@pytest.mark.parametrize(
    ("name", "arrangement", "dtype"),
    every_pair(
        list(
            product(
                ("silu", "gelu", "gelu_tanh", "relu", "relu2"), ("tiles", "halves", "apart", "plain"), DTYPES
            )
        )
    ),
)
def test_activations(builder: Builder, name: str, arrangement: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    m, columns = 5, 192 if arrangement == "tiles" else 136
    parts = 1 if arrangement in ("plain", "apart") else 2
    x = strided(m, parts * columns, parts * columns + 64, dtype)
    x[0, ::7] *= 40  # where exponentials overflow
    out = strided(m, columns, columns + 8, dtype).fill_(torch.nan)
    other = strided(m, columns, columns + 16, dtype) if arrangement == "apart" else None
    prepared = activate(x, out, name, arrangement, 0.75, other)
    start(builder, prepared, [*given(x=x, up=other), *results(out=out)])
    if arrangement == "tiles":
        gate, up = x.double().unflatten(1, (-1, 2, 64)).unbind(2)
        gate, up = gate.flatten(1), up.flatten(1)
    else:
        gate, up = x.double()[:, :columns], (x if other is None else other).double()[:, -columns:]
    expected = expected_activation(name, 0.75 * gate)
    if arrangement != "plain":
        expected = expected * up
    assert relative_error(out, expected) < BOUND[dtype]
