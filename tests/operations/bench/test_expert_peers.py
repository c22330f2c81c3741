"""Peers that run on a CPU compute the layer that we compute."""

from __future__ import annotations

import pytest
import torch

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.experts import reference_experts
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.experts import even_routings
from marlinq.operations.bench.peers.dense import CublasExperts, TorchGroupedExperts
from marlinq.operations.bench.synthetic_experts import random_experts

LAYER = ExpertsLayer("small", 8, 3, 128, 64)
CPU = torch.device("cpu")


@pytest.mark.parametrize("peer", [CublasExperts, TorchGroupedExperts])
@pytest.mark.parametrize("m", [1, 5])
def test_dense_peers_compute_the_layer(peer: type[CublasExperts] | type[TorchGroupedExperts], m: int) -> None:
    torch.manual_seed(0)
    weights = random_experts(
        LAYER, Granularity.group(32), asymmetric=True, dtype=torch.bfloat16, device=CPU, weight_format=INT4
    )
    routings = even_routings(LAYER, m, CPU, 1 << 30)
    contender = peer()
    contender.load(LAYER, weights)
    run = contender.prepare(m, routings)
    x = torch.randn(m, LAYER.hidden, dtype=torch.bfloat16)
    for number, routing in enumerate(routings):
        expected = reference_experts(x.float(), routing.ids, routing.weights, weights, "silu").float()
        # Five roundings to 8 bits: weights, both products, the activation, and the sum.
        assert float((run(number, x).float() - expected).norm() / expected.norm()) < 5 * 2**-9


def test_the_grouped_product_refuses_float16() -> None:
    weights = random_experts(
        LAYER, Granularity.group(32), asymmetric=False, dtype=torch.float16, device=CPU, weight_format=INT4
    )
    with pytest.raises(UnsupportedError, match="--dtype bfloat16"):
        TorchGroupedExperts().load(LAYER, weights)
