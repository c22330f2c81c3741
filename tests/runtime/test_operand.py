"""The kernel's operand holds exactly the weights of the tuple, whatever its shape."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import StoredWeight, layouts
from marlinq.formats.layouts.marlin import Marlin, permute_scales, unpack_tiles
from marlinq.kernels import GRANULARITIES, Operand
from marlinq.runtime import (
    QuantLinear,
    kernel_operand,
    marlin_operand,
    operand_refusal,
    stored_operand,
)
from tests.testing.layouts import INTEGERS
from tests.testing.runnable_folders import random_tuple, stored_weight

CPU = torch.device("cpu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

SHAPES = [
    (64, 64, 32), (80, 72, 16 * 5), (80, 72, -1), (96, 24, 32), (200, 72, 128), (512, 64, 256), (384, 8, 192),
    (192, 100, 96), (1000, 40, 256), (64, 64, 64), (130, 66, 64),
]  # fmt: skip


def quant_linear(q: QuantizedWeight, bias: Tensor | None) -> QuantLinear:
    return QuantLinear(marlin_operand(q, torch.float32), bias)


def held_weight(operand: Operand) -> Tensor:
    """The dense weight [N', K'] that the kernel sees, by the definition of the layout."""
    codes = unpack_tiles(operand.words).float()
    scales = permute_scales(operand.scales).float()
    zeros = torch.full_like(scales, 8) if operand.zeros is None else permute_scales(operand.zeros).float()
    rows = torch.arange(codes.shape[0])
    groups = rows // operand.granularity.channels_per_group(len(rows))
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
    assert operand.granularity in GRANULARITIES
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
    operand = marlin_operand(random_tuple(768, 64, group_size=group_size), torch.float16)
    assert operand.granularity == Granularity.group(refined)


def test_sorting_by_group_is_stable() -> None:
    q = random_tuple(128, 64, group_size=32)
    scattered = replace(q, g_idx=torch.arange(128, dtype=torch.int32) % 4)
    order = marlin_operand(scattered, torch.float16).order
    assert order is not None
    assert order.tolist() == [4 * place + group for group in range(4) for place in range(32)]


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (random_tuple(64, 64, group_size=16), "groups of 16"),
        (random_tuple(160, 64, group_size=80), "groups of 80"),
        (
            replace(random_tuple(64, 64, group_size=32), g_idx=torch.arange(64, dtype=torch.int32) // 63),
            "order",
        ),
    ],
)
def test_weights_that_kernels_cannot_hold_are_refused(q: QuantizedWeight, reason: str) -> None:
    refusal = operand_refusal(q)
    assert refusal is not None
    assert reason in refusal
    with pytest.raises(UnsupportedError, match=f"up_proj: .*{reason}"):
        marlin_operand(q, torch.float16, name="up_proj")
    stored = stored_weight(q)
    assert operand_refusal(stored) == refusal
    with pytest.raises(UnsupportedError, match=reason):
        stored_operand(stored, torch.float16, CPU)


def test_scales_beyond_the_activations_range_are_refused() -> None:
    q = random_tuple(64, 64, group_size=32, scale_dtype=torch.bfloat16)
    q.scales[0, 0] = 1e6
    with pytest.raises(UnsupportedError, match="overflows float16; run in bfloat16"):
        marlin_operand(q, torch.float16)
    with pytest.raises(UnsupportedError, match="compressed-tensors: .* overflows float16; run in bfloat16"):
        stored_operand(stored_weight(q, "compressed-tensors"), torch.float16, CPU)


# Padding of K, of N, of both, none; groups that are kept, refined, single, and longer than what is left.
STORED_SHAPES = [
    (128, 64, 32), (128, 192, 64), (256, 128, 128), (512, 64, 256), (384, 64, 192), (192, 128, 96),
    (256, 64, -1), (80, 64, -1), (96, 64, 32), (64, 72, 32), (200, 72, 40), (320, 24, 160), (1024, 64, 128),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "symmetric"),
    [*product(INTEGERS, [True]), *product(sorted(set(INTEGERS) - {"marlin"}), [False])],
)
@pytest.mark.parametrize("act_order", [False, True])
def test_stored_words_give_the_operand_of_their_codes(layout: str, symmetric: bool, act_order: bool) -> None:
    """Whatever way the words take, the bits are those of unpacking the codes and packing them again."""
    compared = 0
    for seed, ((k, n, size), scales, dtype) in enumerate(product(STORED_SHAPES, FLOATS, FLOATS)):
        q = random_tuple(
            k, n, group_size=size, seed=seed, symmetric=symmetric, act_order=act_order, scale_dtype=scales
        )
        stored_as = INTEGERS[layout].scale_dtype
        if operand_refusal(q) or INTEGERS[layout].refusal(q) or stored_as not in (None, q.scheme.scale_dtype):
            continue
        stored = stored_weight(q, layout)
        assert operand_refusal(stored) is None
        found = stored_operand(stored, dtype, CPU)
        expected = marlin_operand(q, dtype)
        for field in fields(Operand):
            mine, theirs = getattr(found, field.name), getattr(expected, field.name)
            if isinstance(theirs, Tensor):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)
                assert mine.is_contiguous()
            else:
                assert mine == theirs
        compared += 1
    # Every layout holds both weights of a single group, in whatever order, for the three dtypes.
    assert compared >= (6 if act_order and not INTEGERS[layout].stores_order else 18)


def no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nobody unpacks the codes of a weight, or packs them."""

    def forbidden(*_: object) -> None:
        raise AssertionError("codes were unpacked or packed")

    for place in (layouts.words, layouts.marlin):
        monkeypatch.setattr(place, "unpack_rows", forbidden)
    for place in (layouts.words, layouts.marlin):
        monkeypatch.setattr(place, "pack_rows", forbidden)
    monkeypatch.setattr(kernel_operand, "marlin_operand", forbidden)
    monkeypatch.setattr(layouts.marlin, "unpack_tiles", forbidden)


