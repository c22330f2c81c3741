"""The report of ``marlinq recommend``: types of weights side by side, and the recommendation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from marlinq.core.display import Block, Facts, Shown, Table, lines, size_text
from marlinq.operations.recommend.divergence import Divergence
from marlinq.operations.recommend.server_verdicts import LAYOUT, STACKED_LAYOUT, Loader
from marlinq.operations.recommend.step_times import RESERVED_BYTES
from marlinq.operations.recommend.weight_types import NATIVE

_SPARSE = (
    "int4 2:4 sparse: left out; 3 bits a weight, but on two small models 7 to 12 times the KL of int4 "
    "and 1.8 to 3 times that of 3 bits without pruning (docs/results.md)"
)


@dataclass(frozen=True)
class Point:
    """Expected figures of a type of weights at one batch.

    Attributes:
        batch: sequences decoded together.
        step_seconds: seconds of a decode step.
        intensity: operations per byte that the step reads.
        rate: operations a second.
        fits: whether weights and cache fit the GPU's memory.
    """

    batch: int
    step_seconds: float
    intensity: float
    rate: float
    fits: bool


@dataclass(frozen=True)
class WeightsCandidate:
    """Expected figures of a type of weights under the wanted load.

    Attributes:
        name: name from ``quantize --scheme`` and ``--group-size``.
        bits: bits per weight, without scales.
        weight_bytes: bytes of all weights and scales.
        memory_bytes: bytes of weights and cache, and 1.5 GB for the driver, graphs and buffers.
        fits: whether ``memory_bytes`` fit the GPU's memory.
        step_seconds: seconds of a decode step; None where no kernel runs it.
        prefill_seconds: seconds from the prompts to their first tokens; None where no kernel runs it.
        basis: source of the times, in words.
        quality: expected divergence; None where none is known.
        loaders: verdicts of servers.
        points: figures for each batch of the comparison.
        refusal: why there are no times; empty where there are.
    """

    name: str
    bits: int
    weight_bytes: float
    memory_bytes: float
    fits: bool
    step_seconds: float | None
    prefill_seconds: float | None
    basis: str
    quality: Divergence | None
    loaders: tuple[Loader, ...]
    points: tuple[Point, ...]
    refusal: str = ""


@dataclass(frozen=True)
class Recommendation(Shown):
    """Candidates for a model, a GPU and a load.

    Attributes:
        model: model as the user named it.
        gpu: name of the GPU and source of its figures.
        half, fp8: peak operations a second of the GPU in 16 bits and in FP8.
        bandwidth: peak bytes a second of the GPU's memory.
        batch: sequences decoded together.
        context: tokens per sequence.
        prompt: tokens per prompt.
        candidates: types of weights, from the most bits to the fewest.
        choice: name of the recommended candidate; None where nothing fits.
        until: smallest batch from which on 4 bits are not faster; None where they always are.
        advice: sentences on what to take.
    """

    model: str
    gpu: str
    half: float
    fp8: float | None
    bandwidth: float
    batch: int
    context: int
    prompt: int
    candidates: tuple[WeightsCandidate, ...]
    choice: str | None
    until: int | None
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def display(self) -> list[Block]:
        """The table, the advice, and the sources of the figures."""
        header = (
            "weights", "size", "with cache", "fits", "step", "tokens/s", "prefill", "KL", "loaded by"
        )  # fmt: skip
        rows = tuple(self._row(candidate) for candidate in self.candidates)
        batches = [point.batch for point in max((c.points for c in self.candidates), key=len)]
        axis = tuple(
            (
                candidate.name,
                *(f"{1e3 * point.step_seconds:.2f}{'' if point.fits else '*'}" for point in candidate.points),
            )
            for candidate in self.candidates
            if candidate.points
        )
        starred = any(not point.fits for candidate in self.candidates for point in candidate.points)
        bases = dict.fromkeys(candidate.basis for candidate in self.candidates if candidate.basis)
        native = any(candidate.name == NATIVE.name for candidate in self.candidates)
        sequences = "sequence" if self.batch == 1 else "sequences"
        notes = [
            f"with cache: and {RESERVED_BYTES / 1e9:g} GB for the driver, graphs and buffers",
            f"loaded by: in the format {LAYOUT}"
            + (f"; {NATIVE.name}: in {STACKED_LAYOUT}, other weights in 16 bits" if native else ""),
        ]
        notes += [
            f"{', '.join(c.name for c in self.candidates if c.basis == basis)}: {basis}" for basis in bases
        ]
        notes += [f"{c.name}: {c.refusal}" for c in self.candidates if c.refusal]
        notes.append(_SPARSE)
        return [
            Facts(
                (
                    ("model", self.model),
                    ("GPU", self.gpu),
                    (
                        "load",
                        f"{self.batch} {sequences} of {self.context} tokens, prompts of {self.prompt}",
                    ),
                )
            ),
            Table(header, rows, numbers=(1, 2, 4, 5, 6), status=3),
            Table(
                ("ms a step, by batch", *(str(batch) for batch in batches)),
                axis,
                numbers=tuple(range(1, len(batches) + 1)),
            ),
            lines(*(["* does not fit the memory"] if starred else []), *self.advice),
            lines(*notes),
        ]

    def _row(self, candidate: WeightsCandidate) -> tuple[str, ...]:
        step, prefill = candidate.step_seconds, candidate.prefill_seconds
        loaded = [
            loader.server + ("" if loader.loads else " (not read)")
            for loader in candidate.loaders
            if loader.loads is not False
        ]
        return (
            candidate.name,
            size_text(candidate.weight_bytes),
            size_text(candidate.memory_bytes),
            "yes" if candidate.fits else "no",
            "" if step is None else f"{1e3 * step:.2f} ms",
            "" if step is None else f"{self.batch / step:.0f}",
            "" if prefill is None else f"{1e3 * prefill:.1f} ms",
            "not measured" if candidate.quality is None else candidate.quality.describe(),
            ", ".join(loaded),
        )
