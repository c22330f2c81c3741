"""Tuning as a stage of a quantise run: between the last quantised module and the finished folder."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
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
from marlinq.operations.quantize.planning import OutputPlan, PlannedModule
from marlinq.operations.quantize.reproducible import reproducible
from marlinq.operations.quantize.tuning.files import RESULT, STATE, keep, kept
from marlinq.operations.quantize.tuning.loop import (
    Loop,
    Progress,
    TuningReport,
    TuningSettings,
    records,
)
from marlinq.operations.quantize.tuning.rows import new_rows, random_rows
from marlinq.operations.quantize.tuning.student import Student
from marlinq.operations.quantize.tuning.teacher import draw_anew, learn

NOTE = "tuning"
"""The writer's note that holds the report, once all tuned tensors are written."""

# Places of a micro-batch, padding included; a step takes as many as its tokens need.
_PLACES = {"cpu": 1024, "cuda": 8192}
# Tokens of a row of text, and of all rows together. What enters and what leaves the original's blocks is
# kept, in float32: on a GPU where the model is small and each takes no more than this share of its memory,
# else in host memory, where both together take at most _MOST_BYTES.
_ROW = 512
_MOST_TOKENS = 15 << 18
_SHARE_FOR_STATES = 0.125
_MOST_BYTES = 13_000_000_000
_SAVE_SECONDS = 60.0
# Saving may take this share of the time, at a rate of bytes a second that most disks reach, and this share of
# the host's free memory. A state of codes is 13 bytes a weight.
_SAVE_SHARE = 0.1
_SAVE_RATE = 1e9
_SAVE_MEMORY_SHARE = 0.25
# That read back and check what was written, and hash and write what was tuned.
_THREADS = 4
# What a weight takes whose code is tuned: the code and the best one so far a byte each; a latent and its two
# moments 4 bytes each; its gradient as many, unless a block takes its step as soon as it has its gradients.
# The rest of the memory is for scales, embeddings, a block and its activations.
_LATENT_BYTES = 14
_GRADIENT_BYTES = 4
_SHARE_OF_MEMORY = 0.7


