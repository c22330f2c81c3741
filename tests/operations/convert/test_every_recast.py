"""Every pair of float schemes, and every pair of formats that hold one: exact as promised, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from marlinq.core.dtypes import torch_dtype
from marlinq.core.schemes import SCHEMES
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import FORMATS, Layout, spec_of
from marlinq.operations.convert.recast import recast
from tests.docs.test_format_tables import CT, INTEGERS, example

FLOATS = [name for name in SCHEMES if name not in INTEGERS]
EXACT = {
    ("fp8", "fp8-dynamic"), ("fp8-dynamic", "fp8"), ("mxfp4", "mxfp8"),
    *((name, name) for name in FLOATS),
}  # fmt: skip
"""Pairs that hold whatever the weight; docs/formats.md has the table."""
SOMETIMES = {("mxfp4", "nvfp4"), ("mxfp4", "fp8-block")}
"""Pairs that hold if scales allow."""


@st.composite
def weights(draw: st.DrawFn, name: str) -> QuantizedWeight:
    """A weight of a scheme: any codes but NaN, scales over some octaves anywhere in their dtype's range."""
    scheme = example(name)
    # Two groups at least: of one, MXFP8 is a scale per channel.
    k, n = 32 * draw(st.integers(2, 5)), draw(st.sampled_from([1, 3, 130]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    codes = torch.randint(0, scheme.element.codes, (k, n), generator=generator, dtype=torch.uint8)
    codes[scheme.element.decode(codes).isnan()] = 0
    octaves = draw(st.integers(1, 24))
    shape = scheme.granularity.scales_shape(k, n)
    wanted = torch_dtype(scheme.scale_dtype)
    if wanted == torch.float8_e8m0fnu:
        low = draw(st.integers(0, 254 - octaves))
        scales = torch.randint(low, low + octaves, shape, generator=generator, dtype=torch.uint8).view(wanted)
    elif wanted == torch.float8_e4m3fn:
        scales = torch.randint(1, 0x7F, shape, generator=generator, dtype=torch.uint8).view(wanted)
    else:
        powers = draw(st.integers(-90, 80)) + octaves * torch.rand(shape, generator=generator)
        scales = torch.exp2(powers).to(wanted)
    second = inputs = None
    if scheme.tensor_scale != "none":
        second = torch.tensor(draw(st.sampled_from([2.0**-130, 2.0**-20, 0.0037, 1.0, 3.0, 2.0**15])))
    if scheme.activations is not None and not scheme.activations.dynamic:
        inputs = torch.tensor(draw(st.sampled_from([0.25, 0.37])))
    return QuantizedWeight.from_codes(scheme, codes, scales=scales, tensor_scale=second, input_scale=inputs)


def same_values(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Bit for bit, the signs of zeros among them, as far as float32 holds the values."""
    return torch.equal(bits(one), bits(other))


def bits(weight: QuantizedWeight) -> Tensor:
    return weight.dequantize().view(torch.int32)


@pytest.mark.parametrize("source", FLOATS)
def test_every_scheme_becomes_every_other_or_is_refused(source: str) -> None:
    held = set()

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(weight=weights(source))
    def check(weight: QuantizedWeight) -> None:
        for target in FLOATS:
            layout = CT.layout_of(example(target))
            way = recast(weight.scheme, layout, SCHEMES[target])
            if way is None or isinstance(way, str):
                assert (way is None) == (source == target)
                continue
            found = way.exact(weight)
            if found is None:
                assert (source, target) not in EXACT
                assert way.apply(weight, allow_loss=False) is None
                continue
            assert (source, target) in EXACT | SOMETIMES
            held.add(target)
            assert same_values(weight, found), target
            # Its stored tensors are read back as the same weight.
            assert found.difference(layout.unpack(layout.pack(found), spec_of(found))) is None

    check()
    assert held >= {target for name, target in EXACT if name == source != target}


def layouts(weight: QuantizedWeight) -> list[tuple[str, Layout]]:
    """Layouts of the formats that hold such a weight."""
    return [
        (form.name, form.layout_of(weight.scheme))
        for form in FORMATS.values()
        if form.read_only is None and form.scheme_refusal(weight.scheme) is None
    ]


@pytest.mark.parametrize("source", FLOATS)
def test_every_weight_survives_every_format_that_holds_it(source: str) -> None:
    seen = set()

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(weight=weights(source))
    def check(weight: QuantizedWeight) -> None:
        for name, layout in layouts(weight):
            way = recast(weight.scheme, layout, None)
            assert not isinstance(way, str)
            found = weight if way is None else way.exact(weight)
            if found is None or layout.refusal(found) is not None:
                continue
            seen.add(name)
            stored = layout.as_stored(found.scheme)
            spec = replace(spec_of(found), scheme=stored)
            assert same_values(weight, layout.unpack(layout.pack(found, stored), spec)), name

    check()
    assert "compressed-tensors" in seen
