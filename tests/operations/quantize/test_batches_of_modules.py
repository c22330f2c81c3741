from __future__ import annotations

import torch

from marlinq.core.weight import QuantizedWeight
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.quantize.batches_of_modules import in_module_batches
from tests.testing.schemes import quantized, scheme


def made(n: int, k: int, symmetric: bool = True) -> QuantizedWeight:
    return round_to_nearest(torch.randn(n, k) + 0.5, scheme(32, symmetric=symmetric))


def test_batches_hold_weights_of_one_shape_and_scheme_in_order() -> None:
    torch.manual_seed(0)
    weights = {
        "a": made(8, 64),
        "b": made(16, 64),
        "c": made(8, 64),
        "d": made(8, 64, symmetric=False),
        "e": made(8, 128),
        "f": made(8, 64),
    }
    batches = list(in_module_batches(weights.items(), limit=2 * 8 * 64))
    assert sorted(batch.items for batch in batches) == [["a", "c"], ["b"], ["d"], ["e"], ["f"]]
    for batch in batches:
        dense = batch.weight.dequantize().chunk(len(batch.items))
        assert all(
            torch.equal(part, weights[name].dequantize())
            for name, part in zip(batch.items, dense, strict=True)
        )


def test_a_weight_in_activation_order_is_a_batch_of_its_own() -> None:
    usual = made(8, 64)
    mixed = quantized(
        usual.codes, usual.scales, usual.zeros, usual.g_idx.flip(0), usual.channels_per_group, usual.element
    )
    assert [batch.items for batch in in_module_batches([(0, mixed), (1, mixed), (2, usual)])] == [
        [0],
        [1],
        [2],
    ]
