"""Load any supported checkpoint as a transformers model with marlinq's operators for quantised linears."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from marlinq.checkpoint import (
    Checkpoint,
    QuantizedCheckpoint,
    ReadAhead,
    with_dense_weights,
    without_quantization_config,
)
from marlinq.core import boundaries
from marlinq.core.dtypes import dtype_name, holds
from marlinq.core.errors import CheckpointError, UnsupportedError, UsageError
from marlinq.core.progress import Progress, ReportProgress, no_progress, shows_progress
from marlinq.models import (
    Blueprint,
    Conversion,
    ConvertedTensors,
    ModelInstance,
    Projection,
    TensorNames,
    build_blueprint,
    converted,
    find_conversions,
    quantized_linears,
    without_false_ties,
)
from marlinq.models.anatomy import Anatomy, Unrecognised
from marlinq.models.left_out import left_out
from marlinq.models.recognise import recognise
from marlinq.runtime.cpu_head import HalfWeightLinear, pack_head
from marlinq.runtime.decoding import Decoders
from marlinq.runtime.kernel_operand import KERNEL_LAYOUT
from marlinq.runtime.operator_choice import AUTO, Decision, decide, require_operator, summarize
from marlinq.runtime.operators import OPERATORS, Setting
from marlinq.runtime.packed_experts import check_experts, expert_bias, install_experts
from marlinq.runtime.placement import place
from marlinq.runtime.quant_linear import QuantLinear
from marlinq.runtime.remembered import recognise_once
from marlinq.runtime.timings import LoadTimings
from marlinq.runtime.tokenizer import tokenizer_of

# Files of a tokenizer; without any of them transformers would search the Hub for one.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
NOT_SAVED = (
    "a loaded model holds its weights as its operators want them and is not saved; copy the folder, or write "
    "another format with `marlinq convert` (16-bit weights: --to dense)"
)
"""Message of the error when a loaded model is saved."""
# Bytes of tensors that may be read ahead of their use, for a model on a CPU.
_HOST_AHEAD_BYTES = 256 << 20
# The same on a GPU, where tensors are used as stored: they take no memory beside the model's.
_STORED_AHEAD_BYTES = 8 << 30
# The same on a GPU, where tensors are transcoded, and lie in memory beside the results.
_TRANSCODED_AHEAD_BYTES = 512 << 20


@dataclass(frozen=True, eq=False)
class LoadedFrom:
    """Checkpoint and settings of a load, from which parts that the model lacks, as a draft head, load later.

    Attributes:
        checkpoint: the checkpoint.
        quantized: view of its quantised modules; None where there are none.
        blueprint: structure of the model.
        setting: device and dtype of the model.
    """

    checkpoint: Checkpoint
    quantized: QuantizedCheckpoint | None
    blueprint: Blueprint
    setting: Setting


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        path: the checkpoint folder.
        model: a transformers causal language model in evaluation mode, all on ``device``.
        tokenizer: the folder's tokenizer, or None when it has none. It is transformers', or where the model
            only decodes, one that does the same (:class:`marlinq.runtime.tokenizer.FileTokenizer`).
        device: device of the model.
        dtype: dtype of activations and unquantised weights.
        decisions: operator of every quantised module, and why, by module name.
        notes: further notes for the user, one line each.
        decoders: caches and captured steps, kept between calls of generation.
        timings: seconds of the load by stage.
        anatomy: result of recognition, if the model was recognised while loading; else None.
        source: checkpoint and settings of the load; None if the model was not made by :func:`load`.
    """

    path: Path
    model: PreTrainedModel
    tokenizer: Any | None
    device: torch.device
    dtype: torch.dtype
    decisions: Mapping[str, Decision]
    notes: tuple[str, ...]
    decoders: Decoders = field(default_factory=Decoders, repr=False)
    timings: LoadTimings = field(default_factory=LoadTimings)
    anatomy: Anatomy | Unrecognised | None = field(default=None, repr=False)
    source: LoadedFrom | None = field(default=None, repr=False)

    def report(self) -> list[str]:
        """Lines that describe the model, its operators and the time of the load."""
        dtype = dtype_name(self.dtype)
        lines = [f"{self.path}: {type(self.model).__name__} on {self.device} in {dtype}"]
        return [*lines, *summarize(self.decisions.values()), *self.notes]

    def compile_kernels(self, progress: ReportProgress = no_progress) -> None:
        """Compile the kernels of the model's forward pass on a GPU that the cache lacks.

        Raises:
            EnvironmentProblem: a kernel does not compile.
        """
        setting = Setting(self.device, self.dtype)
        for operator in OPERATORS.values():
            operator.compile(self.model.modules(), setting, progress)


