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
from tests.runtime.step.test_chain import DELTA_NETS, error, halved, recognised, tiny, tolerance
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
def test_a_verification_returns_to_the_state_behind_a_token() -> None:
    """Logits are compared, since two of a tiny model's largest may differ by less than rounding does."""
    model = tiny(DELTA_NETS[0])
    anatomy = recognised(model)
    own = ChainForward(halved(model)[0].cuda(), anatomy, batch=1, capacity=512)
    assert Decoder(own).prepare_drafts() == ""
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0)).cuda()
    length = torch.tensor([6], dtype=torch.int32)
    own.prefill(ids[:, :6], length)
    wanted = [own.step(ids[:, place].contiguous())[0].clone() for place in range(6, 22)]
    own.prefill(ids[:, :6], length)
    found: list[torch.Tensor] = []
    for kept in (2, own.most_verified, 1, 3):
        draft = ids[0, 6 + len(found) :][: own.most_verified].clone()
        draft[kept:] = 1
        found += own.verify(draft)[:kept].clone()
        own.accept(6 + len(found))
        found += own.step(ids[:, 6 + len(found)].contiguous()).clone()
    # Steps and verifications both round; a delta net brings queries and keys to length one.
    assert error(torch.stack(found), torch.stack(wanted[: len(found)])) < tolerance(DELTA_NETS[0])
