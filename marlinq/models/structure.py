"""What a decoder-only language model is made of, found from its module tree.

Nothing here knows an architecture by name. The decoder blocks are the ``ModuleList`` that holds most linear
weights, the linears are the ``nn.Linear`` and ``Conv1D`` modules inside them, and everything else stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.pytorch_utils import Conv1D

from marlinq.core import boundaries
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.rules import Keep

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class LinearModule:
    """One linear layer inside a decoder block.

    Attributes:
        name: full module name, for example ``model.layers.0.self_attn.q_proj``.
        in_features: K.
        out_features: N.
        bias: whether the layer adds a bias [N].
        transposed: True for GPT-2's ``Conv1D``, whose weight is stored [K, N] instead of [N, K].
    """

    name: str
    in_features: int
    out_features: int
    bias: bool
    transposed: bool


@dataclass(frozen=True)
class Block:
    """One decoder block: its full module name and its linears in registration order."""

    name: str
    linears: tuple[LinearModule, ...]


@dataclass(frozen=True, eq=False)
class DecoderStructure:
    """A causal language model on the meta device and what its tree says.

    Attributes:
        model: parameters on the meta device; buffers (rotary frequencies) are real, on the CPU.
        blocks_name: full name of the ``ModuleList`` of decoder blocks.
        blocks: the decoder blocks in order.
        kept: modules with a weight matrix that are not quantised, each with the reason.
        routed: True when linears sit in lists inside a block (experts), so that a linear may see a subset
            of the tokens in an order of its own.
        tied: parameter name -> the parameter name that it shares its tensor with.
        renamings: transformers' own rules from the names in files to those in memory, in order.
    """

    model: PreTrainedModel
    blocks_name: str
    blocks: tuple[Block, ...]
    kept: Mapping[str, Keep]
    routed: bool
    tied: Mapping[str, str]
    renamings: Sequence[Any]

    def linears(self) -> Iterator[LinearModule]:
        """Every quantisable linear, block by block."""
        for block in self.blocks:
            yield from block.linears

    @property
    def replay_root(self) -> nn.Module:
        """The smallest module whose forward takes token ids and runs the blocks: the model without head."""
        prefix = self.model.base_model_prefix
        root: nn.Module = self.model
        if prefix and self.blocks_name.startswith(prefix + "."):
            root = root.get_submodule(prefix)
        return root

    @property
    def replay_root_name(self) -> str:
        """Full name of :attr:`replay_root`; empty for the model itself."""
        return "" if self.replay_root is self.model else self.model.base_model_prefix


def build_structure(
    config: Mapping[str, Any],
    *,
    source: str,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> DecoderStructure:
    """Builds the model that ``config`` describes on the meta device and finds its decoder blocks.

    Args:
        config: the content of ``config.json``; a ``quantization_config`` in it is ignored.
        source: folder of the checkpoint, for error messages and for its code files.
        trust_remote_code: run model code that the checkpoint brings.
        dtype: dtype of the parameters on the meta device.

    Raises:
        CheckpointError: transformers does not know the architecture, or rejects the config.
        UnsupportedError: the tree holds no list of equal decoder blocks, or fused experts.
    """
    model = _build_on_meta(config, source=source, trust_remote_code=trust_remote_code, dtype=dtype)
    return describe(model, source=source)


def _build_on_meta(
    config: Mapping[str, Any], *, source: str, trust_remote_code: bool, dtype: torch.dtype
) -> PreTrainedModel:
    from accelerate import init_empty_weights

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if not plain.get("model_type"):
        raise CheckpointError(
            f"{source}/config.json: no model_type; expected a transformers causal language model"
        )
    if not isinstance(plain["model_type"], str):
        raise CheckpointError(
            f"{source}/config.json: model_type: expected a name, found {plain['model_type']!r}"
        )
    if "auto_map" in plain and not trust_remote_code and plain["model_type"] not in _known_model_types():
        raise UnsupportedError(
            f"{source}: model type {plain['model_type']!r} needs code from the checkpoint; "
            "read that code and pass --trust-remote-code to run it"
        )
    with boundaries.model_config(source, plain["model_type"]):
        if "auto_map" in plain and trust_remote_code:
            parsed = AutoConfig.from_pretrained(source, trust_remote_code=True)
            if getattr(parsed, "quantization_config", None) is not None:
                del parsed.quantization_config
        else:
            parsed = AutoConfig.for_model(**plain)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(parsed, dtype=dtype, trust_remote_code=trust_remote_code)
        # accelerate moves each parameter to the meta device on its own, which unties shared ones.
        model.tie_weights()
        model.eval()
        model.requires_grad_(False)
    result: PreTrainedModel = model
    return result


def _known_model_types() -> Collection[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return set(CONFIG_MAPPING.keys())


def is_linear(module: nn.Module) -> bool:
    """True for the two linear layers that transformers' decoders are made of."""
    return isinstance(module, (nn.Linear, Conv1D))


