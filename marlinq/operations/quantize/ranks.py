"""Several processes that share a quantise run, as ``torchrun`` starts them: ranks.

Every rank holds the block that is being quantised and a share of the calibration batches. Of each block

1. every rank runs its own batches and sums up their statistics;
2. the sums go to the ranks that solve (one reduction for each input that projections share);
3. modules, or output channels of large ones, are solved by different ranks (:func:`share_out`);
4. the results go from each solver to all, so that every rank runs its batches on the quantised block.

Rank 0 alone reads text, writes the folder and keeps the journal; the others learn from it what is written
already. So a run can be continued with another number of ranks.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from marlinq.calibration import Batch, Document, make_batches
from marlinq.checkpoint import CheckpointWriter
from marlinq.checkpoint.source import SourceFile
from marlinq.core.boundaries import reason
from marlinq.core.devices import beside
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import EnvironmentProblem, MarlinqError, UsageError
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import ModuleSpec

TIMEOUT = "MARLINQ_RANK_TIMEOUT"
"""The environment variable that says how many seconds a rank waits for the others."""
# Rank 0 writes calibration text on its own for up to half an hour.
_TIMEOUT_SECONDS = 3600.0
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process and those that share its run.

    Attributes:
        rank: number of this process, from 0.
        size: how many there are.
        device: device of this process; what is exchanged lies there.
        joining: done when this process has met the others; the first exchange waits for it.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    joining: Future[None] | None = None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def meet(self) -> None:
        """Waits until this rank has met the others; whoever does not call it waits in the first exchange."""
        with _waiting(self):
            pass

    def share_json(self, value: Any, source: int = 0) -> Any:
        """The JSON value that rank ``source`` has; the other ranks' ``value`` is not looked at."""
        if self.size == 1:
            return value
        data = torch.empty(0, dtype=torch.uint8)
        if self.rank == source:
            data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = self.share(torch.tensor([data.numel()]), (1,), torch.int64, source)
        text = self.share(data, (int(length[0]),), torch.uint8, source)
        return json.loads(bytes(text.cpu().numpy()))

    def share(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        """The tensor that rank ``source`` has, on the device.

        Args:
            tensor: tensor of that rank; the other ranks' is not looked at.
            shape, dtype: its, known to every rank.
            source: the rank that has it.
        """
        if self.size == 1:
            assert tensor is not None
            return tensor
        if self.rank == source and tensor is not None:
            moved = tensor.to(device=self.device, dtype=dtype).contiguous()
            if tuple(moved.shape) != tuple(shape):
                raise ValueError(f"expected a tensor of {list(shape)} to share, found {list(moved.shape)}")
        else:
            moved = torch.empty(shape, dtype=dtype, device=self.device)
        # As bytes: not every backend knows every dtype.
        with _waiting(self):
            dist.broadcast(moved.view(-1).view(torch.uint8), source)
        return moved

    def share_weight(self, weight: QuantizedWeight | None, spec: ModuleSpec, source: int) -> QuantizedWeight:
        """The quantised weight that rank ``source`` has, on the device.

        Args:
            weight: weight of that rank; the other ranks' is not looked at.
            spec: its, known to every rank; with as many output channels as ``weight`` has.
            source: the rank that has it.
        """
        if self.size == 1 and weight is not None:
            return weight
        of_scales = spec.granularity.scales_shape(*spec.shape)
        parts: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            ("codes", spec.shape, torch.uint8),
            ("scales", of_scales, torch_dtype(spec.scheme.scale_dtype)),
            ("zeros", of_scales, torch.uint8),
            ("g_idx", (spec.in_features,), torch.int32),
        ]
        if spec.scheme.tensor_scale != "none":
            parts.append(("tensor_scale", (), torch.float32))
        if spec.scheme.activations is not None and not spec.scheme.activations.dynamic:
            parts.append(("input_scale", (), torch.float32))
        shared = {
            name: self.share(None if weight is None else getattr(weight, name), shape, dtype, source)
            for name, shape, dtype in parts
        }
        return QuantizedWeight.from_codes(spec.scheme, shared.pop("codes"), **shared)

    def least(self, value: int) -> int:
        """The least of what the ranks have."""
        if self.size == 1:
            return value
        found = torch.tensor([value], device=self.device)
        with _waiting(self):
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found[0])

    def sum(self, tensor: Tensor, owners: Sequence[int]) -> None:
        """Adds up ``tensor`` of all ranks, in place, for the ranks ``owners``; the others' is undefined."""
        if self.size == 1:
            return
        with _waiting(self):
            if len(owners) == 1:
                dist.reduce(tensor, owners[0])
            else:
                dist.all_reduce(tensor)


