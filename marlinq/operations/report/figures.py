"""The figures of a report: of a checkpoint, of each of its modules, and of the run that made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, mode
from typing import Any

from marlinq.methods.quantity import ErrorQuantity
from marlinq.operations.report.evaluation import EvaluationFigures

OCTAVES = (-24, 8)
"""exponents of two between which scales are counted; smaller and larger ones are counted in the end bins"""
BINS_PER_OCTAVE = 4


@dataclass(frozen=True)
class ScaleFigures:
    """The scales of one module, or of a sample of them.

    Attributes:
        counted: number of scales in the sample.
        smallest, low, middle, high, largest: least magnitude, 5 %, 50 % and 95 % quantile, greatest
            magnitude; 0 where no scale is finite.
        negative: share of scales below zero (0 to 1).
        bad: number of scales that are NaN or infinite.
        bins: number of magnitudes in each quarter of an octave between 2**-24 and 2**8.
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
        name: name in the checkpoint.
        block: number of its decoder block; None outside the blocks, as for the output head.
        projection: name inside the block, with ``*`` for the number of an expert.
        in_features, out_features: K and N.
        bits: bits of a code.
        scheme: scheme in words.
        nbytes: bytes of all its tensors.
        codes: number of occurrences of each code in the sample, by code.
        scales: figures of its scales.
        error: relative squared error that the method reported; None where the manifest has none.
        quantity: whether the error is that of outputs or of weights; None where it is unknown.
        tokens: calibration tokens that it saw; None where that is unknown.
        fallback: sentence on a fallback of the method; None without one.
        reason: source of its settings, as text.
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
    """Times of a quantise run.
    Attributes:
        stages: (stage, seconds) in the order of the run.
        blocks: seconds of each decoder block that this run quantised.
        total: seconds of the run.
        device: device that blocks ran on.
        ranks: number of processes that shared the work.
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
        name: last part of its path, or its Hub id.
        format: name in :data:`marlinq.formats.FORMATS`.
        architecture: class name in ``config.json``.
        fingerprint: fingerprint of the run that made it; empty without a manifest.
        modules: quantised linears, in file order.
        sizes: kind of tensor -> bytes.
        wide_bytes: bytes of all tensors if quantised weights had 16 bits.
        parameters: number of parameters of the model; a quantised weight counts as K * N.
        recipe, environment, calibration: printable values from the manifest; empty where it has none.
        kept: linears that stay in floating point -> reason from the manifest, or empty.
        time: times of the run; None without a report in the folder.
        evaluation: figures of ``marlinq eval --keep``; None without any in the folder.
        sampled: share of the codes that were counted (0 to 1).
        notes: sentences on data that could not be read.
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
        """Stored bits per weight of the whole model."""
        return 8 * self.nbytes / max(1, self.parameters)

    @property
    def quantity(self) -> ErrorQuantity | None:
        """The quantity (outputs or weights) of most known errors; None where it is unknown."""
        quantities = [module.quantity for module in self.modules if module.error is not None]
        return mode(quantities) if quantities else None

    @property
    def error_label(self) -> str:
        """The name of a column that holds :attr:`errors`."""
        return "error" if self.quantity is None else self.quantity.label

    def modules_of(self, quantity: ErrorQuantity | None) -> list[ModuleFigures]:
        """The modules with a known error of this quantity; for None, of unknown quantity."""
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
        """(projection, block) -> modules; several for a projection of experts.

        Modules whose error has another quantity than :attr:`quantity` are left out.
        """
        cells: dict[tuple[str, int], list[ModuleFigures]] = {}
        for module in self.modules:
            if module.block is not None and (module.error is None or module.quantity == self.quantity):
                cells.setdefault((module.projection, module.block), []).append(module)
        return cells


def cell_error(modules: list[ModuleFigures]) -> float | None:
    """The greatest error of several modules (the experts of one projection)."""
    return max((module.error for module in modules if module.error is not None), default=None)


def place(name: str) -> tuple[int | None, str]:
    """(block, projection) from a module's name.

    The first number in the name is the block's; further numbers are experts'.
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isascii() and part.isdigit()]
    if not numbers or numbers[0] == len(parts) - 1 or len(parts[numbers[0]]) > 6:
        return None, name
    first = numbers[0]
    inner = ["*" if index + first + 1 in numbers else part for index, part in enumerate(parts[first + 1 :])]
    return int(parts[first]), ".".join(inner)


def plain_time(time: TimeFigures) -> dict[str, Any]:
    """``time`` as plain values for JSON."""
    return {
        "total": time.total,
        "device": time.device,
        "ranks": time.ranks,
        "stages": [list(stage) for stage in time.stages],
        "blocks": list(time.blocks),
    }