@shows_progress
def load(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    operator: str = AUTO,
    exact: bool | None = None,
    activations: str | None = None,
    compile_kernels: bool = True,
    only_decodes: bool = False,
    progress: Progress = True,
) -> LoadedModel:
    """Loads a quantised or unquantised checkpoint for inference.

    Tensors are read by several threads, straight to the device, while the model is built
    (:class:`marlinq.checkpoint.ReadAhead`). Host memory holds at most 256 MB of tensors that are still to be
    used, or for a GPU a ring of 128 MB. No dense copy of a quantised weight outlives its module's load unless
    the module runs dense, which its decision says.

    Args:
        path: a checkpoint folder or a Hub id.
        revision: branch, tag or commit of a Hub id; the main branch when None.
        device: ``auto`` or None (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: dtype of activations and unquantised weights; ``auto`` or None as in
            :func:`marlinq.runtime.placement.place`.
        trust_remote_code: run model code that the checkpoint brings.
        operator: name of the operator for quantised weights, where it can be used; see
            :func:`marlinq.runtime.decide`.
        exact: False lets a CPU round products of quantised weights to bfloat16 where that is faster, and pack
            the head's weight; True keeps every product in ``dtype``. None: True where ``dtype`` is given,
            False where it is ``auto``.
        activations: ``fp8`` rounds the activations of INT4 weights to FP8 E4M3 in large batches, such as
            prompts, on a GPU of compute capability 9.0; each decision says whether its weight allows it. None
            leaves activations as the checkpoint wants them.
        compile_kernels: compile what the model's products need on a GPU now, instead of at their first use.
        only_decodes: True for a model that only :func:`marlinq.runtime.generate` uses. Its parts are then
            recognised while its tensors are read. On a GPU, kernels of a recognised model are compiled by the
            first decoder, which joins products and so needs other shapes; and what was learnt of model and
            tokenizer is kept for the next start (:mod:`marlinq.runtime.remembered`).
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape, or a file changed meanwhile.
        UnsupportedError: the architecture or quantisation method is not supported, a scale overflows
            ``dtype``, or no weight can be multiplied by such ``activations``.
        UsageError: no operator, or no type of activations, has that name.
        EnvironmentProblem: the device is not there, or a kernel does not compile.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    require_operator(operator)
    if activations not in (None, "fp8"):
        raise UsageError(f"activations {activations!r}: expected fp8")
    timings = LoadTimings()
    with timings.stage("open"):
        checkpoint = with_dense_weights(Checkpoint.open(path, revision=revision, progress=progress))
        quantized = QuantizedCheckpoint.of(checkpoint)
        if quantized is not None:
            checkpoint = quantized.checkpoint
    with timings.stage("device"):
        placement = place(checkpoint, quantized=quantized is not None, device=device, dtype=dtype)
    if exact is None:
        exact = dtype not in (None, "auto")
    setting = Setting(placement.device, placement.dtype, exact, fp8_activations=activations is not None)
    keeps = only_decodes and _keeps(placement.device)
    with ReadAhead(checkpoint, placement.device, budget=_budget(quantized, setting)) as reader:
        with timings.stage("first reads"):
            # Packed words are needed in any case, so reading them starts before the blueprint is built.
            order = [] if quantized is None else _reading_order(quantized)
            reader.expect(_packed_tensors(quantized, order))
        with timings.stage("blueprint"):
            blueprint = build_blueprint(
                without_quantization_config(checkpoint.config),
                source=str(checkpoint.path),
                tensors=checkpoint.tensors,
                trust_remote_code=trust_remote_code,
                dtype=placement.dtype,
            )
            conversions = stored_otherwise(blueprint, checkpoint, quantized)
            in_memory = converted(checkpoint, conversions)
            blueprint = without_false_ties(blueprint, in_memory)
            blueprint, replaced = match_tensors(blueprint, in_memory, quantized)
            # Quantised layers that the architecture does not have.
            reader.forget(_packed_tensors(quantized, sorted(set(order) - set(replaced.values()))))
            source = ConvertedTensors(checkpoint.path, in_memory.tensors, reader.tensor, conversions)
            instance = ModelInstance(blueprint, source, device=placement.device, dtype=placement.dtype)
            reader.expect(_plain_tensors(blueprint, instance.names, replaced))
        anatomy: Anatomy | Unrecognised | None = None
        if only_decodes:
            with timings.stage("recognition"), boundaries.forward(checkpoint.path):
                # Recognition needs no weights, which are not there yet.
                find = recognise_once if keeps else recognise
                anatomy = find(instance.model, blueprint.blocks_name)
        with timings.stage("tokenizer"):
            tokenizer = read_tokenizer(checkpoint, trust_remote_code, kept=keeps)
            generation_config = read_generation_config(checkpoint)
        decisions: dict[str, Decision] = {}
        notes = [placement.reason] if placement.reason else []
        if quantized is not None:
            decisions = install_linears(
                instance,
                quantized,
                replaced,
                setting,
                operator=operator,
                compile_kernels=compile_kernels and not isinstance(anatomy, Anatomy),
                progress=progress,
                reader=reader,
                timings=timings,
            )
            notes += scale_notes(quantized, placement.dtype)
        notes += contradictions(blueprint, in_memory, generation_config)
        with timings.stage("other tensors"):
            instance.whole_model()
            if not exact:
                notes += pack_head(instance.model, setting)
        timings.read_bytes, timings.read_seconds = reader.bytes_read, reader.seconds
    with timings.stage("check"):
        checkpoint.check_unchanged()
        if placement.device.type == "cuda":
            # Frees cached memory of the originals of transcoded or cast tensors.
            torch.cuda.empty_cache()
    warn_about_dense(decisions, placement.device)
    model = instance.model
    if activations is not None:
        _check_rounding(model, decisions, checkpoint.path, activations)
    if decisions or type(model.get_output_embeddings()) is HalfWeightLinear:
        _refuse_saving(model, checkpoint.path)
    if generation_config is not None:
        model.generation_config = generation_config
    return LoadedModel(
        path=checkpoint.path,
        model=model,
        tokenizer=tokenizer,
        device=placement.device,
        dtype=placement.dtype,
        decisions=decisions,
        notes=tuple(notes),
        timings=timings,
        anatomy=anatomy,
        source=LoadedFrom(checkpoint, quantized, blueprint, setting),
    )


def _check_rounding(
    model: PreTrainedModel, decisions: Mapping[str, Decision], path: Path, activations: str
) -> None:
    """Refuse a model none of whose products rounds activations."""
    if any(isinstance(module, QuantLinear) and module.rounds for module in model.modules()):
        return
    reasons = [f"{name}: {decision.reason}" for name, decision in decisions.items()]
    raise UnsupportedError(
        f"{path}: activations {activations}: no product can round them; "
        f"{reasons[0] if reasons else 'no weight is quantised'}; load it without"
    )


def _refuse_saving(model: PreTrainedModel, path: Path) -> None:
    """Make ``save_pretrained`` raise an error that says what to do; no loader reads operators' tensors."""

    def save_pretrained(*args: Any, **options: Any) -> None:
        raise UnsupportedError(f"{path}: {NOT_SAVED}")

    model.save_pretrained = save_pretrained


