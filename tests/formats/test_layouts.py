"""Every layout against the plain formulas and itself, over shapes, groups, zeros, g_idx and widths."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.core.scheme import integer_element
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats import ModuleSpec, spec_of, transcode
from marlinq.formats.layouts.marlin import pack_tiles, permute_scales, unpack_tiles
from tests.formats import oracles
from tests.testing.layouts import INTEGERS
from tests.testing.schemes import quantized, scheme

NAMES = tuple(INTEGERS)
CHANNELWISE = scheme(-1)


@st.composite
def tuples(draw: st.DrawFn) -> QuantizedWeight:
    """Mostly tuples that most layouts hold, some that few do."""
    bits = draw(st.sampled_from((4, 4, 4, 8)))
    k = draw(st.sampled_from((16, 32, 48, 64, 64, 96, 128, 20)))
    n = draw(st.sampled_from((64, 64, 128, 8, 24, 12)))
    size = min(k, draw(st.sampled_from((16, 32, 32, 64, 128, k))))
    groups = -(-k // size)
    seed = draw(st.integers(0, 2**32 - 1))
    zeros_kind = draw(st.sampled_from(("middle", "middle", "one and up", "any")))
    order = draw(st.sampled_from(("trivial", "trivial", "trivial", "scattered")))
    dtype = draw(st.sampled_from((torch.float16, torch.float16, torch.bfloat16)))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (k, n), generator=generator, dtype=torch.uint8)
    # Both signs, and values that float16 and bfloat16 both hold exactly.
    scales = torch.randint(-255, 256, (groups, n), generator=generator).to(dtype) / 1024
    if zeros_kind == "middle":
        zeros = torch.full((groups, n), 1 << (bits - 1), dtype=torch.uint8)
    else:
        low = 1 if zeros_kind == "one and up" else 0
        zeros = torch.randint(low, 1 << bits, (groups, n), generator=generator, dtype=torch.uint8)
    g_idx = trivial_g_idx(k, size)
    if order == "scattered":
        g_idx = g_idx[torch.randperm(k, generator=generator)]
    return quantized(codes, scales, zeros, g_idx, size, integer_element(bits))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(q=tuples())
def test_pack_holds_the_formula_and_unpack_undoes_it_or_the_refusal_says_why(
    name: str, q: QuantizedWeight
) -> None:
    layout, reasons = INTEGERS[name], oracles.refusals(name, q)
    if reasons:
        with pytest.raises(ConversionRefused) as caught:
            layout.pack(q)
        assert any(reason in str(caught.value) for reason in reasons), (str(caught.value), reasons)
        return
    packed = layout.pack(q)
    expected = oracles.pack(name, q)
    assert set(packed) == set(expected)
    for suffix, tensor in expected.items():
        if tensor.is_floating_point():
            tensor = tensor.to(torch_dtype(layout.scale_dtype or q.scheme.scale_dtype))
        assert packed[suffix].dtype == tensor.dtype, suffix
        assert packed[suffix].is_contiguous(), suffix
        assert torch.equal(packed[suffix], tensor), suffix
    natural = replace(q.scheme, scale_dtype=layout.scale_dtype or q.scheme.scale_dtype)
    spec = replace(spec_of(q), scheme=layout.as_stored(natural))
    assert {
        suffix: (torch_dtype(want.dtype), want.shape) for suffix, want in layout.expected(spec).items()
    } == {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in packed.items()}
    shapes = {suffix: tuple(tensor.shape) for suffix, tensor in packed.items()}
    assert layout.infer_shape(shapes, q.element) == (q.in_features, q.out_features)
    assert q.difference(layout.unpack(packed, spec)) is None


@settings(max_examples=40, deadline=None)
@given(q=tuples(), names=st.permutations(NAMES))
def test_transcoded_words_are_the_packed_words(q: QuantizedWeight, names: list[str]) -> None:
    able = [name for name in names if INTEGERS[name].refusal(q) is None]
    for source, target in pairwise(able):
        stored = INTEGERS[source].pack(q)[INTEGERS[source].key]
        words = transcode(stored, spec_of(q), INTEGERS[source], INTEGERS[target])
        assert torch.equal(words, INTEGERS[target].pack(q)[INTEGERS[target].key]), (
            source,
            target,
        )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "marlin"])
def test_large_tensors_are_transcoded_in_several_slabs(name: str) -> None:
    # 2**21 codes a slab: 4096 columns leave 512 rows for the first and 272 for the last.
    codes = torch.randint(0, 16, (784, 4096), dtype=torch.uint8)
    q = quantized(
        codes,
        torch.ones(1, 4096, dtype=torch.float16),
        torch.full((1, 4096), 8, dtype=torch.uint8),
        torch.zeros(784, dtype=torch.int32),
        784,
    )
    source, target = INTEGERS["marlin"], INTEGERS[name]
    stored = source.pack(q)
    assert torch.equal(unpack_tiles(stored["B"]), codes)
    assert torch.equal(pack_tiles(codes), stored["B"])
    words = transcode(stored["B"], spec_of(q), source, target)
    assert q.difference(target.unpack({**target.pack(q), target.key: words}, spec_of(q))) is None


@settings(max_examples=30, deadline=None)
@given(groups=st.integers(1, 3), blocks=st.integers(1, 3))
def test_scale_permutation_is_undone(groups: int, blocks: int) -> None:
    scales = torch.arange(groups * blocks * 64).reshape(groups, blocks * 64)
    assert torch.equal(permute_scales(permute_scales(scales)), scales)


def small(
    bits: int = 4, zero: int = 8, scale: float = 0.5, dtype: torch.dtype = torch.float16
) -> QuantizedWeight:
    return quantized(
        torch.zeros(64, 64, dtype=torch.uint8),
        torch.full((2, 64), scale, dtype=dtype),
        torch.full((2, 64), zero, dtype=torch.uint8),
        trivial_g_idx(64, 32),
        32,
        integer_element(bits),
    )


def test_symmetric_words_are_the_well_known_ones() -> None:
    assert {word & 0xFFFFFFFF for word in INTEGERS["gptq"].pack(small())["qzeros"].flatten().tolist()} == {
        0x77777777
    }
    assert {word & 0xFFFFFFFF for word in INTEGERS["gptq-v2"].pack(small())["qzeros"].flatten().tolist()} == {
        0x88888888
    }
    eight = INTEGERS["gptq"].pack(small(bits=8, zero=128))["qzeros"]
    assert {word & 0xFFFFFFFF for word in eight.flatten().tolist()} == {0x7F7F7F7F}


@pytest.mark.parametrize("name", ["gptq", "gptq-v2", "awq", "marlin"])
def test_scales_that_float16_rounds_are_refused(name: str) -> None:
    fine = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0)).item()
    with pytest.raises(ConversionRefused, match="not exactly representable in float16"):
        INTEGERS[name].pack(small(scale=fine, dtype=torch.float32))
    with pytest.raises(ConversionRefused, match="not exactly representable in float16"):
        INTEGERS[name].pack(small(scale=2.0**20, dtype=torch.bfloat16))
    kept = INTEGERS["compressed-tensors"].pack(small(scale=fine, dtype=torch.float32))["weight_scale"]
    assert kept.dtype == torch.float32
    assert torch.equal(kept, torch.full((64, 2), fine))


def test_negative_zero_and_nan_scales_survive() -> None:
    q = small()
    q.scales[0, 0], q.scales[0, 1], q.scales[1, 0] = -0.0, float("nan"), float("-inf")
    for name, layout in INTEGERS.items():
        back = layout.unpack(layout.pack(q), spec_of(q))
        assert torch.equal(back.scales.view(torch.int16), q.scales.view(torch.int16)), name


def word_subtracted(zeros: list[int]) -> int:
    """How GPTQModel stores v1 zeros: one subtraction a word, so that a zero of 0 borrows."""
    return (oracles.packed(zeros, 4) - 0x11111111) % (1 << 32)


@given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
@settings(max_examples=200, deadline=None)
def test_v1_zeros_are_decoded_as_written_or_refused(zeros: list[int]) -> None:
    layout = INTEGERS["gptq"]
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": oracles.words([[word_subtracted(zeros)]]),
        "scales": torch.ones(1, 8, dtype=torch.float16),
        "g_idx": torch.zeros(8, dtype=torch.int32),
    }
    known = layout.unpack(tensors, ModuleSpec(8, 8, CHANNELWISE, zero_writer="gptqmodel"))
    assert known.zeros.tolist() == [zeros]
    if 0 in zeros:
        with pytest.raises(ConversionRefused, match="different writers"):
            layout.unpack(tensors, ModuleSpec(8, 8, CHANNELWISE))
    else:
        assert layout.unpack(tensors, ModuleSpec(8, 8, CHANNELWISE)).zeros.tolist() == [zeros]


def test_a_tuple_declared_asymmetric_stores_its_zeros() -> None:
    layout, q = INTEGERS["compressed-tensors"], small()
    declared = scheme(32, symmetric=False)
    tensors = layout.pack(q, declared)
    spec = ModuleSpec(64, 64, declared)
    assert set(tensors) == set(layout.expected(spec))
    assert q.difference(layout.unpack(tensors, spec)) is None
    with pytest.raises(ConversionRefused, match="declared symmetric"):
        layout.pack(small(zero=7), scheme(32))


@pytest.mark.parametrize("name", NAMES)
def test_missing_extra_and_misshapen_tensors_are_named(name: str) -> None:
    layout, q = INTEGERS[name], small()
    tensors, spec = layout.pack(q), spec_of(q)
    for suffix, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != suffix}
        with pytest.raises(CheckpointError, match=f"^{suffix}: expected .* found no tensor"):
            layout.unpack(rest, spec)
        with pytest.raises(CheckpointError, match=f"^{suffix}: expected"):
            layout.unpack({**rest, suffix: tensor[:-1]}, spec)
        with pytest.raises(CheckpointError, match=f"^{suffix}: expected"):
            layout.unpack({**rest, suffix: tensor.to(torch.float64)}, spec)
    with pytest.raises(CheckpointError, match="^extra: not a tensor of a"):
        layout.unpack({**tensors, "extra": q.codes}, spec)


def test_g_idx_out_of_range_is_refused() -> None:
    layout, q = INTEGERS["gptq"], small()
    tensors = layout.pack(q)
    for wrong in (2, -1, 2**31 - 1):
        g_idx = tensors["g_idx"].clone()
        g_idx[5] = wrong
        with pytest.raises(CheckpointError, match=r"g_idx: expected values in 0\.\.1"):
            layout.unpack({**tensors, "g_idx": g_idx}, spec_of(q))


def test_dequantize_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(3)
    k, n, size = 1100, 3, 100
    q = quantized(
        torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8),
        torch.randn(11, n, generator=generator).half(),
        torch.randint(0, 16, (11, n), generator=generator, dtype=torch.uint8),
        trivial_g_idx(k, size)[torch.randperm(k, generator=generator)],
        size,
    )
    weight = q.dequantize()
    for row in range(n):
        for column in (0, 1, 511, 512, 513, 1099):
            group = int(q.g_idx[column])
            value = (int(q.codes[column, row]) - int(q.zeros[group, row])) * float(q.scales[group, row])
            assert float(weight[row, column]) == torch.tensor(value, dtype=torch.float32).item()
