from __future__ import annotations

import math

import pytest
import torch

from marlinq.core.errors import UsageError
from marlinq.methods.drift import PairedHessian, make_up_for_drift, trusted_share
from marlinq.methods.factor import Factor, channel_order, factorise
from marlinq.methods.gptq import GPTQ, GPTQOptions
from tests.testing.schemes import scheme

K, N, T = 64, 24, 400
CPU = torch.device("cpu")


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, the original's inputs, and the quantised model's: with errors that the inputs predict."""
    generator = torch.Generator().manual_seed(8)
    mix = torch.randn(K, K, generator=generator) / K**0.5
    original = torch.randn(T, K, generator=generator) @ (torch.eye(K) + mix)
    lost = torch.randn(K, K, generator=generator) * 0.02
    seen = original + original @ lost + 0.02 * torch.randn(T, K, generator=generator)
    return torch.randn(N, K, generator=generator), original, seen


def factor(hessian: torch.Tensor, damp: float = 0.01) -> Factor:
    return factorise(hessian, channel_order(hessian, 32, "static"), damp)


def broken() -> Factor:
    hessian = torch.eye(K)
    hessian[0, 1] = hessian[1, 0] = 1e6
    found = factor(hessian)
    assert found.fallback is not None
    return found


def paired(seen: torch.Tensor, original: torch.Tensor) -> PairedHessian:
    statistics = PairedHessian(K, device=CPU, name="o_proj")
    statistics.add_pair(seen, original)
    return statistics


def streams() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, its inputs, the stream behind it in the quantised model, and in the original."""
    weight, original, seen = inputs()
    generator = torch.Generator().manual_seed(9)
    beside = torch.randn(T, N, generator=generator)
    # Errors of earlier blocks in the stream show in the inputs as well.
    drifted = beside + 0.1 * seen @ torch.randn(K, N, generator=generator)
    return weight, seen, drifted + seen @ weight.t(), beside + original @ weight.t()


def rms(stream: torch.Tensor) -> torch.Tensor:
    return stream.square().mean(dim=-1, keepdim=True).sqrt()


def follower(*tensors: torch.Tensor) -> PairedHessian:
    statistics = PairedHessian(K, device=CPU, name="o_proj")
    statistics.write_to_stream(N)
    if tensors:
        statistics.add_stream(*tensors)
    return statistics


def test_the_whole_correction_of_a_stream_is_the_least_squares_solution() -> None:
    weight, seen, stream, original = streams()
    statistics = follower(seen, stream, original)
    drift = statistics.drift()
    assert drift is not None
    assert statistics.of_stream
    assert drift.shape == (N, K)
    whole, quarter = (
        make_up_for_drift(
            [weight],
            factor(statistics.hessian(), 1e-6),
            drift,
            share=share,
            limits=[math.inf],
            of_stream=True,
        )
        for share in (1.0, 0.25)
    )
    assert whole is not None
    assert quarter is not None
    beside, sizes = (stream - seen @ weight.t()).double(), rms(stream).double().sqrt()
    solved = torch.linalg.lstsq(seen / sizes, (original - beside) / sizes).solution.t()
    assert float((whole[0] - solved).norm() / solved.norm()) < 64 * 2**-24 * 300
    torch.testing.assert_close(quarter[0], weight + (whole[0] - weight) / 4, rtol=1e-5, atol=1e-6)
    # Nothing of the accumulator's was changed.
    expected = 2 * ((original - stream) / sizes**2).t() @ seen.double() / T
    torch.testing.assert_close(statistics.drift(), expected.float(), rtol=1e-4, atol=1e-5)


