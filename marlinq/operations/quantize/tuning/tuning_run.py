"""Runs tuning as a part of a quantise run, after the last module is quantised."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from marlinq.calibration import Batch, Document, make_batches
from marlinq.checkpoint import Checkpoint, CheckpointWriter
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import EnvironmentProblem, UnsupportedError
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.core.weight import QuantizedWeight
from marlinq.models import BlockReplay, Blueprint, ModelInstance
from marlinq.operations.quantize.budget import logits_at_once
from marlinq.operations.quantize.module_writer import packed
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.reproducible import reproducible
from marlinq.operations.quantize.tuning.loop import (
    Loop,
    Progress,
    TuningReport,
    TuningSettings,
    records,
)
from marlinq.operations.quantize.tuning.saved_files import RESULT, STATE, keep, kept
from marlinq.operations.quantize.tuning.student import Student
from marlinq.operations.quantize.tuning.teacher import draw_anew, learn
from marlinq.operations.quantize.tuning.text_rows import new_rows, random_rows

NOTE = "tuning"
"""Key of the writer's note that holds the report, once all tuned tensors are written."""
_PLACES = {"cpu": 1024, "cuda": 8192}
"""tokens per micro-batch with padding, by kind of device"""
_ROW = 512
"""tokens per row of text"""
_MOST_TOKENS = 15 << 18
"""tokens of all rows together, at most"""
_SHARE_FOR_STATES = 0.125
"""share of a GPU's memory for the inputs of the original's first block, and again for the outputs of its last
block, both float32; larger ones, and those of large models, are kept in host memory"""
_MOST_BYTES = 13_000_000_000
"""bytes of host memory for both, at most"""
_SAVE_SECONDS = 60.0
"""seconds between two saved states, at least"""
_SAVE_SHARE = 0.1
"""share of the time that saving may take"""
_SAVE_RATE = 1e9
"""bytes a second that a state is assumed to be saved at; it has 13 bytes per weight with tuned codes"""
_SAVE_MEMORY_SHARE = 0.25
"""share of the host's free memory that a saved state may take"""
_THREADS = 4
"""threads that read stored tensors and write tuned ones"""
_LATENT_BYTES = 14
"""device bytes per weight with a tuned code: 1 for the code, 1 for the best code so far, 4 for the latent, 8
for its two moments"""
_GRADIENT_BYTES = 4
"""device bytes per weight for gradients, unless each block drops them after its own update"""
_SHARE_OF_MEMORY = 0.7
"""share of a GPU's memory for tuned codes; the rest is for scales, embeddings, a block and its activations"""


def tune(writer: CheckpointWriter, device: torch.device, begin: Callable[[], TuningRun]) -> None:
    """Tunes the modules that ``writer`` holds, overwrites their tensors, and notes the :class:`TuningReport`.

    The state is saved in the unfinished folder about once a minute, a large state less often or never. The
    result is saved before any tensor is overwritten. A run that is interrupted at any moment therefore
    continues to the same values.

    Args:
        writer: writer with every quantised module.
        device: device to tune on.
        begin: makes the run; not called if there is a result already.

    Raises:
        UnsupportedError: a weight can't be tuned.
        NumericsError: values of the original or of the quantised model are not finite.
        OutputError: the files of an interrupted run are damaged.
    """
    if NOTE in writer.notes:
        return

    def result(tensors: dict[str, Tensor], facts: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        for name, tensor in tensors.items():
            info = writer.tensors[name]
            if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (info.dtype, info.shape):
                raise ValueError(name)
        return tensors, facts

    tuned = kept(writer, RESULT, result)
    if tuned is None:
        with reproducible(device):
            tuned = begin().result()
        keep(writer, RESULT, *tuned)
    tensors, report = tuned
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="marlinq-write") as threads:
        for _ in threads.map(lambda name: writer.write(name, tensors[name].cpu()), tensors):
            pass
    writer.commit({NOTE: report})


def forget_tuning(writer: CheckpointWriter) -> None:
    """Removes the files that only a resumed run needs from the unfinished folder."""
    writer.remove(STATE)
    writer.remove(RESULT)


