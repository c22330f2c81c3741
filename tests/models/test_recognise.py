from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models import build_blueprint, recognise_mixture
from marlinq.models.anatomy import (
    Anatomy,
    DeltaNet,
    GatedConvolution,
    LatentAttention,
    Mamba,
    Mixture,
    Unrecognised,
)
from marlinq.models.blueprint import decoder_blocks
from marlinq.models.formulas import norm_formula
from marlinq.models.recognise import anatomy_of, recognise
from tests.testing.decoders import KNOWN, UNKNOWN, WINDOW, Decoder, random_decoder
from tests.testing.mixtures import random_mixture


@cache
def tiny(name: str) -> Anatomy:
    found = anatomy_of(random_decoder(KNOWN[name]))
    assert isinstance(found, Anatomy), found
    return found


class Embedded(nn.Module):
    """Frequencies of times, as models of actions have them: it takes no positions."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", torch.ones(4), persistent=False)

    def forward(self, times: Tensor, *, steps: int) -> Tensor:
        return times * self.frequencies * steps


def test_frequencies_of_something_else_than_positions_are_no_rotation() -> None:
    known = KNOWN["llama"]
    blueprint = build_blueprint({**known.config, "model_type": known.model_type}, source="llama")
    model = blueprint.build()
    model.times = Embedded(model.config)
    assert isinstance(recognise(model, blueprint.blocks_name), Anatomy)


@pytest.mark.parametrize("name", KNOWN)
def test_known_architectures_are_recognised_without_weights(name: str) -> None:
    known = KNOWN[name]
    config = {**known.config, "model_type": known.model_type}
    blueprint = build_blueprint(config, source=name)
    model = blueprint.build()
    found = recognise(model, blueprint.blocks_name)
    assert isinstance(found, Anatomy), found
    assert [layer.name for layer in found.layers] == [block.name for block in blueprint.blocks]
    # Every projection has a place, and no other module is named.
    for layer, block in zip(found.layers, blueprint.blocks, strict=True):
        mixer, mlp = layer.attention, layer.mlp
        named: set[str | None] = set()
        if isinstance(mixer, DeltaNet):
            named = {*mixer.inputs.modules, *mixer.rates.modules, mixer.output}
            if mixer.channels is not None:
                named |= {mixer.channels.steps, mixer.channels.gates}
        elif isinstance(mixer, Mamba | GatedConvolution):
            named = {*mixer.inputs.modules, mixer.output}
        elif isinstance(mixer, LatentAttention):
            named = {*mixer.inputs.modules, mixer.query, mixer.expansion, mixer.output}
        elif mixer is not None:
            named = {*mixer.qkv.modules, mixer.output}
            named.add(None if mixer.gate is None else mixer.gate.module)
        if isinstance(mlp, Mixture):
            named |= {each.name for each in block.projections if each.name.startswith(f"{mlp.experts}.")}
            named |= {mlp.into, mlp.out} - {None}
            if mlp.shared is not None:
                named |= {*mlp.shared.inputs.modules, mlp.shared.down}
        elif mlp is not None:
            named |= {*mlp.inputs.modules, mlp.down}
        if layer.input_gate is not None:
            named |= {layer.input_gate.gate, layer.input_gate.output}
        if layer.beside is not None:
            named |= {*layer.beside.inputs.modules, layer.beside.output}
        assert named - {None} == {projection.name for projection in block.projections}
    # The model is as it was.
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation != "marlinq_recording"


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_architectures_are_refused_with_the_part(name: str) -> None:
    decoder, part, reason = UNKNOWN[name]
    model = random_decoder(decoder)
    found = recognise(model, decoder_blocks(model, name)[0])
    assert isinstance(found, Unrecognised)
    assert re.search(part, found.part), found
    assert reason in found.reason, found


def test_a_loaded_model_is_recognised_from_a_copy_without_weights() -> None:
    model = random_decoder(KNOWN["qwen3"], dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.model.layers[0].mlp.down_proj.forward = lambda x: pytest.fail("the model itself ran")
    assert anatomy_of(model) == tiny("qwen3")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_windows_are_those_of_the_layers() -> None:
    assert [layer.attention.window for layer in tiny("mistral").layers] == [WINDOW] * 3
    assert [layer.attention.window for layer in tiny("qwen2").layers] == [None, WINDOW, WINDOW]
    assert [layer.attention.window for layer in tiny("gemma-3").layers] == [WINDOW] * 5 + [None]
    assert [layer.attention.window for layer in tiny("cohere-2").layers] == [WINDOW] * 3 + [None]


def test_gemma_4s_own_parts_are_recognised() -> None:
    local, whole = tiny("gemma-4").layers[:2]
    assert (local.attention.head_dim, local.attention.keys_are_values) == (16, False)
    assert (whole.attention.head_dim, whole.attention.keys_are_values) == (32, True)
    assert (whole.attention.kv_heads, whole.attention.window) == (1, None)
    assert whole.attention.value_norm is not None
    assert whole.attention.rotary is not None
    assert whole.attention.rotary.channels == 32
    assert whole.stream_scale == "model.layers.1.layer_scalar"
    mixture = tiny("gemma-4-moe").layers[1].mlp
    assert isinstance(mixture, Mixture)
    router = mixture.router
    assert (router.input_factor, router.scale, router.normalised) == (0.125, 1.0, True)
    assert router.input_scale == "model.layers.1.router.scale"
    assert router.expert_scale == "model.layers.1.router.per_expert_scale"
    assert router.norm is not None
    assert None not in (mixture.norm, mixture.post_norm, mixture.shared_post_norm)
    edge = tiny("gemma-4-e")
    assert [layer.attention.shared for layer in edge.layers] == [None, None, 0, 1]
    assert [len(layer.attention.qkv.widths) for layer in edge.layers] == [3, 3, 1, 1]
    inputs = edge.layer_inputs
    assert inputs is not None
    assert (inputs.width, inputs.embedding_scale, inputs.projection_scale) == (16, 4.0, 0.125)
    assert inputs.scale == pytest.approx(0.5**0.5, rel=1e-7)


def test_a_factor_that_is_a_root_is_the_same_in_every_recording() -> None:
    """Measured ratios differ in their last digits, and anatomies of several recordings are compared."""
    known = KNOWN["gemma-4-moe"]
    config = {**known.config, "model_type": known.model_type, "hidden_size": 88}
    blueprint = build_blueprint(config, source="gemma")
    found = recognise(blueprint.build(), blueprint.blocks_name)
    assert isinstance(found, Anatomy), found
    assert isinstance(found.layers[0].mlp, Mixture)
    assert found.layers[0].mlp.router.input_factor == pytest.approx(88**-0.5, rel=1e-6)


def test_a_row_of_the_embedding_may_be_read() -> None:
    """Wrappers of image models read that of the padding token, which takes the place of images."""
    model = random_decoder(KNOWN["llama"])

    def read(module: nn.Module, args: object) -> None:
        assert module.get_parameter("embed_tokens.weight")[0, :].shape == (64,)

    model.model.register_forward_pre_hook(read)
    assert recognise(model, "model.layers") == tiny("llama")


def test_rotations_are_those_of_the_layers() -> None:
    found = [layer.attention.rotary for layer in tiny("gemma-3").layers]
    assert {rotary.frequencies for rotary in found[:5] if rotary} == {"sliding_attention_inv_freq"}
    assert found[5] is not None
    assert found[5].frequencies == "full_attention_inv_freq"
    assert [layer.attention.rotary is None for layer in tiny("smollm-3").layers] == [0, 0, 0, 1, 0]
    assert [layer.attention.rotary is None for layer in tiny("cohere-2").layers] == [0, 0, 0, 1]
    partial = tiny("phi-3").layers[0].attention.rotary
    assert partial is not None
    assert (partial.channels, partial.interleaved) == (8, False)
    glm = tiny("glm").layers[0].attention.rotary
    assert glm is not None
    assert (glm.channels, glm.interleaved) == (12, True)
    yarn = tiny("llama-yarn").layers[0].attention.rotary
    assert yarn is not None
    assert yarn.scaling == pytest.approx(0.1 * torch.log(torch.tensor(4.0)).item() + 1)
    limits = {
        name: rotary.limit
        for name in ("llama-dynamic-rope", "phi-3-longrope", "llama-yarn")
        if (rotary := tiny(name).layers[0].attention.rotary) is not None
    }
    assert limits == {"llama-dynamic-rope": 128, "phi-3-longrope": 64, "llama-yarn": None}


def test_scales_and_softcaps_are_recognised() -> None:
    granite = tiny("granite")
    assert (granite.embedding_scale, granite.logit_scale) == (12.0, 0.125)
    assert {(layer.attention_scale, layer.mlp_scale) for layer in granite.layers} == {(0.22, 0.22)}
    assert {layer.attention.scale for layer in granite.layers} == {0.1}
    gemma = tiny("gemma-2")
    assert (gemma.embedding_scale, gemma.logit_softcap) == (8.0, 3.0)
    assert {layer.attention.softcap for layer in gemma.layers} == {2.0}
    assert gemma.layers[0].attention.scale == pytest.approx(20**-0.5)
    assert tiny("cohere").logit_scale == 0.0625
    # OPT scales its queries before attention, not in it.
    assert tiny("opt").layers[0].attention.scale == pytest.approx(16**-0.5)


def test_latents_are_expanded_by_head_and_rotated_in_pairs() -> None:
    scaled = tiny("deepseek-v3").layers[0].attention
    assert isinstance(scaled, LatentAttention)
    sizes = scaled.heads, scaled.plain_dim, scaled.rotated_dim, scaled.value_dim, scaled.latent_dim
    assert sizes == (4, 12, 8, 16, 16)
    assert scaled.inputs.widths == (20, 24)
    assert scaled.query_norm is not None
    assert scaled.query_norm.width == 20
    # YaRN's mscale_all_dim multiplies queries and keys.
    assert scaled.scale == pytest.approx(20**-0.5 * (0.1 * math.log(4.0) + 1) ** 2)
    assert (scaled.rotary.channels, scaled.rotary.interleaved) == (8, True)
    plain = tiny("deepseek-v2").layers[0].attention
    assert isinstance(plain, LatentAttention)
    assert (plain.query, plain.query_norm, plain.inputs.widths) == (None, None, (80, 24))
    halves = tiny("minicpm-3")
    assert isinstance(halves.layers[0].attention, LatentAttention)
    assert not halves.layers[0].attention.rotary.interleaved
    # MiniCPM divides what its head reads.
    assert halves.logit_scale == 0.25


def test_norms_of_queries_are_over_a_head_or_over_all() -> None:
    for name, width in (("qwen3", 24), ("gemma-3", 24), ("olmo-2", 64)):
        norm = tiny(name).layers[1].attention.query_norm
        assert norm is not None
        assert norm.width == width


def test_blocks_are_parallel_or_have_norms_behind_them() -> None:
    assert {name for name in KNOWN if tiny(name).layers[0].parallel} == {
        "phi",
        "cohere",
        "cohere-2",
        "stablelm-parallel",
        "gpt-neox",
    }
    phi = tiny("phi").layers[0]
    assert phi.mlp_norm == phi.attention_norm
    neox = tiny("gpt-neox").layers[0]
    assert neox.mlp_norm != neox.attention_norm
    assert neox.attention.qkv.turns == neox.attention.heads
    olmo = tiny("olmo-2").layers[0]
    assert olmo.attention_norm is None
    assert olmo.post_attention_norm is not None
    gemma = tiny("gemma-2").layers[0]
    assert None not in (gemma.attention_norm, gemma.post_attention_norm, gemma.mlp_norm, gemma.post_mlp_norm)


def test_learned_position_embeddings_are_recognised() -> None:
    opt = tiny("opt")
    assert (opt.positions, opt.positions_offset) == ("model.decoder.embed_positions", 2)
    gpt2 = tiny("gpt-2")
    assert (gpt2.positions, gpt2.positions_offset) == ("transformer.wpe", 0)


def test_the_activation_is_the_one_that_is_computed() -> None:
    for activation, expected in (("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu2", "relu2")):
        model = random_decoder(Decoder("llama", {**KNOWN["llama"].config, "hidden_act": activation}))
        found = recognise(model, "model.layers")
        assert isinstance(found, Anatomy)
        assert found.layers[0].mlp.activation == expected
    model = random_decoder(KNOWN["llama"])
    model.model.layers[1].mlp.act_fn = nn.Softplus()
    found = recognise(model, "model.layers")
    assert found == Unrecognised(
        "model.layers.1.mlp.down_proj",
        "reads no known activation of model.layers.1.mlp.gate_proj and model.layers.1.mlp.up_proj",
    )


def _wrapped(block: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def test_unknown_terms_added_in_a_block_are_refused() -> None:
    model = random_decoder(KNOWN["llama"])
    _wrapped(model.model.layers[1], lambda x: x + 1e-3)
    found = recognise(model, "model.layers")
    assert isinstance(found, Unrecognised)
    assert found.part == "model.layers.1"
    assert "residual stream" in found.reason


def test_unused_numbers_per_head_are_named() -> None:
    model = random_decoder(KNOWN["llama"])
    model.model.layers[1].self_attn.per_head = nn.Parameter(torch.zeros(4))
    found = recognise(model, "model.layers")
    assert isinstance(found, Unrecognised)
    assert found.part == "model.layers.1.self_attn.per_head"


@pytest.mark.parametrize("name", ["afmoe-one-expert", "laguna-experts", "kolibri-1"])
def test_corrections_of_routers_are_told_from_chance(name: str) -> None:
    """They change few choices, above all of one expert a token, and those of logits hardly any."""
    mlp = tiny(name).layers[-1].mlp
    assert isinstance(mlp, Mixture)
    router = mlp.router
    assert router.correction is not None
    assert router.correction.endswith("bias")
    assert (router.scoring, router.groups) == ("sigmoid", None)
    assert router.corrects_logits == name.startswith("kolibri")
    assert router.top == (1 if "one" in name else 2)


def test_a_router_that_fits_near_the_start_by_chance_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that explains the recordings at position 0 but not the one far behind."""
    model = random_mixture("qwen3-moe")
    right = recognise(model, "model.layers")
    plain, calls = recognise_mixture._routers, []

    def routers(block: Any, routed: Any, found: Any, vectors: Any) -> Any:
        calls.append(block.name)
        for router, call in plain(block, routed, found, vectors):
            # In the first recording alone.
            if calls.count(block.name) < 2:
                yield replace(router, scale=2.0), call
            yield router, call

    monkeypatch.setattr(recognise_mixture, "_routers", routers)
    assert recognise(model, "model.layers") == right
    assert isinstance(right, Anatomy)


def test_experts_without_a_gate_are_told_from_gated_ones() -> None:
    found = anatomy_of(random_mixture("nemotron-h"))
    assert isinstance(found, Anatomy), found
    mixture = found.layers[1].mlp
    assert isinstance(mixture, Mixture)
    assert (mixture.gated, mixture.activation) == (False, "relu2")


def test_unknown_terms_of_attention_are_refused() -> None:
    sinks = "sinks that are no parameter of one number a head"
    for key, reason in (("s_aux", sinks), ("something", "an argument 'something'")):
        model = random_decoder(KNOWN["llama"])
        attention = model.model.layers[1].self_attn
        attention.forward = partial(attention.forward, **{key: torch.zeros(4)})
        found = recognise(model, "model.layers")
        assert found == Unrecognised("model.layers.1.self_attn", f"its attention has {reason}")


def test_a_norm_without_a_weight_has_the_width_of_its_input() -> None:
    model = random_decoder(KNOWN["qwen3"])
    for layer in model.model.layers:
        for key in ("q_norm", "k_norm"):
            norm = getattr(layer.self_attn, key)
            norm.forward = lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5)
            del norm.weight
    found = recognise(model, "model.layers")
    assert isinstance(found, Anatomy), found
    query = found.layers[2].attention.query_norm
    assert query is not None
    assert (query.width, query.eps) == (24, 1e-5)
    assert "forward" in vars(model.model.layers[0].self_attn.q_norm)


def test_an_unexpected_linear_is_named() -> None:
    model = random_decoder(KNOWN["llama"])
    mlp = model.model.layers[2].mlp
    mlp.extra = nn.Linear(64, 64, bias=False)
    mlp.forward = lambda x: mlp.extra(mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    found = recognise(model, "model.layers")
    assert isinstance(found, Unrecognised)
    assert found.part == "model.layers.2.mlp.extra"


class _Norm(nn.Module):
    def __init__(self, eps: float, offset: float, narrow_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))
        self.some_number = eps
        self.offset, self.narrow_first = offset, narrow_first

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.some_number)
        if self.narrow_first:
            return (self.weight + self.offset) * wide.to(x.dtype)
        return ((self.weight.float() + self.offset) * wide).to(x.dtype)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 3e-8])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("narrow_first", [True, False])
def test_norms_are_recognised_by_their_results(eps: float, offset: float, narrow_first: bool) -> None:
    found = norm_formula(_Norm(eps, offset, narrow_first), 48)
    assert found is not None
    assert (found.kind, found.eps, found.offset) == ("rms", eps, offset)
    assert found.narrow_first is narrow_first


def test_other_modules_are_no_norms() -> None:
    layer = norm_formula(nn.LayerNorm(48, eps=1e-3), 48)
    assert layer is not None
    assert (layer.kind, layer.eps) == ("layer", 1e-3)
    for module in (
        nn.SiLU(),
        nn.Identity(),
        nn.Dropout(),
        nn.Softmax(-1),
        nn.GroupNorm(4, 48),
        _Norm(0.5, 0, True),
    ):
        assert norm_formula(module, 48) is None
