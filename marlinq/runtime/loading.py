"""Any supported checkpoint as a transformers model whose quantised linears are ours."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, without_quantization_config
from marlinq.core import boundaries
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import CheckpointError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.models import Blueprint, ModelInstance, Projection, TensorNames, build_blueprint
from marlinq.runtime.decision import AUTO, Decision, decide, require_operator, summarize
from marlinq.runtime.decoding import Decoders
from marlinq.runtime.head import pack_head
from marlinq.runtime.operators import OPERATORS, Setting
from marlinq.runtime.placement import place

# Files that tell a tokenizer is there; without any of them transformers would look for one on the Hub.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        path: the checkpoint folder.
        model: a transformers causal language model in evaluation mode, all on ``device``.
        tokenizer: the folder's tokenizer, or None when it has none.
        device: where the model is.
        dtype: of activations and unquantised weights.
        decisions: quantised module name -> what multiplies it, and why.
        notes: what else a person should know, one line each.
        decoders: what generation keeps between calls: caches and captured steps.
    """

    path: Path
    model: PreTrainedModel
    tokenizer: Any | None
    device: torch.device
    dtype: torch.dtype
    decisions: Mapping[str, Decision]
    notes: tuple[str, ...]
    decoders: Decoders = field(default_factory=Decoders, repr=False)

    def report(self) -> list[str]:
        """What was loaded and how it is multiplied, line by line."""
        dtype = dtype_name(self.dtype)
        lines = [f"{self.path}: {type(self.model).__name__} on {self.device} in {dtype}"]
        return [*lines, *summarize(self.decisions.values()), *self.notes]


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    operator: str = AUTO,
    exact: bool | None = None,
    compile_kernels: bool = True,
    progress: ReportProgress = no_progress,
) -> LoadedModel:
    """Loads a quantised or unquantised checkpoint for inference.

    Tensors are read one at a time; no dense copy of a quantised weight outlives its module's load unless the
    module runs dense, which its decision says.

    Args:
        path: a checkpoint folder or a Hub id.
        device: ``auto`` or None (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: of activations and unquantised weights; ``auto`` or None as in
            :func:`marlinq.runtime.placement.place`.
        trust_remote_code: run model code that the checkpoint brings.
        operator: what multiplies quantised weights, where it can; see :func:`marlinq.runtime.decide`.
        exact: products with quantised weights round no more than the dtype makes them, where a CPU has a
            faster one in bfloat16, and a CPU's head is torch's plain product; None: True where ``dtype`` is
            given, False where it is ``auto``.
        compile_kernels: compile what the model's products need on a GPU now, instead of at their first use.
        progress: called after each module, and while kernels are compiled.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
        UnsupportedError: the architecture or the quantisation method, or a scale that overflows ``dtype``.
        UsageError: no operator has that name.
        EnvironmentProblem: the device is not there, or a kernel does not compile.
    """
    require_operator(operator)
    checkpoint = Checkpoint.open(path)
    quantized = QuantizedCheckpoint.of(checkpoint)
    placement = place(checkpoint, quantized=quantized is not None, device=device, dtype=dtype)
    blueprint = build_blueprint(
        without_quantization_config(checkpoint.config),
        source=str(checkpoint.path),
        tensors=checkpoint.tensors,
        trust_remote_code=trust_remote_code,
        dtype=placement.dtype,
    )
    notes = [placement.reason] if placement.reason else []
    decisions: dict[str, Decision] = {}
    if exact is None:
        exact = dtype not in (None, "auto")
    setting = Setting(placement.device, placement.dtype, exact)
    blueprint, replaced = match_tensors(blueprint, checkpoint, quantized)
    instance = ModelInstance(blueprint, checkpoint, device=placement.device, dtype=placement.dtype)
    if quantized is not None:
        decisions = install_linears(
            instance,
            quantized,
            replaced,
            setting,
            operator=operator,
            compile_kernels=compile_kernels,
            progress=progress,
        )
        notes += scale_notes(quantized, placement.dtype)
    instance.whole_model()
    if not exact:
        notes += pack_head(instance.model, setting)
    warn_about_dense(decisions, placement.device)
    model = instance.model
    generation_config = read_generation_config(checkpoint)
    if generation_config is not None:
        model.generation_config = generation_config
    return LoadedModel(
        path=checkpoint.path,
        model=model,
        tokenizer=read_tokenizer(checkpoint, trust_remote_code),
        device=placement.device,
        dtype=placement.dtype,
        decisions=decisions,
        notes=tuple(notes),
    )


