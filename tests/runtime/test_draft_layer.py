"""Draft heads of checkpoints: what they compute, that drafts change no text, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, modeling_layers

from marlinq.core.errors import UnsupportedError
from marlinq.operations.verify import verify
from marlinq.runtime import LoadedModel, Sampling, generate, generate_batch, load
from marlinq.runtime.draft_layer import DraftLayer
from marlinq.runtime.speculation import LayerSpeculation
from marlinq.runtime.step.draft_reference import ReferenceDraft
from marlinq.runtime.step.forward import DraftForward
from marlinq.runtime.step.forward_choice import draft_layer
from tests.testing.draft_heads import LAYOUTS, add_draft_head
from tests.testing.mixtures import save_mixture
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized
from tests.testing.tiny_models import tiny_model

PROMPT = [1, 9, 30, 77, 5]


def opened(folder: Path, dtype: str = "float32") -> LoadedModel:
    loaded = load(folder, device="cpu", dtype=dtype, progress=False)
    loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
    return loaded


def with_head(folder: Path, layout: str = "mtp", *, block_weight: float = 0.15) -> LoadedModel:
    """A model whose blocks add ``block_weight`` of what they would, and a head that predicts as with 0."""
    model = tiny_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(block_weight)
    save_plain(folder, model)
    add_draft_head(folder, 1, layout, copies=True)
    return opened(folder)


@pytest.mark.parametrize(("name", "layout"), [("deepseek-v3", "layer"), ("qwen3-next", "mtp")])
@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="transformers runs no draft heads")
def test_hidden_states_are_those_of_transformers(name: str, layout: str, tmp_path: Path) -> None:
    save_mixture(tmp_path, name, dtype=torch.float32)
    add_draft_head(tmp_path, 1, layout)
    layer = draft_layer(opened(tmp_path))
    assert isinstance(layer, DraftLayer), layer
    main = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*" if layout == "layer" else r"^mtp.*"]
    main.config.num_mtp_layers = 1
    main.config.mtp_layer_types, main.config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
    ids = torch.arange(3, 12)
    with torch.no_grad():
        hidden = main.model(ids[None, :-1]).last_hidden_state
        head = modeling_layers.MtpModel.from_pretrained(main).eval()
        expected = head.forward_layer(0, hidden, torch.arange(1, 9)[None], None, input_ids=ids[None, 1:])[0]
    ours = ReferenceDraft(layer, capacity=12)
    found = torch.cat([ours._append(ids[1:6], hidden[0, :5]), ours._append(ids[6:], hidden[0, 5:])])
    # float32, some 30 roundings of 2^-24 each.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("layout", "temperature"), [(LAYOUTS[0], None), (LAYOUTS[0], 0.2), (LAYOUTS[1], None)]
)
def test_text_is_that_of_steps(layout: str, temperature: float | None, tmp_path: Path) -> None:
    model = with_head(tmp_path, layout)
    sampling = Sampling(temperature=temperature, seed=3)
    plain = generate(model, PROMPT, max_new_tokens=24, sampling=sampling, speculate="off")
    drafted = generate(model, PROMPT, max_new_tokens=24, sampling=sampling, speculate="mtp")
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.drafts.accepted < drafted.drafts.drafted, drafted.drafts
    assert drafted.drafts.verifications < 23
    assert "drafts from the model's draft head" in drafted.render()
    if temperature is None:
        # A cache that a draft has left behind is not read by the next text.
        again = generate(model, PROMPT, max_new_tokens=24, sampling=sampling, speculate="mtp")
        assert (again.tokens, again.drafts) == (drafted.tokens, drafted.drafts)


def test_a_head_that_is_right_is_accepted(tmp_path: Path) -> None:
    model = with_head(tmp_path, block_weight=0.0)
    drafts = generate(model, PROMPT, max_new_tokens=32, speculate="mtp").drafts
    assert drafts.accepted == drafts.drafted > 20, drafts


def test_drafts_behind_recurrent_states(tmp_path: Path) -> None:
    """A delta net takes the state behind the last accepted token, and the head a quantised model's states."""
    save_mixture(tmp_path, "qwen3-next", dtype=torch.float32)
    add_draft_head(tmp_path, 1, "mtp", copies=True)
    model = opened(tmp_path)
    plain = generate(model, PROMPT, max_new_tokens=24, speculate="off")
    drafted = generate(model, PROMPT, max_new_tokens=24, speculate="mtp")
    assert drafted.tokens == plain.tokens
    assert drafted.drafts.verifications > 2


@pytest.mark.parametrize("name", ["fc", "pre_fc_norm_hidden", "norm", "layers.0.mlp.up_proj"])
@pytest.mark.parametrize("damage", ["shape", "dtype"])
def test_text_goes_on_without_a_damaged_head(name: str, damage: str, tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model("llama"))
    add_draft_head(tmp_path, 1, "mtp")
    path, name = tmp_path / "model.safetensors", f"mtp.{name}.weight"
    tensors = load_file(path)
    tensors[name] = tensors[name][:-1].clone() if damage == "shape" else tensors[name].to(torch.int8)
    save_file(tensors, path)
    loaded = opened(tmp_path)
    with pytest.raises(UnsupportedError, match="draft head .*: expected "):
        generate(loaded, PROMPT, max_new_tokens=4, speculate="mtp")
    assert generate(loaded, PROMPT, max_new_tokens=4).drafts.source == "the text so far"


def test_quantised_heads(tmp_path: Path) -> None:
    """A head's block may be quantised as the model's blocks are; text goes on without one that is damaged."""
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    add_draft_head(tmp_path, 1, "mtp")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "mtp.layers.0.self_attn.q_proj.qweight" in tensors
    layer = draft_layer(opened(tmp_path))
    assert isinstance(layer, DraftLayer), layer
    assert verify(tmp_path).ok
    tensors["mtp.layers.0.self_attn.q_proj.scales"] = tensors["mtp.layers.0.self_attn.q_proj.scales"][:1]
    save_file(tensors, path)
    loaded = opened(tmp_path)
    assert loaded.decisions
    with pytest.raises(UnsupportedError, match=r"draft head can't be loaded: .*q_proj.*scales"):
        generate(loaded, PROMPT, max_new_tokens=4, speculate="mtp")
    drafted = generate(loaded, PROMPT, max_new_tokens=4)
    assert drafted.drafts.source == "the text so far"
    assert "the checkpoint's draft head is not used: its draft head can't be loaded" in drafted.notes[-1]


def test_refusals_name_the_cause(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_plain(tmp_path, model)
    with pytest.raises(UnsupportedError, match="the checkpoint has no draft head; use another --speculate"):
        generate(opened(tmp_path), PROMPT, max_new_tokens=4, speculate="mtp")
    add_draft_head(tmp_path, 1, "mtp")
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for changed, reason in (
        ({"mtp.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)}, r"up_proj.weight: expected \[128, 64\]"),
        ({"mtp.layers.0.mlp.up_proj.weight": None}, "expected a tensor .*up_proj.weight"),
        ({"mtp.pre_fc_norm_hidden.weight": None}, "no tensor named mtp.pre_fc_norm_hidden.weight"),
    ):
        tensors: dict[str, Tensor | None] = {**whole, **changed}
        save_file({name: value for name, value in tensors.items() if value is not None}, path)
        with pytest.raises(UnsupportedError, match=reason):
            generate(opened(tmp_path), PROMPT, max_new_tokens=4, speculate="mtp")
    save_file(whole, path)
    loaded = opened(tmp_path)
    penalty = Sampling(repetition_penalty=1.1)
    with pytest.raises(UnsupportedError, match="penalty"):
        generate(loaded, PROMPT, max_new_tokens=4, speculate="mtp", sampling=penalty)
    assert "2 texts" in generate_batch(loaded, [PROMPT, PROMPT], max_new_tokens=4).rows[0].drafts.refusal


class Guess(DraftForward):
    """Drafts tokens of ``text``, each right with a chance."""

    def __init__(self, text: list[int], chance: float, cost: float, seed: int) -> None:
        self.known, self.cost = 0, cost
        self._text, self._chance, self._rng = text, chance, random.Random(seed)

    def begin(self) -> None:
        self.known = 0

    def start(self, tokens: Sequence[int], hidden: Tensor, most: int) -> None:
        place = int(hidden[-1]) + 1
        assert len(tokens) <= 32, "a long pause is not read"
        assert list(tokens) == [self._text[int(before) + 1] for before in hidden]
        self.known += len(tokens)
        ahead = self._text[place + 1 : place + 1 + most]
        ahead += [0] * (most - len(ahead))
        self._ahead = [token if self._rng.random() < self._chance else -1 for token in ahead]

    def drafted(self) -> list[int]:
        return self._ahead


class Costs(NamedTuple):
    """Times in steps of a model.

    Attributes:
        verification: time of a verification.
        token: time of one more drafted token.
        most: number of tokens that a verification checks at most.
        draft: time of a draft besides its tokens.
        behind_steps: time that a draft behind a step takes longer.
    """

    verification: float
    token: float
    most: int
    draft: float = 0.13
    behind_steps: float = 0.7

    def fixed(self, chance: float, count: int) -> float:
        """Time of a token where all drafts have ``count``, of which each is right with a chance."""
        given = sum(chance**index for index in range(count + 1))
        return (self.verification + self.draft + count * self.token) / given if count else 1.0


# An INT4 model of 32 blocks with a 16-bit head; a head that costs little; a hybrid of few blocks.
COSTS = [Costs(1.4, 0.33, 7), Costs(1.4, 0.06, 7), Costs(1.3, 0.6, 3)]


def time_of(length: int, chance: float, costs: Costs, seed: int = 0) -> tuple[float, float]:
    """Steps that take as long as a text of ``length`` tokens, and the share of drafted tokens accepted."""
    text = list(range(length + 1))
    head = Guess(text, chance, costs.token, seed)
    hidden = torch.arange(length + 1)[:, None]
    speculation = LayerSpeculation(text[:2], head, hidden, most=costs.most, cost=costs.verification)
    place, spent, stepped = 2, 1.0, True
    while place <= length:
        draft = speculation.draft(min(costs.most, length - place)) if speculation.promising else []
        if not draft:
            speculation.came(text[place])
            place, spent, stepped = place + 1, spent + 1, True
            continue
        pairs = zip(draft, text[place:], strict=False)
        right = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(draft))
        spent += costs.verification + costs.draft + costs.token * len(draft)
        spent += costs.behind_steps if stepped else 0
        stepped = False
        speculation.checked(draft, text[place : place + right + 1])
        place += right + 1
    return spent, speculation.result().share


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("length", [200, 256, 4000])
def test_a_head_that_is_never_right_costs_little(length: int, costs: Costs) -> None:
    assert time_of(length, 0.0, costs)[0] < 1.03 * length


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("chance", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_drafts_take_little_more_time_than_the_best_fixed_number(chance: float, costs: Costs) -> None:
    """Mean over texts of 256 tokens. The best number needs the chance, which drafts first have to show."""
    best = min(costs.fixed(chance, count) for count in range(costs.most + 1))
    mean = sum(time_of(256, chance, costs, seed)[0] for seed in range(20)) / 20 / 256
    assert mean < 1.08 * best
    assert mean < 1.03


def test_a_head_that_is_wrong_from_some_token_on_loses_little_more_than_it_may() -> None:
    """Time that drafts gained is lost again up to a limit only."""
    costs = COSTS[0]
    text = list(range(2001))
    head = Guess(text, 1.0, costs.token, 0)
    hidden = torch.arange(2001)[:, None]
    speculation = LayerSpeculation(text[:2], head, hidden, most=7, cost=costs.verification)
    place, behind = 2, 0
    while place <= 1000:
        draft = speculation.draft(7)
        speculation.checked(draft, text[place : place + len(draft) + 1])
        place += len(draft) + 1
    head._chance, start, spent = 0.0, place, 0.0
    while place <= 2000:
        draft = speculation.draft(min(7, 2000 - place)) if speculation.promising else []
        if draft:
            speculation.checked(draft, text[place : place + 1])
            spent += costs.verification + costs.draft + costs.token * len(draft)
        else:
            speculation.came(text[place])
            spent += 1
        place, behind = place + 1, behind + bool(draft)
    assert 5 < behind < 50
    assert spent < 1.03 * (place - start)


def test_a_head_that_is_right_in_half_of_a_draft_makes_text_faster() -> None:
    spent, share = time_of(4000, 0.8, COSTS[1])
    assert 0.4 < share < 0.7
    assert spent < 4000 / 1.8
