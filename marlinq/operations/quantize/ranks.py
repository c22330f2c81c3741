"""Ranks: processes, started by ``torchrun``, that share a quantise run.

Every rank holds the block that is being quantised and a share of the calibration batches. For each block

1. every rank runs its own batches and sums up their statistics;
2. the sums are reduced to the ranks that solve (one reduction for each input that projections share);
3. modules, or output channels of large ones, are solved by different ranks (:func:`share_out`);
4. each solver broadcasts its results, so that every rank runs its batches on the quantised block.

Rank 0 alone reads text, writes the folder and keeps the journal, and tells the others what is written
already. A run can therefore be resumed with another number of ranks.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from marlinq.core.display import counted
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import EnvironmentProblem, MarlinqError, UnsupportedError, UsageError
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import ModuleSpec

TIMEOUT = "MARLINQ_RANK_TIMEOUT"
"""Name of the environment variable with the seconds that a rank waits for the others."""
_TIMEOUT_SECONDS = 3600.0
"""default of ``TIMEOUT``: rank 0 alone writes calibration text, for up to half an hour"""
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among those that share its run.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        device: device of this process, on which exchanged tensors are.
        joining: future that ends when this process is connected to the others; the first exchange waits for
            it. None in a run with one process.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    joining: Future[None] | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the output."""
        return self.rank == 0

    def meet(self) -> None:
        """Waits until this rank is connected to the others. Without this call, the first exchange waits."""
        with _waiting(self):
            pass

    def share_json(self, value: Any, source: int = 0) -> Any:
        """The JSON value of rank ``source``, on every rank; ``value`` is ignored on the others."""
        if self.size == 1:
            return value
        data = torch.empty(0, dtype=torch.uint8)
        if self.rank == source:
            data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = self.share(torch.tensor([data.numel()]), (1,), torch.int64, source)
        text = self.share(data, (int(length[0]),), torch.uint8, source)
        return json.loads(bytes(text.cpu().numpy()))

    def share(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        """The tensor of rank ``source``, on every rank's device.

        Args:
            tensor: the tensor on rank ``source``; ignored on the others.
            shape, dtype: its shape and dtype, on every rank.
            source: rank that has the tensor.
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
        # As bytes, because not every backend knows every dtype.
        with _waiting(self):
            dist.broadcast(moved.view(-1).view(torch.uint8), source)
        return moved

    def share_weight(self, weight: QuantizedWeight | None, spec: ModuleSpec, source: int) -> QuantizedWeight:
        """The quantised weight of rank ``source``, on every rank's device.

        Args:
            weight: the weight on rank ``source``; ignored on the others.
            spec: its shape and scheme, on every rank.
            source: rank that has the weight.
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
        """The smallest ``value`` of all ranks."""
        if self.size == 1:
            return value
        smallest = torch.tensor([value], device=self.device)
        with _waiting(self):
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest[0])

    def sum(self, tensor: Tensor, owners: Sequence[int]) -> None:
        """Sums ``tensor`` over all ranks, in place, on ranks ``owners``; elsewhere it becomes undefined."""
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

    They connect in a thread beside other work, because NCCL takes a second for it.

    Args:
        device: device of this process.

    Raises:
        UsageError: WORLD_SIZE says that there are several ranks, but another variable of torchrun is missing.
        EnvironmentProblem: other ranks could not be reached, ended, or did not answer in time; raised by the
            first exchange or a later one.
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
        # Pinned memory and other libraries' kernels use the current device.
        torch.cuda.set_device(device)
    # With this setting a rank that waits too long raises an error instead of being killed by NCCL's watchdog.
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
        # All ranks leave together: to rank 0, which is still writing, one that left early would seem dead.
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
    """Wraps an exchange: waits until this rank is connected, and turns errors into one line for the user."""
    try:
        if ranks.joining is not None:
            ranks.joining.result()
        yield
    except MarlinqError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        # Errors of torch.distributed are RuntimeErrors.
        raise EnvironmentProblem(
            f"rank {ranks.rank} of {ranks.size}: another rank ended, or did not answer within "
            f"{_timeout():g} s ({reason(error)}); look for its message, then start the command again with "
            "--resume and any number of ranks"
        ) from error


def own_share(sizes: Sequence[int], ranks: Ranks) -> list[int]:
    """Indices of this rank's pieces of work, ascending. Pieces are dealt largest first, each to the rank with
    the least work so far."""
    loads = [0] * ranks.size
    mine = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least = min(range(ranks.size), key=lambda rank: (loads[rank], rank))
        loads[least] += sizes[index]
        if least == ranks.rank:
            mine.append(index)
    return sorted(mine)


