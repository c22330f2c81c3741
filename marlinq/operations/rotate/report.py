"""What a rotation did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from marlinq.core.display import Block, Facts, Shown


@dataclass(frozen=True)
class RotationReport(Shown):
    """The outcome of :func:`marlinq.operations.rotate.rotate`.

    Attributes:
        source, out: the folders.
        rotated: tensors that were multiplied by the rotation.
        folded: norms whose weights went into the layers behind them.
        carried: tensors that were copied unchanged.
        untied: the output head was tied to the embedding and has a weight of its own now.
        block_error, logits_error: relative differences, in float32, that the rotation makes to the first
            block's output, rotated back, and to logits.
        resumed: tensors that an interrupted run had already written.
        source_bytes, out_bytes: sizes of all tensors.
        seconds: wall-clock time.
    """

    source: str
    out: str
    rotated: int
    folded: int
    carried: int
    untied: bool
    block_error: float
    logits_error: float
    resumed: int
    source_bytes: int
    out_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def display(self) -> list[Block]:
        """What was rotated, and how exactly."""
        sizes = f"{self.source_bytes / 1e6:.1f} MB -> {self.out_bytes / 1e6:.1f} MB"
        rows = [
            ("from", self.source),
            ("to", self.out),
            (
                "rotated",
                f"{self.rotated} tensors; {self.folded} norms folded, {self.carried} tensors copied",
            ),
            (
                "same function",
                f"first block to {self.block_error:.1e}, logits to {self.logits_error:.1e}, before rounding",
            ),
            ("tensors", f"{sizes} in {self.seconds:.1f} s"),
        ]
        if self.untied:
            rows.append(("output head", "was tied to the embedding, has a weight of its own now"))
        if self.resumed:
            rows.append(("continued", f"{self.resumed} tensors had been written by an interrupted run"))
        rows.append(("next", f"marlinq quantize {self.out} ..., then marlinq eval against {self.source}"))
        return [Facts(tuple(rows))]
