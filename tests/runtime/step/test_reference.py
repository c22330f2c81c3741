from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.models.anatomy import Anatomy, Layer, Norm, Unrecognised
from marlinq.models.recognise import anatomy_of
from marlinq.runtime import QuantLinear, load, marlin_operand
from marlinq.runtime.step import probe
from marlinq.runtime.step import reference_forward as reference_module
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.join import join_modules
from marlinq.runtime.step.probe import capacity_limit, compare, own_forward_refusal
from marlinq.runtime.step.reference_forward import ReferenceForward
from tests.testing.decoders import KNOWN, UNKNOWN, WINDOW, random_decoder
from tests.testing.runnable_folders import random_quantizer, random_tuple, save_quantized
from tests.testing.tiny_models import tiny_model

# Prompts shorter and longer than the window, and steps across its edge.
LENGTHS = (WINDOW + 11, 3, WINDOW, 1)
STEPS = WINDOW + 3


def recognised(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Anatomy]:
    model = random_decoder(KNOWN[name], dtype=dtype)
    found = anatomy_of(model)
    assert isinstance(found, Anatomy), found
    return model, found


def reference(model: PreTrainedModel, anatomy: Anatomy) -> Callable[[int, int], Forward]:
    return lambda batch, capacity: ReferenceForward(model, anatomy, batch=batch, capacity=capacity)


@pytest.mark.parametrize("name", KNOWN)
def test_every_layer_equals_transformers(name: str) -> None:
    model, anatomy = recognised(name)
    found = compare(model, anatomy, reference(model, anatomy), lengths=LENGTHS, steps=STEPS)
    assert len(found) == len(anatomy.layers) + 1
    assert all(each.holds for each in found), found


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gpt_neox", "phi3", "gemma2"])
@pytest.mark.parametrize("operator", ["auto", "w4a16"])
def test_quantised_models_run_with_their_operators(name: str, operator: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model(name), "gptq", random_quantizer(symmetric=False))
    model = load(tmp_path, device="cpu", operator=operator).model
    found = anatomy_of(model)
    assert isinstance(found, Anatomy), found
    differences = compare(model, found, reference(model, found), lengths=LENGTHS, steps=STEPS)
    assert all(each.holds for each in differences), differences


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "gemma-2", "cohere", "gpt-neox", "opt", "granite"),
        *("qwen3.5", "nemotron-h", "deepseek-v3"),
    ],
)
def test_narrow_dtypes_differ_by_rounding(name: str, dtype: torch.dtype) -> None:
    model, anatomy = recognised(name, dtype)
    found = compare(model, anatomy, reference(model, anatomy), lengths=LENGTHS, steps=STEPS)
    assert all(each.holds for each in found), found


def with_layer(anatomy: Anatomy, index: int, change: Callable[[Layer], Layer]) -> Anatomy:
    layers = list(anatomy.layers)
    layers[index] = change(layers[index])
    return replace(anatomy, layers=tuple(layers))


def in_attention(change: Callable[[Any], Any]) -> Callable[[Layer], Layer]:
    return lambda layer: replace(layer, attention=change(layer.attention))


def in_norm(key: str, **changes: Any) -> Callable[[Layer], Layer]:
    def change(layer: Layer) -> Layer:
        norm = getattr(layer, key)
        assert isinstance(norm, Norm)
        return replace(layer, **{key: replace(norm, **changes)})

    return change


def in_rotary(**changes: Any) -> Callable[[Layer], Layer]:
    return in_attention(lambda a: replace(a, rotary=replace(a.rotary, **changes)))


FAULTS: dict[str, tuple[str, Callable[[Layer], Layer]]] = {
    "eps": ("llama", in_norm("attention_norm", eps=1e-4)),
    "offset": ("gemma-2", in_norm("post_mlp_norm", offset=0.0)),
    "kind of norm": ("starcoder-2", in_norm("mlp_norm", kind="rms")),
    "norm left out": ("olmo-2", lambda layer: replace(layer, post_attention_norm=None)),
    "scale": ("llama", in_attention(lambda a: replace(a, scale=a.scale * 1.001))),
    "window one longer": ("mistral", in_attention(lambda a: replace(a, window=WINDOW + 1))),
    "window one shorter": ("mistral", in_attention(lambda a: replace(a, window=WINDOW - 1))),
    "no window": ("mistral", in_attention(lambda a: replace(a, window=None))),
    "soft cap": ("gemma-2", in_attention(lambda a: replace(a, softcap=2.01))),
    "no soft cap": ("gemma-2", in_attention(lambda a: replace(a, softcap=None))),
    "no query norm": ("qwen3", in_attention(lambda a: replace(a, query_norm=None))),
    "pairs": ("llama", in_rotary(interleaved=True)),
    "channels of other frequencies": ("gemma-3", in_rotary(frequencies="full_attention_inv_freq")),
    "scaling": ("llama-yarn", in_rotary(scaling=1.0)),
    "no rotation": ("llama", in_attention(lambda a: replace(a, rotary=None))),
    "scale of attention": ("granite", lambda layer: replace(layer, attention_scale=0.2201)),
    "scale of the MLP": ("granite", lambda layer: replace(layer, mlp_scale=0.2201)),
    "scale of a mixer beside": ("falcon-h1", lambda layer: replace(layer, beside_scale=0.3001)),
    "scale of the gate": (
        "falcon-h1",
        lambda layer: replace(layer, mlp=replace(layer.mlp, gate_scale=0.7501)),
    ),
    "parallel": ("llama", lambda layer: replace(layer, parallel=True)),
    "shared norm": ("gpt-neox", lambda layer: replace(layer, mlp_norm=layer.attention_norm)),
    "activation": ("gemma", lambda layer: replace(layer, mlp=replace(layer.mlp, activation="gelu"))),
    "turns": ("gpt-neox", in_attention(lambda a: replace(a, qkv=replace(a.qkv, turns=1)))),
    "scale of latent attention": ("deepseek-v2", in_attention(lambda a: replace(a, scale=a.scale * 1.001))),
    "pairs of latent attention": ("deepseek-v3", in_rotary(interleaved=False)),
    "norm of a latent": (
        "minicpm-3",
        in_attention(lambda a: replace(a, latent_norm=replace(a.latent_norm, eps=1e-3))),
    ),
    "heads of a delta net": ("qwen3-next", in_attention(lambda a: replace(a, key_heads=1, key_dim=16))),
    "decay and bias": (
        "qwen3-next",
        in_attention(lambda a: replace(a, decay=a.step_bias, step_bias=a.decay)),
    ),
    "beta and step": (
        "qwen3.5",
        in_attention(lambda a: replace(a, rates=replace(a.rates, modules=a.rates.modules[::-1]))),
    ),
    "steps by channel and gates": (
        "kimi-linear",
        in_attention(
            lambda a: replace(a, channels=replace(a.channels, steps=a.channels.gates, gates=a.channels.steps))
        ),
    ),
    "decay and skip of a mixer": (
        "granite-4",
        in_attention(lambda a: replace(a, decay=a.skip, skip=a.decay)),
    ),
    "groups of a mixer's heads": (
        "granite-4",
        in_attention(lambda a: replace(a, groups=1, state_dim=a.groups * a.state_dim)),
    ),
    "channels of a mixer's norm": (
        "granite-4",
        in_attention(lambda a: replace(a, norm=replace(a.norm, width=a.width))),
    ),
    "gate behind a mixer's norm": ("granite-4", in_attention(lambda a: replace(a, norm_first=True))),
    "square of an MLP alone": (
        "nemotron-h",
        lambda layer: replace(layer, mlp=replace(layer.mlp, activation="relu")),
    ),
    "gate and up": (
        "llama",
        lambda layer: replace(
            layer,
            mlp=replace(layer.mlp, inputs=replace(layer.mlp.inputs, modules=layer.mlp.inputs.modules[::-1])),
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_its_layer(fault: str) -> None:
    name, change = FAULTS[fault]
    if name not in KNOWN:
        pytest.skip(f"transformers has no {name}")
    model, anatomy = recognised(name)
    wrong = with_layer(anatomy, 1, change)
    assert wrong != anatomy
    found = compare(model, wrong, reference(model, wrong), lengths=LENGTHS, steps=STEPS)
    first = next(each for each in found if not each.holds)
    assert first.layer == 1, found


@pytest.mark.parametrize(
    ("name", "changes", "layer"),
    [
        ("granite", {"embedding_scale": 12.001}, 0),
        ("opt", {"positions_offset": 1}, 0),
        ("gpt-2", {"positions": None}, 0),
        ("granite", {"logit_scale": 0.12501}, 3),
        ("gemma-2", {"logit_softcap": None}, 3),
        ("llama", {"final_norm": None}, 3),
    ],
)
def test_planted_faults_outside_the_layers_are_found(name: str, changes: dict[str, Any], layer: int) -> None:
    model, anatomy = recognised(name)
    wrong = replace(anatomy, **changes)
    found = compare(model, wrong, reference(model, wrong), lengths=LENGTHS, steps=STEPS)
    assert next(each for each in found if not each.holds).layer == layer


def test_rows_do_not_see_each_other() -> None:
    model, anatomy = recognised("gemma-3")
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(96, (3, 20), generator=generator)
    lengths = torch.tensor([13, 2, 9], dtype=torch.int32)

    def run(rows: list[int], padding: int) -> list[Tensor]:
        prompt = ids[rows, :13].clone()
        for place, row in enumerate(rows):
            prompt[place, lengths[row] :] = padding
        forward = ReferenceForward(model, anatomy, batch=len(rows), capacity=24)
        logits = [forward.prefill(prompt, lengths[rows])]
        logits += [forward.step(ids[rows, 14 + step]) for step in range(5)]
        assert forward.lengths.tolist() == [int(lengths[row]) + 5 for row in rows]
        return logits

    together = run([0, 1, 2], padding=5)
    for row in range(3):
        alone = run([row], padding=7)
        for a, b in zip(together, alone, strict=True):
            # Sums of at most 96 products in another order: 2^-24 * sqrt(96) a product, 8 products deep.
            torch.testing.assert_close(a[row], b[0], rtol=0, atol=1e-5 * float(b.abs().max()))


def test_a_long_prompt_in_blocks_of_rows_equals_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, anatomy = recognised("gemma-2")
    ids = torch.randint(96, (2, 30), generator=torch.Generator().manual_seed(4))
    lengths = torch.tensor([30, 17], dtype=torch.int32)
    whole = ReferenceForward(model, anatomy, batch=2, capacity=32).prefill(ids, lengths)
    monkeypatch.setattr("marlinq.runtime.step.attention._ROW_BLOCK", 7)
    blocks = ReferenceForward(model, anatomy, batch=2, capacity=32).prefill(ids, lengths)
    torch.testing.assert_close(whole, blocks, rtol=0, atol=1e-5 * float(whole.abs().max()))


def test_a_prefill_forgets_what_was_there() -> None:
    model, anatomy = recognised("mistral")
    forward = ReferenceForward(model, anatomy, batch=1, capacity=24)
    ids = torch.arange(1, 15)[None]
    first = forward.prefill(ids, torch.tensor([14], dtype=torch.int32))
    forward.step(torch.tensor([3]))
    again = forward.prefill(ids, torch.tensor([14], dtype=torch.int32))
    assert torch.equal(first, again)


def test_logits_may_be_changed_in_place() -> None:
    model, anatomy = recognised("llama")
    forward = ReferenceForward(model, anatomy, batch=1, capacity=8)
    forward.prefill(torch.tensor([[5, 6]]), torch.tensor([2], dtype=torch.int32)).div_(2)
    forward.step(torch.tensor([3])).div_(2)
    assert forward.lengths.tolist() == [3]


def test_wrong_sizes_are_errors() -> None:
    model, anatomy = recognised("llama")
    forward = ReferenceForward(model, anatomy, batch=2, capacity=8)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="expected at most"):
        forward.prefill(torch.ones(2, 9, dtype=torch.int64), lengths)
    with pytest.raises(ValueError, match="expected at most"):
        forward.prefill(torch.ones(1, 4, dtype=torch.int64), lengths[:1])
    with pytest.raises(ValueError, match=r"expected 2 of 1\.\.3"):
        forward.prefill(torch.ones(2, 3, dtype=torch.int64), lengths)
    forward.prefill(torch.ones(2, 8, dtype=torch.int64), torch.tensor([3, 8], dtype=torch.int32))
    with pytest.raises(ValueError, match="the cache is full: 8 tokens"):
        forward.step(torch.tensor([1, 1]))


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5", "nemotron-h", "falcon-h1", "lfm2"])
def test_a_verification_equals_steps(name: str) -> None:
    """Also behind one of which only some tokens were kept: recurrent states return to the last of them."""
    model, anatomy = recognised(name)
    ids = torch.arange(3, 19)
    forward = ReferenceForward(model, anatomy, batch=1, capacity=16, keeps_hidden=True)
    prompt, length = ids[None, :7], torch.tensor([7], dtype=torch.int32)
    forward.prefill(prompt, length)
    expected = torch.cat([forward.step(ids[index : index + 1]) for index in range(7, 16)])
    assert forward.hidden_states is not None
    hidden = forward.hidden_states.clone()
    forward.hidden_states.zero_()
    forward.prefill(prompt, length)
    found = [forward.verify(torch.cat((ids[7:10], torch.tensor([1, 2]))))[:3]]
    forward.accept(10)
    found.append(forward.step(ids[10:11]))
    found.append(forward.verify(ids[11:]))
    forward.accept(16)
    # float32, three layers of some 20 roundings of 2^-24 each.
    for ours, steps in ((torch.cat(found), expected), (forward.hidden_states, hidden)):
        torch.testing.assert_close(ours, steps, rtol=0, atol=2e-5 * float(steps.abs().max()))


def test_limits_of_positions() -> None:
    limits = {
        name: capacity_limit(*recognised(name))
        for name in ("llama", "llama-dynamic-rope", "phi-3-longrope", "gpt-2", "opt")
    }
    assert limits == {
        "llama": None,
        "llama-dynamic-rope": 128,
        "phi-3-longrope": 64,
        "gpt-2": 64,
        "opt": 128,
    }


def test_the_refusal_names_the_part_and_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_passed", set())
    model, anatomy = recognised("qwen3")
    builds = []

    def build(batch: int, capacity: int, *, what: Anatomy) -> Forward:
        builds.append(batch)
        return ReferenceForward(model, what, batch=batch, capacity=capacity)

    def refusal(found: Anatomy | Unrecognised, executor: str, capacity: int = 32) -> str | None:
        what = anatomy if isinstance(found, Unrecognised) else found
        return own_forward_refusal(
            model, found, partial(build, what=what), executor=executor, capacity=capacity
        )

    assert refusal(anatomy, "reference") is None
    assert refusal(anatomy, "reference") is None
    assert len(builds) == 1
    wrong = with_layer(anatomy, 2, in_norm("mlp_norm", offset=1.0))
    reason = refusal(wrong, "wrong")
    assert reason is not None
    assert reason.startswith("model.layers.2 differs from transformers' by ")
    assert refusal(Unrecognised("a.b", "is strange"), "reference") == "a.b: is strange"
    assert len(builds) == 2
    longrope, found = recognised("phi-3-longrope")
    longer = own_forward_refusal(
        longrope, found, reference(longrope, found), executor="reference", capacity=65
    )
    assert longer == "positions from 64 on are computed in another way, and 65 tokens are asked for"


@pytest.mark.parametrize("name", ["llama-dynamic-rope", "phi-3-longrope"])
def test_a_longer_sequence_in_transformers_leaves_our_frequencies(name: str) -> None:
    model, anatomy = recognised(name)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 200, dtype=torch.int64), use_cache=False)
    forward = ReferenceForward(model, anatomy, batch=1, capacity=16)
    ids = torch.arange(3, 15)[None]
    found = forward.prefill(ids, torch.tensor([12], dtype=torch.int32))
    with torch.no_grad():
        # A short sequence brings the short frequencies back.
        expected = model(input_ids=ids, use_cache=False).logits[:, -1]
    # float32, three layers of some 20 roundings of 2^-24 each.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_rounding_is_measured_where_a_layer_enlarges_it() -> None:
    """Biases of 40 in queries and keys make scores of thousands, which rounding changes by whole numbers."""
    model, anatomy = recognised("qwen2", torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.bias.copy_(40 * torch.randn(linear.bias.shape, generator=generator))
    found = compare(model, anatomy, reference(model, anatomy))
    plain = [3 * 2**-7 * (each.layer + 1 + (each.name == "logits")) ** 0.5 for each in found]
    assert any(each.distance > allowed for each, allowed in zip(found, plain, strict=True))
    assert all(each.holds for each in found), found
    # A wrong anatomy is still found.
    wrong = with_layer(anatomy, 0, in_attention(lambda attention: replace(attention, rotary=None)))
    assert not compare(model, wrong, reference(model, wrong))[0].holds


def test_the_comparison_leaves_the_model_as_it_was() -> None:
    model, anatomy = recognised("gemma-2")
    before = model.config._attn_implementation
    compare(model, anatomy, reference(model, anatomy))
    assert model.config._attn_implementation == before
    assert all(not module._forward_hooks for module in model.modules())


def test_unknown_architectures_have_no_forward_of_ours() -> None:
    decoder, _, _ = UNKNOWN["bloom"]
    model = random_decoder(decoder)
    found = anatomy_of(model)
    assert isinstance(found, Unrecognised)
    reason = own_forward_refusal(
        model, found, lambda batch, capacity: pytest.fail("built"), executor="reference", capacity=8
    )
    assert reason is not None
    assert reason.startswith("transformer.h.0: ")


def test_agreement_holds_for_later_processes_until_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path))
    model, anatomy = recognised("qwen3")
    compared: list[Anatomy] = []

    def refusal(found: Anatomy, *, kept: bool = True) -> str | None:
        # Each asks as a new process would.
        monkeypatch.setattr(probe, "_passed", set())
        return own_forward_refusal(
            model, found, reference(model, found), executor="reference", capacity=32, kept=kept
        )

    def counted(model: PreTrainedModel, found: Anatomy, build: probe.Build) -> list[probe.Difference]:
        compared.append(found)
        return compare(model, found, build)

    monkeypatch.setattr(probe, "compare", counted)
    assert refusal(anatomy, kept=False) is None
    assert not list(tmp_path.rglob("probe-*"))
    assert refusal(anatomy) is None
    assert refusal(anatomy) is None
    assert len(compared) == 2
    # Another anatomy is another question, and what is wrong stays wrong without a note.
    wrong = with_layer(anatomy, 2, in_norm("mlp_norm", offset=1.0))
    assert refusal(wrong) is not None
    assert refusal(wrong) is not None
    assert len(compared) == 4
    assert len(list(tmp_path.rglob("probe-*"))) == 1
    monkeypatch.setattr("marlinq.core.notes.code_digest", lambda _: "other files")
    assert refusal(anatomy) is None
    assert len(compared) == 5


