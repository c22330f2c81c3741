"""The devices that computations run on, by the names that every command and function takes."""

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
    """Which of how many processes this is, as ``torchrun`` says it; (0, 1) for one on its own."""
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
    """The CPU, or a GPU that is there, with its index.

    Of several processes that ``torchrun`` started on a host, each has a first GPU of its own.

    Args:
        device: ``auto`` or None (the first GPU, else the CPU), ``cpu``, ``cuda`` (the first GPU), ``cuda:N``,
            or a torch device of these kinds.

    Raises:
        UsageError: the name means no device.
        EnvironmentProblem: the device is not there.
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
            f"device {name}: torch sees {seen}; run `marlinq doctor`, or choose --device cpu"
        )
    return torch.device("cuda", index)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` is a CPU with instructions for products of bfloat16 (AVX512_BF16 or AMX), which take
    half the time of float32's or less."""
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def start_beside(device: torch.device) -> Future[None]:
    """Lets a thread start a GPU and its library of products, which takes a second and more, beside the work
    that needs no GPU; nothing on the CPU.

    Returns:
        What to wait for before the GPU is used. What goes wrong in the thread goes wrong there too, and is
        said there.
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
    """Lets a thread of its own do ``work``."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="marlinq-start")
    begun = thread.submit(work)
    thread.shutdown(wait=False)
    return begun


def read_clock(device: torch.device) -> float:
    """Seconds of a monotonic clock, when all work that was given to ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
