"""A stored weight says what its values are, and decodes to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marlinq.core.errors import CheckpointError, ConversionRefused
from tests.testing.layouts import INTEGERS
from tests.testing.runnable_folders import random_tuple, stored_weight


@pytest.mark.parametrize("layout", INTEGERS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, -1])
def test_scheme_and_values_are_those_of_the_weight(
    layout: str, bits: int, symmetric: bool, act_order: bool, group_size: int
) -> None:
    q = random_tuple(128, 64, group_size=group_size, bits=bits, symmetric=symmetric, act_order=act_order)
    refusal = INTEGERS[layout].refusal(q)
    if refusal is not None:
        with pytest.raises(ConversionRefused, match="weights|asymmetric|activation order"):
            stored_weight(q, layout)
        return
    stored = stored_weight(q, layout)
    assert stored.scheme == q.scheme
    assert (stored.in_features, stored.out_features) == (128, 64)
    assert q.difference(stored.weight()) is None
    assert q.difference(stored.weight(torch.device("cpu"))) is None
    # A config may say desc_act where there is no order.
    declared = replace(stored.spec, scheme=replace(stored.spec.scheme, act_order=True))
    assert replace(stored, spec=declared).scheme == q.scheme


@pytest.mark.parametrize("layout", ["gptq", "gptq-v2"])
def test_zero_points_count_more_than_the_config(layout: str) -> None:
    q = random_tuple(128, 64, group_size=32, symmetric=False)
    stored = stored_weight(q, layout)
    declared = replace(stored.spec, scheme=replace(stored.spec.scheme, zero_point="midpoint"))
    assert replace(stored, spec=declared).scheme.stores_zeros


def test_an_order_that_an_old_writer_left_is_seen() -> None:
    q = random_tuple(128, 64, group_size=32)
    stored = stored_weight(q, "compressed-tensors")
    g_idx = q.g_idx.flip(0)
    left = replace(
        stored,
        tensors={**stored.tensors, "weight_g_idx": g_idx},
        spec=replace(stored.spec, extras=frozenset({"weight_g_idx"})),
    )
    assert left.scheme.act_order
    assert torch.equal(left.weight().g_idx, g_idx)


def test_errors_name_the_weight() -> None:
    stored = replace(stored_weight(random_tuple(128, 64, group_size=32)), name="folder: up_proj")
    tensors = {**stored.tensors, "g_idx": torch.full((128,), 7, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match=r"^folder: up_proj: g_idx: expected values in 0\.\.3"):
        replace(stored, tensors=tensors).weight()
