"""2:4 pruning inside GPTQ's sweep against SparseGPT's algorithm 1, and by magnitude."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.scheme import Scheme
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import QuantizedWeight
from marlinq.methods import METHODS
from marlinq.methods.factor import channel_order
from marlinq.methods.gptq import GPTQOptions, solve_gptq
from marlinq.methods.rtn import round_to_nearest
from marlinq.methods.tuning import TunableWeight
from tests.testing.layers import make_layer
from tests.testing.schemes import scheme

PLAIN = GPTQOptions(clip_search=False, act_order="none")


def sparse(group_size: int, *, symmetric: bool = True, bits: int = 4) -> Scheme:
    return scheme(group_size, symmetric=symmetric, bits=bits, sparsity=TWO_OF_FOUR)


def is_sparse(q: QuantizedWeight) -> bool:
    """Counted in plain Python, with the zeros of every group."""
    values = q.dequantize().tolist()
    return all(
        sum(value != 0 for value in row[start : start + 4]) <= 2
        for row in values
        for start in range(0, len(row), 4)
    )


def sparse_gpt(weight: Tensor, hessian: Tensor, g: int, damp: float) -> tuple[Tensor, Tensor]:
    """SparseGPT's algorithm 1 with rounding, on the inverse's Cholesky factor, in float64: codes [K, N], and
    the smallest relative gap between a score that is kept and one that is not, for each output channel.

    A group's scale spans what would be kept of it if the masks were chosen at its first channel.
    """
    w = weight.to(torch.float64).clone()
    n, k = w.shape
    h = hessian.to(torch.float64) + damp * hessian.double().diagonal().mean() * torch.eye(k).double()
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    codes, kept = torch.empty(k, n, dtype=torch.int64), torch.empty(n, k, dtype=torch.bool)
    gaps = torch.full((n,), torch.inf, dtype=torch.float64)

    def choose(part: slice) -> tuple[Tensor, Tensor]:
        scores = (w[:, part].square() / u.diagonal()[part].square()).reshape(n, -1, 4)
        ordered = scores.sort(dim=2, descending=True)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, ordered.indices[:, :, :2], True)
        gap = (ordered.values[:, :, 1] / ordered.values[:, :, 2]).amin(dim=1)
        return mask.reshape(n, -1), gap

    for column in range(k):
        if column % g == 0:
            group = slice(column, column + g)
            mask, gap = choose(group)
            s = (2 * (w[:, group] * mask).abs().amax(dim=1) / 15).half().double()
            gaps = torch.minimum(gaps, gap)
        if column % 4 == 0:
            span = slice(column, column + 4)
            kept[:, span], gap = choose(span)
            gaps = torch.minimum(gaps, gap)
        c = torch.clamp(torch.round(w[:, column] / s) + 8, 0, 15).where(kept[:, column], 8.0)
        error = (w[:, column] - (c - 8) * s) / u[column, column]
        w[:, column:] -= error[:, None] * u[column, column:]
        codes[column] = c.long()
    return codes, gaps


@pytest.mark.parametrize("group_size", [32, -1])
def test_the_sweep_is_sparsegpts(group_size: int) -> None:
    weight, hessian = make_layer(48, 128)
    q, _ = solve_gptq(weight, hessian, sparse(group_size), PLAIN)
    expected, gaps = sparse_gpt(weight, hessian, 128 if group_size == -1 else group_size, 0.01)
    different = (q.codes.long() != expected).any(dim=0)
    # float32 against float64: scores that nearly tie may change places; of others one channel may follow a
    # rounding that nearly ties.
    assert int((different & (gaps > 1 + 1e-4)).sum()) <= 1
    assert int(different.sum()) <= 5


@pytest.mark.parametrize(("group_size", "symmetric", "bits"), [(32, True, 4), (64, False, 4), (-1, True, 8)])
def test_every_span_keeps_two_and_the_sweep_makes_up_for_the_others(
    group_size: int, symmetric: bool, bits: int
) -> None:
    weight, hessian = make_layer(24, 192)  # 192 is halved to spans of 96, 48, 24, 12: no power of two
    wanted = sparse(group_size, symmetric=symmetric, bits=bits)
    by_magnitude = round_to_nearest(weight, wanted)
    assert is_sparse(by_magnitude)
    rounded = _loss(weight, by_magnitude.dequantize(), hessian)
    for options in (PLAIN, GPTQOptions(act_order="none"), GPTQOptions()):
        q, report = solve_gptq(weight, hessian, wanted, options)
        assert is_sparse(q)
        assert q.scheme == wanted
        assert TWO_OF_FOUR.refusal(q.used()) is None
        loss = _loss(weight, q.dequantize(), hessian)
        assert loss < 0.75 * rounded
        assert report.relative_error == pytest.approx(loss, rel=1e-3)


def test_searched_scales_fit_what_is_kept() -> None:
    weight, hessian = make_layer(32, 256)
    spanned, searched = (
        solve_gptq(weight, hessian, sparse(64), replace(PLAIN, clip_search=search))[1].relative_error
        for search in (False, True)
    )
    assert searched < spanned


def test_magnitudes_decide_without_a_hessian() -> None:
    weight = torch.tensor(
        [[4.0, -3.0, 2.0, 1.0, 0.0, 0.0, -5.0, 5.0], [1.0, 1.0, 1.0, 1.0, 0.0, 7.0, 0.0, 0.0]]
    )
    q = round_to_nearest(weight, sparse(-1))
    kept = [
        [True, True, False, False, False, False, True, True],
        [True, True] + [False] * 3 + [True] + [False] * 2,
    ]
    assert q.used().t().tolist() == kept


def test_of_equal_scores_the_lower_channels_are_kept() -> None:
    for chosen in combinations(range(4), 2):
        scores = torch.zeros(4, 1)
        scores[list(chosen)] = 1.0
        assert TWO_OF_FOUR.largest(scores).flatten().nonzero().flatten().tolist() == list(chosen)
    assert TWO_OF_FOUR.largest(torch.zeros(8, 3)).int().tolist() == [[1] * 3, [1] * 3, [0] * 3, [0] * 3] * 2


def test_dense_codes_are_named() -> None:
    used = torch.zeros(12, 5, dtype=torch.bool)
    used[[4, 5, 7], 3] = True
    reason = TWO_OF_FOUR.refusal(used) or ""
    assert "1 of 15 spans" in reason
    assert "output channel 3 at input channel 4" in reason
    used[5, 3] = False
    assert TWO_OF_FOUR.refusal(used) is None
    assert "multiple of 4" in (TWO_OF_FOUR.refusal(used[:10]) or "")


def test_spans_and_groups_stay_whole_in_activation_order() -> None:
    _, hessian = make_layer(1, 64)
    order = channel_order(hessian, 32, "static", 4)
    assert sorted(order.tolist()) == list(range(64))
    for size in (4, 32):
        assert all(len({c // size for c in run}) == 1 for run in order.reshape(-1, size).tolist())
    means = hessian.diagonal()[order].reshape(2, 8, 4).mean(dim=2)
    assert bool((means[:, 1:] <= means[:, :-1]).all())


def test_tuning_keeps_the_mask() -> None:
    weight, hessian = make_layer(16, 64)
    q, _ = solve_gptq(weight, hessian, sparse(32))
    tunable = TunableWeight(q, weight)
    assert tunable.quantized().difference(q) is None
    assert tunable.latent is not None
    for step in range(4):
        tunable.latent.grad = None
        noise = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        (tunable.dense() * noise).sum().backward()
        with torch.no_grad():
            tunable.latent -= tunable.latent.grad.sign()
    after = tunable.quantized()
    assert after.sparsity == TWO_OF_FOUR
    assert is_sparse(after)
    assert not torch.equal(after.codes, q.codes)
    # Every span has two weights that follow, those that were rounded to zero among them.
    assert int((tunable.latent != 8).reshape(16, 4, 16).sum(dim=1).min()) == 2


def test_weights_that_cannot_be_pruned_are_refused_by_name() -> None:
    assert "does not prune" in (METHODS["imatrix"].scheme_refusal(sparse(32)) or "")
    with pytest.raises(UnsupportedError, match="layer: in_features 6 is not a multiple of 4"):
        round_to_nearest(torch.ones(2, 6), sparse(-1), name="layer")


def _loss(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    difference = (weight - quantized).double()
    wide = weight.double()
    return float((difference @ hessian.double() * difference).sum() / (wide @ hessian.double() * wide).sum())
