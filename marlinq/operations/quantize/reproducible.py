"""Contexts in which torch computes the same bits in every run, as far as it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention kernels whose backward pass can sum in a fixed order; torch takes the first that supports the
inputs. cuDNN's is left out: on an H200, up to 22 of 299 repeats gave other bits."""
_MULTIPLE = 8
"""channels per head that the fused kernels need a multiple of"""


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Inside, torch uses deterministic algorithms where it has them, and TF32 for float32 GPU products."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # Any: the type stubs take this object for a plain module, without its settable attribute.
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    precision = torch.backends.cuda.matmul.allow_tf32
    _wish_for_order()
    # Filling new memory costs time and would only hide reads of uninitialised memory, which are bugs.
    deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = precision
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def reproducible_attention(device: torch.device) -> Iterator[None]:
    """Inside this and :func:`reproducible`, attention's backward pass on a GPU gives the same bits in every
    run."""
    if device.type != "cuda":
        yield
        return
    with _OrderedAttention():
        yield


class _OrderedAttention(TorchFunctionMode):
    """Makes torch's fused attention sum the gradient of the queries in a fixed order.

    The kernels do so only in torch's strict mode, where every operation without a fixed order raises an
    error. Other operations of a backward pass have none, so strict mode is on only while an attention's own
    backward pass is launched. On an H200 all of 299 repeats gave the same bits. Without strict mode, no
    repeat did with flash attention, and with memory-efficient attention it depended on the shape.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend(*args, **(kwargs or {}))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Tensor:
    """``F.scaled_dot_product_attention`` of [B, heads, T, channels], with a reproducible backward pass."""
    if enable_gqa:
        # The memory-efficient kernel does not support grouped queries.
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    fits = query.shape[-1] % _MULTIPLE == 0
    with sdpa_kernel(_KERNELS if fits else SDPBackend.MATH):
        attended = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    node = attended.grad_fn
    # SDPBackend.MATH makes many nodes, none with this name.
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_prehook(_order)
        node.register_hook(_wish_for_order)
    return attended


def _order(*_: Any) -> None:
    """Turns strict mode on: operations without a fixed order raise."""
    torch.use_deterministic_algorithms(True, warn_only=False)


def _wish_for_order(*_: Any) -> None:
    """Turns strict mode off: operations without a fixed order only warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