def test_the_stream_comes_closer_to_the_originals() -> None:
    weight, seen, stream, original = streams()
    beside = stream - seen @ weight.t()

    def loss(share: float) -> float:
        options = GPTQOptions(drift_correction=share)
        [(found, report)] = GPTQ().solve(
            [weight], follower(seen, stream, original), scheme(32), options, names=["o_proj"]
        )
        assert report.fallback is None
        errors = (beside + seen @ found.dequantize().t() - original).square().sum(dim=1, keepdim=True)
        return float((errors / rms(stream)).sum())

    assert loss(1.0) < loss(0.25) < loss(0.0)


def test_a_token_counts_by_the_inverse_of_its_streams_size() -> None:
    _, seen, stream, original = streams()
    statistics, plain, halves = follower(), follower(), follower()
    statistics.add_stream(seen, stream, None)
    # The same tokens, a hundred times as large; one of zeros; and the quantised model's stream alone.
    plain.add_stream(100 * seen, 100 * stream, 100 * original)
    halves.add_stream(seen, stream, original)
    halves.add_stream(torch.ones(1, K), torch.zeros(1, N), torch.ones(1, N))
    expected = 2 / T * (seen / rms(stream)).t() @ seen
    for found, share in ((statistics, 1.0), (plain, 100.0), (halves, T / (T + 1))):
        torch.testing.assert_close(found.hessian(), share * expected, rtol=1e-4, atol=1e-5)
    assert statistics.drift() is None
    assert statistics.tokens == T
    assert statistics.pairs == 0
    drifts = plain.drift(), halves.drift()
    assert drifts[0] is not None
    assert drifts[1] is not None
    torch.testing.assert_close(drifts[0] / 100 * (T / (T + 1)), drifts[1], rtol=1e-4, atol=1e-5)


def test_an_input_far_larger_than_its_stream_does_not_overflow_16_bits() -> None:
    statistics = follower()
    x = torch.full((2, K), 100.0, dtype=torch.float16)
    statistics.add_stream(x, torch.full((2, N), 6e-8, dtype=torch.float16), None)
    most = torch.finfo(torch.float16).max / 2
    expected = torch.full((K, K), 2 * most**2)
    torch.testing.assert_close(statistics.hessian(), expected, rtol=2**-9, atol=0)