def match_tensors(
    blueprint: Blueprint, checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None
) -> tuple[Blueprint, dict[str, str]]:
    """Give every tensor its place and every place a tensor of its shape; no tensor is read.

    Returns:
        The blueprint without the ties of quantised projections, and the checkpoint's name of every quantised
        projection by its own.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    replaced: dict[str, str] = {}
    if quantized is not None:
        replaced = _quantized_names(blueprint, quantized)
        # A quantised head is tied to nothing, whatever the config says.
        blueprint = blueprint.without_ties({blueprint.by_name[name].parameter for name in replaced})
    _check_tensors(blueprint, checkpoint, quantized, replaced)
    return blueprint, replaced


def _quantized_names(blueprint: Blueprint, quantized: QuantizedCheckpoint) -> dict[str, str]:
    """Projection name -> the checkpoint's name for it, for every projection that is quantised there."""
    checkpoint, key = quantized.checkpoint, quantized.layout.key
    names = TensorNames(blueprint, checkpoint.tensors.keys(), source=str(checkpoint.path))
    found: dict[str, str] = {}
    for name, projection in blueprint.by_name.items():
        stem = names.stem(projection, key)
        if stem is None:
            continue
        spec = quantized.modules[stem]
        expected = (projection.in_features, projection.out_features)
        if (spec.in_features, spec.out_features) != expected:
            raise CheckpointError(
                f"{checkpoint.path}: {stem}: expected K, N = {expected[0]}, {expected[1]} from "
                f"config.json, found {spec.in_features}, {spec.out_features}"
            )
        found[name] = stem
    homeless = sorted(set(quantized.modules) - set(found.values()))
    if homeless:
        raise CheckpointError(
            f"{checkpoint.path}: quantised module {homeless[0]} ({len(homeless)} such) is no "
            f"linear of {blueprint.architecture}; config.json describes another model"
        )
    return found


def install_linears(
    instance: ModelInstance,
    quantized: QuantizedCheckpoint,
    replaced: Mapping[str, str],
    setting: Setting,
    *,
    operator: str = AUTO,
    compile_kernels: bool = True,
    progress: ReportProgress = no_progress,
) -> dict[str, Decision]:
    """Put what multiplies it into the place of every quantised projection of a model.

    Args:
        instance: the model; what stands in those places is not looked at.
        quantized: where the weights and biases are read from.
        replaced: as from :func:`match_tensors`.
        setting: where the model runs.
        operator: as in :func:`load`.
        compile_kernels: as in :func:`load`.
        progress: as in :func:`load`.

    Returns:
        The decision for every projection, by its name.

    Raises:
        CheckpointError: a file of the checkpoint was changed since it was opened.
        UnsupportedError: a scale overflows the dtype.
        EnvironmentProblem: the device or a package is missing, or a kernel does not compile.
    """
    decisions = {}
    for index, (name, stored) in enumerate(replaced.items()):
        weight = quantized.stored(stored)
        decisions[name] = decide(weight, setting, operator=operator)
        projection = instance.blueprint.by_name[name]
        bias = _bias(instance, quantized.checkpoint, projection)
        instance.install(projection, OPERATORS[decisions[name].operator].build(weight, bias, setting))
        progress("loading", index + 1, len(replaced))
    if compile_kernels:
        _compile_kernels(instance.model, decisions, setting, progress)
    return decisions


def _bias(instance: ModelInstance, checkpoint: Checkpoint, projection: Projection) -> Tensor | None:
    name = f"{projection.module}.bias"
    if projection.bias:
        return instance.read(name, (projection.out_features,))
    stored = instance.names.own(name)
    if stored is None:
        return None
    # Some writers give every quantised linear a bias, zeros where the model has none.
    bias = checkpoint.tensor(stored)
    return bias if bool(bias.any()) else None


def _check_tensors(
    blueprint: Blueprint,
    checkpoint: Checkpoint,
    quantized: QuantizedCheckpoint | None,
    replaced: Mapping[str, str],
) -> None:
    names = TensorNames(blueprint, checkpoint.tensors.keys(), source=str(checkpoint.path))
    packed = {blueprint.by_name[name].parameter for name in replaced}
    used: set[str] = set()

    def take(stored: str | None, shape: Sequence[int]) -> None:
        if stored is None:
            return
        used.add(stored)
        found = checkpoint.tensors[stored].shape
        if found != tuple(shape):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {stored!r}: expected shape {list(shape)} from config.json, "
                f"found {list(found)}"
            )

    shapes = {name: blueprint.parameters[owner] for name, owner in blueprint.tied.items()}
    for name, shape in {**blueprint.parameters, **shapes}.items():
        if name not in packed:
            take(names.require(name), shape)
            take(names.own(name), shape)
    for name, shape in blueprint.buffers.items():
        take(names.own(name), shape)
    # Computed by the model; what an old checkpoint stores of them is not read.
    used.update(stored for name in blueprint.computed if (stored := names.own(name)) is not None)
    if quantized is not None:
        for name, module in replaced.items():
            used.update(quantized.tensor_names(module).values())
            take(names.own(f"{name}.bias"), (quantized.modules[module].out_features,))
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in blueprint.ignored))
    unexpected = [name for name in checkpoint.tensors if name not in used and not ignored.search(name)]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {unexpected[0]!r} ({len(unexpected)} such) has no place in "
            f"{blueprint.architecture}; config.json describes another model"
        )


def scale_notes(quantized: QuantizedCheckpoint, dtype: torch.dtype) -> list[str]:
    """What is said of a checkpoint whose scales are not exact in ``dtype``; nothing of another."""
    stored = {spec.scale_dtype for spec in quantized.modules.values()}
    rounded = sorted(dtype_name(found) for found in stored if torch.promote_types(found, dtype) != dtype)
    if not rounded:
        return []
    target = dtype_name(dtype)
    return [f"scales stored in {', '.join(rounded)} are rounded to {target}"]


def _compile_kernels(
    model: nn.Module, decisions: Mapping[str, Decision], setting: Setting, progress: ReportProgress
) -> None:
    for operator in OPERATORS.values():
        modules = [
            model.get_submodule(name)
            for name, decision in decisions.items()
            if decision.operator == operator.name
        ]
        if modules:
            operator.compile(modules, setting, progress)


def warn_about_dense(decisions: Mapping[str, Decision], device: torch.device) -> None:
    """Warn where weights take more memory on a GPU than in the checkpoint, with the reason."""
    dense = [decision for decision in decisions.values() if OPERATORS[decision.operator].dense]
    if dense and device.type == "cuda":
        warnings.warn(
            f"{len(dense)} of {len(decisions)} quantised linears run as dense weights on {device}, which "
            f"takes more memory: {dense[0].reason}",
            stacklevel=3,
        )


def read_generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """The folder's generation config, or None where it has none.

    Raises:
        CheckpointError: transformers can't read it.
    """
    if not (checkpoint.path / "generation_config.json").is_file():
        return None
    with boundaries.generation_config(checkpoint.path):
        return GenerationConfig.from_pretrained(checkpoint.path)


def read_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Any | None:
    """The folder's tokenizer, or None where it has none.

    Raises:
        CheckpointError: transformers can't read it.
    """
    if not any((checkpoint.path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from marlinq.calibration import load_tokenizer

    return load_tokenizer(checkpoint.path, trust_remote_code=trust_remote_code)
