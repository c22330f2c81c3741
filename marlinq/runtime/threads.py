"""How many of torch's threads a small computation on a CPU takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_at_most(threads: int | None) -> Iterator[None]:
    """Compute with at most this many of torch's threads inside; None for all there are."""
    before = torch.get_num_threads()
    if threads is None or threads >= before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
