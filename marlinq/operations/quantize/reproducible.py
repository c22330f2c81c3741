"""The same bits each time, as far as torch can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# Kernels whose backward pass can add up in a fixed order, and the plain one, which always does; torch takes
# the first that can do what is asked. Not cuDNN's: of 299 repeats on an H200 up to 22 had other bits.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Channels of a head that the kernels take as they are.
_MULTIPLE = 8


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
    _wish_for_order()
    # Memory that is read before it is written would be a mistake, not a source of chance.
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
    """Attention whose backward pass on a GPU has the same bits each time, inside :func:`reproducible`."""
    if device.type != "cuda":
        yield
        return
    with _OrderedAttention():
        yield


class _OrderedAttention(TorchFunctionMode):
    """Torch's attention, its fused kernels told to add up the gradient of the queries in a fixed order.

    They do so only where every operation that has no such order raises an error, which is more than the
    other operations of a pass can be held to. So that is in force while an attention's own backward pass is
    launched. On an H200, of 299 repeats none had other bits than the first; without it all had with flash
    attention, and none to all, by the shape, with the memory-efficient one.
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
    """Torch's function of the name, of [B, heads, T, channels]."""
    if enable_gqa:
        # Which the memory-efficient kernel can't do.
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    fits = query.shape[-1] % _MULTIPLE == 0
    with sdpa_kernel(_KERNELS if fits else SDPBackend.MATH):
        found = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    node = found.grad_fn
    # Plain attention is many nodes, none of this name.
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_prehook(_order)
        node.register_hook(_wish_for_order)
    return found


def _order(*_: Any) -> None:
    """From here on, operations without a fixed order raise."""
    torch.use_deterministic_algorithms(True, warn_only=False)


def _wish_for_order(*_: Any) -> None:
    """From here on, they warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
