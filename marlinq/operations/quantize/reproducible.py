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
from torch.utils.checkpoint import checkpoint

# Of a GPU's memory, what scores of a piece of attention may take, beside some copies of them.
_SCORES_SHARE = 1 / 32


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
    most = int(torch.cuda.get_device_properties(device).total_memory * _SCORES_SHARE)
    with _PlainAttention(most):
        yield


class _PlainAttention(TorchFunctionMode):
    """Torch's plain attention in the place of its fused kernels.

    These add up the gradient of the queries in another order each time: of 299 repeats on an H200 all had
    other bits than the first with flash attention, 19 to 296 with cuDNN's, 13 with the memory-efficient one,
    none with the plain one. An algorithm of a fixed order they take only where every operation that has none
    raises an error.

    The plain one keeps a score for every pair of tokens. So of long text a few rows and heads run at a time,
    and the backward pass computes them again.

    Args:
        most: bytes of scores of a piece, but for those of one head of keys.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Torch's function of the name, of [B, heads, T, channels]."""
        nbytes = query.shape[:-1].numel() * key.shape[-2] * torch.float32.itemsize
        if nbytes <= self._most or query.dim() != 4:
            return _plain(query, key, value, attn_mask, *args, **kwargs)
        # Heads of queries that share one of keys stay together.
        rows = _pieces(query.shape[0], self._most * query.shape[0] // nbytes)
        shared = _pieces(key.shape[1], self._most * query.shape[0] * key.shape[1] // nbytes)
        per = query.shape[1] // key.shape[1]
        return torch.cat(
            [
                torch.cat(
                    [
                        self._piece(
                            query[row, per * some.start : per * some.stop],
                            key[row, some],
                            value[row, some],
                            _part(attn_mask, row, slice(per * some.start, per * some.stop)),
                            *args,
                            **kwargs,
                        )
                        for some in shared
                    ],
                    dim=1,
                )
                for row in rows
            ]
        )

    def _piece(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = (
            checkpoint(_plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            if torch.is_grad_enabled()
            else _plain(*args, **kwargs)
        )
        return found


def _plain(*args: Any, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def _pieces(count: int, most: int) -> list[slice]:
    """``count`` things in parts of at most ``most``, of one where that is less."""
    step = max(1, most)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _part(mask: Tensor | None, row: slice, heads: slice) -> Tensor | None:
    """What of a mask, which broadcasts to [B, heads, T, T], is some rows' and heads'."""
    if mask is None:
        return None
    if mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask[..., heads, :, :]
    return mask[row] if mask.dim() == 4 and mask.shape[0] > 1 else mask