def test_tokens_may_be_flattened() -> None:
    _, seen, stream, original = streams()
    flat, shaped = follower(seen, stream, original), follower()
    shaped.add_stream(seen, stream.reshape(4, T // 4, N), original.reshape(2, T // 2, N))
    assert torch.equal(flat.hessian(), shaped.hessian())


def test_streams_in_parts_masked_merged_and_shared() -> None:
    _, *tensors = streams()
    whole = follower(*tensors)
    mask = torch.ones(4, 50, dtype=torch.bool)
    mask[1:, 30:] = False
    padded = [torch.zeros(4, 50, tensor.shape[1]) for tensor in tensors]
    for place, source in zip(padded, tensors, strict=True):
        place[mask] = source[: int(mask.sum())]
    seen, stream, original = padded
    first, second, empty = follower(), follower(), follower()
    first.add_stream(seen, stream, original, mask)
    second.add_stream(*(tensor[140:200] for tensor in tensors))
    second.merge(follower(*(tensor[200:] for tensor in tensors)))
    # A rank that has seen nothing has a tensor of the same shape.
    shares = [rank.as_share(T) for rank in (first, second, empty)]
    for one, *others in zip(*shares, strict=True):
        for other in others:
            one.add_(other)
    expected, found = whole.drift(), first.drift()
    assert expected is not None
    assert found is not None
    assert first.pairs == whole.pairs == T
    largest = float(2 * (tensors[2] - tensors[1]).abs().max() * tensors[0].abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=T * 2**-24 * largest)


@pytest.mark.parametrize("members", [1, 3])
def test_the_whole_correction_is_the_least_squares_solution(members: int) -> None:
    """For few output channels, and for more than K, which are solved for in another order."""
    weight, original, seen = inputs()
    weights = [weight * (1 + member) for member in range(members)]
    statistics = paired(seen, original)
    drift = statistics.drift()
    assert drift is not None
    root, limits = factor(statistics.hessian(), 1e-6), [math.inf] * members
    found = make_up_for_drift(weights, root, drift, share=1.0, limits=limits)
    half = make_up_for_drift(weights, root, drift, share=0.5, limits=limits)
    assert found is not None
    assert half is not None
    for before, after, between in zip(weights, found, half, strict=True):
        solved = torch.linalg.lstsq(seen.double(), (original @ before.t()).double()).solution.t()
        # The damping moves it by about 1e-6, float32 by K roundings times the condition of the Hessian (3e2).
        assert float((after - solved).norm() / solved.norm()) < 64 * 2**-24 * 300
        torch.testing.assert_close(between, (before + after) / 2, rtol=1e-5, atol=1e-6)


def test_a_correction_is_no_larger_than_its_limit() -> None:
    weight, original, seen = inputs()
    statistics = paired(seen, original)
    drift = statistics.drift()
    assert drift is not None
    root = factor(statistics.hessian())
    far, near = (
        make_up_for_drift([weight], root, drift, share=1.0, limits=[at_most]) for at_most in (math.inf, 0.5)
    )
    assert far is not None
    assert near is not None
    assert float((far[0] - weight).norm()) > 1
    direction = (far[0] - weight) / (far[0] - weight).norm()
    torch.testing.assert_close(near[0] - weight, direction * 0.5, rtol=1e-3, atol=1e-5)


def test_a_solve_says_that_it_went_without_the_correction() -> None:
    weight, original, seen = inputs()
    statistics = paired(seen, original)
    drift = statistics.drift()
    assert drift is not None
    drift.fill_(math.inf)
    [(found, report)] = GPTQ().solve([weight], statistics, scheme(32), GPTQOptions(), names=["o_proj"])
    assert report.fallback == "no drift correction: it is not finite"
    [(plain, _)] = GPTQ().solve(
        [weight], paired(seen, original), scheme(32), GPTQOptions(drift_correction=0.0), names=["o_proj"]
    )
    assert found.difference(plain) is None


@pytest.mark.parametrize("strip", [1024, 24, 1])
def test_a_factor_divides_as_float64_does(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlinq.methods.factor._STRIP", strip)
    _, original, seen = inputs()
    statistics = paired(seen, original)
    hessian = statistics.hessian()
    found = factor(hessian)
    assert sorted(found.order.tolist()) == list(range(K))
    assert found.order.tolist() != list(range(K))
    damped = hessian.double() + found.shift * torch.eye(K, dtype=torch.float64)
    right = torch.randn(K, N, generator=torch.Generator().manual_seed(3))
    expected = torch.linalg.solve(damped, right.double())
    # Sums of K products in each of three steps, which the matrix's condition makes as much worse.
    bound = 3 * K * 2**-24 * float(torch.linalg.cond(damped))
    assert float((found.divide(right) - expected).norm() / expected.norm()) < bound < 0.01


def test_outputs_come_closer_to_the_originals() -> None:
    weight, original, seen = inputs()
    wanted = original @ weight.t()

    def loss(share: float) -> float:
        options = GPTQOptions(drift_correction=share)
        [(found, report)] = GPTQ().solve(
            [weight], paired(seen, original), scheme(32), options, names=["o_proj"]
        )
        assert report.fallback is None
        return float((seen @ found.dequantize().t() - wanted).square().sum())

    assert loss(1.0) < loss(0.25) < loss(0.0)


def test_nothing_drifted_is_plain_gptq() -> None:
    weight, original, _ = inputs()
    statistics = paired(original, original)
    assert statistics.drift() is None
    found = GPTQ().solve([weight], statistics, scheme(32), GPTQOptions(), names=["a"])
    plain = GPTQ().solve([weight], statistics, scheme(32), GPTQOptions(drift_correction=0.0), names=["a"])
    assert found[0][0].difference(plain[0][0]) is None


def test_pairs_in_parts_masked_and_merged() -> None:
    _, original, seen = inputs()
    whole = paired(seen, original)
    mask = torch.ones(4, 50, dtype=torch.bool)
    mask[1:, 30:] = False
    first, second = (PairedHessian(K, device=CPU, name="a") for _ in range(2))
    padded = [torch.zeros(4, 50, K), torch.zeros(4, 50, K)]
    for place, source in zip(padded, (seen, original), strict=True):
        place[mask] = source[: int(mask.sum())]
    first.add_pair(*padded, mask)
    first.add_pair(seen[140:200], original[140:200])
    second.add_pair(seen[200:], original[200:])
    first.merge(second)
    assert first.tokens == T
    expected, found = whole.drift(), first.drift()
    assert expected is not None
    assert found is not None
    # Means of 400 products in other orders: 400 roundings of 2**-24 of terms as large as the largest.
    largest = float(2 * (original - seen).abs().max() * seen.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=400 * 2**-24 * largest)


def test_a_hessian_that_cannot_be_factorised_leaves_the_correction_out() -> None:
    weight, original, seen = inputs()
    statistics = paired(seen, original)
    drift = statistics.drift()
    assert drift is not None
    assert make_up_for_drift([weight], broken(), drift, share=0.25, limits=[math.inf]) is None


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "a quarter"])
def test_a_share_is_from_0_to_1(share: object) -> None:
    with pytest.raises(UsageError, match="drift_correction: expected a number from 0 to 1"):
        GPTQOptions(drift_correction=share)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 1.0, False, "a tenth"])
