"""The same bits each time, as far as torch can."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# Not torch's fused kernels, which add up the gradient of the queries in another order each time: of 299
# repeats on an H200 all had other bits than the first with flash attention, 19 to 296 with cuDNN's, 13 with
# the memory-efficient one, none with the plain one. An algorithm of a fixed order they take only where every
# operation that has none raises an error.
_ATTENTION = SDPBackend.MATH


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """The same bits each time, as far as torch can; float32 products on a GPU in TF32."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # Typed as a plain module, which it only poses as.
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    precision = torch.backends.cuda.matmul.allow_tf32
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Memory that is read before it is written would be a mistake, not a source of chance.
    deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = device.type == "cuda"
    try:
        with warnings.catch_warnings():
            # Warned of for every kind of attention, whether or not its sums are in a fixed order.
            warnings.filterwarnings("ignore", ".*ttention defaults to a non-deterministic algorithm")
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = precision
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def reproducible_attention(device: torch.device) -> Iterator[None]:
    """Attention whose backward pass on a GPU has the same bits each time, inside :func:`reproducible`."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(_ATTENTION):
        yield
