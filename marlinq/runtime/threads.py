"""Limit the number of torch's threads for a small computation on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_at_most(threads: int | None) -> Iterator[None]:
    """Use at most ``threads`` of torch's threads inside; None for all."""
    before = torch.get_num_threads()
    if threads is None or threads >= before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