ALONE = Ranks()
"""A run in one process."""


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started; :data:`ALONE` where it did not start this process.

    They meet beside what is done until their first exchange, since NCCL takes a second.

    Args:
        device: device of this process.

    Raises:
        UsageError: the environment says that there are several ranks, but not which this is.
        EnvironmentProblem: the others could not be reached, ended, or did not answer in time; from the first
            exchange on.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if not count.isdigit() or int(count) <= 1:
        yield ALONE
        return
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE={count}, but {missing[0]} is not set; start several ranks with torchrun"
        )
    if device.type == "cuda":
        # Page-locked memory and kernels of other libraries go to the current device.
        torch.cuda.set_device(device)
    # A rank that waits in vain raises an error instead of being killed by a watchdog thread.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    join = partial(
        dist.init_process_group,
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=_timeout()),
        device_id=device if device.type == "cuda" else None,
    )
    ranks = Ranks(int(os.environ["RANK"]), int(count), device, beside(join))
    try:
        yield ranks
        # Rank 0 finishes the folder; whoever left before would look to it like a rank that died.
        with _waiting(ranks):
            dist.barrier()
    finally:
        if ranks.joining is not None:
            wait([ranks.joining])
        if dist.is_initialized():
            dist.destroy_process_group()


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else _TIMEOUT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"{TIMEOUT}: expected a number of seconds above 0, found {text!r}")
    return seconds


@contextmanager
def _waiting(ranks: Ranks) -> Iterator[None]:
    """An exchange: begins when this rank has met the others, and says in one line that they don't answer."""
    try:
        if ranks.joining is not None:
            ranks.joining.result()
        yield
    except MarlinqError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        # torch's own errors of the distributed package are RuntimeErrors.
        raise EnvironmentProblem(
            f"rank {ranks.rank} of {ranks.size}: another rank ended, or did not answer within "
            f"{_timeout():g} s ({reason(error)}); look for its message, then start the command again with "
            "--resume and any number of ranks"
        ) from error


def own_share(sizes: Sequence[int], ranks: Ranks) -> list[int]:
    """Which of several pieces of work this rank does, ascending: the largest first to whoever has least."""
    loads = [0] * ranks.size
    mine = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least = min(range(ranks.size), key=lambda rank: (loads[rank], rank))
        loads[least] += sizes[index]
        if least == ranks.rank:
            mine.append(index)
    return sorted(mine)