class TuningRun:
    """One tuning run, from the stored tensors to the tuned ones.

    Args:
        checkpoint: the original.
        blueprint: structure of the original.
        plan: plan of the output.
        writer: writer with every quantised module.
        learning: documents to learn from.
        held_out: documents to evaluate on; may be empty.
        settings: length and rates.
        max_length: tokens that a row of text may have.
        device: device to tune on.
        progress: called for every block of the original, then for every step.
        message: called with one line from time to time on the state of tuning.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        blueprint: Blueprint,
        plan: OutputPlan,
        writer: CheckpointWriter,
        learning: Sequence[Document],
        held_out: Sequence[Document],
        settings: TuningSettings,
        *,
        max_length: int,
        device: torch.device,
        progress: ReportProgress,
        message: ReportMessage,
    ) -> None:
        self._blueprint, self._plan, self._writer = blueprint, plan, writer
        self._settings, self._progress, self._message = settings, progress, message
        self._instance = ModelInstance(blueprint, checkpoint, device=device, dtype=torch.float32)
        self._learning, self._held_out = len(learning), len(held_out)
        places = _PLACES[device.type]
        width = blueprint.config.get_text_config().hidden_size
        self._device_bytes = bytes_for_states(plan, settings, device, max_length)
        room = max(_MOST_BYTES // 2, self._device_bytes)
        most = min(_MOST_TOKENS, room // (4 * width), settings.steps * settings.tokens)
        length = min(_ROW, max_length)
        # Rows have one length, so that make_batches keeps their order.
        self._rows = make_batches(
            random_rows(learning, length, places, most, settings.seed), token_budget=places
        )
        rows = sum(len(batch.lengths) for batch in self._rows)
        self._new_rows = min(rows, new_rows(learning, length))
        self._watched = (
            make_batches(held_out, token_budget=places, pad=not blueprint.routed) if held_out else []
        )

    def result(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(stored name -> tuned tensor, report as JSON values)."""
        instance, settings = self._instance, self._settings
        batches = [*self._varied(), *self._watched]
        replay = BlockReplay(instance)
        lesson = learn(
            instance,
            replay,
            batches,
            folder=self._writer.partial,
            progress=lambda *done: self._progress("running the original", *done),
            device_bytes=self._device_bytes,
        )
        before = self._read_blocks()
        student = Student(
            instance, replay, self._plan, before, codes=settings.code_rate > 0, vectors=settings.vectors
        )
        with instance.outer(whole=True):
            original = instance.head_parameters()
            loop = Loop(
                student,
                replay,
                lesson,
                len(self._rows),
                settings,
                original=original,
                head=self._own_head(original),
                logits=logits_at_once(self._blueprint.config, instance.device),
            )
            self._optimise(loop)
        return self._outcome(loop, student, before)

    def _varied(self) -> list[Batch]:
        """The rows to learn from. In repeated text the original draws some tokens anew, because tuning would
        overfit a few documents; the drawn text is similar to them but never the same.
        """
        full = len(self._rows[0].lengths)
        new = self._rows[: self._new_rows // full]
        again = self._rows[len(new) :]
        if not again:
            return new
        varied = draw_anew(
            self._instance,
            again,
            noise=self._settings.noise,
            seed=self._settings.seed,
            folder=self._writer.partial,
            progress=lambda *done: self._progress("varying the text", *done),
            device_bytes=self._device_bytes,
        )
        # The first of these batches may begin with rows that are not repeated; they stay as they are.
        kept = max(0, self._new_rows - full * len(new))
        varied[0].ids[:kept] = again[0].ids[:kept]
        return new + varied

    def _optimise(self, loop: Loop) -> None:
        writer = self._writer
        last = time.monotonic()

        def save() -> None:
            nonlocal last
            passed = time.monotonic() - last
            if passed < _SAVE_SECONDS:
                return
            tensors = loop.tensors()
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            room = psutil.virtual_memory().available * _SAVE_MEMORY_SHARE
            if nbytes <= min(room, passed * _SAVE_SHARE * _SAVE_RATE):
                keep(writer, STATE, tensors, asdict(loop.now))
                last = time.monotonic()

        def restore(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
            loop.restore(tensors, Progress(**facts))

        kept(writer, STATE, restore)
        loop.run(self._progress, save, self._message)

    def _outcome(
        self, loop: Loop, student: Student, before: Mapping[str, QuantizedWeight]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        changed = count = 0
        for block in self._blueprint.blocks:
            for planned in self._plan.members(block):
                name = planned.projection.name
                after = student.weights[name].quantized()
                changed += int((after.codes != before[name].codes.to(after.codes.device)).sum())
                count += after.codes.numel()
                tensors |= packed(self._plan, planned, after)
        vectors = {}
        for name, vector in student.vectors.items():
            if bool(vector.change.any()):
                vectors[self._instance.names.require(name)] = vector.tensor()
        report = TuningReport(
            steps=loop.now.step,
            tokens=loop.now.tokens,
            documents=self._learning,
            held_out=self._held_out,
            kl_before=loop.now.before,
            kl_after=loop.now.best,
            kept_step=loop.now.best_step,
            astray=loop.now.astray,
            halvings=loop.now.halvings,
            changed_codes=changed / count,
            vectors=tuple(sorted(vectors)),
        )
        return tensors | vectors, report.to_dict()

    def _read_blocks(self) -> dict[str, QuantizedWeight]:
        """Name of a projection -> its quantised weight as written, on the device, for all blocks."""
        weights = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="marlinq-read") as readers:
            for block in self._blueprint.blocks:
                members = self._plan.members(block)
                for planned, tensors in zip(members, readers.map(self._stored, members), strict=True):
                    weights[planned.projection.name] = self._unpacked(planned, tensors)
        return weights

    def _read(self, planned: PlannedModule) -> QuantizedWeight:
        return self._unpacked(planned, self._stored(planned))

    def _stored(self, planned: PlannedModule) -> dict[str, Tensor]:
        names = self._plan.tensor_names(planned)
        return {suffix: self._writer.read_back(name) for suffix, name in names.items()}

    def _unpacked(self, planned: PlannedModule, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        there = {suffix: tensor.to(self._instance.device) for suffix, tensor in tensors.items()}
        return planned.layout.unpack(there, planned.spec)

    def _own_head(self, original: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Name -> parameter of the output's head: the original's, or the dequantised one."""
        if self._plan.head is None:
            return original
        projection = self._plan.head.projection
        weight = self._read(self._plan.head).dequantize()
        return {projection.parameter: projection.as_parameter(weight)}


def draw_calibration(
    instance: ModelInstance,
    documents: Sequence[Document],
    settings: TuningSettings,
    tokens: int,
    *,
    max_length: int,
    folder: Path,
    progress: ReportProgress,
) -> list[Document]:
    """Rows of pieces of ``documents`` with some tokens drawn anew, to calibrate on besides the documents.

    Args:
        instance: the loaded original, without any weights in memory before and after the call.
        documents: documents that tuning learns from.
        settings: settings of tuning.
        tokens: approximate number of tokens in all rows.
        max_length: tokens that a row may have.
        folder: folder for hidden states that don't fit host memory.
        progress: called for every block of the original.
    """
    places = _PLACES[instance.device.type]
    rows = random_rows(documents, min(_ROW, max_length), places, tokens, settings.seed)
    with reproducible(instance.device):
        drawn = draw_anew(
            instance,
            make_batches(rows, token_budget=places),
            noise=settings.noise,
            seed=settings.seed,
            folder=folder,
            progress=lambda *done: progress("varying the text", *done),
        )
    return [Document(tuple(row)) for batch in drawn for row in batch.ids.tolist()]


def check_head(blueprint: Blueprint, source: Path) -> None:
    """Checks that a model has an output head, whose predictions tuning compares.

    ``source`` is the path of the model, for the message.

    Raises:
        UnsupportedError: it has none.
    """
    if blueprint.head is None:
        raise UnsupportedError(
            f"{source}: tuning needs an output head, {blueprint.architecture} has none; pass --tune-steps 0"
        )


def settings_that_fit(
    plan: OutputPlan, settings: TuningSettings, device: torch.device, max_length: int
) -> TuningSettings:
    """``settings``, or with a warning ``settings`` without tuned codes where the GPU has too little memory.

    Args:
        plan: plan with the weights to tune.
        settings: settings of tuning.
        device: device to tune on.
        max_length: tokens that a row of text may have.

    Raises:
        EnvironmentProblem: the GPU has too little memory even without tuned codes.
    """
    if device.type != "cuda":
        return settings
    # All of the GPU's memory, not the free part, so that the same command always does the same.
    memory = torch.cuda.get_device_properties(device).total_memory
    room = memory * _SHARE_OF_MEMORY
    needed = tuning_bytes(plan, settings, device, max_length)
    if settings.code_rate > 0 and needed > room:
        warnings.warn(
            f"tuning: with codes it needs {needed / 1e9:.0f} GB, {device} has "
            f"{memory / 1e9:.0f} GB; only scales are tuned",
            stacklevel=3,
        )
        settings = replace(settings, code_rate=0.0)
        needed = tuning_bytes(plan, settings, device, max_length)
    if needed > room:
        raise EnvironmentProblem(
            f"tuning: needs {needed / 1e9:.0f} GB on {device} even if only scales are tuned, found "
            f"{memory / 1e9:.0f} GB; pass --tune-steps 0"
        )
    return settings


def tuning_bytes(plan: OutputPlan, settings: TuningSettings, device: torch.device, max_length: int) -> int:
    """Device bytes of the planned weights while they are tuned, without those of the block that runs."""
    weights = _weights(plan)
    if settings.code_rate == 0:
        return weights
    recorded = device.type == "cuda" and records(weights)
    length = min(_ROW, max_length)
    at_once = settings.tokens <= _PLACES[device.type] // length * length and not recorded
    return weights * (_LATENT_BYTES + (0 if at_once else _GRADIENT_BYTES))


def bytes_for_states(
    plan: OutputPlan, settings: TuningSettings, device: torch.device, max_length: int
) -> int:
    """Device bytes that the inputs of the first block may take, and as many for the outputs of the last.

    A share of a GPU's memory that leaves room for the tuned weights; 0 on a CPU and for large models.
    """
    weights = _weights(plan)
    if device.type != "cuda" or not records(weights):
        return 0
    memory = torch.cuda.get_device_properties(device).total_memory
    left = memory * _SHARE_OF_MEMORY - tuning_bytes(plan, settings, device, max_length)
    return max(0, int(min(memory * _SHARE_FOR_STATES, left / 2)))


def _weights(plan: OutputPlan) -> int:
    return sum(module.spec.in_features * module.spec.out_features for module in plan.modules.values())
