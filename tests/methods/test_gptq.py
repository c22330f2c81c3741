from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from marlinq.core.errors import NumericsError, UnsupportedError, UsageError
from marlinq.core.scheme import INT8
from marlinq.core.schemes import SCHEMES
from marlinq.methods import METHODS, Inputs
from marlinq.methods.gptq import GPTQ, GPTQOptions, solve_gptq, solve_gptq_shared
from marlinq.methods.hessian import HessianAccumulator
from marlinq.methods.rtn import round_to_nearest
from tests.testing.schemes import scheme

_spec = importlib.util.spec_from_file_location("textbook", Path(__file__).with_name("textbook.py"))
assert _spec is not None
assert _spec.loader is not None
_textbook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_textbook)
layer_loss, textbook_gptq = _textbook.layer_loss, _textbook.textbook_gptq

GROUP_SIZES = (32, 64, 128, -1)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_same_solution_as_the_textbook(make_layer, group_size, symmetric):
    weight, hessian = make_layer(48, 256)
    plain = GPTQOptions(clip_search=False, act_order="none")
    q, _ = solve_gptq(weight, hessian, scheme(group_size, symmetric=symmetric), plain)
    expected = textbook_gptq(weight, hessian, group_size=group_size, symmetric=symmetric, damp=0.01)
    # float32 against float64: a weight within rounding of a tie may fall the other way, and an output
    # channel follows its own tie from there on; one such channel of 48 is allowed for.
    different = (q.codes.long() != expected).any(dim=0)
    assert int(different.sum()) <= 1


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_each_step_lowers_the_loss(make_layer, group_size, symmetric):
    losses = {"rtn": 0.0, "gptq": 0.0, "clip": 0.0, "order": 0.0}
    for seed in range(3):
        weight, hessian = make_layer(32, 256, seed)
        wanted = scheme(group_size, symmetric=symmetric)
        steps = {
            "gptq": GPTQOptions(clip_search=False, act_order="none"),
            "clip": GPTQOptions(act_order="none"),
            "order": GPTQOptions(act_order="static"),
        }
        results = {"rtn": round_to_nearest(weight, wanted)}
        for label, options in steps.items():
            results[label] = solve_gptq(weight, hessian, wanted, options)[0]
        for label, q in results.items():
            assert q.has_trivial_g_idx
            assert not q.scheme.stores_zeros or not symmetric
            losses[label] += layer_loss(weight, q.dequantize(), hessian)
    assert losses["gptq"] < 0.75 * losses["rtn"]
    assert losses["clip"] < 0.85 * losses["gptq"]
    assert losses["order"] < 0.95 * losses["clip"]


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("act_order", ["none", "static"])
def test_reported_error_is_the_loss(make_layer, group_size, act_order):
    weight, hessian = make_layer(16, 128)
    q, report = solve_gptq(
        weight, hessian, scheme(group_size, symmetric=False), GPTQOptions(act_order=act_order)
    )
    assert report.relative_error == pytest.approx(layer_loss(weight, q.dequantize(), hessian), rel=1e-4)
    assert report.fallback is None
    assert report.figures["dead_channels"] == 0
    assert report.figures["damp"] == 0.01


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
def test_stored_scales_are_the_ones_used(make_layer, scale_dtype):
    weight, hessian = make_layer(16, 128)
    q, report = solve_gptq(weight, hessian, scheme(scale_dtype=scale_dtype))
    assert q.scheme.scale_dtype == scale_dtype
    assert report.relative_error == pytest.approx(layer_loss(weight, q.dequantize(), hessian), rel=1e-4)


def test_order_of_the_channels_does_not_move_groups(make_layer):
    weight, hessian = make_layer(16, 256)
    # A group of large weights must keep its own scales whenever its turn comes.
    weight[:, 64:96] *= 100
    q, _ = solve_gptq(weight, hessian, scheme(), GPTQOptions(act_order="static"))
    magnitude = q.scales.abs().float().mean(dim=1)
    assert int(magnitude.argmax()) == 2
    assert float(magnitude[2] / magnitude.median()) > 20


def test_same_input_same_bits(make_layer):
    weight, hessian = make_layer(24, 128)
    first, report = solve_gptq(weight, hessian, scheme(64))
    again, second = solve_gptq(weight.clone(), hessian.clone(), scheme(64))
    assert first.difference(again) is None
    assert report == second


def test_inputs_are_left_as_they_were(make_layer):
    weight, hessian = make_layer(8, 64)
    kept = weight.clone(), hessian.clone()
    solve_gptq(weight, hessian, scheme(), GPTQOptions(act_order="static"))
    assert torch.equal(weight, kept[0])
    assert torch.equal(hessian, kept[1])


def test_the_scale_of_the_hessian_does_not_matter(make_layer):
    weight, hessian = make_layer(16, 128)
    # A power of two is exact in every step, so even the bits agree.
    a, _ = solve_gptq(weight, hessian, scheme())
    b, _ = solve_gptq(weight, hessian / 4096, scheme())
    assert a.difference(b) is None


