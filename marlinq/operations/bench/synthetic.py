"""Models of well-known shapes with random weights, for a bench without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.core.devices import resolve_device
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import UsageError
from marlinq.core.granularity import Granularity
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.core.scheme import INT4, Scheme
from marlinq.formats import StoredWeight
from marlinq.formats.layouts import ModuleSpec
from marlinq.formats.layouts.marlin import GROUP_SIZES, Marlin
from marlinq.kernels import explain
from marlinq.kernels.contract.weight_formats import INT4 as PACKED_INT4
from marlinq.kernels.contract.weight_formats import INT4_SPARSE
from marlinq.kernels.experts import ExpertWeights, StoredExperts
from marlinq.models import Blueprint, Experts, Projection, build_blueprint
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.kernels import SCHEMES
from marlinq.operations.bench.shapes import LinearSize
from marlinq.operations.bench.synthetic_experts import random_experts
from marlinq.operations.bench.weights import random_weight
from marlinq.runtime import OPERATORS, Decision, LoadedModel, Setting, decide
from marlinq.runtime.grouped_experts import GroupedExperts, activation_name
from marlinq.runtime.operator_choice import OperatorCandidate
from marlinq.runtime.operators.packed import Packed
from marlinq.runtime.placement import DTYPES
from marlinq.runtime.quant_linear import QuantLinear

Head = Literal["16", "int4"]
"""Type of the output head: the activations' dtype, or 4-bit integers."""

_ROPE_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
_DELTA_NET = {
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
# Layers of Nemotron-H-8B: M for Mamba-2, * for attention, - for an MLP.
_NEMOTRON_H = [
    {"M": "linear_attention", "*": "full_attention", "-": "mlp"}[kind]
    for kind in "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"
]
# Layers of Granite 4.0 H: every tenth attends, from the sixth on.
_GRANITE_4_H = ["attention" if index % 10 == 5 else "mamba" for index in range(40)]

# Layers of Kimi-Linear-48B-A3B: every fourth attends, and the last.
_KIMI = ["full_attention" if index % 4 == 3 or index == 26 else "linear_attention" for index in range(27)]

# Layers of LFM2-2.6B and of LFM2-8B-A1B that attend, among those of short convolutions.
_LFM2 = ["full_attention" if index in (2, 5, 9, 12, 15, 18, 21, 24, 27) else "conv" for index in range(30)]
_LFM2_MOE = ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)]

