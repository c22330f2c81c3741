"""The neutral tuple: one canonical value between every pair of on-disk layouts.

A quantised linear layer computes ``y = x @ W.T + b`` with K = in_features, N = out_features and

    W[n, k] = (codes[k, n] - zeros[g_idx[k], n]) * scales[g_idx[k], n]

where the K input channels are split into G groups. Every supported layout is a lossless encoding of a
subset of these tuples; what a layout can't hold it refuses by name (see ``Format.refusal``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marlinq.core.errors import CheckpointError

_SLAB = 512
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def group_count(in_features: int, group_size: int) -> int:
    """Groups along K; ``group_size`` -1 means one group (channelwise). A last group may be short."""
    return 1 if group_size == -1 else -(-in_features // group_size)


def trivial_g_idx(in_features: int, group_size: int) -> Tensor:
    """``g_idx[k] = k // group_size`` as int32 [K]; all zeros when ``group_size`` is -1."""
    if group_size == -1:
        return torch.zeros(in_features, dtype=torch.int32)
    return torch.arange(in_features, dtype=torch.int32) // group_size


def symmetric_zero(bits: int) -> int:
    """The zero point of a symmetric layer in code units: 8 for 4 bits, 128 for 8."""
    return 1 << (bits - 1)


@dataclass(frozen=True, eq=False)
class Grid:
    """Everything of a quantised linear but its codes: what decides whether a layout can hold it.

    Attributes:
        scales: float16, bfloat16 or float32 [G, N]; negative values are legal.
        zeros: uint8 [G, N], zero points in code units; ``2**(bits-1)`` everywhere means symmetric.
        g_idx: int32 [K], the group of each input channel, in ``0 .. G - 1``.
        group_size: channels a group, 1..K; a channelwise layer (one group) has ``group_size == K``.
        bits: 4 or 8.

    Raises:
        CheckpointError: the parts don't fit together (shape, dtype or range).
    """

    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    group_size: int
    bits: int = 4

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise CheckpointError(f"quantised tensor: expected 4 or 8 bits, found {self.bits}")
        if self.g_idx.dtype != torch.int32 or self.g_idx.dim() != 1:
            raise CheckpointError(
                f"g_idx: expected int32 [K], found {self.g_idx.dtype} {list(self.g_idx.shape)}"
            )
        k = self.in_features
        if not 1 <= self.group_size <= k:
            raise CheckpointError(f"group_size: expected 1..{k} (K), found {self.group_size}")
        if self.scales.dim() != 2 or self.scales.dtype not in _SCALE_DTYPES:
            raise CheckpointError(
                f"scales: expected float [G, N], found {self.scales.dtype} {list(self.scales.shape)}"
            )
        shape = (group_count(k, self.group_size), self.out_features)
        if tuple(self.scales.shape) != shape:
            raise CheckpointError(f"scales: expected {list(shape)}, found {list(self.scales.shape)}")
        if tuple(self.zeros.shape) != shape or self.zeros.dtype != torch.uint8:
            raise CheckpointError(
                f"zeros: expected uint8 {list(shape)}, found {self.zeros.dtype} {list(self.zeros.shape)}"
            )
        low, high = int(self.g_idx.min()), int(self.g_idx.max())
        if low < 0 or high >= shape[0]:
            raise CheckpointError(f"g_idx: expected values in 0..{shape[0] - 1}, found {low}..{high}")

    @property
    def in_features(self) -> int:
        """K."""
        return self.g_idx.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return self.scales.shape[1]

    @property
    def groups(self) -> int:
        """G, the number of groups along K."""
        return self.scales.shape[0]

    @property
    def symmetric(self) -> bool:
        """True when every zero point is the middle code, whatever a config file says."""
        return bool((self.zeros == symmetric_zero(self.bits)).all())

    @property
    def has_trivial_g_idx(self) -> bool:
        """True when channel k belongs to group ``k // group_size``: no activation order is stored."""
        return torch.equal(self.g_idx.cpu(), trivial_g_idx(self.in_features, self.group_size))


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """The integer weight of one linear layer, independent of any file layout.

    Attributes:
        codes: uint8 [K, N], each in ``0 .. 2**bits - 1``.
        scales: float16, bfloat16 or float32 [G, N]; negative values are legal.
        zeros: uint8 [G, N], zero points in code units; ``2**(bits-1)`` everywhere means symmetric.
        g_idx: int32 [K], the group of each input channel, in ``0 .. G - 1``.
        group_size: channels a group, 1..K; a channelwise layer (one group) has ``group_size == K``.
        bits: 4 or 8.

    Raises:
        CheckpointError: the parts don't fit together (shape, dtype or range).
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    group_size: int
    bits: int = 4

    def __post_init__(self) -> None:
        grid = self.grid
        if self.codes.dtype != torch.uint8 or tuple(self.codes.shape) != (
            grid.in_features,
            grid.out_features,
        ):
            raise CheckpointError(
                f"codes: expected uint8 {[grid.in_features, grid.out_features]}, "
                f"found {self.codes.dtype} {list(self.codes.shape)}"
            )

    @cached_property
    def grid(self) -> Grid:
        """Everything but the codes."""
        return Grid(self.scales, self.zeros, self.g_idx, self.group_size, self.bits)

    @property
    def in_features(self) -> int:
        """K."""
        return self.codes.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        """G, the number of groups along K."""
        return self.scales.shape[0]

    @property
    def symmetric(self) -> bool:
        """True when every zero point is the middle code, whatever a config file says."""
        return self.grid.symmetric

    @property
    def has_trivial_g_idx(self) -> bool:
        """True when channel k belongs to group ``k // group_size``: no activation order is stored."""
        return self.grid.has_trivial_g_idx

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight W, [N, K], computed in float32 and cast to ``dtype``."""
        groups = self.g_idx.long()
        zeros = self.zeros.to(torch.float32)
        scales = self.scales.to(torch.float32)
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.codes.device)
        for start in range(0, self.in_features, _SLAB):
            # A slab at a time: the float32 intermediates are several times the size of the codes.
            slab = slice(start, start + _SLAB)
            centred = self.codes[slab].to(torch.float32) - zeros[groups[slab]]
            weight[:, slab] = (centred * scales[groups[slab]]).t()
        return weight

    def difference(self, other: QuantizedTensor) -> str | None:
        """Where ``other`` first differs, in words, or None when both hold the same values.

        Scales are compared bit for bit after an exact widening to float32, so float16 and bfloat16
        scales of equal value agree while -0.0 and 0.0 do not.
        """
        if (self.bits, self.group_size) != (other.bits, other.group_size):
            return f"bits/group_size {self.bits}/{self.group_size} against {other.bits}/{other.group_size}"
        pairs = (
            ("codes", self.codes, other.codes),
            (
                "scales",
                self.scales.to(torch.float32).view(torch.int32),
                other.scales.to(torch.float32).view(torch.int32),
            ),
            ("zeros", self.zeros, other.zeros),
            ("g_idx", self.g_idx, other.g_idx),
        )
        for name, mine, theirs in pairs:
            if mine.shape != theirs.shape:
                return f"{name}: shape {list(mine.shape)} against {list(theirs.shape)}"
            unequal = mine != theirs
            if bool(unequal.any()):
                first = unequal.nonzero()[0].tolist()
                return f"{name}: {int(unequal.sum())} of {unequal.numel()} values differ, first at {first}"
        return None