def test_joining_products_asks_for_no_second_probe() -> None:
    parts = nn.Module()
    for name in ("q", "k", "v", "o"):
        q = random_tuple(64, 64, group_size=32)
        setattr(parts, name, QuantLinear(marlin_operand(q, torch.float32)))
    before = probe._kinds_of_modules(parts)
    assert not isinstance(join_modules(parts, ("q", "k", "v"), interleave=False), str)
    assert probe._kinds_of_modules(parts) == before == ("Module", "QuantLinear")
    assert probe._kinds_of_modules(nn.Linear(2, 2)) == ("Linear",)


def test_small_attention_of_a_step_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model, anatomy = recognised("llama")
    own = ReferenceForward(model, anatomy, batch=1, capacity=12)
    seen: list[int] = []
    fused = F.scaled_dot_product_attention

    def counted(*given: Any, **named: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return fused(*given, **named)

    attention = anatomy.layers[0].attention
    of_a_token = attention.kv_heads * attention.head_dim
    monkeypatch.setattr(reference_module, "_ALONE", 8 * of_a_token)
    own.prefill(torch.ones(1, 6, dtype=torch.int64), torch.tensor([6], dtype=torch.int32))
    monkeypatch.setattr(reference_module.F, "scaled_dot_product_attention", counted)
    with all_threads(2):
        for _ in range(3):  # behind 6, 7 and 8 tokens
            own.step(torch.ones(1, dtype=torch.int64))
        assert torch.get_num_threads() == 2
    layers = len(anatomy.layers)
    assert seen == [1] * 2 * layers + [2] * layers


@contextmanager
def all_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
