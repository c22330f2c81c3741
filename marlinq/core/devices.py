"""Devices by name (``auto``, ``cpu``, ``cuda``, ``cuda:N``), and threads and clocks for them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from marlinq.core.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    import torch
else:
    from marlinq.core.lazy import torch

_NAME = re.compile(r"auto|cpu|cuda(?::\d{1,4})?")


def rank_and_size() -> tuple[int, int]:
    """Rank of this process and number of processes, as ``torchrun`` sets them; (0, 1) without
    ``torchrun``."""
    size = os.environ.get("WORLD_SIZE", "")
    if not size.isdigit() or int(size) < 2:
        return 0, 1
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0, int(size)


def check_device_name(name: str) -> str:
    """``name`` if it is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; torch is not imported.

    Raises:
        UsageError: it is something else.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"device: expected auto, cpu, cuda or cuda:N, found {name!r}")
    return name


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The torch device of a name; a GPU has its index.

    For several processes that ``torchrun`` started on a host, the first GPU of each is a different one.

    Args:
        device: ``auto`` or None (the first GPU, else the CPU), ``cpu``, ``cuda`` (the first GPU), ``cuda:N``,
            or a torch device of these kinds.

    Raises:
        UsageError: the name is not of one of these forms.
        EnvironmentProblem: the machine has no such device.
    """
    name = check_device_name("auto" if device is None else str(device))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    local = os.environ.get("LOCAL_RANK", "") if rank_and_size()[1] > 1 else ""
    index = int(name.partition(":")[2] or (local if local.isdigit() else 0))
    if index >= count:
        seen = f"{count or 'no'} CUDA device{'' if count == 1 else 's'}"
        raise EnvironmentProblem(
            f"device {name}: torch sees {seen}; run `marlinq doctor`, or choose the device cpu"
        )
    return torch.device("cuda", index)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` is a CPU with instructions for products of bfloat16 (AVX512_BF16 or AMX), which take
    half the time of float32's or less."""
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def start_beside(device: torch.device) -> Future[None]:
    """Start a GPU and cuBLAS in a thread, which takes a second and more; nothing for the CPU.

    Returns:
        A future to wait for before the GPU is used. It never raises: an error of the GPU is met, and
        reported, where the GPU is used.
    """

    def start() -> None:
        if device.type != "cuda":
            return
        torch.cuda.init()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            square = torch.ones(16, 16, dtype=torch.float16, device=device)
            square @ square

    return beside(start)


def beside(work: Callable[[], None]) -> Future[None]:
    """Run ``work`` in a thread of its own."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="marlinq-start")
    begun = thread.submit(work)
    thread.shutdown(wait=False)
    return begun


def read_clock(device: torch.device) -> float:
    """Wait until ``device`` has finished all its work; then seconds of a monotonic clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
