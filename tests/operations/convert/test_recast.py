"""Conversions between schemes: the same weight bit for bit, or a refusal that says what would be lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations, Scheme
from marlinq.core.schemes import SCHEMES
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import FORMATS, Format, spec_of
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.convert.recast import recast

CT, MODELOPT = FORMATS["compressed-tensors"], FORMATS["modelopt"]
MXFP4 = SCHEMES["mxfp4"]


def scheme(name: str) -> Scheme:
    """A named scheme; ``compressed-tensors`` has second levels that divide."""
    named = SCHEMES[name]
    found = named.example(Scheme(named.element, named.granularity, "none"))
    return CT.layout_of(found).as_stored(found)


@st.composite
def mxfp4(draw: st.DrawFn, octaves: int) -> QuantizedWeight:
    """A weight whose used exponents span at most ``octaves`` octaves; groups of zeros have any exponent."""
    k, n = 32 * draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 130]))
    seed, low = draw(st.integers(0, 2**32 - 1)), draw(st.integers(60, 160))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(low, low + octaves, (k // 32, n), generator=generator).to(torch.uint8)
    blank = torch.rand(k // 32, n, generator=generator) < 0.2
    codes[blank.repeat_interleave(32, dim=0)] = 8 * draw(st.integers(0, 1))
    exponents[blank] = 0
    return QuantizedWeight.from_codes(scheme("mxfp4"), codes, scales=exponents.view(torch.float8_e8m0fnu))


def same_values(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Bit for bit, the signs of zeros among them, as far as float32 holds the values."""
    return torch.equal(one.dequantize().view(torch.int32), other.dequantize().view(torch.int32))


def changed(weight: QuantizedWeight, name: str, form: Format = CT) -> QuantizedWeight | None:
    way = recast(weight.scheme, form.layout_of(scheme(name)), SCHEMES[name])
    assert way is not None
    assert not isinstance(way, str), way
    return way.exact(weight)


@settings(max_examples=40, deadline=None)
@given(weight=mxfp4(octaves=18))
def test_mxfp4_is_exact_in_nvfp4(weight: QuantizedWeight) -> None:
    for form in (CT, MODELOPT):
        found = changed(weight, "nvfp4", form)
        assert found is not None
        assert same_values(weight, found)
        layout = form.layout_of(found.scheme)
        assert found.scheme.tensor_scale == layout.tensor_scales[0]
        assert found.difference(layout.unpack(layout.pack(found), spec_of(found))) is None


@settings(max_examples=40, deadline=None)
@given(weight=mxfp4(octaves=40))
def test_mxfp4_is_exact_in_mxfp8(weight: QuantizedWeight) -> None:
    found = changed(weight, "mxfp8")
    assert found is not None
    assert same_values(weight, found)


@settings(max_examples=40, deadline=None)
@given(weight=mxfp4(octaves=15))
def test_mxfp4_is_exact_in_blocks_of_fp8(weight: QuantizedWeight) -> None:
    found = changed(weight, "fp8-block")
    assert found is not None
    assert same_values(weight, found)
    # A block's scale is a power of two.
    assert bool((torch.frexp(found.scales).mantissa == 0.5).all())


def spread(octaves: int) -> QuantizedWeight:
    """Two groups whose exponents lie so many octaves apart, both of them used."""
    exponents = torch.tensor([[100], [100 + octaves]], dtype=torch.uint8)
    codes = torch.full((64, 1), 5, dtype=torch.uint8)
    return QuantizedWeight.from_codes(scheme("mxfp4"), codes, scales=exponents.view(torch.float8_e8m0fnu))


@pytest.mark.parametrize(("name", "held", "refused"), [("nvfp4", 17, 18), ("fp8-block", 14, 16)])
def test_wider_spans_are_refused(name: str, held: int, refused: int) -> None:
    assert changed(spread(held), name) is not None
    assert changed(spread(refused), name) is None
    way = recast(scheme("mxfp4"), CT.layout_of(scheme(name)), SCHEMES[name])
    assert way is not None
    assert not isinstance(way, str)
    assert "exponents" in way.refusal
    assert way.apply(spread(refused), allow_loss=False) is None
    rounded = way.apply(spread(refused), allow_loss=True)
    assert rounded is not None
    assert rounded.dequantize().shape == (1, 64)


