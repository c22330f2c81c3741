"""The kernel's operand holds exactly the weights of the tuple, whatever its shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.weight import QuantizedWeight
from marlinq.formats.layouts.marlin import unpack_tiles, unpermute_scales
from marlinq.runtime import MarlinOperand, QuantLinear, decide, marlin_operand, operand_refusal
from tests.testing.runnable_folders import random_tuple

CPU = torch.device("cpu")

SHAPES = [
    (64, 64, 32), (80, 72, 16 * 5), (80, 72, -1), (96, 24, 32), (200, 72, 128), (512, 64, 256), (384, 8, 192),
    (192, 100, 96), (1000, 40, 256), (64, 64, 64), (130, 66, 64),
]  # fmt: skip


def held_weight(operand: MarlinOperand) -> Tensor:
    """The dense weight [N', K'] that the kernel sees, by the definition of the layout."""
    codes = unpack_tiles(operand.words).float()
    scales = unpermute_scales(operand.scales).float()
    zeros = torch.full_like(scales, 8) if operand.zeros is None else unpermute_scales(operand.zeros).float()
    rows = torch.arange(codes.shape[0])
    groups = torch.zeros_like(rows) if operand.group_size == -1 else rows // operand.group_size
    return ((codes - zeros[groups]) * scales[groups]).t()


@pytest.mark.parametrize(("k", "n", "group_size"), SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
def test_every_weight_is_held_and_padding_is_zero(
    k: int, n: int, group_size: int, symmetric: bool, act_order: bool
) -> None:
    q = random_tuple(k, n, group_size=group_size, symmetric=symmetric, act_order=act_order)
    operand = marlin_operand(q, torch.float16)
    assert all(size % 64 == 0 for size in operand.padded_shape)
    assert operand.group_size in (32, 64, 128, -1)
    assert (operand.zeros is None) == (not q.scheme.stores_zeros)
    expected = torch.zeros(operand.padded_shape[::-1])
    order = torch.arange(k) if operand.order is None else operand.order[:k]
    assert operand.order is None or (operand.order[k:] == -1).all()
    expected[:n, :k] = q.dequantize()[:, order]
    assert torch.equal(held_weight(operand), expected)


@pytest.mark.parametrize(
    ("group_size", "refined"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (256, 128)]
)
def test_group_sizes_are_refined_to_the_largest_that_fits(group_size: int, refined: int) -> None:
    assert marlin_operand(random_tuple(768, 64, group_size=group_size), torch.float16).group_size == refined


def test_sorting_by_group_is_stable() -> None:
    q = random_tuple(128, 64, group_size=32)
    scattered = replace(q, g_idx=torch.arange(128, dtype=torch.int32) % 4)
    order = marlin_operand(scattered, torch.float16).order
    assert order is not None
    assert order.tolist() == [4 * place + group for group in range(4) for place in range(32)]


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (random_tuple(64, 64, group_size=16), "group size 16"),
        (random_tuple(160, 64, group_size=80), "group size 80"),
        (random_tuple(64, 64, group_size=32, bits=8), "int8 weights"),
        (
            replace(random_tuple(64, 64, group_size=32), g_idx=torch.arange(64, dtype=torch.int32) // 63),
            "order",
        ),
    ],
)
def test_what_the_kernel_cannot_hold_is_refused_and_runs_dense(q: QuantizedWeight, reason: str) -> None:
    refusal = operand_refusal(q)
    assert refusal is not None
    assert reason in refusal
    with pytest.raises(UnsupportedError, match=f"up_proj: .*{reason}"):
        marlin_operand(q, torch.float16, name="up_proj")
    decision = decide(q, device=CPU, dtype=torch.float32, linears="kernel")
    assert (decision.path, decision.reason) == ("dense", refusal)


def test_scales_beyond_the_activations_range_are_refused() -> None:
    q = random_tuple(64, 64, group_size=32, scale_dtype=torch.bfloat16)
    q.scales[0, 0] = 1e6
    with pytest.raises(UnsupportedError, match="overflows float16; run in bfloat16"):
        marlin_operand(q, torch.float16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
def test_quant_linear_is_a_linear(bias: bool, act_order: bool) -> None:
    q = random_tuple(80, 72, group_size=-1, symmetric=False)
    if act_order:
        q = random_tuple(96, 72, group_size=32, symmetric=False, act_order=True)
    offset = torch.randn(q.out_features) if bias else None
    linear = QuantLinear(q, offset, device=CPU, dtype=torch.float32)
    x = torch.randn(2, 3, q.in_features)
    expected = torch.nn.functional.linear(x, q.dequantize(), offset)
    # One float32 product of at most 96 terms against another.
    torch.testing.assert_close(linear(x), expected, rtol=0, atol=96 * 2**-24 * float(expected.abs().max()))
    assert linear.state_dict() == {}


# torch's own compiler imports what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("act_order", [False, True])
def test_a_compiled_quant_linear_is_one_graph(act_order: bool) -> None:
    q = random_tuple(96, 72, group_size=32, act_order=act_order)
    layer = QuantLinear(q, torch.randn(72), device=CPU, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 96)
    assert torch.equal(compiled(x), layer(x))


def test_a_quant_linear_follows_its_buffers() -> None:
    layer = QuantLinear(random_tuple(64, 64, group_size=64), None, device=CPU, dtype=torch.float32)
    x = torch.randn(3, 64)
    before = layer(x)
    doubled = torch.func.functional_call(layer, {"scales": 2 * layer.scales}, (x,))
    torch.testing.assert_close(doubled, 2 * before)
    layer.scales = 2 * layer.scales
    assert torch.equal(layer(x), doubled)
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
