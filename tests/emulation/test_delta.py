"""New tokens of a gated delta net on the emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, Memory, apart
from marlinq.kernels.step import DeltaWeights, Prepared, RateWeights, delta
from tests.emulation.step import DTYPES, constants, given, poisoned, results, start, strided
from tests.kernels.step_problems import BOUND, expected_delta, expected_delta_run, random, relative_error
from tests.testing.pairs import in_turn

# key heads, value heads, key channels, value channels, taps, turns, lengths, channels of the input of betas
# and steps (0: they are given)
NETS = [
    (1, 3, 16, 32, 4, 1, (0, 5), 0),
    (2, 4, 30, 64, 4, 2, (7,), 0),
    (2, 2, 8, 96, 2, 1, (1, 0, 3), 0),
    # More vectors than threads of a half, and turns.
    (1, 2, 16, 32, 4, 1, (0, 5), 1032),
    (2, 4, 16, 32, 2, 2, (7,), 40),
    # The widest values.
    (1, 1, 8, 192, 2, 1, (3,), 0),
]

# The same with decays by channel.
CHANNEL_NETS = [
    (2, 2, 30, 64, 4, 1, (0, 5), 0),
    (1, 1, 16, 32, 4, 1, (7,), 520),
]


def rate_weights(heads: int, turns: int, inner: int, dtype: torch.dtype, *, by_channel: bool) -> RateWeights:
    """Two weights; with several turns one that holds both; and that of betas twice with decays by channel."""
    rows = 2 * heads if turns > 1 else heads
    betas = apart(random(rows, inner, dtype=dtype, size=inner**-0.5))
    if by_channel:
        return RateWeights(betas, betas)
    if turns > 1:
        return RateWeights(betas, betas[heads // turns :])
    return RateWeights(betas, apart(random(rows, inner, dtype=dtype, size=inner**-0.5)))


def net(
    case: tuple[Any, ...], dtype: torch.dtype, tokens: int = 1, *, by_channel: bool = False
) -> tuple[DeltaWeights, dict[str, torch.Tensor]]:
    key_heads, heads, key_dim, size, taps, turns, lengths, inner = case
    batch, channels = len(lengths), 2 * key_heads * key_dim + heads * size
    rows, slots = batch * tokens, taps + tokens - 1
    weights = DeltaWeights(
        weight=apart(torch.randn(channels, taps)),
        decay=apart(torch.randn(heads)),
        step_bias=apart(torch.randn(heads * (key_dim if by_channel else 1))),
        norm=apart(random(size, dtype=dtype)),
        eps=0.01,
        key_heads=key_heads,
        value_heads=heads,
        key_dim=key_dim,
        turns=turns,
        rates=rate_weights(heads, turns, inner, dtype, by_channel=by_channel) if inner else None,
        beta_scale=2.0 if size == 192 else 1.0,
        by_channel=by_channel,
    )
    columns = channels + (0 if by_channel else heads * size)
    many = inner or (heads if by_channel else 2 * heads)
    tensors = {
        "x": strided(rows, columns, -(-columns // 8) * 8 + 8, dtype),
        "rates": strided(rows, many, many + 8, dtype),
        "ring": apart(random(batch, slots, channels, dtype=dtype)),
        "state": apart(torch.randn(batch, heads, key_dim, size)),
        "lengths": apart(torch.tensor(lengths, dtype=torch.int32)),
        "out": poisoned(rows, heads * size, dtype=dtype),
    }
    if by_channel:
        tensors["steps"] = strided(rows, heads * key_dim, heads * key_dim + 8, dtype)
        tensors["gates"] = strided(rows, heads * size, heads * size + 16, dtype)
    return weights, tensors


def projections(weights: DeltaWeights) -> dict[str, torch.Tensor]:
    if weights.rates is None:
        return {}
    betas, steps = weights.rates.betas, weights.rates.steps
    return {"betas": betas, **({"steps": steps} if weights.turns == 1 and steps is not betas else {})}


def memory(weights: DeltaWeights, tensors: dict[str, torch.Tensor]) -> list[Memory]:
    return [
        *given(**{name: tensors[name] for name in ("x", "rates", "steps", "gates") if name in tensors}),
        *constants(
            lengths=tensors["lengths"],
            weight=weights.weight,
            decay=weights.decay,
            step_bias=weights.step_bias,
            norm=weights.norm,
            **projections(weights),
        ),
        Memory("ring", tensors["ring"], writable=True, holds_values=True),
        Memory("state", tensors["state"], writable=True, holds_values=True),
        *results(out=tensors["out"]),
        *([Memory("states", tensors["states"], writable=True)] if "states" in tensors else []),
    ]


def second(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    return (tensors["steps"], tensors["gates"]) if "steps" in tensors else None


ALL = [*((case, False) for case in NETS), *((case, True) for case in CHANNEL_NETS)]


@pytest.mark.parametrize(("chosen", "dtype"), in_turn(ALL, DTYPES), ids=str)
def test_delta(builder: Builder, chosen: tuple[tuple[Any, ...], bool], dtype: torch.dtype) -> None:
    case, by_channel = chosen
    torch.manual_seed(case[2])
    weights, tensors = net(case, dtype, by_channel=by_channel)
    ring, state = tensors["ring"].clone(), tensors["state"].clone()
    order = ("x", "rates", "out", "ring", "state", "lengths")
    prepared = delta(*(tensors[name] for name in order), weights, second=second(tensors))
    start(builder, prepared, memory(weights, tensors), seed=case[2])
    out, last, kept = expected_delta(
        tensors["x"], tensors["rates"], ring, state, tensors["lengths"], weights, second(tensors)
    )
    assert relative_error(tensors["out"], out) < BOUND[dtype]
    # Queries, keys and values are rounded behind the convolution, on both sides.
    assert relative_error(tensors["state"], last) < BOUND[dtype]
    assert torch.equal(tensors["ring"], kept)


def run_of_tokens(
    case: tuple[Any, ...], dtype: torch.dtype, *, by_channel: bool
) -> tuple[DeltaWeights, dict[str, torch.Tensor], Prepared]:
    """Four neighbouring tokens of one sequence, whose states lie among others."""
    weights, tensors = net(case, dtype, tokens=4, by_channel=by_channel)
    tensors["states"] = torch.full((4, 2, *tensors["state"].shape[1:]), torch.nan)
    order = ("x", "rates", "out", "ring", "state", "lengths")
    given = [tensors[name] for name in order]
    prepared = delta(*given, weights, states=tensors["states"][:, 1], second=second(tensors))
    return weights, tensors, prepared


@pytest.mark.parametrize(
    ("by_channel", "case", "dtype"),
    [
        (False, NETS[4], DTYPES[0]),
        (False, (*NETS[0][:-2], (1,), 0), DTYPES[1]),
        (True, CHANNEL_NETS[1], DTYPES[1]),
    ],
)
def test_neighbouring_tokens(
    builder: Builder, by_channel: bool, case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    """The state stays, and the states behind the tokens lie where they were asked for."""
    torch.manual_seed(case[2])
    weights, tensors, prepared = run_of_tokens(case, dtype, by_channel=by_channel)
    ring, state = tensors["ring"].clone(), tensors["state"].clone()
    start(builder, prepared, memory(weights, tensors), seed=case[2])
    given = (tensors["x"], tensors["rates"], ring, state, tensors["lengths"], weights, second(tensors))
    out, states, kept = expected_delta_run(*given)
    assert relative_error(tensors["out"], out) < BOUND[dtype]
    assert relative_error(tensors["states"][:, 1], states) < BOUND[dtype]
    assert tensors["states"][:, 0].isnan().all()
    assert torch.equal(tensors["state"], state)
    assert torch.equal(tensors["ring"], kept)


FAULTS = [Planted("delta_waits"), Planted("convolved_there"), Planted("answers_there")]


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.site)
def test_a_planted_fault_is_reported(builder: Builder, planted: Planted) -> None:
    torch.manual_seed(0)
    weights, tensors = net(NETS[0], torch.float16)
    order = ("x", "rates", "out", "ring", "state", "lengths")
    prepared = delta(*(tensors[name] for name in order), weights)
    with pytest.raises(KernelFault, match=r"griddepcontrol\.wait|without waiting for it|still be reading"):
        start(builder, prepared, memory(weights, tensors), planted=planted)
