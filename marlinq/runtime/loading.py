"""Any supported checkpoint as a transformers model whose quantised linears are ours."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from marlinq.models import BlockLoader, DecoderStructure, TensorNames, build_structure, is_linear
from marlinq.runtime.decision import AUTO, Decision, decide, require_operator, summarize
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
    """

    path: Path
    model: PreTrainedModel
    tokenizer: Any | None
    device: torch.device
    dtype: torch.dtype
    decisions: Mapping[str, Decision]
    notes: tuple[str, ...]

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
    structure = build_structure(
        without_quantization_config(checkpoint.config),
        source=str(checkpoint.path),
        tensors=checkpoint.tensors,
        trust_remote_code=trust_remote_code,
        dtype=placement.dtype,
    )
    notes = [placement.reason] if placement.reason else []
    decisions: dict[str, Decision] = {}
    setting = Setting(placement.device, placement.dtype)
    structure, replaced = match_tensors(structure, checkpoint, quantized)
    loader = BlockLoader(structure, checkpoint, device=placement.device, dtype=placement.dtype)
    if quantized is not None:
        for index, (name, stored) in enumerate(replaced.items()):
            weight = quantized.stored(stored)
            decision = decide(weight, setting, operator=operator)
            bias = _bias(loader, checkpoint, name, structure.model.get_submodule(name), weight.out_features)
            module = OPERATORS[decision.operator].build(weight, bias, setting)
            structure.model.set_submodule(name, module)
            decisions[name] = decision
            progress("loading", index + 1, len(replaced))
        notes += _scale_notes(quantized, placement.dtype)
    loader.whole_model()
    _warn_about_dense(decisions, placement.device)
    model = structure.model
    if compile_kernels:
        _compile_kernels(model, decisions, setting, progress)
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
    structure: DecoderStructure, checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None
) -> tuple[DecoderStructure, dict[str, str]]:
    """Give every tensor its place and every place a tensor of its shape; no tensor is read.

    Returns:
        The structure without the ties of quantised modules, and the checkpoint's name of every quantised
        linear by module name.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    names = TensorNames(structure, checkpoint.tensors.keys(), source=str(checkpoint.path))
    replaced: dict[str, str] = {}
    if quantized is not None:
        replaced = _quantized_names(structure, names, quantized)
        structure = _without_ties(structure, replaced)
        names = TensorNames(structure, checkpoint.tensors.keys(), source=str(checkpoint.path))
    _check_tensors(structure, names, checkpoint, quantized, replaced)
    return structure, replaced


def _quantized_names(
    structure: DecoderStructure, names: TensorNames, quantized: QuantizedCheckpoint
) -> dict[str, str]:
    """Module name -> the checkpoint's name for it, for every linear that is quantised there."""
    key = quantized.layout.key
    found: dict[str, str] = {}
    for name, module in structure.model.named_modules():
        stored = names.own(f"{name}.{key}") if is_linear(module) else None
        if stored is None:
            continue
        stem = stored.removesuffix(f".{key}")
        shape = tuple(module.get_parameter("weight").shape)
        expected = shape if not isinstance(module, nn.Linear) else (shape[1], shape[0])
        spec = quantized.modules[stem]
        if (spec.in_features, spec.out_features) != expected:
            raise CheckpointError(
                f"{quantized.checkpoint.path}: {stem}: expected K, N = {expected[0]}, {expected[1]} from "
                f"config.json, found {spec.in_features}, {spec.out_features}"
            )
        found[name] = stem
    homeless = sorted(set(quantized.modules) - set(found.values()))
    if homeless:
        raise CheckpointError(
            f"{quantized.checkpoint.path}: quantised module {homeless[0]} ({len(homeless)} such) is no "
            f"linear of {type(structure.model).__name__}; config.json describes another model"
        )
    return found


def _without_ties(structure: DecoderStructure, replaced: Mapping[str, str]) -> DecoderStructure:
    """A quantised head is tied to nothing, whatever the config says."""
    weights = {f"{name}.weight" for name in replaced}
    tied = {name: owner for name, owner in structure.tied.items() if not {name, owner} & weights}
    return replace(structure, tied=tied)


def _bias(
    loader: BlockLoader, checkpoint: Checkpoint, name: str, linear: nn.Module, out_features: int
) -> Tensor | None:
    if getattr(linear, "bias", None) is not None:
        return loader.read(f"{name}.bias", (out_features,))
    stored = loader.names.own(f"{name}.bias")
    if stored is None:
        return None
    # Some writers give every quantised linear a bias, zeros where the model has none.
    bias = checkpoint.tensor(stored)
    return bias if bool(bias.any()) else None


def _check_tensors(
    structure: DecoderStructure,
    names: TensorNames,
    checkpoint: Checkpoint,
    quantized: QuantizedCheckpoint | None,
    replaced: Mapping[str, str],
) -> None:
    model = structure.model
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

    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, key = name.rpartition(".")
        if module not in replaced or key != "weight":
            take(names.require(name), parameter.shape)
            take(names.own(name), parameter.shape)
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        stored = names.own(name)
        if name in persistent:
            take(stored, buffer.shape)
        elif stored is not None:
            # Computed by the model; what an old checkpoint stores of it is not read.
            used.add(stored)
    if quantized is not None:
        for name, module in replaced.items():
            used.update(quantized.tensor_names(module).values())
            take(names.own(f"{name}.bias"), (quantized.modules[module].out_features,))
    ignored = _ignored_pattern(model)
    unexpected = [name for name in checkpoint.tensors if name not in used and not ignored.search(name)]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {unexpected[0]!r} ({len(unexpected)} such) has no place in "
            f"{type(model).__name__}; config.json describes another model"
        )


def _ignored_pattern(model: PreTrainedModel) -> re.Pattern[str]:
    """Tensors that old checkpoints hold and today's models compute: what the model class names, and rotary
    frequencies."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _scale_notes(quantized: QuantizedCheckpoint, dtype: torch.dtype) -> list[str]:
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


def _warn_about_dense(decisions: Mapping[str, Decision], device: torch.device) -> None:
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
