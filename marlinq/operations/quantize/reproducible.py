"""The same bits each time, as far as torch can."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# Not flash attention, nor cuDNN's: their backward passes add up in another order each time. Of 29 repeated on
# an H200 all had other bits with flash attention, 3 to 29 with cuDNN's, none with these.
_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    with sdpa_kernel(_ATTENTION), _OwnHeads():
        yield


class _OwnHeads(TorchFunctionMode):
    """Gives every head keys and values of its own: the kernels with fixed sums know no shared ones."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = _attend if func is F.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Tensor:
    """Torch's function of the name, which ``enable_gqa`` lets share keys and values between heads."""
    if enable_gqa:
        key, value = _for_heads(key, query.shape[-3]), _for_heads(value, query.shape[-3])
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def _for_heads(shared: Tensor, heads: int) -> Tensor:
    """[..., shared heads, T, channels] as [..., heads, T, channels], each for as many neighbours."""
    shape = (*shared.shape[:-2], heads // shared.shape[-3], *shared.shape[-2:])
    return shared.unsqueeze(-3).expand(shape).flatten(-4, -3)