def install_linears(
    instance: ModelInstance,
    quantized: QuantizedCheckpoint,
    replaced: Mapping[str, str],
    setting: Setting,
    *,
    operator: str = AUTO,
    compile_kernels: bool = True,
    progress: ReportProgress = no_progress,
    reader: ReadAhead | None = None,
    timings: LoadTimings | None = None,
) -> dict[str, Decision]:
    """Replace every quantised projection of a model by the module of its operator.

    Args:
        instance: the model; the modules that are replaced are ignored.
        quantized: checkpoint with the weights and biases.
        replaced: the checkpoint's names of quantised projections (:func:`match_tensors`).
        setting: device and dtype of the model.
        operator: as in :func:`load`.
        compile_kernels: as in :func:`load`.
        progress: as in :func:`load`.
        reader: reader of the packed tensors, which may be reading them already; by default a new one.
        timings: seconds by stage, to which those of this load are added.

    Returns:
        The decision for every projection, by its name.

    Raises:
        CheckpointError: a file of the checkpoint was changed since it was opened.
        UnsupportedError: a scale overflows the dtype.
        EnvironmentProblem: the device or a package is missing, or a kernel does not compile.
    """
    timings = timings or LoadTimings()
    names = {stored: name for name, stored in replaced.items()}
    order = [stored for stored in _reading_order(quantized) if stored in names]
    kinds = len(_first_of_each_kind(quantized, order))
    decisions: dict[str, Decision] = {}
    of_experts: dict[str, nn.Module] = {}
    new: dict[str, list[nn.Module]] = {name: [] for name in OPERATORS}
    with ExitStack() as stack:
        if reader is None:
            budget = _budget(quantized, setting)
            reader = stack.enter_context(ReadAhead(quantized.checkpoint, setting.device, budget=budget))
            reader.expect(_packed_tensors(quantized, order))
        for index, stored in enumerate(order):
            with timings.stage("linears"):
                weight = quantized.stored(stored, reader.tensor)
                decision = decisions[names[stored]] = decide(weight, setting, operator=operator)
                projection = instance.blueprint.by_name[names[stored]]
                bias = _bias(instance, reader, projection)
                module = OPERATORS[decision.operator].build(weight, bias, setting)
                if projection.expert is None:
                    instance.install(projection, module)
                    new[decision.operator].append(module)
                else:
                    # Not compiled one by one: other kernels multiply a layer's experts together.
                    of_experts[projection.name] = module
            progress("loading", index + 1, len(order))
            if compile_kernels and index + 1 in (kinds, len(order)):
                # The first module of each kind is read first, so that kernels are compiled while others are
                # read.
                with timings.stage("kernels"):
                    _compile_kernels(new, setting, progress)
    install_experts(instance.model, instance.blueprint, of_experts)
    return {name: decisions[name] for name in replaced}


