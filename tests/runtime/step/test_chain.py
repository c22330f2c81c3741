"""The chain puts its kernels together right: with kernels in torch, it computes what the reference does."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from marlinq.core.float_elements import E4M3
from marlinq.formats import StoredWeight, spec_of
from marlinq.kernels.step import AttentionShape, AttentionWorkspace, Division, divide
from marlinq.methods.rtn import round_to_nearest
from marlinq.models.anatomy import Anatomy, DeltaNet, Unrecognised
from marlinq.models.recognise import recognise
from marlinq.runtime import QuantLinear, marlin_operand
from marlinq.runtime.operators import OPERATORS, Setting
from marlinq.runtime.step import bound_forward, prompts, recorded_step, walk
from marlinq.runtime.step.bound import chain_refusal
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.join import JoinedLinear, JoinedSlice
from marlinq.runtime.step.reference_forward import ReferenceForward
from tests.docs.test_format_tables import CT, example
from tests.runtime.step import torch_kernels
from tests.testing.decoders import KNOWN, random_decoder
from tests.testing.pairs import slow_but
from tests.testing.runnable_folders import random_tuple
from tests.testing.tiny_models import tiny_model

# Hidden states are rounded to float16 some ten times a layer, of which there are up to six; a rounding is
# 2^-11 / sqrt(3) = 2.8e-4 of a value, and the sum of sixty independent ones 2.2e-3.
TOLERANCE = 4e-3

DELTA_NETS = ("qwen3.5", "qwen3-next", "olmo-hybrid")
KIMI = [name for name in ("kimi-linear",) if name in KNOWN]
MIXERS = ("bamba", "granite-4", "nemotron-h", "falcon-h1", "mamba-2", "lfm2", "lfm2-biases")
LATENT = "deepseek-v3"
GEMMA_4 = ("gemma-4", "gemma-4-e")
GATES = ("afmoe", "lfm3", "laguna")
NORMS_BEHIND = ("hunyuan", "nanochat")
MODELS = [
    *("llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3"),
    *("gpt_neox", "opt", "stablelm", "gpt2", "starcoder2", "olmo2", "cohere"),
    *DELTA_NETS,
    *MIXERS,
    LATENT,
    *KIMI,
    *GEMMA_4,
    *GATES,
    *NORMS_BEHIND,
]


def tolerance(name: str) -> float:
    """A delta net brings queries and keys to length one, which magnifies what short ones are off by."""
    return 2 * TOLERANCE if name in (*DELTA_NETS, *KIMI) else TOLERANCE


@pytest.fixture(autouse=True)
def kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (walk, recorded_step):
        monkeypatch.setattr(module, "kernels", torch_kernels)


def halved(
    model: PreTrainedModel, dtype: torch.dtype = torch.float16
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model in 16 bits, and the same weights in float32. Frequencies stay exact."""
    frequencies = {name: value.clone() for name, value in model.named_buffers() if "inv_freq" in name}
    half = copy.deepcopy(model).to(dtype)
    _restore(half, frequencies)
    wide = copy.deepcopy(half).float()
    _restore(wide, frequencies)
    return half, wide


