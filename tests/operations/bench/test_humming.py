"""Humming's operands, read as its schema says (humming-kernels 0.1.19), are the weight that we multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels.experts.experts_reference import expert_matrix
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.kernels import SCHEMES, scale_dtype_of
from marlinq.operations.bench.peers.humming import Given, experts_given, given
from marlinq.operations.bench.shapes import LinearSize
from marlinq.operations.bench.synthetic_experts import gate_then_up, random_experts
from marlinq.operations.bench.weights import random_weight

CPU = torch.device("cpu")
K, N = 256, 192
BITS = {"uint4": 4, "uint8": 8, "float8e4m3": 8, "float4e2m1": 4}
STORED = {"float8e8m0": torch.float8_e8m0fnu, "float8e4m3": torch.float8_e4m3fn}
CASES = [(scheme, False) for scheme in SCHEMES] + [("int4", True), ("int8", True)]


def fields(words: Tensor, bits: int) -> Tensor:
    """Codes of int32 words, the first in the lowest bits: the last axis becomes 32 / bits times as long."""
    places = torch.arange(0, 32, bits)
    return (words.long()[..., None] >> places & 2**bits - 1).flatten(-2)


def value(codes: Tensor, dtype: str) -> Tensor:
    """Values of float codes by sign, exponent and mantissa; integers as they are."""
    if dtype.startswith("uint"):
        return codes.double()
    exponents, mantissas = int(dtype[-3]), int(dtype[-1])
    bias = 2 ** (exponents - 1) - 1
    sign = 1 - 2 * (codes >> exponents + mantissas)
    exponent = codes >> mantissas & 2**exponents - 1
    mantissa = (codes & 2**mantissas - 1).double() / 2**mantissas
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    return sign * torch.where(exponent > 0, normal, mantissa * 2.0 ** (1 - bias))


def read(config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight, float64 [N, K]."""
    bits = BITS[config["dtype"]]
    assert tensors["weight"].dtype == torch.int32
    assert tensors["weight_scale"].dtype == STORED.get(config.get("scale_dtype", ""), dtype)
    codes = value(fields(tensors["weight"], bits), config["dtype"])
    n, k = codes.shape
    scales = tensors["weight_scale"].float().double()
    assert scales.shape == (n, k // (config["group_size"] or k))
    assert ("weight_scale_2" in tensors) == (config.get("scale_2_type") == "tensor")
    if "weight_scale_2" in tensors:
        assert tensors["weight_scale_2"].dtype == torch.float32
        scales = scales * tensors["weight_scale_2"].double()
    offset: float | Tensor = 2 ** (bits - 1) if config["dtype"].startswith("uint") else 0
    assert ("zero_point" in tensors) == config["has_zero_point"]
    if "zero_point" in tensors:
        offset = fields(tensors["zero_point"].t(), bits).t()[..., None].double()
    groups = codes.reshape(n, scales.shape[1], -1)
    return ((groups - offset) * scales[..., None]).reshape(n, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("scheme", "asymmetric"), CASES)
def test_a_weight(scheme: str, asymmetric: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight_format, size = SCHEMES[scheme]
    weight = random_weight(
        LinearSize("small", N, K),
        Granularity.from_group_size(size or 64),
        asymmetric=asymmetric,
        dtype=dtype,
        device=CPU,
        weight_format=weight_format,
        scale_dtype=scale_dtype_of(scheme),
    )
    scales, zeros = weight.natural_scales(), weight.natural_zeros()
    found = given(weight_format, weight.group_size, weight.codes(), scales, zeros, weight.scale_dtype)
    # Only roundings of scales differ, whose power of two is taken off where float16 has fewer bits.
    expected = weight.dense().double().t()
    difference = (read(found.config, found.tensors, dtype) - expected).abs().max() / expected.abs().max()
    assert float(difference) < (2**-11 if scheme in ("int8", "fp8") else 2**-22)
    # Humming multiplies symmetric integers without a code 0 faster.
    if not asymmetric and weight_format.midpoint:
        assert int(weight.codes().min()) > 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts(scheme: str) -> None:
    torch.manual_seed(0)
    weight_format, size = SCHEMES[scheme]
    layer = ExpertsLayer("small", 3, 2, 128, 64)
    weights = random_experts(
        layer,
        Granularity.from_group_size(size or 32),
        asymmetric=weight_format.stores_zeros,
        dtype=torch.bfloat16,
        device=CPU,
        weight_format=weight_format,
        scale_dtype=scale_dtype_of(scheme),
    )
    order = gate_then_up(layer, weights)
    for stored, columns in ((weights.gate_up, order), (weights.down, None)):
        found: Given = experts_given(stored, columns, scale_dtype_of(scheme))
        if "weight_scale_2" in found.tensors:
            assert found.tensors["weight_scale_2"].shape == (layer.experts,)
        for expert in range(layer.experts):
            own = {
                name: tensor[expert : expert + 1] if name == "weight_scale_2" else tensor[expert]
                for name, tensor in found.tensors.items()
            }
            expected = expert_matrix(stored, expert).double()
            if columns is not None:
                expected = expected[:, columns]
            difference = read(found.config, own, torch.bfloat16) - expected.t()
            assert float(difference.abs().max()) < 2**-22 * float(expected.abs().max())
