"""``verify`` does not refuse the results of ``quantize`` for odd but finite weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marlinq.core.errors import CheckpointError
from marlinq.formats import spec_of
from marlinq.formats.stored import check_zero_points
from marlinq.methods.gptq import solve_gptq
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.verify.statistics.evidence import find_faults
from marlinq.operations.verify.statistics.finding import RunSize
from marlinq.operations.verify.values import Values
from tests.testing.faults import flip_bit
from tests.testing.layouts import INTEGERS
from tests.testing.schemes import scheme
from tests.testing.verified_checkpoints import hessian_of

K, N, GROUP = 256, 128, 64


def ordinary():
    return 0.05 * torch.randn(N, K, generator=torch.Generator().manual_seed(0))


def put(place, value):
    weight = ordinary()
    weight[place] = value
    return weight


def times(place, factor):
    weight = ordinary()
    weight[place] *= factor
    return weight


ODD = {
    "one huge weight": lambda: put((3, 17), 5e4),
    "one large weight": lambda: put((3, 17), 300.0),
    "a pruned group": lambda: put((slice(None), slice(64, 128)), 0.0),
    "a pruned output": lambda: put(5, 0.0),
    "99 % zeros": lambda: ordinary().where(
        torch.rand(N, K, generator=torch.Generator().manual_seed(1)) > 0.99, 0.0
    ),
    "a tiny group": lambda: times((slice(None), slice(64, 128)), 1e-6),
    "one tiny group of one output": lambda: times((5, slice(64, 128)), 1e-6),
    "denormals": lambda: put(7, 1e-40),
    "a constant row": lambda: put(4, 0.03),
    "a constant negative row": lambda: put(4, -0.03),
    "a constant group": lambda: put((4, slice(64, 128)), 0.02),
    "huge and small channels in turn": lambda: times((slice(None), slice(0, None, 2)), 1e4),
    "huge and small outputs in turn": lambda: times(slice(0, None, 2), 1e4),
    "one group a hundred thousand times as large": lambda: times((slice(None), slice(0, 64)), 1e5),
    "no negative weight": lambda: ordinary().abs(),
    "no positive weight": lambda: -ordinary().abs(),
    "two values": lambda: 0.05 * ordinary().sign(),
}


def refusals(q):
    """Failed checks of :class:`Values` for ``q``."""
    values = Values()
    values.module("m", q, q.scheme)
    return [check.detail for check in values.results() if check.status == "failed"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ODD)
def test_odd_weights_pass(name, symmetric):
    weight, layout = ODD[name](), INTEGERS["gptq-v2"]
    for q in (
        solve_gptq(weight, hessian_of(K, 0), scheme(GROUP, symmetric=symmetric))[0],
        round_to_nearest(weight, scheme(GROUP, symmetric=symmetric)),
    ):
        assert not refusals(q)
        spec = replace(spec_of(q), scheme=layout.as_stored(replace(q.scheme, scale_dtype="float16")))
        run = RunSize.of([spec])
        assert not find_faults(weight, q, layout, spec, layout.pack(q), run).findings


def findings(weight, q, layout=INTEGERS["gptq-v2"]):
    spec = replace(spec_of(q), scheme=layout.as_stored(replace(q.scheme, scale_dtype="float16")))
    return find_faults(weight, q, layout, spec, layout.pack(q), RunSize.of([spec])).findings


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [4e-4, 5e-5, 2e-5, 1e-5])
def test_weights_too_small_for_float16_scales_are_a_warning(size, symmetric):
    weight = ordinary() * (size / 0.05)
    for q in (
        solve_gptq(weight, hessian_of(K, 0), scheme(GROUP, symmetric=symmetric))[0],
        round_to_nearest(weight, scheme(GROUP, symmetric=symmetric)),
    ):
        assert not [finding for finding in findings(weight, q) if finding.fails]
        values = Values()
        values.module("m", q, q.scheme)
        (row,) = [check for check in values.results() if check.name == "scales"]
        assert row.status == ("warning" if size < 1e-4 else "passed")
        assert row.status == "passed" or "too small for scales in float16" in row.detail


@pytest.mark.parametrize("factor", [1.5, 2.0])
@pytest.mark.parametrize("size", [2e-5, 5e-5])
def test_wrong_scales_of_tiny_weights_are_found(size, factor):
    weight = ordinary() * (size / 0.05)
    q = round_to_nearest(weight, scheme(GROUP))
    assert any(finding.fails for finding in findings(weight, replace(q, scales=q.scales * factor)))


def test_the_smallest_scales_are_wrong_for_larger_weights():
    weight = ordinary() * 6e-3
    q = round_to_nearest(weight, scheme(GROUP))
    least = torch.full_like(q.scales, torch.finfo(torch.float16).tiny)
    assert float(q.scales.min()) > float(least.max())
    assert any(finding.fails for finding in findings(weight, replace(q, scales=least)))


def test_a_scale_no_weights_can_have_is_refused():
    """Full codes under a scale 2**16 times as large as all others: the upper exponent bit flipped."""
    q = round_to_nearest(ordinary(), scheme(GROUP))
    (detail,) = refusals(replace(q, scales=flip_bit(14)(q.scales)))
    assert "times off what its channel and group have elsewhere" in detail


def test_the_other_gptq_format_is_refused():
    """A symmetric weight, declared asymmetric, whose zero points were read as one lower than they are."""
    q = round_to_nearest(ordinary(), scheme(GROUP))
    declared = replace(q.scheme, zero_point="stored")
    for step, seen in ((-1, 7), (1, 9)):
        grid = replace(q, zeros=q.zeros + step)
        with pytest.raises(CheckpointError, match=f"every zero point decodes to {seen}"):
            check_zero_points(grid, declared, lambda: q.codes)
    check_zero_points(q, declared, lambda: q.codes)
    # All weights below zero: such zero points are what asymmetric quantisation gives.
    check_zero_points(replace(q, zeros=q.zeros + 7), declared, lambda: q.codes)


def test_blank_codes_are_refused():
    q = round_to_nearest(ordinary(), scheme(GROUP))
    (detail,) = refusals(replace(q, codes=torch.zeros_like(q.codes)))
    assert detail.endswith("the data is blank or overwritten")
