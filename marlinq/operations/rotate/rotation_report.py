"""The report of a rotation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from marlinq.core.display import Block, Facts, Shown


@dataclass(frozen=True)
class RotationReport(Shown):
    """The outcome of :func:`marlinq.operations.rotate.rotate`.

    Attributes:
        source, out: paths of the two folders.
        rotated: number of tensors multiplied by the rotation.
        folded: number of norms whose weights were multiplied into the layers after them.
        carried: number of tensors copied unchanged.
        untied: whether the output head was tied to the embedding and got a weight of its own.
        block_error, logits_error: relative differences in float32 between the original's and the rotated
            model's first block (its output rotated back) and logits.
        resumed: number of tensors that an interrupted run had already written.
        source_bytes, out_bytes: bytes of all tensors.
        seconds: wall-clock seconds.
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
        """Folders, counts and differences."""
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