def test_shared_solve_is_each_ones_own(make_layer):
    weight, hessian = make_layer(40, 128)
    parts = [weight[:8], weight[8:16], weight[16:]]
    together = solve_gptq_shared(parts, hessian, scheme(), GPTQOptions(clip_search=False))
    for part, (q, report) in zip(parts, together, strict=True):
        own, own_report = solve_gptq(part, hessian, scheme(), GPTQOptions(clip_search=False))
        assert q.codes.shape == (128, part.shape[0])
        assert int((q.codes != own.codes).any(dim=0).sum()) <= 1
        assert report.relative_error == pytest.approx(own_report.relative_error, rel=1e-2)
    assert len({report.relative_error for _, report in together}) == 3


def test_dead_channels_are_quantised_and_disturb_nobody(make_layer):
    weight, hessian = make_layer(16, 128)
    dead = torch.tensor([3, 40, 41, 127])
    hessian[dead] = 0
    hessian[:, dead] = 0
    q, report = solve_gptq(weight, hessian, scheme())
    assert report.figures["dead_channels"] == 4
    assert report.fallback is None
    # Their weights are still near their values: half a step, or what the search clipped.
    step = q.scales.abs().float()[q.g_idx.long()].t()
    difference = (q.dequantize() - weight).abs()[:, dead] / step[:, dead]
    assert float(difference.median()) <= 0.5
    louder = weight.clone()
    louder[:, dead] *= -0.5
    other, _ = solve_gptq(louder, hessian, scheme(), GPTQOptions(clip_search=False))
    plain, _ = solve_gptq(weight, hessian, scheme(), GPTQOptions(clip_search=False))
    alive = torch.ones(128, dtype=torch.bool)
    alive[dead] = False
    same_scale = (other.scales == plain.scales).all(dim=0)
    assert bool(same_scale.any())
    assert torch.equal(other.codes[alive][:, same_scale], plain.codes[alive][:, same_scale])


def test_rank_deficient_hessian_is_damped(make_layer):
    weight, _ = make_layer(16, 128)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    q, report = solve_gptq(weight, x.t() @ x, scheme())
    assert report.fallback is None
    assert layer_loss(weight, q.dequantize(), x.t() @ x) < 1e-3


def test_damping_escalates(make_layer):
    weight, hessian = make_layer(16, 64)
    values, vectors = torch.linalg.eigh(hessian.double())
    values[0] = -0.05 * hessian.diagonal().mean()
    indefinite = ((vectors * values) @ vectors.t()).float()
    indefinite = (indefinite + indefinite.t()) / 2
    q, report = solve_gptq(weight, indefinite, scheme())
    assert report.figures["damp"] == pytest.approx(0.1)
    assert report.fallback is None
    zero, report = solve_gptq(weight, indefinite, scheme(), GPTQOptions(damp=1e-9))
    assert report.figures["damp"] == pytest.approx(0.1)
    assert zero.codes.shape == q.codes.shape


def test_hopeless_hessian_falls_back_to_its_diagonal(make_layer):
    weight, hessian = make_layer(16, 64)
    hopeless = torch.full_like(hessian, -10.0)
    hopeless.fill_diagonal_(1.0)
    hopeless[5, 5] = 4.0
    q, report = solve_gptq(weight, hopeless, scheme(), GPTQOptions(clip_search=False))
    assert report.fallback is not None
    assert report.fallback.startswith("diagonal Hessian: ")
    assert q.difference(round_to_nearest(weight, scheme())) is None
    expected = layer_loss(weight, q.dequantize(), torch.diag(hopeless.diagonal()))
    assert report.relative_error == pytest.approx(expected, rel=1e-4)


def test_layer_that_saw_nothing_is_rounded_to_nearest(make_layer):
    weight, _ = make_layer(16, 64)
    q, report = solve_gptq(weight, torch.zeros(64, 64), scheme(), GPTQOptions(clip_search=False))
    assert report.fallback is not None
    assert report.fallback.startswith("round-to-nearest: ")
    assert report.figures["dead_channels"] == 64
    assert q.difference(round_to_nearest(weight, scheme())) is None


def test_a_zero_weight_stays_zero():
    q, report = solve_gptq(torch.zeros(4, 64), torch.eye(64), scheme())
    assert torch.equal(q.dequantize(), torch.zeros(4, 64))
    assert report.relative_error == 0


def test_eight_bits_are_finer(make_layer):
    weight, hessian = make_layer(16, 128)
    q, report = solve_gptq(weight, hessian, scheme(bits=8))
    coarse = solve_gptq(weight, hessian, scheme())[1]
    assert q.element == INT8
    # Sixteen times finer steps are 256 times less squared error; the wider clipping margin costs some.
    assert report.relative_error < coarse.relative_error / 100


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"act_order": "dynamic"}, "act_order: expected one of none, static, found 'dynamic'"),
        ({"damp": -1}, "damp: expected a number above 0"),
        ({"clip_search": 1}, "clip_search: expected true or false"),
    ],
)
def test_wrong_options_are_named(wrong, message):
    with pytest.raises(UsageError, match=message):
        GPTQOptions(**wrong)


