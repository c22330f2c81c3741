"""The recommend operation: estimates memory and time of every type of weights, and chooses one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.checkpoint.quantization_config import config_in
from marlinq.checkpoint.reader import CONFIG
from marlinq.core.errors import UnsupportedError, UsageError
from marlinq.core.progress import Progress, shows_progress
from marlinq.core.safe_text import escaped
from marlinq.operations.bench.synthetic import Synthetic
from marlinq.operations.recommend import step_times
from marlinq.operations.recommend.divergence import Divergence, known_quality, measure
from marlinq.operations.recommend.gpus import Gpu, find_gpu
from marlinq.operations.recommend.recommendation import Point, Recommendation, WeightsCandidate
from marlinq.operations.recommend.server_verdicts import known_servers, loaders
from marlinq.operations.recommend.shape import ModelShape, read_config, shape_of
from marlinq.operations.recommend.weight_types import NATIVE, Weights, compared

AXIS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""batches for which types of weights are compared"""
CHECKED = ("16 bits", "int8", "fp8", "int4 g128")
"""Types of weights whose estimates were compared with ``bench decode`` on an H200."""
_NEAR = 0.95
"""Ratio of step times up to 1 that counts as equally fast: the faster one is not worth fewer bits."""


@shows_progress
def recommend(
    model: str,
    *,
    synthetic: bool = False,
    gpu: str = "h200",
    batch: int = 1,
    context: int = 2048,
    prompt: int = 512,
    servers: Sequence[str] = (),
    measured: bool = False,
    revision: str | None = None,
    device: str | None = None,
    progress: Progress = True,
) -> Recommendation:
    """Recommends a type of weights for ``model`` on a GPU under a load.

    Only ``config.json`` is read, unless ``measured`` is True.

    Args:
        model: folder or Hub id; with ``synthetic`` the name of a shape of ``bench decode --synthetic``.
        synthetic: whether ``model`` is the name of a known shape.
        gpu: key of :func:`marlinq.operations.recommend.gpus.gpus`.
        batch: sequences decoded together.
        context: mean number of tokens per sequence.
        prompt: tokens per prompt.
        servers: names of servers that must load the weights; empty for all.
        measured: load the model, round its weights to each type, and measure the KL divergence.
        revision: branch, tag or commit of a Hub id; the main branch when None.
        device: device for the measurement, as in :func:`marlinq.runtime.load`.
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).

    Raises:
        UsageError: an unknown GPU, server or shape, or a number below 1.
        CheckpointError: the config can't be read, or no model can be built from it.
        UnsupportedError: the config does not describe a decoder.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    if min(batch, context, prompt) < 1:
        raise UsageError(
            f"--batch, --context, --prompt: expected 1 or more, found {min(batch, context, prompt)}"
        )
    unknown = [name for name in servers if name.lower() not in known_servers()]
    if unknown:
        raise UsageError(f"--servers {unknown[0]}: not known; expected some of {', '.join(known_servers())}")
    if synthetic and measured:
        raise UsageError("--measure needs a checkpoint; leave out --synthetic")
    found = find_gpu(gpu)
    config = Synthetic(model).config() if synthetic else read_config(model, revision, progress)
    shape = shape_of(model, config)
    kinds = (*compared(), *((NATIVE,) if shape.stacks else ()))
    qualities: dict[str, Divergence] = {}
    if measured:
        qualities = measure(model, shape, kinds, revision=revision, device=device, progress=progress)
    axis = tuple(sorted({*AXIS, batch}))
    candidates = []
    for done, kind in enumerate(kinds):
        progress("estimating", done, len(kinds))
        quality = qualities.get(kind.name) or known_quality(kind.name)
        candidates.append(_candidate(shape, kind, found, (batch, context, prompt), axis, quality, servers))
    progress("estimating", len(kinds), len(kinds))
    choice, until = _choice(candidates, servers), _until(candidates)
    return Recommendation(
        model=model,
        gpu=f"{found.name} ({found.source})",
        half=found.half,
        fp8=found.fp8,
        bandwidth=found.bandwidth,
        batch=batch,
        context=context,
        prompt=prompt,
        candidates=tuple(candidates),
        choice=None if choice is None else choice.name,
        until=until,
        advice=(
            *_advice(candidates, choice, until, batch, found, servers),
            *_quantised(config, model),
            *_not_counted(shape),
            *_too_long(shape, context),
        ),
    )


def _quantised(config: Mapping[str, Any], model: str) -> list[str]:
    """Advice on a checkpoint whose weights are quantised already."""
    said, _ = config_in(config, f"{model}/{CONFIG}")
    method = None if said is None else said.get("quant_method")
    if not isinstance(method, str):
        return []
    already = f"the model is quantised already ({escaped(method)})"
    return [f"{already}: more bits than its own gain nothing, the KL of fewer comes on top of its own"]


def _not_counted(shape: ModelShape) -> list[str]:
    """Advice on layers without attention, of which only the linears are counted."""
    if not shape.stateful:
        return []
    which = f"{shape.stateful} of {shape.depth} layers have no attention"
    return [f"{which}: what they keep and compute beside their linears is not counted"]


def _too_long(shape: ModelShape, context: int) -> list[str]:
    """Advice on a context that the model has no positions for."""
    config = shape.config.get("text_config") or shape.config
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or context <= positions:
        return []
    return [f"the model has {positions} positions; pass --context {positions} or less"]


def _candidate(
    shape: ModelShape,
    kind: Weights,
    gpu: Gpu,
    load: tuple[int, int, int],
    axis: Sequence[int],
    quality: Divergence | None,
    servers: Sequence[str],
) -> WeightsCandidate:
    batch, context, prompt = load
    needed = step_times.memory(shape, kind, batch, context)
    points: list[Point] = []
    step = prefill = None
    refusal = ""
    try:
        for rows in axis:
            times = step_times.decode(shape, kind, gpu, rows, context)
            points.append(
                Point(
                    rows,
                    times.step,
                    times.operations / times.step_bytes,
                    times.operations / times.step,
                    step_times.fits(gpu, step_times.memory(shape, kind, rows, context)),
                )
            )
        step = next(point.step_seconds for point in points if point.batch == batch)
        prefill = step_times.prefill(shape, kind, gpu, batch, prompt)
    except UnsupportedError as error:
        points, refusal = [], str(error)
    return WeightsCandidate(
        name=kind.name,
        bits=kind.bits,
        weight_bytes=step_times.weight_bytes(shape, kind),
        memory_bytes=needed,
        fits=step_times.fits(gpu, needed),
        step_seconds=step,
        prefill_seconds=prefill,
        basis="" if refusal else _basis(kind, gpu),
        quality=quality,
        loaders=loaders(shape, kind, servers),
        points=tuple(points),
        refusal=refusal,
    )


def _basis(kind: Weights, gpu: Gpu) -> str:
    if step_times.multiplies_in_fp8(kind, gpu):
        return "published peaks: as servers multiply 8-bit activations"
    if not gpu.device().measured:
        return "published peaks, times the shares of them that an H200 was measured to reach"
    if kind.name in CHECKED:
        return "kernels' measured costs; steps were checked with bench decode on an H200"
    return "kernels' measured costs; whole steps were not compared"


def _is_loaded(candidate: WeightsCandidate, servers: Sequence[str]) -> bool:
    """Whether one of the wanted servers loads it, or it is not known whether any does."""
    return not servers or any(loader.loads is not False for loader in candidate.loaders)


def _choice(candidates: Sequence[WeightsCandidate], servers: Sequence[str]) -> WeightsCandidate | None:
    """The candidate with most bits among those that fit, are loaded and are about as fast as the fastest."""
    able = [
        one for one in candidates if one.fits and one.step_seconds is not None and _is_loaded(one, servers)
    ]
    if not able:
        return None
    fastest = min(one.step_seconds or 0.0 for one in able)
    return next(one for one in able if _NEAR * (one.step_seconds or 0.0) <= fastest)


def _until(candidates: Sequence[WeightsCandidate]) -> int | None:
    """The smallest batch from which on no 4-bit type is clearly faster than all wider types; None where one
    always is."""
    narrow = [one.points for one in candidates if one.bits <= 4 and one.points]
    wide = [one.points for one in candidates if one.bits > 4 and one.points]
    if not narrow or not wide:
        return None
    last: int | None = None
    for index in reversed(range(len(narrow[0]))):
        of_narrow = min(points[index].step_seconds for points in narrow)
        of_wide = min(points[index].step_seconds for points in wide)
        if of_narrow < _NEAR * of_wide:
            return last
        last = narrow[0][index].batch
    return last


def _advice(
    candidates: Sequence[WeightsCandidate],
    choice: WeightsCandidate | None,
    until: int | None,
    batch: int,
    gpu: Gpu,
    servers: Sequence[str],
) -> list[str]:
    """Sentences on what to take for this load, and for large batches."""
    if choice is None and any(one.fits for one in candidates):
        return [f"of what fits, nothing is loaded by {', '.join(servers) or 'a kernel'}"]
    if choice is None:
        least = min(one.memory_bytes for one in candidates)
        room = f"{least / 1e9:.1f} GB are needed at least, {gpu.name} has {gpu.memory / 1e9:.0f}"
        return [f"nothing fits: {room}; lower --batch or --context, or take several GPUs"]
    found = [f"at batch {batch} take {choice.name}: the most bits of those within 5 % of the fastest step"]
    if until is None:
        found.append("4 bits pay over the whole range of batches")
        return found
    # Compared at the largest batch for which a wider type still fits, where the difference is largest.
    wide = [one for one in candidates if one.bits > 4 and one.points and _is_loaded(one, servers)]
    rooms = [
        index
        for index, point in enumerate(wide[0].points if wide else ())
        if point.batch >= until and any(one.points[index].fits for one in wide)
    ]
    if not rooms:
        narrow = [one for one in candidates if one.bits <= 4 and one.points and _is_loaded(one, servers)]
        fits = any(point.batch >= until and point.fits for one in narrow for point in one.points)
        what = "but nothing wider fits the memory" if fits else "but nothing fits the memory there"
        found.append(f"from batch {until} on 4 bits are no faster, {what}")
        return found
    able = [one for one in wide if one.points[rooms[-1]].fits]
    fastest = min(one.points[rooms[-1]].step_seconds for one in able)
    then = next(one for one in able if _NEAR * one.points[rooms[-1]].step_seconds <= fastest)
    found.append(
        f"from batch {until} on a step with 4 bits is less than 5 % faster than with more: take {then.name} "
        "there, unless memory decides"
    )
    return found