@pytest.mark.parametrize("layout", INTEGERS)
def test_codes_of_fitting_shapes_are_never_unpacked(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = random_tuple(256, 128, group_size=128, symmetric=layout == "marlin")
    stored = stored_weight(q, layout)
    expected = marlin_operand(q, torch.float16)
    no_codes(monkeypatch)
    assert torch.equal(stored_operand(stored, torch.float16, CPU).words, expected.words)
    with pytest.raises(AssertionError, match="were unpacked"):
        stored.weight()


class Renamed(Marlin):
    """The kernel's bits under names of its own."""

    name = "renamed"
    key = "bits"
    scale_key = "steps"
    suffixes = ("bits", "steps")


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_any_layout_of_the_kernels_bits_is_taken_as_stored(
    group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = random_tuple(256, 128, group_size=group_size)
    packed = stored_weight(q, "marlin")
    renamed = Renamed()
    stored = StoredWeight(
        "toy", renamed, packed.spec, {renamed.key: packed.words, renamed.scale_key: packed.scales}
    )
    no_codes(monkeypatch)
    for name in ("tile_words", "untile_words", "permute_scales"):
        monkeypatch.setattr(layouts.marlin, name, None)
    monkeypatch.setattr(kernel_operand, "permute_scales", None)
    found = stored_operand(stored, torch.float16, CPU)
    assert found.words is packed.words
    assert found.scales is packed.scales
    # Another dtype costs a copy of the scales, and nothing else.
    narrow = stored_operand(stored, torch.bfloat16, CPU)
    assert narrow.words is packed.words
    assert torch.equal(narrow.scales, packed.scales.bfloat16())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
def test_quant_linear_is_a_linear(bias: bool, act_order: bool) -> None:
    q = random_tuple(80, 72, group_size=-1, symmetric=False)
    if act_order:
        q = random_tuple(96, 72, group_size=32, symmetric=False, act_order=True)
    offset = torch.randn(q.out_features) if bias else None
    linear = quant_linear(q, offset)
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
    layer = quant_linear(q, torch.randn(72))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 96)
    assert torch.equal(compiled(x), layer(x))


def test_a_quant_linear_follows_its_buffers() -> None:
    layer = quant_linear(random_tuple(64, 64, group_size=64), None)
    x = torch.randn(3, 64)
    before = layer(x)
    doubled = torch.func.functional_call(layer, {"scales": 2 * layer.scales}, (x,))
    torch.testing.assert_close(doubled, 2 * before)
    layer.scales = 2 * layer.scales
    assert torch.equal(layer(x), doubled)
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
