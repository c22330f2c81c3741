"""One token of a Mamba-2 mixer, behind its input projection (``cuda/step/mamba.cuh``)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation, Parameters
from marlinq.kernels.launch.prepared import ELEMENTS, Prepared, address, check_rows

# Limits of the kernel: taps, state channels of a head, and channels of a value.
_MOST_TAPS, _MOST_KEYS, _MOST_VALUES = 8, 256, 256
# Columns of the state that a block holds, the most first. Each thread holds four of them.
_COLUMNS = (64, 32, 16)
# Rows of the state that a thread holds: with four columns, 32 registers.
_ROWS = 8
_MOST_THREADS = 256
# Blocks of a launch from which on they are not made smaller: small blocks convolve the same keys more often.
_ENOUGH_BLOCKS = 96


@dataclass(frozen=True, eq=False)
class MambaWeights:
    """Parameters and sizes of a Mamba-2 mixer, besides its projections. All tensors are float32.

    Attributes:
        weight: weights of the convolution over values, keys and queries, [channels, taps].
        bias: bias of the convolution, [channels].
        rates: A, [heads].
        step_bias: numbers added to the steps, [heads].
        skip: D, [heads].
        norm: weight of the norm, [width]; None without a norm.
        norm_width: channels that are normalised together; the width without a norm.
        norm_first: whether the norm stands before the product with the gate.
        eps: number added to the norm's mean square.
        heads, head_dim: number of heads, and channels of a value.
        groups, state_dim: groups of heads, which share keys and queries, and channels of a key.
        least_step, most_step: bounds of a step, the upper one maybe infinite.
        gate_scale, step_scale, result_scale: factors on the projected gates and steps, and on the result.
    """

    weight: Tensor
    bias: Tensor
    rates: Tensor
    step_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    norm_width: int
    norm_first: bool
    eps: float
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    least_step: float = 0.0
    most_step: float = math.inf
    gate_scale: float = 1.0
    step_scale: float = 1.0
    result_scale: float = 1.0

    @property
    def width(self) -> int:
        """Channels of the values, the gates and the result."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def taps(self) -> int:
        """Tokens that the convolution spans."""
        return self.weight.shape[1]


