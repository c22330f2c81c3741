"""The figures of a report: of a checkpoint, of each of its modules, and of the run that made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, mode
from typing import Any

from marlinq.methods.quantity import ErrorQuantity
from marlinq.operations.report.evaluation import EvaluationFigures

OCTAVES = (-24, 8)
"""Powers of two between which magnitudes of scales are counted; what lies outside counts at the ends."""
BINS_PER_OCTAVE = 4


@dataclass(frozen=True)
class ScaleFigures:
    """The scales of one module, or of a sample of them.

    Attributes:
        counted: scales looked at.
        smallest, low, middle, high, largest: the least magnitude, its 5 %, 50 % and 95 % quantiles, and the
            greatest one; 0 where no scale is finite.
        negative: share below zero, 0..1.
        bad: scales that are NaN or infinite.
        bins: how many magnitudes lie in each quarter of an octave between 2**-24 and 2**8.
    """

    counted: int
    smallest: float
    low: float
    middle: float
    high: float
    largest: float
    negative: float
    bad: int
    bins: tuple[int, ...]


@dataclass(frozen=True)
class ModuleFigures:
    """One quantised linear.

    Attributes:
        name: in the checkpoint.
        block: number of its decoder block; None outside the blocks, as the output head is.
        projection: its name inside the block, with ``*`` for the number of an expert.
        in_features, out_features: K and N.
        bits: bits of a code.
        scheme: in words.
        nbytes: bytes of all its tensors.
        codes: how often each code occurs among those counted, by code.
        scales: as stored.
        error: relative squared error, as the method reported it; None where no run of marlinq's tells.
        quantity: quantity that the error is measured on; None where nothing tells.
        tokens: calibration tokens that it saw; None where that is unknown.
        fallback: measure taken instead of the method, and why.
        reason: where its settings come from.
    """

    name: str
    block: int | None
    projection: str
    in_features: int
    out_features: int
    bits: int
    scheme: str
    nbytes: int
    codes: tuple[int, ...]
    scales: ScaleFigures
    error: float | None = None
    quantity: ErrorQuantity | None = None
    tokens: int | None = None
    fallback: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class TimeFigures:
    """Where the time of a quantise run went.

    Attributes:
        stages: stages and their seconds, in the order of the run.
        blocks: seconds of each decoder block that this run quantised.
        total: seconds of the run.
        device: device of the blocks.
        ranks: processes that shared the work.
    """

    stages: tuple[tuple[str, float], ...]
    blocks: tuple[float, ...]
    total: float
    device: str
    ranks: int = 1


@dataclass(frozen=True)
class CheckpointFigures:
    """One quantised checkpoint.

    Attributes:
        name: the last part of its path, or its Hub id.
        format: a name in :data:`marlinq.formats.FORMATS`.
        architecture: architecture in ``config.json``.
        fingerprint: fingerprint of the run that made it; empty where no manifest tells.
        modules: its quantised linears, in file order.
        sizes: bytes of the tensors, by what they are.
        wide_bytes: bytes of the tensors with quantised weights in 16 bits.
        parameters: number of parameters of the model; a quantised weight counts as K * N.
        recipe, environment, calibration: as the manifest has them, made printable; empty where it does not.
        kept: linears that stay in floating point, with the reason where the manifest gives one.
        time: seconds of the run; None where no report of it lies in the folder.
        evaluation: figures of ``marlinq eval --keep``; None where nothing of it lies in the folder.
        sampled: share of the codes that were counted, 0..1.
        notes: things that could not be read, a sentence each.
    """

    name: str
    format: str
    architecture: str
    fingerprint: str
    modules: tuple[ModuleFigures, ...]
    sizes: Mapping[str, int]
    wide_bytes: int
    parameters: int
    recipe: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    calibration: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    time: TimeFigures | None = None
    evaluation: EvaluationFigures | None = None
    sampled: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes.values())

    @property
    def bits_per_weight(self) -> float:
        """Of the whole model."""
        return 8 * self.nbytes / max(1, self.parameters)

    @property
    def quantity(self) -> ErrorQuantity | None:
        """The quantity that most of the known errors are of; None where nothing tells."""
        found = [module.quantity for module in self.modules if module.error is not None]
        return mode(found) if found else None

    @property
    def error_label(self) -> str:
        """The name of a column that holds :attr:`errors`."""
        return "error" if self.quantity is None else self.quantity.label

    def modules_of(self, quantity: ErrorQuantity | None) -> list[ModuleFigures]:
        """The modules with a known error of that quantity; of None: those of which nothing tells."""
        return [module for module in self.modules if module.error is not None and module.quantity == quantity]

    @property
    def errors(self) -> list[float]:
        """The known errors of :attr:`quantity`, ascending."""
        return sorted(module.error or 0.0 for module in self.modules_of(self.quantity))

    @property
    def median_error(self) -> float | None:
        """The median of :attr:`errors`."""
        return median(self.errors) if self.errors else None

    @property
    def worst(self) -> list[ModuleFigures]:
        """The modules of :attr:`errors`, the greatest error first."""
        return sorted(self.modules_of(self.quantity), key=lambda module: -(module.error or 0.0))

    @property
    def projections(self) -> list[str]:
        """Names of projections inside blocks, in file order."""
        return list(dict.fromkeys(module.projection for module in self.modules if module.block is not None))

    @property
    def blocks(self) -> list[int]:
        """Numbers of decoder blocks with quantised linears."""
        return sorted({module.block for module in self.modules if module.block is not None})

    def cells(self) -> dict[tuple[str, int], list[ModuleFigures]]:
        """Modules by projection and block; several where the projection is that of experts.

        Those whose error is of another quantity than :attr:`quantity` are left out.
        """
        found: dict[tuple[str, int], list[ModuleFigures]] = {}
        for module in self.modules:
            if module.block is not None and (module.error is None or module.quantity == self.quantity):
                found.setdefault((module.projection, module.block), []).append(module)
        return found


def cell_error(modules: list[ModuleFigures]) -> float | None:
    """The error that stands for several modules, experts of one projection: the greatest one."""
    return max((module.error for module in modules if module.error is not None), default=None)


def place(name: str) -> tuple[int | None, str]:
    """The block and the projection that a module's name tells.

    The first number in the name is that of the block; further ones are those of experts.
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isascii() and part.isdigit()]
    if not numbers or numbers[0] == len(parts) - 1 or len(parts[numbers[0]]) > 6:
        return None, name
    first = numbers[0]
    inner = ["*" if index + first + 1 in numbers else part for index, part in enumerate(parts[first + 1 :])]
    return int(parts[first]), ".".join(inner)


def plain_time(time: TimeFigures) -> dict[str, Any]:
    """``time`` for JSON."""
    return {
        "total": time.total,
        "device": time.device,
        "ranks": time.ranks,
        "stages": [list(stage) for stage in time.stages],
        "blocks": list(time.blocks),
    }