def _compile_kernels(new: Mapping[str, list[nn.Module]], setting: Setting, progress: ReportProgress) -> None:
    """Compile the kernels of the modules in ``new``, by operator, and empty its lists."""
    for name, modules in new.items():
        if modules:
            OPERATORS[name].compile(modules, setting, progress)
            modules.clear()


def _keeps(device: torch.device) -> bool:
    """Whether notes are written for the next start of the same model: on a GPU only."""
    return device.type == "cuda"


def _budget(quantized: QuantizedCheckpoint | None, setting: Setting) -> int:
    """Bytes of tensors that may be read ahead."""
    if setting.device.type == "cpu":
        return _HOST_AHEAD_BYTES
    as_stored = quantized is None or all(
        layout.family == KERNEL_LAYOUT.family for layout in quantized.layouts.values()
    )
    return _STORED_AHEAD_BYTES if as_stored else _TRANSCODED_AHEAD_BYTES


def _reading_order(quantized: QuantizedCheckpoint) -> list[str]:
    """The quantised modules in the order of their words in the files, but the first of each kind before
    others."""
    infos = quantized.checkpoint.tensors
    shards = {shard: index for index, shard in enumerate(quantized.checkpoint.shards)}

    def place_of(module: str) -> tuple[int, int]:
        info = infos[quantized.codes_name(module)]
        return shards[info.shard], info.offset

    order = sorted(quantized.modules, key=place_of)
    return list(dict.fromkeys((*_first_of_each_kind(quantized, order), *order)))


def _first_of_each_kind(quantized: QuantizedCheckpoint, order: Sequence[str]) -> list[str]:
    """The first module in ``order`` of each shape and scheme, as far as the config tells."""
    return list({quantized.modules[module]: module for module in reversed(order)}.values())[::-1]


def _packed_tensors(quantized: QuantizedCheckpoint | None, order: Sequence[str]) -> Iterator[str]:
    if quantized is not None:
        for module in order:
            yield from quantized.tensor_names(module).values()


def _plain_tensors(blueprint: Blueprint, names: TensorNames, replaced: Mapping[str, str]) -> Iterator[str]:
    """The stored tensors of all parameters that are not packed, in the order in which they are taken."""
    packed = {blueprint.by_name[name].parameter for name in replaced}
    for name, shape in blueprint.parameters.items():
        if name not in packed:
            yield from (stored for stored, _ in names.places(name, shape))