def test_integers_and_floats_are_never_exchanged() -> None:
    for name in ("int4", "int8"):
        said = recast(scheme("mxfp4"), CT.layout_of(scheme("mxfp4")), SCHEMES[name])
        assert isinstance(said, str)
        assert "only floats are converted" in said


@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_second_level_scales_are_inverted_where_that_is_exact(scale: float) -> None:
    codes = torch.full((16, 2), 3, dtype=torch.uint8)
    inputs = Activations(SCHEMES["nvfp4"].element, SCHEMES["nvfp4"].granularity, dynamic=False)
    weight = QuantizedWeight.from_codes(
        Scheme(
            SCHEMES["nvfp4"].element,
            SCHEMES["nvfp4"].granularity,
            "none",
            "float8_e4m3fn",
            tensor_scale="divides",
            activations=inputs,
        ),
        codes,
        scales=torch.ones(1, 2).to(torch.float8_e4m3fn),
        tensor_scale=torch.tensor(scale),
        input_scale=torch.tensor(2.0),
    )
    way = recast(weight.scheme, MODELOPT.layouts[0], None)
    assert way is not None
    assert not isinstance(way, str)
    found = way.exact(weight)
    if scale == 3.0:
        assert found is None
        found = way.apply(weight, allow_loss=True)
        assert found is not None
        torch.testing.assert_close(found.dequantize(), weight.dequantize(), rtol=2**-22, atol=0)
        return
    assert found is not None
    assert same_values(weight, found)
    assert found.input_scale == torch.tensor(0.5)


@pytest.mark.parametrize("name", ["fp8", "fp8-dynamic", "mxfp8", "nvfp4"])
def test_blocks_of_fp8_become_others_with_a_loss_alone(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = round_to_nearest(torch.randn(130, 160, generator=generator), scheme("fp8-block"))
    assert changed(weight, name) is None
    way = recast(weight.scheme, CT.layout_of(scheme(name)), SCHEMES[name])
    assert way is not None
    assert not isinstance(way, str)
    assert "would be rounded again" in way.refusal
    assert way.apply(weight, allow_loss=False) is None
    rounded = way.apply(weight, allow_loss=True)
    assert rounded is not None
    # Half a step of the coarsest target, E2M1, whose scale is at most 2**-4 off: 1/4 + 1/16 of a weight.
    difference = (rounded.dequantize() - weight.dequantize()).norm()
    assert 0 < float(difference) < 0.3125 * float(weight.dequantize().norm())


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8-block", "mxfp8"])
def test_integers_never_become_floats(name: str) -> None:
    for integers in ("int4", "int8"):
        source = SCHEMES[integers].example(
            Scheme(SCHEMES[integers].element, Granularity.group(32), "midpoint")
        )
        said = recast(source, CT.layout_of(scheme(name)), SCHEMES[name])
        assert "only floats are converted" in str(said)


def test_blocks_with_exponents_and_with_float32_scales() -> None:
    """DeepSeek-V4's blocks are exact elsewhere; the way back is for powers of two alone."""
    generator = torch.Generator().manual_seed(0)
    exponents = replace(scheme("fp8-block"), scale_dtype="float8_e8m0fnu")
    weight = round_to_nearest(torch.randn(130, 160, generator=generator), exponents)
    for form in (FORMATS["fp8"], CT):
        layout = form.layout_of(scheme("fp8-block"))
        wide = replace(layout.as_stored(scheme("fp8-block")), scale_dtype="float32")
        tensors = layout.pack(weight, wide)
        found = layout.unpack(tensors, replace(spec_of(weight), scheme=wide))
        assert torch.equal(found.dequantize(), weight.dequantize())
        assert FORMATS["deepseek-v4"].layouts[0].refusal(found) is None
    other = round_to_nearest(torch.randn(130, 160, generator=generator), scheme("fp8-block"))
    assert "scales are not exactly representable in float8_e8m0fnu" in str(
        FORMATS["deepseek-v4"].layouts[0].refusal(other)
    )
