"""The report of ``marlinq bench kernels``: cells, means over layers, and cells behind a peer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from marlinq.core.display import Block, Shown, Table, lines

OURS = "marlinq"
_BEHIND = 1.03


@dataclass(frozen=True)
class Cell:
    """Measurements of one layer at one batch size.

    Attributes:
        layer: name of the layer.
        m: rows of activations.
        n: output features.
        k: input features.
        nbytes: bytes that marlinq's product must move: words, scales, zero points, activations in and out.
        floor_seconds: the longer of a cold read of the weight and the operations at the measured peak; None
            on a CPU.
        seconds: contender -> median seconds.
        errors: contender -> relative error against float32 arithmetic.
        reason: reason for the choice of marlinq's kernel; None where not asked for.
    """

    layer: str
    m: int
    n: int
    k: int
    nbytes: int
    floor_seconds: float | None
    seconds: dict[str, float]
    errors: dict[str, float]
    reason: str | None = None

    @property
    def best_peer(self) -> str | None:
        """The fastest contender except marlinq."""
        peers = [name for name in self.seconds if name != OURS]
        return min(peers, key=self.seconds.__getitem__, default=None)

    @property
    def behind(self) -> float | None:
        """marlinq's time over the best peer's."""
        if self.best_peer is None or OURS not in self.seconds:
            return None
        return self.seconds[OURS] / self.seconds[self.best_peer]

    def ratio(self, contender: str) -> float | None:
        """Time over floor for a contender, or for the best peer if the name is ``best peer``."""
        name = self.best_peer if contender == "best peer" else contender
        if self.floor_seconds is None or name not in self.seconds:
            return None
        return self.seconds[name] / self.floor_seconds

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of marlinq's product."""
        return self.nbytes / self.seconds[OURS] if OURS in self.seconds else None

    @property
    def rate(self) -> float | None:
        """Operations a second of marlinq's product."""
        return 2.0 * self.m * self.n * self.k / self.seconds[OURS] if OURS in self.seconds else None


@dataclass(frozen=True)
class KernelBench(Shown):
    """Times of marlinq's product and its peers, measured in one process.

    Attributes:
        hardware: processor and versions.
        dtype: dtype of activations and scales.
        weights: element of the weights.
        group_size: input channels per scale, or -1 for all.
        asymmetric: whether weights had zero points.
        contenders: names of everything that was timed, marlinq first.
        cold_read_seconds: layer -> seconds of a cold read of its weight; empty on a CPU.
        peak_rate: operations a second of cuBLAS on 8192 x 8192 x 8192; None on a CPU.
        cells: measurements, layer by layer and batch by batch.
        notes: sentences on peers that were left out, and on the measurement.
    """

    hardware: str
    dtype: str
    weights: str
    group_size: int
    asymmetric: bool
    contenders: tuple[str, ...]
    cold_read_seconds: dict[str, float]
    peak_rate: float | None
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes in order."""
        return tuple(dict.fromkeys(cell.m for cell in self.cells))

    def geometric_means(self) -> dict[str, dict[int, float]]:
        """Contender -> batch size -> geometric mean of time over floor, over the layers that it ran."""
        rows = [*self.contenders, *(["best peer"] if len(self.contenders) > 1 else [])]
        means_of = {
            name: {
                m: mean
                for m in self.batches
                if (mean := _geometric_mean(cell.ratio(name) for cell in self.cells if cell.m == m))
                is not None
            }
            for name in rows
        }
        return {name: means for name, means in means_of.items() if means}

    def behind(self) -> tuple[Cell, ...]:
        """Cells where marlinq takes more than 3 % longer than the best peer, worst first."""
        slower = [cell for cell in self.cells if cell.behind is not None and cell.behind > _BEHIND]
        return tuple(sorted(slower, key=lambda cell: -(cell.behind or 0.0)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; times in seconds."""
        return {
            **asdict(self),
            "geometric_means": {
                name: {str(m): mean for m, mean in means.items()}
                for name, means in self.geometric_means().items()
            },
            "behind": [
                {"layer": cell.layer, "m": cell.m, "peer": cell.best_peer, "ratio": cell.behind}
                for cell in self.behind()
            ],
        }

    def display(self) -> list[Block]:
        """The times, their means over the layers, and the cells behind a peer."""
        blocks = [self._heading(), self._cells()]
        means = self.geometric_means()
        if means:
            header = ("time / floor, geometric mean", *(f"M={m}" for m in self.batches))
            rows = tuple(
                (name, *(_number(values.get(m), ".2f") for m in self.batches))
                for name, values in means.items()
            )
            blocks.append(Table(header, rows, numbers=tuple(range(1, len(header)))))
        if len(self.contenders) > 1:
            blocks.append(self._behind())
        reasons = [(cell.layer, str(cell.m), cell.reason) for cell in self.cells if cell.reason is not None]
        if reasons:
            header = ("layer", "M", "reason")
            blocks.append(Table(header, tuple(reasons), numbers=(1,), title="decisions"))
        return [*blocks, lines(self.hardware, *self.notes)]

    def _heading(self) -> Block:
        kind = "asymmetric" if self.asymmetric else "symmetric"
        weights = f"{self.weights} weights, {kind}, group {self.group_size}"
        line = f"products with {weights}, {self.dtype} activations; times in us"
        if self.peak_rate is None:
            return lines(line)
        reads = ", ".join(f"{name} {1e6 * value:.2f}" for name, value in self.cold_read_seconds.items())
        peak = f"peak {self.peak_rate / 1e12:.0f} TFLOP/s (cuBLAS, 8192^3)"
        return lines(line, peak, f"cold read: {reads}")

    def _cells(self) -> Block:
        header = (
            "layer",
            "M",
            "floor",
            *self.contenders,
            "ours/floor",
            "% of floor",
            "peer/floor",
            "ours/peer",
            "GB/s",
            "TFLOP/s",
        )
        rows = tuple(
            (
                cell.layer,
                str(cell.m),
                _number(cell.floor_seconds, ".2f", 1e6),
                *(_number(cell.seconds.get(name), ".2f", 1e6) for name in self.contenders),
                _number(cell.ratio(OURS), ".2f"),
                _number(None if (ratio := cell.ratio(OURS)) is None else 1 / ratio, ".0f", 100),
                _number(cell.ratio("best peer"), ".2f"),
                _number(cell.behind, ".2f"),
                _number(cell.bandwidth, ".0f", 1e-9),
                _number(cell.rate, ".1f", 1e-12),
            )
            for cell in self.cells
        )
        return Table(header, rows, numbers=tuple(range(1, len(header))))

    def _behind(self) -> Block:
        cells = self.behind()
        if not cells:
            return lines("no cell is more than 3% behind the best peer")
        each = [f"{cell.layer} M={cell.m}: {cell.behind:.3f} x {cell.best_peer}" for cell in cells]
        return lines(f"{len(cells)} of {len(self.cells)} cells more than 3% behind the best peer:", *each)


def _geometric_mean(values: Iterable[float | None]) -> float | None:
    logarithms = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, form)
