"""Granularity: shapes of scales, group sizes as configs write them, and what can't be written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlinq.core.granularity import Granularity

TENSOR, CHANNEL = Granularity.tensor(), Granularity.channel()
EXTENTS = st.integers(1, 300)
GRANULARITIES = st.one_of(
    st.just(TENSOR),
    st.just(CHANNEL),
    st.builds(Granularity.group, EXTENTS),
    st.builds(Granularity.block, EXTENTS, EXTENTS),
)


@pytest.mark.parametrize(
    ("granularity", "kind", "shape", "words"),
    [
        (TENSOR, "tensor", (1, 1), "one scale per tensor"),
        (CHANNEL, "channel", (1, 300), "one scale per channel"),
        (Granularity.group(128), "group", (2, 300), "groups of 128"),
        (Granularity.group(200), "group", (1, 300), "groups of 200"),
        (Granularity.group(512), "group", (1, 300), "groups of 512"),
        (Granularity.block(128, 64), "block", (4, 3), "blocks of 128 x 64"),
        (Granularity.block(512, 512), "block", (1, 1), "blocks of 512 x 512"),
        (Granularity.block(1, 16), "group", (13, 300), "groups of 16"),
    ],
)
def test_scales_of_a_weight_with_ragged_edges(
    granularity: Granularity, kind: str, shape: tuple[int, int], words: str
) -> None:
    assert granularity.kind == kind
    assert granularity.scales_shape(200, 300) == shape
    assert granularity.groups(200) == shape[0]
    assert granularity.describe() == words


@given(GRANULARITIES, EXTENTS, EXTENTS)
def test_every_weight_has_one_scale_and_every_scale_a_weight(
    granularity: Granularity, in_features: int, out_features: int
) -> None:
    rows, columns = granularity.scales_shape(in_features, out_features)
    channels = granularity.channels_per_group(in_features)
    outputs = granularity.outputs_per_group(out_features)
    assert (rows - 1) * channels < in_features <= rows * channels
    assert (columns - 1) * outputs < out_features <= columns * outputs
    assert granularity.divides(in_features) == (rows * channels == in_features)


@given(GRANULARITIES, EXTENTS, EXTENTS)
def test_a_weight_that_is_one_group_has_one_scale_per_channel(
    granularity: Granularity, in_features: int, out_features: int
) -> None:
    same = granularity.for_channels(in_features)
    assert same.scales_shape(in_features, out_features) == granularity.scales_shape(in_features, out_features)
    assert same.for_channels(in_features) == same
    assert same.kind != "group" or same.groups(in_features) > 1


@pytest.mark.parametrize("group_size", [-1, 1, 32, 128])
def test_group_sizes_of_configs_come_back(group_size: int) -> None:
    assert Granularity.from_group_size(group_size).group_size == group_size


@pytest.mark.parametrize("group_size", [0, -2, -128])
def test_numbers_that_are_no_group_size(group_size: int) -> None:
    with pytest.raises(ValueError, match="at least one input channel"):
        Granularity.from_group_size(group_size)


@pytest.mark.parametrize("granularity", [TENSOR, Granularity.block(128, 128)])
def test_a_granularity_without_a_group_size_says_so(granularity: Granularity) -> None:
    with pytest.raises(ValueError, match=f"{granularity.describe()} can't be written as a group size"):
        _ = granularity.group_size


@pytest.mark.parametrize(("channels", "outputs"), [(-1, 1), (1, -1), (0, 2), (128, 0)])
def test_tiles_that_no_granularity_has(channels: int, outputs: int) -> None:
    with pytest.raises(ValueError, match="no granularity"):
        Granularity(channels, outputs)