def describe(model: PreTrainedModel, *, source: str = "model") -> DecoderStructure:
    """Finds decoder blocks, linears and kept modules in a built model; ``source`` is for messages.

    Raises:
        UnsupportedError: no list of decoder blocks, blocks of different classes, or fused experts.
    """
    blocks_name, blocks_list = _decoder_blocks(model, source)
    classes = sorted({type(block).__name__ for block in blocks_list})
    if len(classes) != 1:
        raise UnsupportedError(
            f"{source}: {blocks_name} mixes block classes {', '.join(classes)}; "
            "expected one class of decoder block"
        )
    kept: dict[str, Keep] = {}
    blocks: list[Block] = []
    for index, block in enumerate(blocks_list):
        name = f"{blocks_name}.{index}"
        _refuse_fused_experts(block, name, source)
        routers = {f"{name}.{inner}": experts for inner, experts in _routers(block).items()}
        linears = []
        for inner, module in block.named_modules():
            full = f"{name}.{inner}"
            if not is_linear(module):
                continue
            if full in routers:
                kept[full] = Keep(f"router of {routers[full]} experts")
            else:
                linears.append(_linear(full, module))
        blocks.append(Block(name, tuple(linears)))
    kept |= _kept_elsewhere(model, blocks_name)
    return DecoderStructure(
        model=model,
        blocks_name=blocks_name,
        blocks=tuple(blocks),
        kept=kept,
        routed=any(bool(_linear_lists(block)) for block in blocks_list),
        tied=_tied_parameters(model),
        renamings=[rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)],
    )


def _linear(name: str, module: nn.Module) -> LinearModule:
    weight = module.get_parameter("weight")
    transposed = isinstance(module, Conv1D)
    in_features, out_features = weight.shape if transposed else reversed(weight.shape)
    return LinearModule(
        name, in_features, out_features, getattr(module, "bias", None) is not None, transposed
    )


def _linear_weights(module: nn.Module) -> int:
    return sum(inner.get_parameter("weight").numel() for inner in module.modules() if is_linear(inner))


def _linear_lists(block: nn.Module) -> list[str]:
    """Names of the lists of linears inside a block: experts."""
    return [
        name
        for name, module in block.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and _linear_weights(module) > 0
    ]


def _routers(block: nn.Module) -> dict[str, int]:
    """Linears that choose among a sibling list of experts: name -> number of experts."""
    found: dict[str, int] = {}
    for list_name in _linear_lists(block):
        parent_name = list_name.rpartition(".")[0]
        experts = len(list(block.get_submodule(list_name).children()))
        for child_name, child in block.get_submodule(parent_name).named_children():
            if is_linear(child) and _linear(child_name, child).out_features == experts:
                found[f"{parent_name}.{child_name}" if parent_name else child_name] = experts
    return found


def _decoder_blocks(model: PreTrainedModel, source: str) -> tuple[str, nn.ModuleList]:
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            weights = _linear_weights(module) + _fused_weights(module)
            if weights and (best is None or weights > best[0]):
                best = (weights, name, module)
    if best is None:
        raise UnsupportedError(
            f"{source}: {type(model).__name__} has no ModuleList of blocks with nn.Linear or Conv1D layers; "
            "only decoder-only models built of such blocks can be quantised"
        )
    return best[1], best[2]


def _fused_parameters(block: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for module_name, module in block.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # Embedding-like mixing vectors can be 3-D too, with two axes of length one.
            if sum(size > 1 for size in parameter.shape) >= 3:
                yield (f"{module_name}.{name}" if module_name else name), parameter


def _fused_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for _, parameter in _fused_parameters(module))


def _refuse_fused_experts(block: nn.Module, name: str, source: str) -> None:
    for inner, parameter in _fused_parameters(block):
        raise UnsupportedError(
            f"{source}: {name}.{inner} holds fused experts {list(parameter.shape)}; expected nn.Linear or "
            "Conv1D layers; mixture-of-experts models with fused experts can't be quantised yet"
        )


def _kept_elsewhere(model: PreTrainedModel, blocks_name: str) -> dict[str, Keep]:
    kept = {}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        inside = name.startswith(blocks_name + ".")
        if inside and is_linear(module):
            continue
        if not any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False)):
            continue
        if module is head:
            reason = "output head: its error reaches every logit directly"
        elif isinstance(module, nn.Embedding):
            reason = "embedding: a table that is looked up, not multiplied"
        elif inside:
            reason = f"{type(module).__name__} is not an nn.Linear or Conv1D layer"
        else:
            reason = "outside the decoder blocks"
        kept[name] = Keep(reason)
    return kept


def _tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied
