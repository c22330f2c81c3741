"""Measures prefill and decode steps over a grid of batches and contexts, also of the 16-bit model."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from marlinq.core import boundaries
from marlinq.core.devices import read_clock
from marlinq.core.display import Block, Shown, Table, lines
from marlinq.core.errors import UsageError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.models import Blueprint, build_blueprint
from marlinq.models.head_sizes import key_channels
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.peers.transformers import PEERS, CompiledTransformers, dense_twin
from marlinq.operations.bench.synthetic import Synthetic, synthetic_model
from marlinq.operations.bench.trace import StepProfile, profile_steps
from marlinq.operations.loading import load
from marlinq.runtime import LoadedModel, StepDecision
from marlinq.runtime.cpu_head import HalfWeightLinear
from marlinq.runtime.generation import position_limit
from marlinq.runtime.grouped_experts import GroupedExperts
from marlinq.runtime.step.forward_choice import take_decoder

_REPEATS = 3
_WARM_UP_STEPS = 3
_PROFILED_STEPS = 8
_KERNELS_SHOWN = 24
_HEATING_SECONDS = 0.3
"""seconds without pauses after which an H200 that decodes has its final clock (docs/kernels.md, "Two
clocks")"""


@dataclass(frozen=True)
class DecodeCell:
    """Measurements at one batch and context.

    Attributes:
        batch: sequences decoded together.
        context: tokens per sequence when the first timed step begins.
        first_token_seconds: seconds from the prompts to their first new tokens; median of three runs.
        step_seconds: seconds of a decode step; median over three runs of the mean of a run.
        step_bytes: bytes that a step reads once: weights, scales, keys and values of the mean context.
        step: how steps ran, and why.
        peer_first_token_seconds, peer_step_seconds: seconds of the 16-bit model, as above; None where not
            measured.
    """

    batch: int
    context: int
    first_token_seconds: float
    step_seconds: float
    step_bytes: int
    step: StepDecision
    peer_first_token_seconds: float | None = None
    peer_step_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of all sequences together."""
        return self.batch / self.step_seconds

    @property
    def bandwidth(self) -> float:
        """Bytes read a second."""
        return self.step_bytes / self.step_seconds

    @property
    def speedup(self) -> float | None:
        """The 16-bit model's step over this one's."""
        return None if self.peer_step_seconds is None else self.peer_step_seconds / self.step_seconds


@dataclass(frozen=True)
class DecodeBench(Shown):
    """The measurements of decoding with one model.

    Attributes:
        checkpoint: path of the folder, or description of the synthetic model.
        hardware: processor and versions.
        cells: measurements, batch by batch and context by context.
        new_tokens: decode steps of a timed run.
        sustained: whether runs followed each other without pauses.
        load_seconds: seconds to load the model; None for a synthetic or given model.
        weight_bytes: bytes of weights and scales that a step of one sequence reads, without embedding tables.
        peak_bytes: highest bytes of GPU memory while marlinq ran; 0 on a CPU.
        profile: kernels of a step of the last cell; None where not asked for.
        notes: sentences on the operators of the quantised linears and on the run.
    """

    checkpoint: str
    hardware: str
    cells: tuple[DecodeCell, ...]
    new_tokens: int
    sustained: bool
    load_seconds: float | None
    weight_bytes: int
    peak_bytes: int
    profile: StepProfile | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        cells = [
            {
                **asdict(cell),
                "tokens_per_second": cell.tokens_per_second,
                "bandwidth": cell.bandwidth,
                "speedup": cell.speedup,
            }
            for cell in self.cells
        ]
        return {**asdict(self), "cells": cells}

    def display(self) -> list[Block]:
        """The grid, the meaning of its figures, and the hardware."""
        header = ["batch", "context", "first token", "step", "tokens/s", "GB/s"]
        compared = any(cell.peer_step_seconds is not None for cell in self.cells)
        if compared:
            header += ["16-bit first token", "16-bit step", "speedup"]
        rows = tuple(_row(cell, compared) for cell in self.cells)
        blocks: list[Block] = [
            lines(f"{self.checkpoint}"),
            Table(tuple(header), rows, numbers=tuple(range(len(header)))),
            lines(
                "first token: from the prompts to the first new tokens; step: one more in every sequence",
                "GB/s: weights, scales, keys and values, read once a step",
                f"weights: {self.weight_bytes / 1e9:.3f} GB a step, without embedding tables"
                + (f"; peak of GPU memory {self.peak_bytes / 1e9:.2f} GB" if self.peak_bytes else ""),
                f"{self.new_tokens} steps a run, {'no ' if self.sustained else ''}rests between runs",
            ),
        ]
        if self.profile is not None:
            blocks += _profile_blocks(self.profile)
        steps = dict.fromkeys(f"steps: {cell.step.mode}: {cell.step.reason}" for cell in self.cells)
        return [*blocks, lines(*steps, self.hardware, *self.notes)]


def _row(cell: DecodeCell, compared: bool) -> tuple[str, ...]:
    row = [
        str(cell.batch),
        str(cell.context),
        _milliseconds(cell.first_token_seconds),
        _milliseconds(cell.step_seconds),
        f"{cell.tokens_per_second:.1f}",
        f"{cell.bandwidth / 1e9:.1f}",
    ]
    if compared:
        speedup = "" if cell.speedup is None else f"{cell.speedup:.2f}x"
        peers = (cell.peer_first_token_seconds, cell.peer_step_seconds)
        row += [*("" if peer is None else _milliseconds(peer) for peer in peers), speedup]
    return tuple(row)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 1 else f"{1e3 * seconds:.0f} ms"


def _profile_blocks(profile: StepProfile) -> list[Block]:
    rows = tuple(
        (kernel.name, f"{kernel.launches:.1f}", f"{1e6 * kernel.seconds:.1f}", f"{100 * kernel.share:.1f} %")
        for kernel in profile.kernels[:_KERNELS_SHOWN]
    )
    return [
        Table(("kernel", "launches", "us a step", "share"), rows, numbers=(1, 2, 3)),
        lines(
            f"a step spans {1e6 * profile.span_seconds:.1f} us, "
            f"{1e6 * profile.busy_seconds:.1f} of them busy; kernels launched dependently overlap, and count "
            "their waiting",
            f"trace: {profile.trace}",
        ),
    ]


class _Runner(Protocol):
    """A decoder that reads prompts and then makes greedy decode steps."""

    def prefill(self, ids: Tensor) -> None: ...

    def steps(self, count: int) -> None: ...


class _Own:
    """marlinq's decoder."""

    def __init__(self, loaded: LoadedModel, batch: int, capacity: int, progress: ReportProgress) -> None:
        # Frees caches of earlier cells, which would count as this cell's memory.
        loaded.decoders.clear()
        self.decoder = take_decoder(loaded, batch=batch, tokens=capacity, progress=progress)

    def prefill(self, ids: Tensor) -> None:
        """Starts over with the prompts ``ids``, int64 [batch, length]."""
        self.decoder.begin(ids.tolist())

    def steps(self, count: int) -> None:
        """``count`` decode steps, queued as generation queues them."""
        decoder = self.decoder
        queued = 0
        while queued < count or decoder.pending:
            while queued < count and decoder.pending < decoder.visits_at_once:
                more = min(decoder.steps_a_visit, count - queued)
                decoder.advance(more)
                queued += more
            decoder.read()


def bench_decode(
    checkpoint: str | os.PathLike[str] | LoadedModel | Synthetic,
    *,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (512,),
    new_tokens: int = 128,
    against: Sequence[str] = (),
    profile: str | os.PathLike[str] | None = None,
    sustained: bool = False,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: ReportProgress = no_progress,
) -> DecodeBench:
    """Measures prefill and decode steps of every batch and context.

    Args:
        checkpoint: folder, loaded model, or description of a synthetic model.
        batches: numbers of sequences decoded together.
        contexts: numbers of tokens per prompt.
        new_tokens: decode steps of a timed run.
        against: peers to measure in the same process: ``transformers`` is an unquantised model of the same
            shapes, compiled, with a static cache.
        profile: file for a trace of the last cell's steps; needs a GPU.
        sustained: whether runs follow each other without pauses, as on a busy server.
        device, dtype: as in :func:`marlinq.runtime.load`.
        progress: called while the model is loaded, after each compiled kernel and after each run.

    Raises:
        UsageError: a number below 1, an unknown peer, or more tokens than the model has positions for.
        CheckpointError: the checkpoint can't be loaded.
    """
    for name, values in (("batch", batches), ("context", contexts), ("new_tokens", (new_tokens,))):
        if not values or min(values) < 1:
            raise UsageError(f"{name}: expected 1 or more, found {min(values, default='nothing')}")
    unknown = [name for name in against if name not in PEERS]
    if unknown:
        raise UsageError(f"--against {unknown[0]!r} is not known; expected {', '.join(PEERS)}")
    started = time.perf_counter()
    loaded, load_seconds = _model(checkpoint, device, dtype, progress), None
    if isinstance(checkpoint, (str, os.PathLike)):
        read_clock(loaded.device)
        load_seconds = time.perf_counter() - started
    if profile is not None and loaded.device.type != "cuda":
        raise UsageError(f"--profile: needs a GPU, found {loaded.device.type}; leave it out")
    limit = position_limit(loaded.model)
    if limit is not None and max(contexts) + new_tokens > limit:
        raise UsageError(
            f"context + new tokens: {max(contexts) + new_tokens}, but {loaded.path} has positions for "
            f"{limit}; lower them"
        )
    run = _Run(loaded, new_tokens, sustained, progress, len(batches) * len(contexts) * (1 + len(against)))
    on_gpu = loaded.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(loaded.device)
    cells: list[DecodeCell] = []
    step_profile = None
    for batch in batches:
        for context in contexts:
            with boundaries.forward(loaded.path):
                # One run checks the model, so that errors are not raised inside a timed run.
                own = _Own(loaded, batch, context + run.longest, progress)
                own.prefill(run.prompts(batch, context))
                own.steps(1)
            first, step = run.measure(own, batch, context)
            mean_length = context + new_tokens / 2
            nbytes = weight_bytes(loaded.model, batch) + round(
                batch * mean_length * cache_bytes_per_token(loaded)
            )
            cells.append(DecodeCell(batch, context, first, step, nbytes, own.decoder.decision))
            if profile is not None and batch == batches[-1] and context == contexts[-1]:
                own.prefill(run.prompts(batch, context))
                step_profile = profile_steps(
                    partial(own.steps, _PROFILED_STEPS), _PROFILED_STEPS, Path(profile)
                )
    peak = torch.cuda.max_memory_allocated(loaded.device) if on_gpu else 0
    if "transformers" in against:
        cells = _against_transformers(loaded, _twin_blueprint(checkpoint, loaded), run, cells)
    _, *how = loaded.report()
    if load_seconds is not None:
        how += loaded.timings.lines()
    if not on_gpu:
        how.insert(0, "no GPU was used: these are the figures of the CPU path, not of the kernel")
    return DecodeBench(
        checkpoint=str(loaded.path),
        hardware=hardware_line(loaded.device),
        cells=tuple(cells),
        new_tokens=new_tokens,
        sustained=sustained,
        load_seconds=load_seconds,
        weight_bytes=weight_bytes(loaded.model, 1),
        peak_bytes=peak,
        profile=step_profile,
        notes=tuple(how),
    )


def _model(
    checkpoint: str | os.PathLike[str] | LoadedModel | Synthetic,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    progress: ReportProgress,
) -> LoadedModel:
    if isinstance(checkpoint, LoadedModel):
        return checkpoint
    if isinstance(checkpoint, Synthetic):
        return synthetic_model(checkpoint, device=device, dtype=dtype, progress=progress)
    return load(checkpoint, device=device, dtype=dtype, only_decodes=True, progress=progress)


def _twin_blueprint(
    checkpoint: str | os.PathLike[str] | LoadedModel | Synthetic, loaded: LoadedModel
) -> Blueprint:
    if isinstance(checkpoint, Synthetic):
        return build_blueprint(checkpoint.config(), source=checkpoint.describe(), dtype=loaded.dtype)
    config = {
        key: value for key, value in loaded.model.config.to_dict().items() if key != "quantization_config"
    }
    return build_blueprint(config, source=str(loaded.path), dtype=loaded.dtype)


def _against_transformers(
    loaded: LoadedModel, blueprint: Blueprint, run: _Run, cells: list[DecodeCell]
) -> list[DecodeCell]:
    """``cells`` completed by the measurements of the unquantised model."""
    on_gpu = loaded.device.type == "cuda"
    model = dense_twin(blueprint, loaded)
    measured = []
    for cell in cells:
        if on_gpu:
            torch.compiler.reset()
        peer = CompiledTransformers(
            model, batch=cell.batch, capacity=cell.context + run.longest, compiled=on_gpu
        )
        first, step = run.measure(peer, cell.batch, cell.context)
        measured.append(replace(cell, peer_first_token_seconds=first, peer_step_seconds=step))
        del peer
    return measured


class _Run:
    """Model, settings and progress of the runs of all cells."""

    def __init__(
        self, loaded: LoadedModel, new_tokens: int, sustained: bool, progress: ReportProgress, total: int
    ) -> None:
        self._loaded = loaded
        self._device = loaded.device
        self._new_tokens = new_tokens
        self._sustained = sustained
        self._progress = progress
        self._total, self._done = total, 0
        self.longest = new_tokens + _WARM_UP_STEPS

    def prompts(self, batch: int, length: int) -> Tensor:
        """Random token ids [batch, length]."""
        vocabulary = self._loaded.model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, (batch, length), generator=generator).to(self._device)

    def measure(self, runner: _Runner, batch: int, context: int) -> tuple[float, float]:
        """(seconds to the first tokens, seconds of a step)."""
        prompts = self.prompts(batch, context)
        runner.prefill(prompts)
        runner.steps(_WARM_UP_STEPS)
        firsts: list[float] = []
        steps: list[float] = []
        begun = read_clock(self._device)
        while len(steps) < _REPEATS:
            start = read_clock(self._device)
            runner.prefill(prompts)
            first = read_clock(self._device)
            runner.steps(_WARM_UP_STEPS)
            warm = read_clock(self._device)
            runner.steps(self._new_tokens)
            end = read_clock(self._device)
            if not self._sustained or self._device.type == "cpu" or end - begun > _HEATING_SECONDS:
                firsts.append(first - start)
                steps.append((end - warm) / self._new_tokens)
            if not self._sustained and self._device.type == "cuda":
                time.sleep(min(end - start, 1.0))
        self._done += 1
        self._progress("decoding", self._done, self._total)
        return statistics.median(firsts), statistics.median(steps)


def weight_bytes(model: nn.Module, batch: int) -> int:
    """Bytes of parameters and buffers that a decode step of ``batch`` rows reads.

    Embedding tables are left out; of a mixture's experts, the expected share if rows choose evenly is
    counted.
    """
    tensors: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            share, held = 1.0, [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if isinstance(module, GroupedExperts):
                # The shared expert is counted by its linears, not by the copies of its weights here.
                held = [
                    each for stored in module.weights for each in stored.tensors.values() if each is not None
                ]
                whole: Any = model.config
                config = whole.get_text_config()
                # Gemma 4 has another name for num_experts_per_tok.
                chosen = getattr(config, "top_k_experts", None) or config.num_experts_per_tok
                share -= (1 - chosen / module.weights.down.shape[0]) ** batch
            for tensor in held:
                tensors[tensor.data_ptr()] = round(share * tensor.nbytes)
    # torch's packed weights are not among parameters and buffers.
    packed = sum(module.packed_bytes for module in model.modules() if isinstance(module, HalfWeightLinear))
    return sum(tensors.values()) + packed


def cache_bytes_per_token(loaded: LoadedModel) -> int:
    """Bytes of keys and values, or of latents, of one token in all layers; sliding windows are not
    considered."""
    config = loaded.model.config.get_text_config()
    latent = getattr(config, "kv_lora_rank", None)
    layers = config.num_hidden_layers
    # Layers of another type have a state instead, of a size that does not grow.
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    attending = sum("attention" in kind and kind != "linear_attention" for kind in kinds)
    if latent:
        return int(attending * (latent + config.qk_rope_head_dim)) * loaded.dtype.itemsize
    return int(2 * key_channels(config, layers) * attending // layers) * loaded.dtype.itemsize