@dataclass(frozen=True)
class Share:
    """A part of a solve.

    Attributes:
        owners: the ranks that solve it, one slice of the output channels each.
    """

    owners: tuple[int, ...]

    def rows(self, out_features: int, rank: int) -> slice:
        """The output channels of a module that ``rank``, one of the owners, solves."""
        place, count = self.owners.index(rank), len(self.owners)
        return slice(out_features * place // count, out_features * (place + 1) // count)


def share_out(shapes: Sequence[tuple[int, int]], size: int, *, cut: bool = True) -> list[Share]:
    """Who solves what, so that all are done at about the same time.

    A solve of N output channels and K input channels factorises a Hessian, K**3 / 3 products that each of its
    owners repeats, and takes N K**2 for the channels, which they share.

    Args:
        shapes: N and K of each solve.
        size: number of ranks.
        cut: whether a solve may be cut between output channels.

    Returns:
        The share of each solve, in order. Every rank finds the same.
    """
    loads = [0.0] * size
    shares: list[Share | None] = [None] * len(shapes)
    costs = [(float(k) ** 3 / 3, n * float(k) ** 2) for n, k in shapes]
    # A hair above the mean, for sums that round up.
    target = sum(map(sum, costs)) / size * (1 + 1e-9)
    for index in sorted(range(len(shapes)), key=lambda index: (-sum(costs[index]), index)):
        factor, rows = costs[index]
        order = sorted(range(size), key=lambda rank: (loads[rank], rank))

        def longest(count: int) -> float:
            # As long as nobody has more than a fair share, a cut only repeats a factorisation.
            after = loads[order[count - 1]] + factor + rows / count  # noqa: B023  # called in this turn only
            return max(after, loads[order[-1]], target)  # noqa: B023

        most = min(size, shapes[index][0]) if cut else 1
        best = min(range(1, most + 1), key=lambda count: (longest(count), count))
        owners = sorted(order[:best])
        for rank in owners:
            loads[rank] += factor + rows / best
        shares[index] = Share(tuple(owners))
    return [share for share in shares if share is not None]


class FollowingWriter(CheckpointWriter):
    """The writer of every rank but the first: it knows what is written, and writes nothing.

    Args:
        out: the folder that the first rank makes.
        state: result of :func:`share_state` from the first rank.
    """

    def __init__(self, out: Path, state: Mapping[str, Any]) -> None:
        self.out = out
        self.notes = dict(state["notes"])
        self.resumed = bool(state["resumed"])
        self._names = set(state["written"])
        # Where hidden states go that memory does not hold: the first rank's folder may be on another host.
        self.partial = Path(tempfile.gettempdir())

    @property
    def written(self) -> set[str]:
        return self._names

    def write(self, name: str, tensor: Tensor) -> None:
        """Nothing: the first rank writes."""

    def copy(self, name: str, source: SourceFile, offset: int) -> None:
        """Nothing: the first rank writes."""

    def commit(self, notes: Mapping[str, Any] | None = None) -> None:
        """Keeps the notes for this rank's report."""
        self.notes.update(notes or {})

    def finish(self, **_: Any) -> Path:
        """The folder that the first rank makes."""
        return self.out

    def keep_json(self, name: str, value: Any) -> None:
        """Nothing."""

    def kept_json(self, name: str) -> Any:
        """Nothing is there for this rank."""
        return None

    def remove(self, name: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is open."""


def share_state(writer: CheckpointWriter | None, ranks: Ranks) -> dict[str, Any]:
    """What the writer of the first rank found in the folder, on every rank."""
    state: dict[str, Any] = {}
    if writer is not None:
        state = {"written": sorted(writer.written), "notes": writer.notes, "resumed": writer.resumed}
    found: dict[str, Any] = ranks.share_json(state)
    return found


def share_documents(documents: Sequence[Document] | None, ranks: Ranks) -> list[Document]:
    """The calibration documents of the first rank, on every rank."""
    given = documents or []
    if ranks.size == 1:
        return list(given)
    lengths = ranks.share_json([len(document) for document in given])
    flat = torch.tensor([token for document in given for token in document.tokens], dtype=torch.int64)
    tokens = iter(ranks.share(flat, (sum(lengths),), torch.int64, 0).tolist())
    return [Document(tuple(itertools.islice(tokens, length))) for length in lengths]


def own_batches(documents: Sequence[Document], ranks: Ranks, *, token_budget: int, pad: bool) -> list[Batch]:
    """This rank's share of the calibration batches.

    Args:
        documents: all.
        ranks: this process and the others.
        token_budget, pad: as in :func:`~marlinq.calibration.make_batches`; the budget is less where there
            would be too few batches for all ranks.

    Raises:
        UsageError: there are fewer documents than ranks.
    """
    if ranks.size == 1:
        return make_batches(documents, token_budget=token_budget, pad=pad)
    if len(documents) < ranks.size:
        raise UsageError(
            f"calibration: {len(documents)} documents for {ranks.size} ranks; start fewer ranks, or give "
            "more --samples"
        )
    tokens = sum(map(len, documents))
    batches = make_batches(documents, token_budget=min(token_budget, tokens // ranks.size), pad=pad)
    shares = own_share([batch.ids.numel() for batch in batches], ranks)
    return [batches[index] for index in shares]
