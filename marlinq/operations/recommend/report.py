"""What ``marlinq recommend`` says: candidates side by side, and what to take from which batch on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from marlinq.core.display import Block, Facts, Shown, Table, lines
from marlinq.operations.recommend.quality import Quality
from marlinq.operations.recommend.servers import Loader


@dataclass(frozen=True)
class Point:
    """A kind of weights at one batch.

    Attributes:
        batch: sequences decoded together.
        step_seconds: expected of a decode step.
        intensity: operations a byte that the step reads.
        rate: operations a second.
        fits: weights and cache fit the memory.
    """

    batch: int
    step_seconds: float
    intensity: float
    rate: float
    fits: bool


@dataclass(frozen=True)
class Candidate:
    """A kind of weights.

    Attributes:
        name: as ``quantize --scheme`` and ``--group-size`` call it.
        bits: of a weight, scales aside.
        weight_bytes: of all weights and scales.
        memory_bytes: with cache and buffers, at the batch asked for.
        fits: that is in the GPU's memory.
        step_seconds: expected of a decode step; None where no kernel runs it.
        prefill_seconds: expected from the prompts to their first tokens; None likewise.
        basis: what the times rest on.
        quality: expected divergence; None where none was measured.
        loaders: verdicts of servers.
        points: over the batches of the axis.
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
    quality: Quality | None
    loaders: tuple[Loader, ...]
    points: tuple[Point, ...]
    refusal: str = ""


@dataclass(frozen=True)
class Recommendation(Shown):
    """Candidates for a model, a GPU and a load.

    Attributes:
        model: as it was named.
        gpu: its name, and where its figures come from.
        half, fp8, bandwidth: its peaks, operations and bytes a second.
        batch, context, prompt: sequences together, tokens of each, tokens of a prompt.
        candidates: from the most bits to the fewest.
        choice: name of the candidate for this load; None where nothing fits.
        until: the batch from which 4 bits pay no more; None where they pay over the whole axis.
        advice: what to take, in a sentence each.
    """

    model: str
    gpu: str
    half: float
    fp8: float | None
    bandwidth: float
    batch: int
    context: int
    prompt: int
    candidates: tuple[Candidate, ...]
    choice: str | None
    until: int | None
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def display(self) -> list[Block]:
        """The table, what to take, and what the figures rest on."""
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
        bases = dict.fromkeys(candidate.basis for candidate in self.candidates if candidate.basis)
        notes = [
            f"{', '.join(c.name for c in self.candidates if c.basis == basis)}: {basis}" for basis in bases
        ]
        notes += [f"{c.name}: {c.refusal}" for c in self.candidates if c.refusal]
        return [
            Facts(
                (
                    ("model", self.model),
                    ("GPU", self.gpu),
                    (
                        "load",
                        f"{self.batch} sequences of {self.context} tokens, prompts of {self.prompt}",
                    ),
                )
            ),
            Table(header, rows, numbers=(1, 2, 4, 5, 6), status=3),
            Table(
                ("ms a step, by batch", *(str(batch) for batch in batches)),
                axis,
                numbers=tuple(range(1, len(batches) + 1)),
            ),
            lines("* does not fit the memory", *self.advice),
            lines(*notes),
        ]

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        step, prefill = candidate.step_seconds, candidate.prefill_seconds
        loaded = [
            loader.server + ("" if loader.loads else " (not read)")
            for loader in candidate.loaders
            if loader.loads is not False
        ]
        return (
            candidate.name,
            f"{candidate.weight_bytes / 1e9:.2f} GB",
            f"{candidate.memory_bytes / 1e9:.2f} GB",
            "yes" if candidate.fits else "no",
            "" if step is None else f"{1e3 * step:.2f} ms",
            "" if step is None else f"{self.batch / step:.0f}",
            "" if prefill is None else f"{1e3 * prefill:.1f} ms",
            "not measured" if candidate.quality is None else candidate.quality.describe(),
            ", ".join(loaded),
        )