def tune(
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
    """Tunes what ``writer`` holds, and writes it again; its notes then have the :class:`TuningReport`.

    The state is kept in the unfinished folder about once a minute, a large one less often or not at all, and
    the result before any tensor is overwritten, so a run that is interrupted at any moment continues to the
    same values.

    Args:
        checkpoint: the original.
        blueprint: blueprint of the original.
        plan: place of every stored tensor.
        writer: holds every quantised module.
        learning: the text.
        held_out: the text that tells whether tuning helped; may be empty.
        settings: how.
        max_length: tokens that a row of text may have.
        device: where.
        progress: told about every block of the original, then about every step.
        message: given a line now and then that says how tuning stands.

    Raises:
        UnsupportedError: a weight can't be tuned.
        NumericsError: the original's or the student's values are not finite.
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

    found = kept(writer, RESULT, result)
    if found is None:
        with reproducible(device):
            run = _Run(
                checkpoint,
                blueprint,
                plan,
                writer,
                learning,
                held_out,
                settings,
                max_length,
                device,
                progress,
                message,
            )
            found = run.result()
        keep(writer, RESULT, *found)
    tensors, report = found
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="marlinq-write") as threads:
        for _ in threads.map(lambda name: writer.write(name, tensors[name].cpu()), tensors):
            pass
    writer.commit({NOTE: report})


def forget_tuning(writer: CheckpointWriter) -> None:
    """Removes what only a resumed run would need."""
    writer.remove(STATE)
    writer.remove(RESULT)


class _Run:
    """One tuning run, from the stored tensors to the tuned ones; arguments as for :func:`tune`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        blueprint: Blueprint,
        plan: OutputPlan,
        writer: CheckpointWriter,
        learning: Sequence[Document],
        held_out: Sequence[Document],
        settings: TuningSettings,
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
        # Rows are of one length, so batches have them in order.
        self._rows = make_batches(
            random_rows(learning, length, places, most, settings.seed), token_budget=places
        )
        rows = sum(len(batch.lengths) for batch in self._rows)
        self._new_rows = min(rows, new_rows(learning, length))
        self._watched = (
            make_batches(held_out, token_budget=places, pad=not blueprint.routed) if held_out else []
        )

    def result(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What is to be written, by stored name, and the report as JSON values."""
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
        """The rows to learn from; where the text comes again, the original has drawn some tokens anew.

        A few documents are learnt by heart otherwise. What the original draws is near to them, and never the
        same.
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
        # Of the first of these batches some rows may be new.
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
                packed = planned.layout.pack(after, planned.spec.scheme)
                tensors |= {f"{planned.stored}.{suffix}": tensor for suffix, tensor in packed.items()}
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
            changed_codes=changed / count,
            vectors=tuple(sorted(vectors)),
        )
        return tensors | vectors, report.to_dict()

    def _read_blocks(self) -> dict[str, QuantizedWeight]:
        """The written weights of all blocks on the device, by the projection's name."""
        found = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="marlinq-read") as readers:
            for block in self._blueprint.blocks:
                members = self._plan.members(block)
                for planned, tensors in zip(members, readers.map(self._stored, members), strict=True):
                    found[planned.projection.name] = self._unpacked(planned, tensors)
        return found

    def _read(self, planned: PlannedModule) -> QuantizedWeight:
        return self._unpacked(planned, self._stored(planned))

    def _stored(self, planned: PlannedModule) -> dict[str, Tensor]:
        names = self._plan.tensor_names(planned)
        return {suffix: self._writer.read_back(name) for suffix, name in names.items()}

    def _unpacked(self, planned: PlannedModule, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        there = {suffix: tensor.to(self._instance.device) for suffix, tensor in tensors.items()}
        return planned.layout.unpack(there, planned.spec)

    def _own_head(self, original: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The head that will be stored: the original's, or what it was quantised to."""
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
    """Rows of pieces of ``documents``, some of their tokens drawn anew, to calibrate on beside them.

    Args:
        instance: the original, nothing materialised; nothing is afterwards.
        documents: documents that tuning learns from.
        settings: settings of tuning.
        tokens: number of tokens of all rows, about.
        max_length: tokens that a row may have.
        folder: where hidden states go that host memory has no room for.
        progress: told about every block of the original.
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
    """Makes sure that the model of the folder ``source`` makes predictions that it can be tuned by.

    Raises:
        UnsupportedError: it has no output head.
    """
    if blueprint.head is None:
        raise UnsupportedError(
            f"{source}: tuning needs an output head, {blueprint.architecture} has none; pass --tune-steps 0"
        )


def settings_that_fit(
    plan: OutputPlan, settings: TuningSettings, device: torch.device, max_length: int
) -> TuningSettings:
    """``settings``, without the tuning of codes where a GPU has too little memory for it, which is warned of.

    Args:
        plan: plan with the weights to tune.
        settings: settings of tuning.
        device: where.
        max_length: tokens that a row of text may have.

    Raises:
        EnvironmentProblem: there is too little memory for the scales alone.
    """
    if device.type != "cuda":
        return settings
    # Of all there is, not of what is free now: the same command has to do the same.
    memory = torch.cuda.get_device_properties(device).total_memory
    room = memory * _SHARE_OF_MEMORY
    needed = tuning_bytes(plan, settings, device, max_length)
    if settings.code_rate > 0 and needed > room:
        warnings.warn(
            f"tuning: codes would take {needed / 1e9:.0f} GB, {device} has "
            f"{memory / 1e9:.0f} GB; they stay as they are, scales are tuned",
            stacklevel=3,
        )
        settings = replace(settings, code_rate=0.0)
        needed = tuning_bytes(plan, settings, device, max_length)
    if needed > room:
        raise EnvironmentProblem(
            f"tuning keeps all codes on {device}: {needed / 1e9:.0f} GB, it has {memory / 1e9:.0f} GB; "
            "pass --tune-steps 0"
        )
    return settings


def tuning_bytes(plan: OutputPlan, settings: TuningSettings, device: torch.device, max_length: int) -> int:
    """What the planned weights take on ``device`` while they are tuned, without what a block needs."""
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
    """What enters the blocks, and what leaves them, may each take on ``device``: of a GPU's memory a share
    that leaves room for what is tuned; nothing on a CPU, nor beside a large model."""
    weights = _weights(plan)
    if device.type != "cuda" or not records(weights):
        return 0
    memory = torch.cuda.get_device_properties(device).total_memory
    left = memory * _SHARE_OF_MEMORY - tuning_bytes(plan, settings, device, max_length)
    return max(0, int(min(memory * _SHARE_FOR_STATES, left / 2)))


def _weights(plan: OutputPlan) -> int:
    return sum(found.spec.in_features * found.spec.out_features for found in plan.modules.values())
