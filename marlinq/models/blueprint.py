"""Blueprint: the structure of a decoder-only language model, found in its module tree.

No architecture is known by name. The decoder blocks are the ``ModuleList`` with most linear weights, the
projections are the ``nn.Linear`` and ``Conv1D`` modules and fused experts inside them, and everything else
stays unquantised.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.pytorch_utils import Conv1D

from marlinq.core.errors import UnsupportedError
from marlinq.core.rules import Keep
from marlinq.models.building import build_on_meta
from marlinq.models.classes import predicts_tokens
from marlinq.models.fused_experts import Experts, find_experts
from marlinq.models.linears import is_linear, linear_shape, linear_weights
from marlinq.models.plausible import StoredTensor
from marlinq.models.projection import Projection
from marlinq.models.roles import routers, usually_kept

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Buffers that old checkpoints store although models compute them.
_COMPUTED = (r"rotary_emb\.inv_freq$",)


@dataclass(frozen=True)
class Block:
    """One decoder block.

    Attributes:
        name: full module name.
        projections: projections that may be quantised, in the order of the model, with those of
            :attr:`experts`.
        experts: modules of fused experts.
    """

    name: str
    projections: tuple[Projection, ...]
    experts: tuple[Experts, ...] = ()


@dataclass(frozen=True, eq=False)
class Blueprint:
    """The structure of a causal language model; immutable, without weights.

    Attributes:
        build: function that makes a new model of this kind, with parameters on the meta device and real
            buffers (rotary frequencies) on the CPU.
        architecture: name of the model's class.
        config: transformers config of the model.
        blocks_name: full name of the ``ModuleList`` of decoder blocks.
        blocks: decoder blocks in order, with the projections that may be quantised.
        others: projections outside the blocks, and routers; with the output head.
        head: name of the output head, one of :attr:`others`; None for a model without one.
        predicts_tokens: whether the model has an output head, linear or not.
        embedding: full name of the input embedding's table, which a head may be tied to.
        kept: full name -> reason, for modules with a weight matrix that are not quantised.
        routers: names in :attr:`kept` of modules that choose experts, or weigh a shared one.
        usually_kept: projection -> reason, for those that stay unquantised unless an override names them.
        routed: whether a block has experts, which see subsets of the tokens in an order of their own.
        parameters: full name -> shape; of tied parameters, only the first.
        buffers: full name -> shape of the buffers that checkpoints store.
        computed: full names of the other buffers, which are not read even if a checkpoint stores them.
        tied: parameter -> parameter whose tensor it shares.
        ignored: regular expressions of stored tensors that the model class ignores.
        base_prefix: prefix of names that some checkpoints leave out; may be empty.
        replay_root_name: full name of the smallest module that takes token ids and runs the blocks (the model
            without its head); empty for the model itself.
        seeing_root_name: full name of the smallest module that takes token ids and images and runs towers and
            blocks; empty for the model itself.
        text_root_name: full name of the smallest module that takes token ids and returns logits (a language
            model without vision or audio towers); empty for the model itself.
        renamings: transformers' rules from names in files to names in memory, in order.
        converters: transformers' rules that convert stored tensors to parameters by more than renaming, in
            order; :mod:`marlinq.models.conversion` runs them.
    """

    build: Callable[[], PreTrainedModel]
    architecture: str
    config: Any
    blocks_name: str
    blocks: tuple[Block, ...]
    others: tuple[Projection, ...]
    head: str | None
    predicts_tokens: bool
    embedding: str | None
    kept: Mapping[str, Keep]
    routers: frozenset[str]
    usually_kept: Mapping[str, Keep]
    routed: bool
    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    computed: tuple[str, ...]
    tied: Mapping[str, str]
    ignored: tuple[str, ...]
    base_prefix: str
    replay_root_name: str
    seeing_root_name: str
    text_root_name: str
    renamings: tuple[Any, ...]
    converters: tuple[Any, ...]

    def projections(self) -> Iterator[Projection]:
        """Every projection that may be quantised, block by block."""
        for block in self.blocks:
            yield from block.projections

    @cached_property
    def fused(self) -> Mapping[str, tuple[Projection, ...]]:
        """Parameter that holds several projections -> these projections."""
        by_parameter: dict[str, list[Projection]] = {}
        for projection in self.projections():
            if not projection.whole:
                by_parameter.setdefault(projection.parameter, []).append(projection)
        return MappingProxyType({name: tuple(members) for name, members in by_parameter.items()})

    @cached_property
    def by_name(self) -> Mapping[str, Projection]:
        """Name -> projection, for all projections of the model with :attr:`others`."""
        return MappingProxyType(
            {projection.name: projection for projection in (*self.projections(), *self.others)}
        )

    def with_ties(self, ties: Mapping[str, str]) -> Blueprint:
        """This model with further ties: parameter -> parameter whose tensor it shares."""
        own = {name: shape for name, shape in self.parameters.items() if name not in ties}
        return replace(self, tied=MappingProxyType({**self.tied, **ties}), parameters=MappingProxyType(own))

    def without_ties(self, parameters: set[str]) -> Blueprint:
        """This model without ties of ``parameters``, as for a quantised head with a weight of its own."""
        tied = {name: owner for name, owner in self.tied.items() if not {name, owner} & parameters}
        free = {name: self.parameters[owner] for name, owner in self.tied.items() if name not in tied}
        return replace(
            self, tied=MappingProxyType(tied), parameters=MappingProxyType({**self.parameters, **free})
        )


def build_blueprint(
    config: Mapping[str, Any],
    *,
    source: str,
    tensors: Mapping[str, StoredTensor] | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Blueprint:
    """The blueprint of the model that ``config`` describes; no weight is read.

    Args:
        config: content of ``config.json``; a ``quantization_config`` in it is ignored.
        source: folder of the checkpoint, for messages and for its code files.
        tensors: tensors of the checkpoint; a model that they can't fill is refused before it takes memory.
        trust_remote_code: run model code that the checkpoint brings.
        dtype: dtype of the parameters of built models.

    Raises:
        CheckpointError: transformers does not know the architecture, or rejects the config.
        UnsupportedError: the model has no list of equal decoder blocks, or an unknown layout of fused experts
            (:mod:`marlinq.models.fused_experts`).
    """
    anew = partial(
        build_on_meta, dict(config), source=source, trust_remote_code=trust_remote_code, dtype=dtype
    )
    described = anew(tensors=tensors)
    spare = [described]

    def build() -> PreTrainedModel:
        """The described model on the first call, then new ones, because building takes long."""
        return spare.pop() if spare else anew()

    return _describe(described, build, source)


def describe(build: Callable[[], PreTrainedModel], *, source: str = "model") -> Blueprint:
    """Finds decoder blocks, projections and kept modules of the model that ``build`` makes.

    ``source`` is the folder of the checkpoint, for messages.

    Raises:
        UnsupportedError: no list of decoder blocks, blocks of different classes, or unknown fused experts.
    """
    return _describe(build(), build, source)


def _describe(model: PreTrainedModel, build: Callable[[], PreTrainedModel], source: str) -> Blueprint:
    blocks_name, blocks_list = decoder_blocks(model, source)
    rules = get_model_conversion_mapping(model)
    hidden = _hidden_size(model)
    kept: dict[str, Keep] = {}
    usual: dict[str, Keep] = {}
    blocks: list[Block] = []
    proved: set[tuple[object, ...]] = set()
    for index, block in enumerate(blocks_list):
        name = f"{blocks_name}.{index}"
        fused = _fused_experts(block, name, source, rules, proved)
        counts = {
            listed: len(list(block.get_submodule(listed).children())) for listed in _linear_lists(block)
        }
        counts |= {experts.name.removeprefix(f"{name}."): experts.count for experts in fused}
        chosen_by = {f"{name}.{key}": Keep(reason) for key, reason in routers(block, counts, hidden).items()}
        kept |= chosen_by
        usual |= {f"{name}.{key}": Keep(reason) for key, reason in usually_kept(block, hidden).items()}
        by_module = {experts.name: experts for experts in fused}
        projections: list[Projection] = []
        for inner, module in block.named_modules():
            full = f"{name}.{inner}"
            if full in by_module:
                projections += by_module[full].projections
            elif is_linear(module) and full not in chosen_by:
                projections.append(_projection(full, module))
        blocks.append(Block(name, tuple(projections), fused))
    routers_found = frozenset(kept)
    kept = (
        _kept_elsewhere(model, blocks_name, {each.name for block in blocks for each in block.experts}) | kept
    )
    chosen = {projection.name for block in blocks for projection in block.projections}
    persistent = model.state_dict().keys()
    return Blueprint(
        build=build,
        architecture=type(model).__name__,
        config=model.config,
        blocks_name=blocks_name,
        blocks=tuple(blocks),
        others=tuple(
            _projection(name, module)
            for name, module in model.named_modules()
            if is_linear(module) and name not in chosen
        ),
        head=_head_of(model),
        predicts_tokens=predicts_tokens(model),
        embedding=_table_of(model),
        kept=MappingProxyType(kept),
        routers=routers_found,
        usually_kept=MappingProxyType({name: usual[name] for name in usual if name in chosen}),
        routed=any(block.experts for block in blocks) or any(map(_linear_lists, blocks_list)),
        parameters=MappingProxyType({name: tuple(value.shape) for name, value in model.named_parameters()}),
        buffers=MappingProxyType(
            {name: tuple(value.shape) for name, value in model.named_buffers() if name in persistent}
        ),
        computed=tuple(name for name, _ in model.named_buffers() if name not in persistent),
        tied=MappingProxyType(_tied_parameters(model)),
        ignored=(*(model._keys_to_ignore_on_load_unexpected or ()), *_COMPUTED),
        base_prefix=model.base_model_prefix,
        replay_root_name=_replay_root(model, blocks_name),
        seeing_root_name=_innermost(model, blocks_name, _table_of(model), *towers(model)),
        text_root_name=_text_root(model),
        renamings=tuple(rule for rule in rules if isinstance(rule, WeightRenaming)),
        converters=tuple(rule for rule in rules if isinstance(rule, WeightConverter)),
    )


def _projection(name: str, module: nn.Module) -> Projection:
    in_features, out_features = linear_shape(module)
    return Projection(
        name=name,
        parameter=f"{name}.weight",
        in_features=in_features,
        out_features=out_features,
        bias=getattr(module, "bias", None) is not None,
        transposed=isinstance(module, Conv1D),
    )


def _linear_lists(block: nn.Module) -> list[str]:
    """Names of lists of modules with linears inside a block, which are experts."""
    return [
        name
        for name, module in block.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and linear_weights(module) > 0
    ]


def decoder_blocks(model: PreTrainedModel, source: str) -> tuple[str, nn.ModuleList]:
    """(full name, list) of the decoder blocks: the list with most weights in the text model.

    The text model is the smallest model inside that embeds tokens. A projector of images beside it may be a
    list too, which in small models has more weights than the blocks.

    ``source`` is the folder of the checkpoint, for messages.

    Raises:
        UnsupportedError: no list of modules holds linears.
    """
    outside = tuple(f"{name}." for name in towers(model))
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not name.startswith(outside) and _weights(module)
    }
    text_model = _innermost(model, _table_of(model))
    chosen = [name for name in lists if name.startswith(f"{text_model}.")] or list(lists)
    if not chosen:
        raise UnsupportedError(
            f"{source}: {type(model).__name__} has no ModuleList of blocks with nn.Linear or Conv1D layers; "
            "only decoder-only models built of such blocks can be quantised"
        )
    name = max(chosen, key=lambda each: _weights(lists[each]))
    return name, lists[name]


def _weights(blocks: nn.ModuleList) -> int:
    return linear_weights(blocks) + _fused_weights(blocks)


def towers(model: PreTrainedModel) -> Iterator[str]:
    """Full names of the vision and audio towers: models inside ``model`` that don't embed text."""
    table = _table_of(model)
    if table is None:
        return
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel) and not table.startswith(f"{name}."):
            yield name


def _replay_root(model: PreTrainedModel, blocks_name: str) -> str:
    """Full name of the smallest module that takes token ids and runs the blocks."""
    prefix = model.base_model_prefix
    root = prefix if prefix and blocks_name.startswith(f"{prefix}.") else ""
    if not any(towers(model)):
        return root
    return _innermost(model, blocks_name, _table_of(model)) or root


def _text_root(model: PreTrainedModel) -> str:
    """Full name of the smallest module that takes token ids and returns logits."""
    head = model.get_output_embeddings()
    if head is None or not any(towers(model)):
        return ""
    return _innermost(
        model, _table_of(model), *(name for name, each in model.named_modules() if each is head)
    )


def _innermost(model: PreTrainedModel, *inside: str | None) -> str:
    """The smallest model in ``model`` that holds all of ``inside`` and takes token ids; empty for itself."""
    innermost = ""
    for name, module in model.named_modules():
        holds = all(each is not None and each.startswith(f"{name}.") for each in inside)
        if name and holds and isinstance(module, PreTrainedModel):
            takes = inspect.signature(module.forward).parameters
            innermost = name if "input_ids" in takes and len(name) > len(innermost) else innermost
    return innermost


def _hidden_size(model: PreTrainedModel) -> int:
    """Channels of the residual stream; 0 where the config does not say."""
    try:
        size = model.config.get_text_config().hidden_size
    except AttributeError:
        return 0
    return size if isinstance(size, int) else 0