def test_some_of_the_hessian_stays(share: object) -> None:
    with pytest.raises(UsageError, match="shrinkage: expected a number from 0 to below 1"):
        GPTQOptions(shrinkage=share)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (64, 0.0), (32, 0.0), (128, 0.125), (6400, 0.2475)]
)
def test_few_tokens_are_trusted_less(tokens: int, expected: float) -> None:
    assert trusted_share(0.25, tokens, 64) == expected


def test_shards_without_the_originals_inputs_add_no_drift() -> None:
    _, original, seen = inputs()
    whole, left, right = (PairedHessian(K, device=CPU, name="o_proj") for _ in range(3))
    assert whole.drift() is None
    whole.add_pair(seen[:100], original[:100])
    whole.add(seen[100:])
    left.add_pair(seen[:100], original[:100])
    right.add(seen[100:])
    right.merge(left)
    expected, found = whole.drift(), right.drift()
    assert expected is not None
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    difference = (original - seen)[:100]
    torch.testing.assert_close(found, 2 * difference.t() @ seen[:100] / 100, rtol=1e-4, atol=1e-6)
    assert whole.pairs == right.pairs == 100
    assert whole.tokens == T


def test_shares_of_ranks_add_up_to_the_drift_of_all_pairs() -> None:
    _, original, seen = inputs()
    whole, first, second, third = (PairedHessian(K, device=CPU, name="o_proj") for _ in range(4))
    whole.add_pair(seen[:200], original[:200])
    whole.add(seen[200:])
    first.add_pair(seen[:150], original[:150])
    second.add_pair(seen[150:200], original[150:200])
    second.add(seen[200:300])
    third.add(seen[300:])
    shares = [rank.as_share(T) for rank in (first, second, third)]
    for tensors in zip(*shares, strict=True):
        tensors[0].copy_(sum(tensors))
    expected, found = whole.drift(), first.drift()
    assert expected is not None
    assert found is not None
    assert first.pairs == whole.pairs == 200
    # Means of 200 products in another order, as large as the largest.
    largest = float(2 * (original - seen).abs().max() * seen.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=200 * 2**-24 * largest)
    torch.testing.assert_close(first.hessian(), whole.hessian(), rtol=1e-5, atol=1e-5)
