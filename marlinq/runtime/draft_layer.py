"""Loads the draft head of a checkpoint beside its model (:mod:`marlinq.checkpoint.draft_head`).

Its block is one of the model's kind. So it is loaded as a block of a second model without weights, from the
head's tensors under the names of such a block: every layout, format and renaming that the model's own blocks
may have works for it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.checkpoint import (
    Checkpoint,
    DerivedCheckpoint,
    DraftHead,
    QuantizedCheckpoint,
    ReadAhead,
    find_draft_head,
)
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.models import ConvertedTensors, ModelInstance, TensorNames, converted
from marlinq.models.anatomy import Anatomy, Attention, LatentAttention, Layer, Mixture, Norm
from marlinq.models.quantized_linears import quantized_linears
from marlinq.runtime.loading import LoadedFrom, LoadedModel, install_linears, stored_otherwise
from marlinq.runtime.packed_experts import check_experts

_HELD = "draft_head"
"""Name of the module that holds the parts besides the block."""

_loaded: WeakKeyDictionary[PreTrainedModel, DraftLayer | str] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class DraftLayer:
    """A draft head with its weights.

    Attributes:
        model: model of the main model's class, with the head's parts, and the main model's embedding, head
            and rotations. Nothing else in it has weights.
        anatomy: the head as a decoder of one layer, without what makes the layer's input.
        projection: full name of the linear that makes the layer's input.
        token_norm, hidden_norm: norms of its two inputs.
        nbytes: bytes of weights that a drafted token reads.
        model_nbytes: bytes of weights that a step of the main model reads.
    """

    model: PreTrainedModel
    anatomy: Anatomy
    projection: str
    token_norm: Norm
    hidden_norm: Norm
    nbytes: float
    model_nbytes: float


def has_draft_head(loaded: LoadedModel) -> bool:
    """Whether the checkpoint of the model has a draft head, which may be unusable."""
    return loaded.source is not None and find_draft_head(loaded.source.checkpoint.tensors) is not None


def load_draft(loaded: LoadedModel, anatomy: Anatomy) -> DraftLayer | str:
    """The draft head that the model's checkpoint has, or why it can't be used, in one clause. Loaded once.

    Args:
        loaded: the model.
        anatomy: its anatomy.
    """
    if loaded.source is None:
        return "the model was not loaded from a checkpoint"
    if loaded.model not in _loaded:
        try:
            _loaded[loaded.model] = _load(loaded.model, loaded.source, anatomy)
        except MarlinqError as error:
            _loaded[loaded.model] = f"its draft head can't be loaded: {error}"
    return _loaded[loaded.model]


@torch.no_grad()
def _load(model: PreTrainedModel, source: LoadedFrom, anatomy: Anatomy) -> DraftLayer | str:
    head = find_draft_head(source.checkpoint.tensors)
    if head is None:
        return "the checkpoint has no draft head"
    if anatomy.final_norm is None:
        return "the model has no norm before its head"
    width = anatomy.final_norm.width
    reasons: dict[str, None] = {}
    for index in reversed(range(len(anatomy.layers))):
        layer = anatomy.layers[index]
        if not isinstance(layer.attention, Attention | LatentAttention) or layer.beside is not None:
            continue
        view = _View.of(source, head, layer.name, anatomy.final_norm.module)
        reason = view.mismatch(layer.name) or view.damage(width)
        if reason is None:
            return _built(model, view, anatomy, layer)
        reasons[reason] = None
    listed = next(iter(reasons), "none of the model's blocks has attention of a known kind")
    return f"its draft head ({head.block}*) is no block of the model's kind: {listed}"


@dataclass(frozen=True, eq=False)
class _View:
    """A checkpoint whose only tensors are those of a draft head, under the names of a block of the model.

    Attributes:
        source: checkpoint and settings of the model's load.
        head: names of the head's parts.
        checkpoint: the view.
        quantized: the head's tensors as a quantised checkpoint; None if no linear of the block is quantised.
    """

    source: LoadedFrom
    head: DraftHead
    checkpoint: Checkpoint
    quantized: QuantizedCheckpoint | None

    @classmethod
    def of(cls, source: LoadedFrom, head: DraftHead, block: str, final_norm: str) -> _View:
        base, quantized = source.checkpoint, source.quantized
        renamed = dict(_renamed(base, head, block, final_norm))
        view = DerivedCheckpoint.of(
            base,
            {name: replace(base.tensors[stored], name=name) for name, stored in renamed.items()},
            {name: partial(base.tensor, stored) for name, stored in renamed.items()},
            base.config,
        )
        modules = {}
        if quantized is not None:
            inside = [module for module in quantized.modules if module.startswith(head.block)]
            modules = {f"{block}.{module.removeprefix(head.block)}": module for module in inside}
        if quantized is None or not modules:
            return cls(source, head, view, None)
        return cls(
            source,
            head,
            view,
            replace(
                quantized,
                checkpoint=view,
                modules={name: quantized.modules[module] for name, module in modules.items()},
                layouts={name: quantized.layouts[module] for name, module in modules.items()},
                passthrough=[name for name in view.tensors if name.rpartition(".")[0] not in modules],
            ),
        )

    def mismatch(self, block: str) -> str | None:
        """Why the tensors are not those of ``block``, or None."""
        blueprint = self.source.blueprint
        try:
            replaced = self.replaced()
            view = converted(self.checkpoint, stored_otherwise(blueprint, self.checkpoint, self.quantized))
            names = TensorNames(blueprint, view.tensors.keys(), source=str(view.path))
            packed = {blueprint.by_name[name].parameter for name in replaced}
            for name, shape in blueprint.parameters.items():
                if not name.startswith(f"{block}.") or name in packed:
                    continue
                for stored, size in names.places(name, shape):
                    if view.tensors[stored].shape != size:
                        return f"{name}: expected {list(size)}, found {list(view.tensors[stored].shape)}"
        except CheckpointError as error:
            return str(error)
        return None

    def damage(self, width: int) -> str | None:
        """What is wrong with the head's parts: one besides the block has another shape than hidden states of
        ``width`` channels need, or a dense tensor holds no floats. None if nothing is.

        Damaged quantised linears are found when they are loaded.
        """
        stored, packed = self.source.checkpoint.tensors, self.source.quantized
        head, modules = self.head, {} if packed is None else packed.modules
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (width,) for name in (head.token_norm, head.hidden_norm, head.final_norm)
        }
        if head.projection not in modules:
            shapes[f"{head.projection}.weight"] = (width, 2 * width)
        for name, shape in shapes.items():
            if name in stored and stored[name].shape != shape:
                return f"{name}: expected {list(shape)}, found {list(stored[name].shape)}"
        for name, info in stored.items():
            inside = name.startswith((head.block, *(f"{part}." for part in head.outside)))
            dense = name.endswith((".weight", ".bias")) and name.rpartition(".")[0] not in modules
            if inside and dense and not torch_dtype(info.dtype).is_floating_point:
                return f"{name}: expected floats, found {info.dtype}"
        return None

    def replaced(self) -> dict[str, str]:
        """The view's name of each quantised projection, by its name in the model."""
        if self.quantized is None:
            return {}
        stored = quantized_linears(self.source.blueprint, self.quantized)
        check_experts(self.source.blueprint, stored, self.checkpoint)
        return stored

    def matrix(self, module: str) -> Tensor:
        """The weight [N, K] of a linear outside the block, quantised or not."""
        quantized = self.source.quantized
        if quantized is not None and module in quantized.modules:
            return quantized.load(module).dequantize(torch.float32).t()
        return self.source.checkpoint.tensor(f"{module}.weight")


def _renamed(
    checkpoint: Checkpoint, head: DraftHead, block: str, final_norm: str
) -> Iterator[tuple[str, str]]:
    """(name in the view, stored name) of the tensors of the head's block and of its last norm."""
    places = {head.final_norm: final_norm, head.block.removesuffix("."): block}
    for stored in checkpoint.tensors:
        module = next((module for module in places if stored.startswith(f"{module}.")), None)
        outside = module != head.final_norm and stored.startswith(tuple(f"{part}." for part in head.outside))
        if module is not None and not outside:
            yield places[module] + stored.removeprefix(module), stored


def _built(model: PreTrainedModel, view: _View, anatomy: Anatomy, layer: Layer) -> DraftLayer:
    """The head as the block ``layer`` of a new model of the class of ``model``."""
    blueprint, setting, head = view.source.blueprint, view.source.setting, view.head
    assert anatomy.final_norm is not None
    conversions = stored_otherwise(blueprint, view.checkpoint, view.quantized)
    tensors = converted(view.checkpoint, conversions).tensors
    # Every tensor of a view is computed, so nothing is read ahead.
    with ReadAhead(view.checkpoint, setting.device, budget=0) as reader:
        stored = ConvertedTensors(view.checkpoint.path, tensors, reader.tensor, conversions)
        instance = ModelInstance(blueprint, stored, device=setting.device, dtype=setting.dtype)
        if view.quantized is not None:
            install_linears(
                *(instance, view.quantized, view.replaced(), setting), compile_kernels=False, reader=reader
            )
        instance.materialise(layer.name)
        instance.materialise(anatomy.final_norm.module)
    own = instance.model
    held = nn.Module()
    own.add_module(_HELD, held)
    norms = []
    for key, name in (("token_norm", head.token_norm), ("hidden_norm", head.hidden_norm)):
        norm = deepcopy(own.get_submodule(anatomy.final_norm.module))
        for parameter, value in norm.named_parameters():
            value.copy_(view.source.checkpoint.tensor(f"{name}.{parameter}"))
        held.add_module(key, norm)
        norms.append(replace(anatomy.final_norm, module=f"{_HELD}.{key}"))
    weight = view.matrix(head.projection)
    held.projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    held.projection.weight = nn.Parameter(weight.to(setting.device, setting.dtype), requires_grad=False)
    for name in _shared(anatomy, layer):
        own.set_submodule(name, model.get_submodule(name))
    output = _nbytes(model.get_submodule(anatomy.head))
    read = _read_nbytes(own, layer) + _nbytes(held) + output
    model_read = sum(_read_nbytes(model, each) for each in anatomy.layers) + output
    projection = f"{_HELD}.projection"
    return DraftLayer(
        own, replace(anatomy, layers=(layer,)), projection, norms[0], norms[1], read, model_read
    )


def _read_nbytes(model: nn.Module, layer: Layer) -> float:
    """Bytes of a block's weights that one token reads: of its experts, those that are chosen."""
    nbytes: float = _nbytes(model.get_submodule(layer.name))
    if isinstance(layer.mlp, Mixture):
        router = layer.mlp.router
        experts = _nbytes(model.get_submodule(layer.mlp.experts))
        nbytes -= experts * (1 - router.top / router.experts)
    return nbytes


def _nbytes(module: nn.Module) -> int:
    return sum(value.nbytes for value in (*module.parameters(), *module.buffers()))


def _shared(anatomy: Anatomy, layer: Layer) -> Iterator[str]:
    """Names of modules of the main model that the head uses."""
    yield anatomy.embedding
    yield anatomy.head
    if anatomy.positions is not None:
        yield anatomy.positions
    if anatomy.embedding_norm is not None:
        yield anatomy.embedding_norm.module
    assert isinstance(layer.attention, Attention | LatentAttention)
    if layer.attention.rotary is not None:
        yield layer.attention.rotary.module
