"""Opens the unfinished output folder of a run and tells how much of the run it already holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from marlinq.checkpoint import CheckpointWriter, CopyBehind, StackingWriter
from marlinq.checkpoint.manifest import fingerprint_of
from marlinq.core.progress import ReportProgress
from marlinq.models.left_out import unread_names
from marlinq.operations.quantize.allocation.stored_allocation import keep_allocation
from marlinq.operations.quantize.journal_notes import check_notes, check_planned
from marlinq.operations.quantize.prepare import PreparedRun
from marlinq.operations.quantize.ranks import FollowingWriter, share_state
from marlinq.operations.quantize.tuning import NOTE


@dataclass(frozen=True)
class Output:
    """The output folder while it is written.

    Attributes:
        writer: writer of the folder; ranks other than the first have one that writes nothing.
        copying: copies unchanged tensors in a thread of its own.
        blocks: number of decoder blocks with quantised linears.
        resumed_blocks: number of blocks that an interrupted run completed.
        unsolved: whether a module is still to be quantised.
        untuned: whether tuning is still to be done.
    """

    writer: CheckpointWriter
    copying: CopyBehind
    blocks: int
    resumed_blocks: int
    unsolved: bool
    untuned: bool


@contextmanager
def open_output(
    prepared: PreparedRun, out: Path, *, resume: bool, max_shard_size: int, progress: ReportProgress
) -> Iterator[Output]:
    """Creates the folder ``<out>.partial``, or opens an interrupted run's.

    Raises:
        OutputError: an unfinished folder belongs to another run, or is damaged.
    """
    decisions, ranks = prepared.decisions, prepared.ranks
    plan, blueprint = decisions.plan, decisions.blueprint
    writer: CheckpointWriter | None = None
    if ranks.first:
        writer_class = StackingWriter if plan.format.stacked else CheckpointWriter
        writer = writer_class(
            out,
            plan.tensors,
            fingerprint=_fingerprint(prepared, max_shard_size),
            max_shard_bytes=max_shard_size,
            resume=resume,
        )
        check_notes(writer.notes, writer.partial)
        check_planned(writer.notes, plan, writer.partial)
        if decisions.allocation is not None:
            prepared.gatherer.keep_sources(writer)
            keep_allocation(writer, decisions.allocation, decisions.recipe)
    state = share_state(writer, ranks)
    writer = writer or FollowingWriter(out, state)
    copied = plan.copied if ranks.first else ()
    unread = unread_names(blueprint)
    finite = [name for name in copied if not unread(name)]
    with writer, CopyBehind(plan.carried, writer, copied, progress, finite=finite) as copying:
        if resume and ranks.first and not writer.resumed:
            warnings.warn(f"{writer.partial}: no unfinished run to resume; starting afresh", stacklevel=4)
        by_block = [members for block in blueprint.blocks if (members := plan.members(block))]
        resumed = sum(plan.are_written(members, writer.written, writer.notes) for members in by_block)
        heads = [] if plan.head is None else [plan.head]
        yield Output(
            writer=writer,
            copying=copying,
            blocks=len(by_block),
            resumed_blocks=resumed,
            unsolved=resumed < len(by_block) or not plan.are_written(heads, writer.written, writer.notes),
            untuned=decisions.tuning is not None and NOTE not in writer.notes,
        )


def _fingerprint(prepared: PreparedRun, max_shard_size: int) -> str:
    environment, recipe = prepared.environment, prepared.decisions.recipe
    if environment["device"] != "cpu":
        # The number of threads decides the order of sums on a CPU only. torchrun changes it.
        environment = {key: value for key, value in environment.items() if key != "threads"}
    # The quality record has a version, because the recipe alone does not tell what its settings mean.
    quality = recipe.quality_record()
    return fingerprint_of(
        prepared.decisions.checkpoint, recipe.to_dict(), quality, environment, max_shard_size
    )
