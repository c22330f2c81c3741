"""Routers and small gates are found by what they do, in whatever module they lie."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lab.models.families import Family, random_model
from lab.models.shrink import shrunk
from marlinq.models import build_blueprint, describe
from tests.testing.decoders import KNOWN

ROUTERS = {
    "afmoe": ("AfmoeForCausalLM", "mlp.router.gate"),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", "mlp.gate.wg"),
    "zaya": ("ZayaForCausalLM", "mlp.gate.router_mlp.out_proj"),
    "qwen3_next": ("Qwen3NextForCausalLM", "mlp.shared_expert_gate"),
    "gpt_oss": ("GptOssForCausalLM", "mlp.router"),
}
GATES = {
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "linear_attn.in_proj_b"),
    "qwen3_next": ("Qwen3NextForCausalLM", "linear_attn.in_proj_ba"),
    "jamba": ("JambaForCausalLM", "mamba.dt_proj"),
    "laguna": ("LagunaForCausalLM", "self_attn.g_proj"),
    "gemma3n_text": ("Gemma3nForCausalLM", "altup.correction_coefs"),
}


@pytest.mark.parametrize("family", ROUTERS)
def test_modules_that_choose_experts_are_routers(family: str) -> None:
    architecture, router = ROUTERS[family]
    model = random_model(Family(family, architecture, wrapper=False))
    blueprint = describe(lambda: model)
    assert any(name.endswith(router) for name in blueprint.routers)
    quantised = {projection.name for projection in blueprint.projections()}
    assert not quantised & blueprint.routers
    # Nothing that makes hidden states is taken for a router.
    assert not any("down_proj" in name and "expert" in name for name in blueprint.routers)


def test_a_router_beside_the_block_of_experts_is_found() -> None:
    """Gemma 4 has router and experts beside a dense MLP; their parent is the decoder layer."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
    config = CONFIG_MAPPING["gemma4_text"](
        **small,
        **experts,
        **heads,
        layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )
    blueprint = describe(lambda: AutoModelForCausalLM.from_config(config))
    assert "model.layers.0.router.proj" in blueprint.routers


def test_heads_are_counted_by_the_linears_beside_a_gate() -> None:
    """LFM3's attention keeps its number of heads in the config alone."""
    known = KNOWN["lfm3"]
    blueprint = build_blueprint({**known.config, "model_type": known.model_type}, source="lfm3")
    kept = {name: keep.reason for name, keep in blueprint.usually_kept.items()}
    assert "8 numbers" in kept["model.layers.1.self_attn.g_proj"]
    assert not any("q_proj" in name for name in kept)


@pytest.mark.parametrize("family", GATES)
def test_modules_that_servers_build_in_16_bits_stay_unless_named(family: str) -> None:
    architecture, gate = GATES[family]
    model = random_model(Family(family, architecture, wrapper=False))
    blueprint = describe(lambda: model)
    kept = [name for name in blueprint.usually_kept if name.endswith(gate)]
    assert kept
    assert blueprint.usually_kept[kept[0]].reason
    assert not any(name.endswith(("q_proj", "down_proj", "out_proj")) for name in blueprint.usually_kept)


@pytest.mark.parametrize(
    ("model_type", "architecture", "blocks"),
    [
        ("llava", "LlavaForConditionalGeneration", "model.language_model.layers"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.layers"),
        ("git", "GitForCausalLM", "git.encoder.layer"),
        # Lists of their projectors have more weights than these two blocks.
        ("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", "model.language_model.layers"),
        ("granite4_vision", "Granite4VisionForConditionalGeneration", "model.language_model.layers"),
        # Its tokens are embedded by a module that holds the table, and its sounds by larger blocks.
        ("kyutai_speech_to_text", "KyutaiSpeechToTextForConditionalGeneration", "model.layers"),
    ],
)
def test_the_decoder_is_the_part_that_embeds_text(model_type: str, architecture: str, blocks: str) -> None:
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**shrunk(model_type, config_class().to_dict())).to_dict()
    blueprint = build_blueprint({**config, "architectures": [architecture]}, source=model_type)
    assert blueprint.architecture == architecture
    assert blueprint.blocks_name == blocks


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_of_a_model_that_speaks_the_thinker_is_quantised(family: str) -> None:
    """Its largest list of blocks may be one that makes sound, and none of the whole reads text."""
    config_class = CONFIG_MAPPING[family]
    config = config_class(**shrunk(family, config_class().to_dict())).to_dict()
    blueprint = build_blueprint({**config, "architectures": ["Speaking"]}, source=family)
    assert blueprint.architecture.endswith("ThinkerForConditionalGeneration")
    assert blueprint.blocks_name == "model.language_model.layers"
    assert blueprint.head == "lm_head"


def test_a_model_without_a_head_is_built_by_its_own_class() -> None:
    config = CONFIG_MAPPING["qwen3"](hidden_size=64, num_hidden_layers=1, vocab_size=96).to_dict()
    assert build_blueprint({**config, "architectures": ["Qwen3Model"]}, source="q").head is None
    assert build_blueprint({**config, "architectures": ["Qwen3ForCausalLM"]}, source="q").head == "lm_head"


@pytest.mark.skipif("kimi-linear" not in KNOWN, reason="transformers has no Kimi Linear")
def test_a_number_for_each_channel_is_none_a_head() -> None:
    """Of Kimi Linear's gate, whose biases of decays are as many as its second linear's results."""
    known = KNOWN["kimi-linear"]
    blueprint = build_blueprint(
        {**known.config, "model_type": known.model_type, "linear_head_dim": 32}, source="kimi"
    )
    kept = {name.rpartition(".")[2] for name in blueprint.usually_kept}
    assert "b_proj" in kept
    assert not kept & {"f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"}
