"""Draft heads and verifications behind recurrent states on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from marlinq.runtime import generate, load
from marlinq.runtime.decoding import Decoder
from marlinq.runtime.draft_layer import DraftLayer
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.draft_chain import ChainDraft
from marlinq.runtime.step.forward_choice import draft_layer, take_decoder
from tests.runtime.step.test_chain import DELTA_NETS, halved, recognised, tiny
from tests.testing.draft_heads import add_draft_head
from tests.testing.runnable_folders import save_plain
from tests.testing.tiny_models import tiny_model

pytestmark = pytest.mark.gpu


def test_drafted_text_is_that_of_steps(tmp_path: Path) -> None:
    """A head that predicts as the model without its blocks, which add little."""
    model = tiny_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.1)
    save_plain(tmp_path, model)
    add_draft_head(tmp_path, 1, "mtp", copies=True)
    loaded = load(tmp_path, device="cuda", dtype="float16", progress=False)
    loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
    prompt = list(range(3, 30))
    plain = generate(loaded, prompt, max_new_tokens=40, speculate="off")
    drafted = generate(loaded, prompt, max_new_tokens=40, speculate="mtp")
    assert drafted.step.mode == "cuda-graph"
    assert drafted.tokens == plain.tokens
    assert drafted.drafts.accepted > 4, drafted.drafts
    again = generate(loaded, prompt, max_new_tokens=40, speculate="mtp")
    assert (again.tokens, again.drafts) == (drafted.tokens, drafted.drafts)


def test_captured_drafts_are_eager_ones(tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model("llama"))
    add_draft_head(tmp_path, 1, "mtp")
    loaded = load(tmp_path, device="cuda", dtype="float16", progress=False)

    layer = draft_layer(loaded)
    assert isinstance(layer, DraftLayer), layer
    decoder = take_decoder(loaded, batch=1, tokens=64, layer=layer)
    captured = decoder.forward.drafter
    assert isinstance(captured, ChainDraft)
    eager = ChainDraft(layer, capacity=decoder.forward.capacity, graphs=False)
    torch.manual_seed(0)
    ids = torch.randint(3, 120, (40,)).tolist()
    decoder.begin([ids])
    hidden = decoder.forward.hidden_states
    assert hidden is not None
    for first, last in ((0, 12), (12, 13), (13, 17), (17, 38)):
        tokens = ids[first + 1 : last + 1]
        found = [head.draft(tokens, hidden[first:last], 3) for head in (captured, eager)]
        assert found[0] == found[1]


@torch.no_grad()
def test_a_captured_verification_returns_to_the_state_behind_a_token() -> None:
    half, _ = halved(tiny(DELTA_NETS[0]))
    half = half.cuda()
    own = ChainForward(half, recognised(half), batch=1, capacity=512)
    decoder = Decoder(own)
    assert decoder.prepare_drafts() == ""
    prompt = list(range(3, 20))
    decoder.begin([prompt])
    plain = [decoder.read()[0][0]]
    for _ in range(20):
        decoder.advance()
        plain += decoder.read()[0]
    decoder.begin([prompt])
    tokens = [decoder.read()[0][0]]
    most, turn = decoder.most_drafted, 0
    while len(tokens) < 18:
        right = turn % (most + 1)
        ahead = plain[len(tokens) : len(tokens) + right]
        draft = [*ahead, (plain[len(tokens) + right] + 1) % 90][:most]
        new = decoder.verify(tokens[-1], draft)
        assert len(new) == min(right, most) + 1
        tokens += new
        turn += 1
    assert tokens == plain[: len(tokens)]