@dataclass(frozen=True, eq=False)
class MambaWorkspace:
    """Memory through which blocks of one launch exchange results that are normalised together.

    Attributes:
        results: float32 results before the norm.
        squares: float32 sums of squares, one a block.
        counters: int32, zero between launches.
    """

    results: Tensor
    squares: Tensor
    counters: Tensor

    @classmethod
    def of(cls, mixers: Iterable[MambaWeights], batch: int, device: torch.device) -> MambaWorkspace:
        """Memory for a token of ``batch`` rows of any of ``mixers``."""
        widths = [(each.width, each.width // each.norm_width) for each in mixers]
        width = max((width for width, _ in widths), default=0)
        groups = max((groups for _, groups in widths), default=0)
        return cls(
            torch.zeros(batch * width, device=device),
            torch.zeros(batch * width // _COLUMNS[-1], device=device),
            torch.zeros(batch * groups, dtype=torch.int32, device=device),
        )


class _Mixer(ctypes.Structure):
    """Mirrored in the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "ring", "state", "weight", "bias", "rates", "step_bias", "skip", "norm", "lengths"),
                *("results", "squares", "counters"),
            )
        ),
        *((name, ctypes.c_longlong) for name in ("x_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("heads", "groups", "norm_width")),
        *(
            (name, ctypes.c_float)
            for name in ("eps", "least_step", "most_step", "gate_scale", "step_scale", "result_scale")
        ),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (("mixer", _Mixer), ("out", ctypes.c_void_p))


def mamba_refusal(taps: int, state_dim: int, head_dim: int, norm_width: int) -> str | None:
    """Why the kernel can't compute a mixer of these sizes, in one clause; None if it can."""
    if head_dim % _COLUMNS[-1] or head_dim > _MOST_VALUES or state_dim > _MOST_KEYS or taps > _MOST_TAPS:
        return (
            f"heads of {head_dim} channels with a state of {state_dim}, {taps} taps; the kernel takes heads "
            f"of a multiple of {_COLUMNS[-1]} to {_MOST_VALUES}, states to {_MOST_KEYS}, taps to {_MOST_TAPS}"
        )
    if norm_width % head_dim:
        return f"a norm over {norm_width} channels, which are no whole heads of {head_dim}"
    return None


def mamba(
    x: Tensor,
    out: Tensor,
    ring: Tensor,
    state: Tensor,
    lengths: Tensor,
    weights: MambaWeights,
    workspace: MambaWorkspace,
) -> Prepared:
    """Compute the next token of every sequence; update the convolution's ring and the state.

    If launched dependently, the kernel may read the state while the stream's previous kernels still run.

    Args:
        x: [B, 2 * width + 2 * groups * state channels + heads], gates, values, keys, queries and steps;
            further columns are padding.
        out: [B, width]; written.
        ring: [B, taps, channels], contiguous; inputs of the convolution, position p at index p modulo taps.
        state: float32 [B, heads, state channels, value channels], contiguous; replaced.
        lengths: int32 [B], tokens before this one.
        weights: parameters and sizes of the mixer.
        workspace: memory of :meth:`MambaWorkspace.of` for this mixer and batch.

    Raises:
        ValueError: a tensor has a dtype or shape that the kernel can't load or compute.
    """
    check_rows(out=out)
    batch, heads, size, keys = out.shape[0], weights.heads, weights.head_dim, weights.state_dim
    refused = mamba_refusal(weights.taps, keys, size, weights.norm_width)
    if refused is not None:
        raise ValueError(refused)
    if x.dtype != out.dtype or ring.dtype != out.dtype or x.stride(-1) != 1:
        raise ValueError(f"x, ring: expected rows of {out.dtype} as out")
    if tuple(ring.shape) != (batch, weights.taps, weights.channels) or not ring.is_contiguous():
        raise ValueError(
            f"ring: expected {[batch, weights.taps, weights.channels]}, found {list(ring.shape)}"
        )
    if tuple(state.shape) != (batch, heads, keys, size) or state.dtype != torch.float32:
        raise ValueError(f"state: expected float32 {[batch, heads, keys, size]}, found {list(state.shape)}")
    if x.shape[1] < weights.width + weights.channels + heads or out.shape[1] != weights.width:
        raise ValueError(f"x, out: {list(x.shape)} and {list(out.shape)} for {heads} heads of {size}")
    columns, parts = _division(batch, heads, size, keys)
    gating = "ALONE" if weights.norm is None else "NORM_FIRST" if weights.norm_first else "NORM_BEHIND"
    parameters: Parameters = (
        ("Element", ELEMENTS[out.dtype]),
        ("N", keys),
        ("P", size),
        ("COLUMNS", columns),
        ("PARTS", parts),
        ("ROWS", -(-keys // parts)),
        ("TAPS", weights.taps),
        ("GATING", f"Gating::{gating}"),
    )
    mixer = _Mixer(
        x=x.data_ptr(),
        ring=ring.data_ptr(),
        state=state.data_ptr(),
        weight=weights.weight.data_ptr(),
        bias=weights.bias.data_ptr(),
        rates=weights.rates.data_ptr(),
        step_bias=weights.step_bias.data_ptr(),
        skip=weights.skip.data_ptr(),
        norm=address(weights.norm),
        lengths=lengths.data_ptr(),
        results=workspace.results.data_ptr(),
        squares=workspace.squares.data_ptr(),
        counters=workspace.counters.data_ptr(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        heads=heads,
        groups=weights.groups,
        norm_width=weights.norm_width,
        eps=weights.eps,
        least_step=weights.least_step,
        most_step=weights.most_step,
        gate_scale=weights.gate_scale,
        step_scale=weights.step_scale,
        result_scale=weights.result_scale,
    )
    instantiation = Instantiation("step/mamba.cuh", "step_mamba", parameters)
    grid = batch * heads * (size // columns)
    return Prepared(instantiation, grid, parts * columns // 4, _Arguments(mixer, out.data_ptr()))


def _division(batch: int, heads: int, size: int, keys: int) -> tuple[int, int]:
    """(columns of a block, threads that share a column): the largest blocks that fill the GPU, else the
    smallest."""
    fitting = []
    for columns in _COLUMNS:
        # Whole warps.
        unit = 32 // math.gcd(32, columns // 4)
        parts = -(-keys // (_ROWS * unit)) * unit
        if size % columns == 0 and parts * columns // 4 <= _MOST_THREADS:
            fitting.append((columns, parts))
    enough = [pair for pair in fitting if batch * heads * (size // pair[0]) >= _ENOUGH_BLOCKS]
    return enough[0] if enough else fitting[-1]