def tiny(name: str) -> PreTrainedModel:
    if name == "opt":
        # Else a projection stands before the first block, which is not recognised.
        return tiny_model(name, word_embed_proj_dim=64)
    if name in DELTA_NETS:
        # Heads that the kernel of delta nets takes.
        sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
        return random_decoder(replace(KNOWN[name], config={**KNOWN[name].config, **sizes}))
    if name in MIXERS + GEMMA_4 + GATES + NORMS_BEHIND:
        return random_decoder(KNOWN[name])
    if name in KIMI:
        # Sizes that the kernels take, without experts: theirs must be packed.
        sizes = {"kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
        more = {**sizes, "linear_head_dim": 64, "mlp_layer_types": ["dense"] * 3}
        return random_decoder(replace(KNOWN[name], config={**KNOWN[name].config, **more}))
    if name == LATENT:
        # Sizes that the kernels of latent attention take.
        sizes = {"kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
        return random_decoder(replace(KNOWN[name], config={**KNOWN[name].config, **sizes, "q_lora_rank": 64}))
    if name == "padded":
        # 96 columns are a tile and a half, and every linear has a bias.
        return tiny_model("llama", intermediate_size=96, mlp_bias=True, attention_bias=True)
    return tiny_model(name)


def _restore(model: PreTrainedModel, buffers: dict[str, Tensor]) -> None:
    for name, value in buffers.items():
        model.get_buffer(name).data = value.clone()


def recognised(model: PreTrainedModel) -> Anatomy:
    blocks = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    found = recognise(model, blocks)
    assert isinstance(found, Anatomy), found
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@torch.no_grad()
def differences(own: ChainForward, reference: ReferenceForward, vocabulary: int) -> list[float]:
    """Relative errors of the logits behind ragged prompts and some steps."""
    torch.manual_seed(1)
    ids = torch.randint(0, vocabulary, (own.batch, 11))
    lengths = torch.tensor([11, 1, 7], dtype=torch.int32)
    found = [error(own.prefill(ids, lengths), reference.prefill(ids, lengths))]
    for _ in range(4):
        tokens = torch.randint(0, vocabulary, (own.batch,))
        found.append(error(own.step(tokens), reference.step(tokens)))
    assert torch.equal(own.lengths, reference.lengths)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_references(name: str) -> None:
    half, wide = halved(tiny(name))
    anatomy = recognised(wide)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    found = differences(own, reference, wide.config.vocab_size)
    assert max(found) < tolerance(name), found


@pytest.mark.parametrize(("name", "products"), list(zip(DELTA_NETS, (2, 1, 2), strict=True)))
def test_a_delta_net_multiplies_its_rates(name: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections of betas and steps in 16 bits are no launches of their own."""
    half, wide = halved(tiny(name))
    anatomy = recognised(wide)
    nets = sum(isinstance(layer.attention, DeltaNet) for layer in anatomy.layers)
    together = ChainForward(half, anatomy, batch=1, capacity=24)
    monkeypatch.setattr(bound_forward, "makes_rates", lambda inner, value_dim: False)
    apart = ChainForward(half, anatomy, batch=1, capacity=24)
    assert len(apart.recorded.starts) - len(together.recorded.starts) == products * nets > 0


@pytest.mark.parametrize("name", [DELTA_NETS[0], *KIMI])
def test_verifications_return_to_the_state_behind_a_token(name: str) -> None:
    """In a delta net: after a step, a verification with a refused tail, steps, and another verification."""
    half, wide = halved(tiny(name))
    anatomy = recognised(wide)
    own = ChainForward(half, anatomy, batch=1, capacity=40)
    reference = ReferenceForward(wide, anatomy, batch=1, capacity=40)
    torch.manual_seed(2)
    ids = torch.randint(0, wide.config.vocab_size, (1, 32))
    length = torch.tensor([6], dtype=torch.int32)
    reference.prefill(ids[:, :6], length)
    wanted = torch.cat([reference.step(ids[:, place]) for place in range(6, 20)])
    own.prefill(ids[:, :6], length)
    rows, found = own.most_verified, []
    for kept in (rows - 2, rows, 1, 2):
        start = 6 + len(found)
        draft = ids[0, start : start + rows].clone()
        draft[kept:] = 1
        found += own.verify(draft)[:kept].clone()
        own.accept(start + kept)
        found += own.step(ids[0, start + kept : start + kept + 1].contiguous()).clone()
    assert error(torch.stack(found), wanted[: len(found)]) < tolerance(name)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "padded", LATENT, *GEMMA_4])
def test_verifications_are_steps(name: str) -> None:
    """A verification behind a step, a refused tail, and another one over what that has left."""
    half, wide = halved(tiny(name))
    anatomy = recognised(wide)
    own = ChainForward(half, anatomy, batch=1, capacity=40)
    reference = ReferenceForward(wide, anatomy, batch=1, capacity=40)
    torch.manual_seed(2)
    ids = torch.randint(0, wide.config.vocab_size, (1, 32))
    length = torch.tensor([6], dtype=torch.int32)
    assert error(own.prefill(ids[:, :6], length), reference.prefill(ids[:, :6], length)) < TOLERANCE
    for start in (6, 9, 17):
        reference.keep(start)
        wanted = [reference.step(ids[:, place])[0] for place in range(start, start + 8)]
        own.keep(start)
        found = own.verify(ids[0, start : start + 8].contiguous())
        assert error(found, torch.stack(wanted)) < TOLERANCE
        reference.keep(start)
        assert error(reference.verify(ids[0, start : start + 8]), torch.stack(wanted)) < 1e-5
    own.keep(25)
    reference.keep(25)
    token = ids[0, 25:26].contiguous()
    assert error(own.step(token), reference.step(token)) < TOLERANCE


def quantized(
    model: PreTrainedModel, *, act_order: str = "", apart: str = "", group_size: int = 32, bits: int = 4
) -> None:
    """Replace the linears of the blocks by packed ones, in float32."""
    for seed, (name, module) in enumerate(list(model.named_modules())):
        if type(module) is not nn.Linear or "lm_head" in name:
            continue
        q = random_tuple(
            module.in_features,
            module.out_features,
            group_size=64 if apart and apart in name else group_size,
            seed=seed,
            act_order=bool(act_order) and act_order in name,
            bits=bits,
        )
        parent, _, leaf = name.rpartition(".")
        bias = None if module.bias is None else module.bias.detach()
        packed = QuantLinear(marlin_operand(q, torch.float32), bias)
        setattr(model.get_submodule(parent), leaf, packed)


@pytest.mark.parametrize(
    ("name", "act_order", "apart", "joined"),
    [
        ("qwen2", "", "", True),
        ("llama", "down_proj", "", True),
        ("llama", "q_proj", "up_proj", False),
        ("phi3", "", "", False),
        ("opt", "", "", True),
        ("padded", "", "", True),
        ("padded", "", "up_proj", False),
        (LATENT, "", "", True),
        *((name, "", "", True) for name in KIMI),
    ],
)
def test_packed_weights_joined_and_apart(name: str, act_order: str, apart: str, joined: bool) -> None:
    model = tiny(name)
    anatomy = recognised(model)
    quantized(model, act_order=act_order, apart=apart)
    half, wide = halved(model)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    slices = [module for module in half.modules() if isinstance(module, JoinedSlice)]
    assert bool(slices) == joined
    assert ("groups of 32 and" in own.reason) == bool(apart)
    assert ("activation order" in own.reason) == (act_order == "q_proj")
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    assert max(differences(own, reference, wide.config.vocab_size)) < tolerance(name)


def test_weights_of_eight_bits_are_joined_and_multiplied() -> None:
    model = tiny("llama")
    anatomy = recognised(model)
    quantized(model, bits=8)
    half, wide = halved(model)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    joined = [module for module in half.modules() if isinstance(module, JoinedLinear)]
    assert joined
    assert {module.format.name for module in joined} == {"int8"}
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    assert max(differences(own, reference, wide.config.vocab_size)) < TOLERANCE


@pytest.mark.parametrize(
    "scheme", slow_but(("fp8", "fp8-dynamic", "fp8-block", "mxfp8", "mxfp4", "nvfp4"), "fp8-block", "nvfp4")
)
def test_weights_of_floats_are_joined_and_multiplied(scheme: str) -> None:
    model = tiny("llama")
    anatomy = recognised(model)
    half, wide = halved(model)
    for name, module in wide.named_modules():
        if type(module) is nn.Linear and "lm_head" not in name:
            q = round_to_nearest(module.weight.detach(), example(scheme))
            module.weight.data = q.dequantize()
            layout = CT.layout_of(q.scheme)
            stored = StoredWeight(name, layout, replace(spec_of(q), scheme=q.scheme), layout.pack(q))
            operator = OPERATORS["w8a16" if q.element == E4M3 else "fp4a16"]
            packed = operator.build(stored, None, Setting(torch.device("cpu"), torch.float16))
            half.set_submodule(name, packed)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    joined = [module for module in half.modules() if isinstance(module, JoinedLinear)]
    assert joined
    assert {module.format.name for module in joined} == {example(scheme).element.name}
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    assert max(differences(own, reference, wide.config.vocab_size)) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2", "phi", "opt", "cohere", "qwen3-next", "nemotron-h", "falcon-h1", LATENT],
)
def test_prompts_in_pieces_give_the_same(name: str) -> None:
    half, wide = halved(tiny(name))
    anatomy = recognised(wide)
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    # Two sequences at a time, and pieces of one sequence, of which the last is shorter.
    for most in (22, 4):
        own = ChainForward(half, anatomy, batch=3, capacity=24, most_rows=most)
        assert max(differences(own, reference, wide.config.vocab_size)) < tolerance(name)


def test_pieces_are_equal_and_bounded() -> None:
    assert [prompts.piece_rows(total) for total in (1, 2048, 2049, 4096, 4097, 10_000)] == [
        *(128, 2048, 1152, 2048, 1408, 2048)
    ]
    assert all(prompts.piece_rows(total) <= prompts.MOST_ROWS for total in range(1, 9000))


def test_memory_of_a_prompt_is_its_rows_and_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream, queries and attention's result are of all rows; the rest is of one piece."""
    length, piece = 256, 16
    half, wide = halved(tiny_model("llama", max_position_embeddings=length))
    own = ChainForward(half, recognised(wide), batch=1, capacity=length, most_rows=piece)
    live: list[tuple[StorageWeakRef, int]] = []
    peak = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal peak
        storage = tensor.untyped_storage()
        live[:] = [(kept, nbytes) for kept, nbytes in live if not kept.expired()]
        live.append((StorageWeakRef(storage), storage.nbytes()))
        peak = max(peak, sum(nbytes for _, nbytes in live))
        return tensor

    empty, multiply, attention = walk.Walk.empty, walk.Walk.multiply, prompts.causal_attention
    monkeypatch.setattr(walk.Walk, "empty", lambda *given: note(empty(*given)))
    monkeypatch.setattr(walk.Walk, "multiply", lambda *given: note(multiply(*given)))
    monkeypatch.setattr(prompts, "causal_attention", lambda *given: note(attention(*given)))
    own.prefill(torch.arange(length)[None] % 100, torch.tensor([length], dtype=torch.int32))
    config = wide.config
    hidden = config.hidden_size * 2
    heads = config.num_attention_heads * own.anatomy.layers[0].attention.head_dim * 2
    rows_of_all = length * (hidden + 2 * heads)
    # Inside an MLP: gate and up with their activation; around it at most the sum, its norm and two products.
    of_a_piece = piece * (3 * config.intermediate_size * 2 + 4 * hidden)
    assert rows_of_all < peak <= rows_of_all + of_a_piece


@torch.no_grad()
def test_every_layer_can_be_observed() -> None:
    half, wide = halved(tiny_model("gemma3"))
    anatomy = recognised(wide)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    seen: dict[str, list[tuple[int, Tensor]]] = {"own": [], "reference": []}
    own.observe = lambda index, x: seen["own"].append((index, x.clone()))
    reference.observe = lambda index, x: seen["reference"].append((index, x.clone()))
    assert max(differences(own, reference, wide.config.vocab_size)) < TOLERANCE
    assert [index for index, _ in seen["own"]] == [index for index, _ in seen["reference"]]
    for (_, found), (_, expected) in zip(seen["own"], seen["reference"], strict=True):
        assert found.shape == expected.shape
        # Padding behind a prompt is nobody's.
        assert error(found[0], expected[0]) < TOLERANCE


def test_anatomies_without_kernels_are_refused() -> None:
    model = tiny_model("llama")
    anatomy = recognised(model)
    refused = chain_refusal(model, anatomy)
    assert refused == Unrecognised(
        "model.embed_tokens", "activations in torch.float32; the kernels take 16 bits"
    )
    with pytest.raises(ValueError, match=r"model\.embed_tokens: activations in torch\.float32"):
        ChainForward(model, anatomy, batch=1, capacity=8)


def test_prompts_that_do_not_fit() -> None:
    half, wide = halved(tiny_model("llama"))
    own = ChainForward(half, recognised(wide), batch=2, capacity=8)
    ids = torch.zeros(2, 9, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected at most \[2, 8\]"):
        own.prefill(ids, torch.tensor([1, 1]))
    for wrong in (-1, 128):
        with pytest.raises(ValueError, match=r"ids .*: expected 0\.\.127"):
            own.prefill(torch.full((2, 3), wrong), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"expected 2 of 1\.\.5"):
        own.prefill(ids[:, :5], torch.tensor([6, 1]))


def test_a_workspace_serves_the_largest_attention() -> None:
    shapes = [
        (AttentionShape(2, 16, 1, 64, 100), Division(3, warps=8)),
        (AttentionShape(1, 4, 4, 256, 100), Division(2)),
    ]
    made = AttentionWorkspace.of(shapes, torch.device("cpu"))
    assert made.partials.numel() == max(2 * 2 * 3 * 8 * 66, 4 * 2 * 8 * 258)
    assert made.counters.tolist() == [0] * 4


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_forward_nobody_uses_gives_its_cache_back_at_once(name: str) -> None:
    """A new decoder asks for its memory right after the one that it replaces."""
    half, wide = halved(tiny(name))
    anatomy = recognised(wide)
    gc.disable()
    try:
        own = ChainForward(half, anatomy, batch=1, capacity=24)
        own.prefill(torch.ones(1, 4, dtype=torch.int64), torch.tensor([4], dtype=torch.int32))
        own.step(torch.ones(1, dtype=torch.int64))
        cache = StorageWeakRef(own.layers[0].keys.untyped_storage())
        assert not cache.expired()
        del own
        assert cache.expired()
    finally:
        gc.enable()


# Llama-3-8B's attention on 132 multiprocessors: batch, capacity, how it is divided.
DIVISIONS = [
    (1, 4096, Division(16, warps=8)),
    (4, 256, Division(1, warps=8)),
    (4, 640, Division(5, warps=8, meets=True)),
    (4, 4096, Division(8, warps=8)),
    (8, 256, Division(2, warps=8)),
    (8, 640, Division(4, warps=8)),
    (16, 640, Division(2, warps=8, meets=True)),
    (64, 640, Division(1)),
]


@pytest.mark.parametrize(("batch", "capacity", "expected"), DIVISIONS)
def test_attention_is_divided_for_a_gpu(batch: int, capacity: int, expected: Division) -> None:
    shape = AttentionShape(batch, 32, 8, 128, capacity)
    assert divide(shape, 132, clusters=True) == expected
    assert divide(shape, 132) == expected._replace(meets=False)