def stored_otherwise(
    blueprint: Blueprint, checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None
) -> tuple[Conversion, ...]:
    """Conversions of tensors that are not packed (:func:`~marlinq.models.find_conversions`).

    Raises:
        CheckpointError: stored tensors do not fit transformers' rule.
    """
    packed = () if quantized is None else set(checkpoint.tensors) - set(quantized.passthrough)
    return find_conversions(blueprint, checkpoint.tensors, source=str(checkpoint.path), packed=packed)


def match_tensors(
    blueprint: Blueprint, checkpoint: Checkpoint, quantized: QuantizedCheckpoint | None
) -> tuple[Blueprint, dict[str, str]]:
    """Match stored tensors with the model's parameters, by name and shape; no tensor is read.

    Returns:
        The blueprint without the ties of quantised projections; and the checkpoint's name of every quantised
        projection, by its name in the model.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    checkpoint = converted(checkpoint, stored_otherwise(blueprint, checkpoint, quantized))
    replaced: dict[str, str] = {}
    if quantized is not None:
        replaced = quantized_linears(blueprint, quantized)
        check_experts(blueprint, replaced, checkpoint)
        # A quantised head is tied to nothing, whatever the config says.
        blueprint = blueprint.without_ties({blueprint.by_name[name].parameter for name in replaced})
    _check_tensors(blueprint, checkpoint, quantized, replaced)
    return blueprint, replaced


def _bias(instance: ModelInstance, reader: ReadAhead, projection: Projection) -> Tensor | None:
    if projection.expert is not None:
        return expert_bias(instance, reader, projection)
    name = f"{projection.module}.bias"
    if projection.bias:
        return instance.read(name, (projection.out_features,))
    stored = instance.names.own(name)
    if stored is None:
        return None
    # Some writers store a bias of zeros for linears that have none.
    bias = reader.tensor(stored)
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
            for place in names.places(name, shape):
                take(*place)
            take(names.own(name), shape)
    for name, shape in blueprint.buffers.items():
        take(names.own(name), shape)
    # Buffers that the model computes; old checkpoints store some, which are not read.
    used.update(stored for name in blueprint.computed if (stored := names.own(name)) is not None)
    if quantized is not None:
        for name, module in replaced.items():
            used.update(quantized.tensor_names(module).values())
            take(names.own(f"{name}.bias"), (quantized.modules[module].out_features,))
    left = left_out(blueprint, checkpoint.tensors)
    unexpected = [name for name in checkpoint.tensors if name not in used and not left(name)]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {unexpected[0]!r} ({len(unexpected)} such) has no place in "
            f"{blueprint.architecture}; config.json describes another model"
        )


def contradictions(
    blueprint: Blueprint, checkpoint: Checkpoint, generation_config: GenerationConfig | None
) -> list[str]:
    """Inconsistencies of a folder that can be loaded in spite of them; one line each."""
    names = TensorNames(blueprint, checkpoint.tensors.keys(), source=str(checkpoint.path))
    missing = [name for name in blueprint.buffers if names.own(name) is None]
    notes = []
    if missing:
        notes.append(
            f"{missing[0]}: not stored ({len(missing)} such buffers); it has the value that a new "
            f"{blueprint.architecture} has"
        )
    ends = getattr(generation_config, "eos_token_id", None)
    vocabulary = getattr(blueprint.config.get_text_config(), "vocab_size", None)
    notes += [
        f"generation_config.json: eos_token_id {end} is no token of a vocabulary of {vocabulary}: "
        "no text ends by it"
        for end in (ends if isinstance(ends, list) else [ends])
        if isinstance(end, int) and isinstance(vocabulary, int) and not 0 <= end < vocabulary
    ]
    return notes


def scale_notes(quantized: QuantizedCheckpoint, dtype: torch.dtype) -> list[str]:
    """A note for a checkpoint whose scales are not exact in ``dtype``; empty for others."""
    stored = {spec.scale_dtype for spec in quantized.modules.values()}
    rounded = sorted(dtype_name(each) for each in stored if not holds(dtype, each))
    if not rounded:
        return []
    target = dtype_name(dtype)
    return [f"scales stored in {', '.join(rounded)} are rounded to {target}"]


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


def read_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool, *, kept: bool = False) -> Any | None:
    """The folder's tokenizer, or None where it has none; ``kept`` as :func:`tokenizer_of` has it.

    Raises:
        CheckpointError: transformers can't read it.
    """
    if not any((checkpoint.path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return tokenizer_of(checkpoint.path, trust_remote_code=trust_remote_code, kept=kept)
