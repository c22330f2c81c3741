"""A draft head through the kernels of a step, with kernels in torch, drafts as the reference does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from marlinq.models.anatomy import Anatomy
from marlinq.models.recognise import anatomy_of
from marlinq.runtime import load
from marlinq.runtime.draft_layer import DraftLayer
from marlinq.runtime.step import recorded_step, walk
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.draft_chain import ChainDraft
from marlinq.runtime.step.draft_reference import ReferenceDraft
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.forward_choice import draft_layer
from marlinq.runtime.step.reference_forward import ReferenceForward
from tests.runtime.step import torch_kernels
from tests.testing.draft_heads import add_draft_head
from tests.testing.runnable_folders import save_plain
from tests.testing.tiny_models import tiny_model

# As in test_chain: hidden states of a few layers, rounded to float16 some ten times a layer.
TOLERANCE = 4e-3


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_drafts_are_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prompt, a step and a verification, of which one token is refused."""
    for module in (walk, recorded_step):
        monkeypatch.setattr(module, "kernels", torch_kernels)
    save_plain(tmp_path, tiny_model("llama"))
    add_draft_head(tmp_path, 1, "mtp")
    # With this seed the two largest logits are never closer than 0.03 of the logits' spread, ten times
    # what rounding changes.
    ids = torch.randint(3, 120, (40,), generator=torch.Generator().manual_seed(2))
    forwards: list[Forward] = []
    heads: list[ChainDraft | ReferenceDraft] = []
    for kind, head, dtype in (
        (ChainForward, ChainDraft, "float16"),
        (ReferenceForward, ReferenceDraft, "float32"),
    ):
        loaded = load(tmp_path, device="cpu", dtype=dtype, progress=False)
        anatomy, layer = anatomy_of(loaded.model), draft_layer(loaded)
        assert isinstance(anatomy, Anatomy)
        assert isinstance(layer, DraftLayer)
        forwards.append(kind(loaded.model, anatomy, batch=1, capacity=64, keeps_hidden=True))
        heads.append(head(layer, capacity=64))
    for forward in forwards:
        forward.prefill(ids[None, :20], torch.tensor([20], dtype=torch.int32))
        forward.step(ids[20:21].contiguous())
        forward.verify(ids[21:29].contiguous())
        forward.accept(28)
    own, reference = (forward.hidden_states for forward in forwards)
    assert own is not None
    assert reference is not None
    assert error(own[:28], reference[:28]) < TOLERANCE
    chain, torchs = heads
    assert isinstance(chain, ChainDraft)
    assert isinstance(torchs, ReferenceDraft)
    # A prompt; one pair, then several; more than a step takes.
    for first, last in ((0, 12), (12, 13), (13, 17), (17, 28)):
        tokens = ids[first + 1 : last + 1].tolist()
        found = [
            head.draft(tokens, hidden[first:last], 3) for head, hidden in ((chain, own), (torchs, reference))
        ]
        assert found[0] == found[1]
        keys = chain.layers[0].keys[:, :, :last], torchs._keys[0][:, :, :last]
        assert error(*keys) < TOLERANCE
