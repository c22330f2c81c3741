from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme, TensorScale
from marlinq.core.schemes import SCHEMES
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.rtn import round_to_nearest
from marlinq.methods.tuning import TunableVector, TunableWeight, divergence
from tests.testing.schemes import scheme

K, N, G = 64, 24, 32


def quantized(symmetric: bool = True) -> tuple[torch.Tensor, QuantizedWeight]:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(3))
    return weight, round_to_nearest(weight, scheme(group_size=G, symmetric=symmetric))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("codes", [True, False])
def test_a_tunable_weight_begins_as_stored(symmetric: bool, codes: bool) -> None:
    weight, q = quantized(symmetric)
    tunable = TunableWeight(q, weight if codes else None)
    assert tunable.quantized().difference(q) is None
    assert torch.equal(tunable.dense(), q.dequantize())


@pytest.mark.parametrize("use", ["multiplies", "divides"])
@pytest.mark.parametrize("name", ["fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_scales_of_floats_follow_as_they_are_stored(name: str, use: TensorScale) -> None:
    weight = torch.randn(160, 192, generator=torch.Generator().manual_seed(3))
    named = SCHEMES[name]
    wanted = named.example(Scheme(named.element, Granularity.group(32), "none"))
    if named.two_levels:
        wanted = replace(wanted, tensor_scale=use)
    q = round_to_nearest(weight, wanted)
    tunable = TunableWeight(q)
    assert tunable.quantized().difference(q) is None
    assert torch.equal(tunable.dense(), q.dequantize())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        tunable.change += 0.1 * torch.randn(tunable.change.shape, generator=generator)
    after = tunable.quantized()
    assert torch.equal(tunable.dense(), after.dequantize())
    # A power of two has no neighbour within a small step.
    assert torch.equal(after.scales.float(), q.scales.float()) == name.startswith("mx")
    assert after.scales.dtype == q.scales.dtype
    tunable.dense().sum().backward()
    assert tunable.change.grad is not None
    assert bool(tunable.change.grad.any())


def test_gradients_are_those_of_the_formula() -> None:
    weight, q = quantized(symmetric=False)
    tunable = TunableWeight(q, weight)
    assert tunable.latent is not None
    direction = torch.randn(N, K, generator=torch.Generator().manual_seed(4))
    tunable.dense().backward(direction)
    levels = q.codes.float() - q.zeros.float().repeat_interleave(G, 0)
    scales = q.scales.float()
    by_scale = (direction.t() * levels).reshape(K // G, G, N).sum(1) * scales
    # Sums of 32 products in another order: 32 roundings of 2**-24 of the largest term.
    torch.testing.assert_close(
        tunable.change.grad, by_scale, rtol=0, atol=32 * 2**-24 * float(by_scale.abs().max())
    )
    assert torch.equal(tunable.latent.grad, direction.t() * scales.repeat_interleave(G, 0))


def test_a_forward_pass_sees_what_would_be_stored() -> None:
    weight, q = quantized()
    tunable = TunableWeight(q, weight)
    assert tunable.latent is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        tunable.change += 0.1 * torch.randn(tunable.change.shape, generator=generator)
        tunable.latent += 0.4 * torch.randn(tunable.latent.shape, generator=generator)
    after = tunable.quantized()
    assert torch.equal(tunable.dense(), after.dequantize())
    assert not torch.equal(after.codes, q.codes)
    assert after.scales.dtype == q.scales.dtype


def test_codes_stop_at_the_ends_of_their_range() -> None:
    weight, q = quantized()
    tunable = TunableWeight(q, weight)
    assert tunable.latent is not None
    with torch.no_grad():
        tunable.latent[0] = 40.0
        tunable.latent[1] = -40.0
    tunable.dense().sum().backward()
    assert tunable.latent.grad is not None
    assert torch.equal(
        tunable.quantized().codes[:2], torch.tensor([[15], [0]], dtype=torch.uint8).expand(2, N)
    )
    assert not tunable.latent.grad[:2].any()


def test_an_activation_order_is_refused() -> None:
    _, q = quantized()
    shuffled = replace(q, g_idx=q.g_idx.flip(0))
    with pytest.raises(UnsupportedError, match="q_proj: tuning needs groups of neighbouring channels"):
        TunableWeight(shuffled, name="q_proj")


def test_a_vector_moves_in_units_of_its_size() -> None:
    stored = torch.tensor([0.0, 3.0, -4.0, 0.0], dtype=torch.float16)
    vector = TunableVector(stored, added=False)
    assert torch.equal(vector.tensor(), stored)
    with torch.no_grad():
        vector.change[0] = 0.1
    # The root mean square of the four is 2.5.
    assert vector.tensor().tolist() == [0.25, 3.0, -4.0, 0.0]


def test_a_few_huge_biases_do_not_set_the_pace_of_the_others() -> None:
    stored = torch.tensor([200.0, 0.0, -0.5, 0.25, 0.0, 0.5])
    vector = TunableVector(stored, added=True)
    with torch.no_grad():
        vector.change[:2] = 0.5
    assert vector.tensor().tolist() == [200.25, 0.25, -0.5, 0.25, 0.0, 0.5]
    none = TunableVector(torch.zeros(2), added=True)
    with torch.no_grad():
        none.change[0] = 0.5
    assert none.tensor().tolist() == [0.5, 0.0]


@pytest.mark.parametrize("chunk", [3, 64])
def test_divergence_in_chunks_is_the_divergence(chunk: int) -> None:
    generator = torch.Generator().manual_seed(6)
    hidden, expected = (torch.randn(10, 8, generator=generator) for _ in range(2))
    head = torch.randn(40, 8, generator=generator)
    own = head.clone().requires_grad_()
    total, gradient = divergence(
        lambda x: x @ own.t(),
        lambda x: x @ head.t(),
        hidden,
        expected,
        chunk=chunk,
        weight=0.1,
        parameters=[own],
    )
    whole = hidden.double().requires_grad_()
    wide = head.double().requires_grad_()
    log_q = F.log_softmax(whole @ wide.t(), -1)
    log_p = F.log_softmax(expected.double() @ head.double().t(), -1)
    loss = (log_p.exp() * (log_p - log_q)).sum()
    (0.1 * loss).backward()
    # Logits of magnitude 10 in float32: 10 * 2**-24 each, summed over 40 tokens of 10 positions.
    assert math.isclose(total, float(loss.detach()), rel_tol=1e-5)
    torch.testing.assert_close(gradient, whole.grad.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(own.grad, wide.grad.float(), rtol=1e-4, atol=1e-6)
    alone, nothing = divergence(
        lambda x: x @ head.t(),
        lambda x: x @ head.t(),
        hidden,
        hidden,
        chunk=chunk,
        weight=0.0,
        gradient=False,
    )
    assert (alone, nothing) == (0.0, None)