SYNTHETIC: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_parameters": _ROPE_LLAMA3, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "llama-3-70b": {
        "model_type": "llama", "vocab_size": 128256, **_LLAMA_70B,
        "max_position_embeddings": 131072, "rope_parameters": _ROPE_LLAMA3, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "mistral-7b": {
        "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 1024, "max_position_embeddings": 131072,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 1024, "max_position_embeddings": 131072,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
    },
    "qwen3.5-27b": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        **_DELTA_NET, "linear_num_value_heads": 48,
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, **_DELTA_NET, "linear_num_value_heads": 32,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "first_k_dense_replace": 1, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "v_head_dim": 256, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
        "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8,
        "num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
        "routed_scaling_factor": 2.446, "num_hidden_layers": 27, "layer_types": _KIMI,
        "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "linear_num_heads": 32,
        "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "model_max_length": 1048576,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 768,
        "shared_intermediate_size": 1536, "num_local_experts": 72, "num_experts_per_tok": 10,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "layer_types": _GRANITE_4_H, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
        "position_embedding_type": "nope", "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125, "logits_scaling": 16.0, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
        "num_hidden_layers": 52, "layers_block_type": _NEMOTRON_H, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128,
        "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
        "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        "sliding_window": 1024, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144,
    },
    "gemma-4-31b": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "sliding_window": 1024, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262144,
    },
    "gemma-4-e4b": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072,
    },
    "lfm2-2.6b": {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 10752,
        "num_hidden_layers": 30, "layer_types": _LFM2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "block_auto_adjust_ff_dim": False, "conv_L_cache": 3, "max_position_embeddings": 128000,
        "norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
        "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2,
        "num_hidden_layers": 24, "layer_types": _LFM2_MOE, "num_attention_heads": 32,
        "num_key_value_heads": 8, "conv_L_cache": 3, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Name -> config, with the dimensions from the models' publishers."""

_LINEAR_SCHEMES = {**SCHEMES, INT4_SPARSE.name: (INT4_SPARSE, None)}
"""Schemes of linears that are made in the kernels' layout."""


@dataclass(frozen=True)
class Synthetic:
    """Description of a model with random weights.

    Attributes:
        name: key of :data:`SYNTHETIC`.
        layers: number of decoder blocks; None for the config's.
        group_size: input channels per scale; where it does not divide K, the largest smaller size that does.
        head: type of the output head.
        scheme: type of the weights: a key of :data:`marlinq.operations.bench.kernels.SCHEMES`, ``int4-2:4``
            for 2:4 sparse ones, or ``16`` for the activations' dtype. Schemes with a group size of their own
            ignore ``group_size``.
    """

    name: str
    layers: int | None = None
    group_size: int = 128
    head: Head = "16"
    scheme: str = "int4"

    def config(self) -> dict[str, Any]:
        """The content of a ``config.json``.

        Raises:
            UsageError: an unknown name.
        """
        if self.name not in SYNTHETIC:
            raise UsageError(
                f"--synthetic {self.name!r} is not known; expected one of {', '.join(sorted(SYNTHETIC))}"
            )
        config = dict(SYNTHETIC[self.name])
        if self.layers is not None:
            # Lists with a value for every layer, as the types of layers, are cut with them.
            whole = config["num_hidden_layers"]
            config |= {
                key: value[: self.layers]
                for key, value in config.items()
                if isinstance(value, list) and len(value) == whole
            }
            if "num_kv_shared_layers" in config:
                config["num_kv_shared_layers"] = config["num_kv_shared_layers"] * self.layers // whole
            config["num_hidden_layers"] = self.layers
        if self.head == "int4":
            config["tie_word_embeddings"] = False
        return config

    def describe(self) -> str:
        """The description in one line."""
        layers = "" if self.layers is None else f", {self.layers} layers"
        kind = "" if self.scheme == "int4" else f", {self.scheme}"
        return f"synthetic {self.name}{layers}{kind}, random weights"


def synthetic_model(
    wanted: Synthetic,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: ReportProgress = no_progress,
) -> LoadedModel:
    """The model with random weights, as :func:`marlinq.runtime.load` returns one that only decodes.

    Raises:
        UsageError: an unknown name, or a group size that does not suit a layer.
    """
    chosen_device = resolve_device(device)
    chosen_dtype = _dtype(dtype, chosen_device)
    blueprint = build_blueprint(wanted.config(), source=wanted.describe(), dtype=chosen_dtype)
    model = blueprint.build()
    setting = Setting(chosen_device, chosen_dtype, exact=dtype not in (None, "auto"))
    decisions: dict[str, Decision] = {}
    projections = _quantised(blueprint, model, wanted)
    torch.manual_seed(0)
    with torch.no_grad():
        for block in blueprint.blocks:
            for experts in block.experts:
                if wanted.scheme != "16":
                    model.set_submodule(experts.name, _random_grouped(experts, wanted, setting, model))
        for done, projection in enumerate(projections):
            bias = torch.randn(projection.out_features) * 0.1 if projection.bias else None
            module: nn.Module
            if wanted.scheme in ("int4", "16"):  # with 16 bits only a head that was asked for
                stored = _random_stored(projection, wanted.group_size, setting)
                decision = decide(stored, setting)
                module = OPERATORS[decision.operator].build(stored, bias, setting)
            else:
                decision, module = _random_packed(projection, wanted, bias, setting)
            decisions[projection.name] = decision
            model.set_submodule(projection.module, module)
            progress("making weights", done + 1, len(projections))
        fill_random(model, chosen_device, chosen_dtype)
    return LoadedModel(
        path=Path(wanted.describe()),
        model=model,
        tokenizer=None,
        device=chosen_device,
        dtype=chosen_dtype,
        decisions=decisions,
        notes=(),
    )


def fill_random(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Fills parameters on the meta device with random values, and moves buffers to the device.

    Matrices preserve the size of activations. Vectors (weights of norms, biases) are near the values of the
    module's own initialisation.
    """
    made: dict[int, nn.Parameter] = {}
    embeddings = model.get_input_embeddings()
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                value = torch.randn(parameter.shape, device=device, dtype=dtype)
                if parameter.dim() >= 2:
                    value *= 1.0 if module is embeddings else parameter.shape[-1] ** -0.5
                else:
                    value = value * 0.1 + (0.0 if key == "bias" else 1.0)
                made[id(parameter)] = nn.Parameter(value, requires_grad=False)
            module._parameters[key] = made[id(parameter)]
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(device)


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None or dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype not in DTYPES:
        raise UsageError(f"dtype: expected auto, {', '.join(DTYPES)}, found {dtype!r}")
    return DTYPES[dtype]


def _quantised(blueprint: Blueprint, model: PreTrainedModel, wanted: Synthetic) -> list[Projection]:
    # Projections of a delta net's betas and steps stay in 16 bits, as ``quantize`` leaves them.
    quantised = [
        one
        for one in blueprint.projections()
        if one.expert is None and one.out_features % 64 == 0 and wanted.scheme != "16"
    ]
    if wanted.head == "int4":
        module = model.get_output_embeddings()
        quantised += [one for one in blueprint.others if model.get_submodule(one.module) is module]
    return quantised


def _random_grouped(
    experts: Experts, wanted: Synthetic, setting: Setting, model: PreTrainedModel
) -> GroupedExperts:
    """Random experts of a layer, as the module that loading makes."""
    activation = activation_name(experts.activation(model.get_submodule(experts.name)))
    if activation is None or not experts.gated or not experts.routed:
        raise UsageError(f"{experts.name}: no synthetic experts of this kind; choose another --synthetic")
    layer = ExpertsLayer(experts.name, experts.count, 1, experts.hidden, experts.intermediate)
    if wanted.scheme not in SCHEMES:
        raise UsageError(
            f"{experts.name}: no kernel multiplies {wanted.scheme} experts; choose another model"
        )
    weight_format, usual = SCHEMES[wanted.scheme]
    inputs = math.gcd(experts.hidden, experts.intermediate)
    size = _group_size(experts.name, inputs, wanted.group_size) if usual is None else usual
    weights = random_experts(
        layer,
        Granularity.from_group_size(size),
        asymmetric=False,
        dtype=setting.dtype,
        device=setting.device,
        weight_format=weight_format,
    )
    if experts.biases is not None:
        weights = ExpertWeights(*(_with_biases(stored, setting) for stored in weights))
    return GroupedExperts(weights, activation)


def _with_biases(stored: StoredExperts, setting: Setting) -> StoredExperts:
    count, _, columns = stored.shape
    return replace(stored, bias=0.1 * torch.randn(count, columns, dtype=setting.dtype, device=setting.device))


def _random_packed(
    projection: Projection, wanted: Synthetic, bias: Tensor | None, setting: Setting
) -> tuple[Decision, QuantLinear]:
    """A random linear of another element than 4-bit integers, made directly in the kernels' layout."""
    k, n = projection.in_features, projection.out_features
    weight_format, usual = _LINEAR_SCHEMES[wanted.scheme]
    granularity = Granularity.from_group_size(wanted.group_size if usual is None else usual)
    if k % 64 or n % 64 or not granularity.divides(k):
        raise UsageError(
            f"{projection.name}: K={k} and N={n} must be multiples of 64, and K of {granularity.describe()}; "
            "choose another --group-size"
        )
    multiple = weight_format.channel_multiple
    weight = random_weight(
        LinearSize(projection.name, n, -(-k // multiple) * multiple),
        granularity,
        asymmetric=False,
        dtype=setting.dtype,
        device=setting.device,
        weight_format=weight_format,
    ).operand
    kernel = explain(setting.device, weight.problem(1))
    operator = next(
        name for name, each in OPERATORS.items() if isinstance(each, Packed) and weight_format in each.formats
    )
    reason = f"{kernel.kernel} kernel: {kernel.reason}"
    chosen = OperatorCandidate(operator, True, kernel.seconds or None, reason)
    return Decision(chosen, ()), QuantLinear(replace(weight, in_features=k), bias)


def _group_size(name: str, channels: int, most: int) -> int:
    """The largest group size up to ``most`` that divides ``channels``; -1 where ``most`` is."""
    if most == Granularity.channel().group_size:
        return most
    for size in sorted(GROUP_SIZES, reverse=True):
        if 0 < size <= most and channels % size == 0:
            return size
    raise UsageError(
        f"{name}: K={channels} must be a multiple of a group size up to {most}; choose another --group-size"
    )


def _random_stored(projection: Projection, group_size: int, setting: Setting) -> StoredWeight:
    k, n = projection.in_features, projection.out_features
    if k % 64 or n % 64:
        raise UsageError(
            f"{projection.name}: K={k} and N={n} must be multiples of 64; choose another --synthetic"
        )
    dtype = torch.float16 if setting.dtype == torch.float32 else setting.dtype
    granularity = Granularity.from_group_size(_group_size(projection.name, k, group_size))
    weight = random_weight(
        LinearSize(projection.name, n, k),
        granularity,
        asymmetric=False,
        dtype=dtype,
        device=setting.device,
        weight_format=PACKED_INT4,
    )
    tensors: dict[str, Tensor] = {"B": weight.words, "s": weight.scales}
    scheme = Scheme(INT4, granularity, "midpoint", dtype_name(dtype))
    return StoredWeight(projection.name, Marlin(), ModuleSpec(k, n, scheme), tensors)
