"""Other implementations that the kernels are timed against, on the same codes and scales.

A peer is one file: a :class:`~marlinq.operations.bench.peers.contenders.Contender` for products, an
:class:`~marlinq.operations.bench.peers.contenders.ExpertsContender` for routed layers, or both.
"""

from __future__ import annotations

from collections.abc import Callable

from marlinq.operations.bench.peers.contenders import Contender, ExpertsContender
from marlinq.operations.bench.peers.dense import Cublas, CublasExperts, TorchGroupedExperts
from marlinq.operations.bench.peers.humming import Humming, HummingExperts
from marlinq.operations.bench.peers.own import ActivationOrder, BatchInvariant, Fp8Activations
from marlinq.operations.bench.peers.tinygemm import Tinygemm

PEERS: dict[str, Contender] = {
    peer.name: peer
    for peer in (Cublas(), Humming(), Tinygemm(), BatchInvariant(), ActivationOrder(), Fp8Activations())
}
"""Contenders of products by name."""

EXPERT_PEERS: dict[str, Callable[[], ExpertsContender]] = {
    contender.name: contender for contender in (HummingExperts, CublasExperts, TorchGroupedExperts)
}
"""Contenders of routed layers by name."""
