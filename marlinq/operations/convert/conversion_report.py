"""The report of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from marlinq.core.display import Block, Facts, Shown, Table, counted
from marlinq.core.rules import Keep


@dataclass(frozen=True)
class ConversionReport(Shown):
    """The outcome of :func:`marlinq.operations.convert.convert`.

    Attributes:
        source, out: paths of the input and output folders.
        source_format, target_format: names in :data:`marlinq.formats.FORMATS`.
        converted: quantised modules in the output.
        skipped: modules stored dequantised because the target can't hold them, with reasons.
        carried: number of tensors copied unchanged (norms, embeddings, biases).
        side_files: other files that were copied (tokenizer, templates, code).
        left_out: files of the source that were not copied: weights in other file formats.
        lossy: whether any module lost precision.
        notes: sentences that the user of the output should know.
        resumed: number of tensors that an interrupted run had already written.
        source_bytes, out_bytes: bytes of all tensors.
        seconds: wall-clock seconds of this run.
    """

    source: str
    out: str
    source_format: str
    target_format: str
    converted: int
    skipped: Mapping[str, Keep]
    carried: int
    side_files: tuple[str, ...]
    left_out: tuple[str, ...]
    lossy: bool
    notes: tuple[str, ...]
    resumed: int
    source_bytes: int
    out_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        skipped = {name: keep.reason for name, keep in self.skipped.items()}
        return {**asdict(self), "skipped": skipped}

    def display(self) -> list[Block]:
        """Folders, counts, sizes and notes, then the modules that were dequantised."""
        sizes = f"{self.source_bytes / 1e6:.1f} MB -> {self.out_bytes / 1e6:.1f} MB"
        others = counted(len(self.side_files), "other files")
        rows = [
            ("from", f"{self.source} ({self.source_format})"),
            ("to", f"{self.out} ({self.target_format})"),
            (
                "converted",
                f"{counted(self.converted, 'modules')}, {'rounded' if self.lossy else 'bit for bit'}",
            ),
            (
                "carried",
                f"{counted(self.carried, 'tensors')} and {others}, unchanged",
            ),
            ("tensors", f"{sizes} in {self.seconds:.1f} s"),
        ]
        if self.resumed:
            rows.append(("continued", f"{self.resumed} tensors had been written by an interrupted run"))
        if self.left_out:
            rows.append(("not copied", ", ".join(self.left_out)))
        rows += [("note", note) for note in self.notes]
        blocks: list[Block] = [Facts(tuple(rows))]
        if self.skipped:
            skipped = tuple((name, keep.reason) for name, keep in self.skipped.items())
            title = f"{counted(len(skipped), 'modules')} kept unquantised"
            blocks.append(Table(("module", "reason"), skipped, title=title))
        return blocks
