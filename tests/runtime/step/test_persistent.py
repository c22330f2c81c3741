"""Layers in one launch are given what the chain computes with: a stand-in for the kernel, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress
from marlinq.kernels.launch.persistent import LayerOperands, Model
from marlinq.runtime import QuantLinear
from marlinq.runtime.step import persistent, recorded_step, walk
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.persistent import join_layers
from marlinq.runtime.step.reference_forward import ReferenceForward
from tests.kernels.persistent_problems import Reference
from tests.runtime.step import torch_kernels
from tests.runtime.step.test_chain import TOLERANCE, error, halved, quantized, recognised
from tests.testing.tiny_models import tiny_model

SIZES = {
    "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}  # fmt: skip


class InFloat64:
    """:class:`marlinq.kernels.launch.persistent.PersistentLayers` on a CPU."""

    def __init__(
        self,
        layers: Sequence[LayerOperands],
        model: Model,
        hidden: Tensor,
        lengths: Tensor,
        progress: ReportProgress,
    ) -> None:
        self._layers, self._model = list(layers), model
        self._hidden, self._lengths = hidden, lengths

    def launch(self) -> None:
        reference = Reference(self._model, self._lengths.tolist(), self._hidden.dtype)
        self._hidden.copy_(reference.step(self._layers, self._hidden))


@pytest.fixture(autouse=True)
def kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (walk, recorded_step):
        monkeypatch.setattr(module, "kernels", torch_kernels)
    numbers = SimpleNamespace(architecture="sm_90a", shared_bytes=232_448)
    monkeypatch.setattr(persistent, "device_numbers", lambda index: numbers)
    monkeypatch.setattr(persistent, "PersistentLayers", InFloat64)


def made(
    name: str, batch: int = 1, group_size: int = 32, **changes: object
) -> tuple[ChainForward, ReferenceForward]:
    model = tiny_model(name, **{**SIZES, **changes})
    anatomy = recognised(model)
    quantized(model, group_size=group_size)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            # Products as large as their input, as the tolerance presumes, for this many channels.
            module.scales.div_(3)
    half, wide = halved(model)
    own = ChainForward(half, anatomy, batch=batch, capacity=24)
    return own, ReferenceForward(wide, anatomy, batch=batch, capacity=24)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"group_size": -1}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 64}),
        ("mistral", {}),
        ("gemma2", {"head_dim": 64}),
        ("gemma3", {"head_dim": 64, "num_hidden_layers": 6}),
    ],
)
def test_a_step_is_the_references(name: str, changes: dict[str, Any]) -> None:
    own, reference = made(name, **changes)
    apart = len(own.recorded.starts)
    assert join_layers(own) is None
    assert own.reason.startswith("all layers in one launch")
    # Embedding, layers, norm, head; and Gemma 2's cap of the logits.
    assert len(own.recorded.starts) == (5 if name == "gemma2" else 4) < apart
    ids, lengths = torch.arange(11)[None], torch.tensor([11], dtype=torch.int32)
    with torch.no_grad():
        found = [error(own.prefill(ids, lengths), reference.prefill(ids, lengths))]
        for token in (5, 77, 3, 100):
            tokens = torch.tensor([token])
            found.append(error(own.step(tokens), reference.step(tokens)))
    assert torch.equal(own.lengths, reference.lengths)
    assert max(found) < TOLERANCE, found


@pytest.mark.parametrize(
    ("name", "batch", "changes", "reason"),
    [
        ("llama", 2, {}, "2 sequences"),
        ("llama", 1, {"num_attention_heads": 16}, "heads of 32 channels"),
        ("starcoder2", 1, {}, "gelu_tanh, or gate and up"),
        ("phi", 1, {}, "parallel blocks"),
    ],
)
def test_models_that_the_kernel_does_not_take_stay_a_chain(
    name: str, batch: int, changes: dict[str, Any], reason: str
) -> None:
    own, _ = made(name, batch, **changes)
    recorded = own.recorded
    found = join_layers(own)
    assert found is not None
    assert reason in found
    assert own.recorded is recorded


def test_a_cache_too_short_for_the_comparison_stays_a_chain() -> None:
    model = tiny_model("llama", **SIZES)
    anatomy = recognised(model)
    quantized(model)
    half, _ = halved(model)
    own = ChainForward(half, anatomy, batch=1, capacity=4)
    assert join_layers(own) == "a cache of 4 tokens, too few to compare both"


def test_other_logits_than_the_chains_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "_rotate", lambda self, x, layer: x)
    own, _ = made("llama")
    recorded = own.recorded
    found = join_layers(own)
    assert found is not None
    assert "its logits differ by" in found
    assert own.recorded is recorded