@dataclass(frozen=True)
class RankShare:
    """The ranks that share one solve.

    Attributes:
        owners: ranks, each of which solves one slice of the output channels.
    """

    owners: tuple[int, ...]

    def rows(self, out_features: int, rank: int) -> slice:
        """The output channels of a module that ``rank``, one of the owners, solves."""
        place, count = self.owners.index(rank), len(self.owners)
        return slice(out_features * place // count, out_features * (place + 1) // count)


def share_out(shapes: Sequence[tuple[int, int]], size: int, *, cut: bool = True) -> list[RankShare]:
    """Distributes solves over ranks so that all ranks finish at about the same time.

    A solve of N output and K input channels costs K**3 / 3 products to factorise the Hessian, which each of
    its owners repeats, and N K**2 products for the channels, which its owners share.

    Args:
        shapes: (N, K) of each solve.
        size: number of ranks.
        cut: whether a solve may be split between output channels.

    Returns:
        The share of each solve, in order, computed alike on every rank.
    """
    loads = [0.0] * size
    shares: list[RankShare | None] = [None] * len(shapes)
    costs = [(float(k) ** 3 / 3, n * float(k) ** 2) for n, k in shapes]
    # The factor keeps a sum that was rounded up from counting as above the mean.
    target = sum(map(sum, costs)) / size * (1 + 1e-9)
    for index in sorted(range(len(shapes)), key=lambda index: (-sum(costs[index]), index)):
        factor, rows = costs[index]
        order = sorted(range(size), key=lambda rank: (loads[rank], rank))

        def longest(count: int) -> float:
            # At least the mean: below it, a further cut gains nothing and repeats a factorisation.
            after = loads[order[count - 1]] + factor + rows / count  # noqa: B023  # called in this turn only
            return max(after, loads[order[-1]], target)  # noqa: B023

        most = min(size, shapes[index][0]) if cut else 1
        best = min(range(1, most + 1), key=lambda count: (longest(count), count))
        owners = sorted(order[:best])
        for rank in owners:
            loads[rank] += factor + rows / best
        shares[index] = RankShare(tuple(owners))
    return [share for share in shares if share is not None]


class FollowingWriter(CheckpointWriter):
    """The writer of every rank but the first: it knows what is written, and writes nothing.

    Args:
        out: folder that the first rank writes.
        state: names already written, from :func:`share_state`.
    """

    def __init__(self, out: Path, state: Mapping[str, Any]) -> None:
        self.out = out
        self.notes = dict(state["notes"])
        self.resumed = bool(state["resumed"])
        self._names = set(state["written"])
        # Folder for hidden states that don't fit memory; the first rank's folder may be on another host.
        self.partial = Path(tempfile.gettempdir())

    @property
    def written(self) -> set[str]:
        return self._names

    def write(self, name: str, tensor: Tensor) -> None:
        """Nothing: the first rank writes."""

    def copy(
        self,
        name: str,
        source: SourceFile,
        offset: int,
        check_piece: Callable[[memoryview], None] | None = None,
    ) -> None:
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
    """Written tensors and notes of the first rank's ``writer``, on every rank."""
    state: dict[str, Any] = {}
    if writer is not None:
        state = {"written": sorted(writer.written), "notes": writer.notes, "resumed": writer.resumed}
    shared: dict[str, Any] = ranks.share_json(state)
    return shared


def share_documents(documents: Sequence[Document] | None, ranks: Ranks) -> list[Document]:
    """The calibration documents of the first rank, on every rank.

    Raises:
        UnsupportedError: there are several ranks, and a document holds images.
    """
    given = documents or []
    if ranks.size == 1:
        return list(given)
    if ranks.share_json(any(document.beside is not None for document in given)):
        raise UnsupportedError(
            f"calibration: rows with images need a single process, found {ranks.size} ranks; start it "
            "without torchrun"
        )
    lengths = ranks.share_json([len(document) for document in given])
    flat = torch.tensor([token for document in given for token in document.tokens], dtype=torch.int64)
    tokens = iter(ranks.share(flat, (sum(lengths),), torch.int64, 0).tolist())
    return [Document(tuple(itertools.islice(tokens, length))) for length in lengths]


def own_batches(documents: Sequence[Document], ranks: Ranks, *, token_budget: int, pad: bool) -> list[Batch]:
    """This rank's share of the calibration batches.

    Args:
        documents: documents of all ranks.
        ranks: processes that share the run.
        token_budget, pad: as in :func:`~marlinq.calibration.make_batches`; the budget is lowered where there
            would be fewer batches than ranks.

    Raises:
        UsageError: there are fewer documents than ranks.
    """
    if ranks.size == 1:
        return make_batches(documents, token_budget=token_budget, pad=pad)
    if len(documents) < ranks.size:
        raise UsageError(
            f"calibration: {counted(len(documents), 'documents')} for {ranks.size} ranks; start fewer ranks, "
            "or give more --samples"
        )
    tokens = sum(map(len, documents))
    batches = make_batches(documents, token_budget=min(token_budget, tokens // ranks.size), pad=pad)
    shares = own_share([batch.ids.numel() for batch in batches], ranks)
    return [batches[index] for index in shares]