def _fused_parameters(block: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for module_name, module in block.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # Mixing vectors can be 3-D too, but with two axes of length 1.
            if sum(size > 1 for size in parameter.shape) >= 3:
                yield (f"{module_name}.{name}" if module_name else name), parameter


def _fused_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for _, parameter in _fused_parameters(module))


def _fused_experts(
    block: nn.Module, name: str, source: str, rules: Sequence[Any], proved: set[tuple[object, ...]]
) -> tuple[Experts, ...]:
    layers = []
    weights = sum(parameter.numel() for parameter in block.parameters())
    for inner, module in block.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            continue
        try:
            experts = find_experts(f"{name}.{inner}" if inner else name, module, rules, proved)
        except UnsupportedError as error:
            own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            if "down_proj" not in module._parameters and 2 * own < weights:
                # Block-diagonal gates, or parameters with an axis of heads: no linears, hence kept.
                continue
            raise UnsupportedError(f"{source}: {error}") from None
        layers += [] if experts is None else [experts]
    return tuple(layers)


def _kept_elsewhere(model: PreTrainedModel, blocks_name: str, fused: Collection[str]) -> dict[str, Keep]:
    kept = {}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        inside = name.startswith(blocks_name + ".")
        if name in fused or (inside and is_linear(module)):
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


def _head_of(model: PreTrainedModel) -> str | None:
    """Full name of the output head where it is a linear layer."""
    head = model.get_output_embeddings()
    return next(
        (name for name, module in model.named_modules() if module is head and is_linear(module)), None
    )


def _table_of(model: PreTrainedModel) -> str | None:
    """Full name of the input embedding's parameter."""
    try:
        table: object = model.get_input_embeddings()
    except NotImplementedError:
        # transformers raises this for a model without an embedding.
        return None
    if not isinstance(table, nn.Module):
        return None
    # Some models embed tokens in a module of their own, which holds the table.
    table = next((module for module in table.modules() if isinstance(module, nn.Embedding)), None)
    names = (name for name, module in model.named_modules() if module is table)
    return next((f"{name}.weight" for name in names if table is not None), None)


def _tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied
