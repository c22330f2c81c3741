"""A token of a Mamba-2 mixer on the emulation."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, Memory, apart
from marlinq.kernels.step import MambaWeights, MambaWorkspace, Prepared, mamba
from tests.emulation.step import DTYPES, constants, given, poisoned, results, start, strided
from tests.kernels.step_problems import BOUND, expected_mamba, random, relative_error
from tests.testing.pairs import in_turn


class Case(NamedTuple):
    """Sizes of a mixer, and the lengths of its rows; ``norm`` is ``first``, ``behind`` or ``none``, and
    ``enough`` the blocks from which on they are not made smaller."""

    heads: int
    groups: int
    keys: int
    size: int
    taps: int
    norm: str
    norm_width: int
    lengths: tuple[int, ...]
    least: float = 0.0
    most: float = math.inf
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    enough: int = 96


# Blocks of 16, 64 and 32 columns of the state: the least where there are few blocks.
MIXERS = [
    Case(4, 2, 16, 32, 4, "behind", 64, (0, 5)),
    Case(3, 1, 30, 16, 4, "first", 48, (7,), 0.5, 0.9, (1.0, 1.0, 1.5)),
    Case(2, 1, 70, 64, 2, "none", 128, (1, 0, 3), scales=(0.5, 2.0, 0.75)),
    Case(4, 2, 128, 64, 4, "behind", 128, (9,), enough=1),
    Case(2, 1, 40, 96, 4, "first", 192, (2,), enough=1),
]


def mixer(case: Case, dtype: torch.dtype) -> tuple[MambaWeights, dict[str, Tensor]]:
    batch, width = len(case.lengths), case.heads * case.size
    channels = width + 2 * case.groups * case.keys
    weights = MambaWeights(
        weight=apart(torch.randn(channels, case.taps)),
        bias=apart(torch.randn(channels)),
        rates=apart(-torch.rand(case.heads)),
        step_bias=apart(torch.randn(case.heads)),
        skip=apart(torch.randn(case.heads)),
        norm=None if case.norm == "none" else apart(torch.randn(width)),
        norm_width=case.norm_width,
        norm_first=case.norm == "first",
        eps=0.25,  # large enough to be missed
        heads=case.heads,
        head_dim=case.size,
        groups=case.groups,
        state_dim=case.keys,
        least_step=case.least,
        most_step=case.most,
        gate_scale=case.scales[0],
        step_scale=case.scales[1],
        result_scale=case.scales[2],
    )
    columns = width + channels + case.heads
    workspace = MambaWorkspace.of([weights], batch, torch.device("cpu"))
    tensors = {
        "x": strided(batch, columns, columns + 5, dtype),
        "out": poisoned(batch, width, dtype=dtype),
        "ring": apart(random(batch, case.taps, channels, dtype=dtype)),
        "state": apart(torch.randn(batch, case.heads, case.keys, case.size)),
        "lengths": apart(torch.tensor(case.lengths, dtype=torch.int32)),
        "results": apart(workspace.results.fill_(torch.nan)),
        "squares": apart(workspace.squares.fill_(torch.nan)),
        "counters": apart(workspace.counters),
    }
    return weights, tensors


def prepare(weights: MambaWeights, tensors: dict[str, Tensor]) -> Prepared:
    workspace = MambaWorkspace(*(tensors[name] for name in ("results", "squares", "counters")))
    order = ("x", "out", "ring", "state", "lengths")
    return mamba(*(tensors[name] for name in order), weights, workspace)


def memory(weights: MambaWeights, tensors: dict[str, Tensor]) -> list[Memory]:
    names = ("weight", "bias", "rates", "step_bias", "skip", "norm")
    return [
        *given(x=tensors["x"]),
        *constants(lengths=tensors["lengths"], **{name: getattr(weights, name) for name in names}),
        *(Memory(name, tensors[name], writable=True, holds_values=True) for name in ("ring", "state")),
        *results(**{name: tensors[name] for name in ("out", "results", "squares")}),
        Memory("counters", tensors["counters"], writable=True, after_previous=True, flags=True),
    ]


@pytest.mark.parametrize(("case", "dtype"), in_turn(MIXERS, DTYPES), ids=str)
def test_mamba(builder: Builder, case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(case.keys)
    # The package has the function under the name of its module.
    monkeypatch.setattr(sys.modules[mamba.__module__], "_ENOUGH_BLOCKS", case.enough)
    weights, tensors = mixer(case, dtype)
    ring, state = tensors["ring"].clone(), tensors["state"].clone()
    found: list[Tensor] = []
    for resident in (1, 3):
        tensors["ring"].copy_(ring)
        tensors["state"].copy_(state)
        tensors["out"].fill_(torch.nan)
        prepared = prepare(weights, tensors)
        start(builder, prepared, memory(weights, tensors), seed=case.keys + resident, resident=resident)
        assert not tensors["counters"].any()
        found.append(tensors["out"].clone())
    out, last, kept = expected_mamba(tensors["x"], ring, state, tensors["lengths"], weights)
    assert relative_error(found[0], out) < BOUND[dtype]
    # Values, keys and queries are rounded behind the convolution, on both sides.
    assert relative_error(tensors["state"], last) < BOUND[dtype]
    assert torch.equal(tensors["ring"], kept)
    assert torch.equal(found[0], found[1]), "which block comes last shows in the bits"


FAULTS = [Planted(site) for site in ("mamba_waits", "mamba_convolved", "mamba_summed", "mamba_arrived")]


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.site)
def test_a_planted_fault_is_reported(builder: Builder, planted: Planted) -> None:
    torch.manual_seed(0)
    weights, tensors = mixer(MIXERS[0], torch.float16)
    with pytest.raises(KernelFault, match=r"griddepcontrol\.wait|without waiting for it|still be reading"):
        start(builder, prepare(weights, tensors), memory(weights, tensors), planted=planted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": (1, 100)}, "out: "),
        ({"x": (2, 20)}, "x, out: "),
        ({"ring": (2, 3, 192)}, "ring: expected"),
        ({"state": (2, 4, 32, 16)}, "state: expected float32"),
    ],
)
def test_other_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    weights, tensors = mixer(MIXERS[0], torch.float16)
    tensors |= {name: torch.zeros(shape, dtype=tensors[name].dtype) for name, shape in changes.items()}
    with pytest.raises(ValueError, match=message):
        prepare(weights, tensors)