def test_errors_name_the_module(make_layer):
    weight, hessian = make_layer(8, 64)
    name = "layers.0.q_proj"
    with pytest.raises(UnsupportedError, match=r"layers\.0\.q_proj: in_features 64 .* group size 48"):
        solve_gptq(weight, hessian, scheme(48), name=name)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.q_proj: .* \[8, 64\] .* found \[32, 32\]"):
        solve_gptq(weight, torch.eye(32), scheme(), name=name)
    with pytest.raises(NumericsError, match=r"layers\.0\.q_proj: a weight of magnitude 1e\+06"):
        solve_gptq(weight.clone().fill_(1e6), hessian, scheme(), name=name)
    for bad in (torch.nan, torch.inf):
        broken = hessian.clone()
        broken[1, 2] = bad
        with pytest.raises(NumericsError, match=r"layers\.0\.q_proj: the Hessian"):
            solve_gptq(weight, broken, scheme(), name=name)
        broken = weight.clone()
        broken[0, 0] = bad
        with pytest.raises(NumericsError, match=r"layers\.0\.q_proj: 1 of 512"):
            solve_gptq(broken, hessian, scheme(), name=name)


@pytest.mark.gpu
def test_gpu_agrees_with_the_cpu(make_layer):
    weight, hessian = make_layer(64, 512)
    for act_order in ("none", "static"):
        options = GPTQOptions(act_order=act_order)
        cpu, report = solve_gptq(weight, hessian, scheme(64), options)
        gpu, gpu_report = solve_gptq(weight.cuda(), hessian.cuda(), scheme(64), options)
        assert gpu.codes.is_cuda
        assert float((gpu.codes.cpu() != cpu.codes).float().mean()) < 0.02
        assert gpu_report.relative_error == pytest.approx(report.relative_error, rel=0.01)


@pytest.mark.parametrize("name", METHODS)
def test_many_inputs_are_solved_like_one(name: str) -> None:
    method = METHODS[name]
    generator = torch.Generator().manual_seed(6)
    given = next(
        each
        for each in (scheme(32), SCHEMES["fp8-static"].example(scheme(32)))
        if method.scheme_refusal(each) is None
    )
    options, inputs = method.options(), []
    for number in range(3):
        statistics = None
        if method.calibrated:
            statistics = method.statistics(64, options, device=torch.device("cpu"), name="x")
            statistics.add(torch.randn(200, 64, generator=generator))
        weights = [torch.randn(n, 64, generator=generator).to(torch.bfloat16) for n in (8, 24)]
        inputs.append(Inputs(weights, statistics, [f"{number}.gate", f"{number}.up"]))
    together = method.solve_many(inputs, given, options)
    for each, found in zip(inputs, together, strict=True):
        wide = [weight.float() for weight in each.weights]
        alone = method.solve(wide, each.statistics, given, options, names=each.names)
        for (mine, report), (other, expected) in zip(found, alone, strict=True):
            assert mine.difference(other) is None
            assert report == expected


@pytest.mark.gpu
@pytest.mark.parametrize("drift", [0.0, 0.25])
def test_gpu_solves_many_inputs_like_one(drift):
    method, options = GPTQ(), GPTQOptions(drift_correction=drift)
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(512, 512, generator=generator) / 512**0.5 + torch.eye(512)

    def statistics(tokens: int) -> HessianAccumulator:
        found = method.statistics(512, options, device=torch.device("cuda"), name="x")
        found.add((torch.randn(tokens, 512, generator=generator) @ mixing).cuda())
        return found

    inputs = [
        Inputs(
            [torch.randn(n, 512, generator=generator).cuda() * 0.05 for n in (96, 64)],
            statistics(tokens),
            [f"{number}.gate", f"{number}.up"],
        )
        for number, tokens in enumerate((2000, 0, 700, 1500))
    ]
    together = method.solve_many(inputs, scheme(128), options)
    for each, found in zip(inputs, together, strict=True):
        alone = method.solve(each.weights, each.statistics, scheme(128), options, names=each.names)
        for (mine, report), (other, expected) in zip(found, alone, strict=True):
            assert float((mine.codes != other.codes).float().mean()) < 0.02
            assert report.relative_error == pytest.approx(expected.relative_error, rel=0.01)
            assert (report.fallback, report.figures) == (expected.fallback, expected.figures)
    assert "never reached" in str(together[1][0][1].fallback)
    bad = Inputs([inputs[0].weights[0] * float("nan")], inputs[0].statistics, ["7.down"])
    good = Inputs([inputs[0].weights[0]], inputs[0].statistics, ["0.down"])
    with pytest.raises(NumericsError, match=r"7\.down"):
        method.solve_many([good, bad], scheme(128), options)
