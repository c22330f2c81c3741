"""One token of a short convolution between gates, behind its input projection
(``cuda/step/convolution.cuh``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation, Parameters
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, Prepared, address, check_rows

_MOST_TAPS = 8
_THREADS = 128


@dataclass(frozen=True, eq=False)
class ConvolutionWeights:
    """Parameters of a gated convolution, besides its projections.

    Attributes:
        weight: weights of the convolution, float32 [channels, taps].
        bias: bias of the convolution, float32 [channels]; or None.
        gate: index, 0 to 2, of the part of the inputs that multiplies the convolution's result.
    """

    weight: Tensor
    bias: Tensor | None
    gate: int

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.weight.shape[0]

    @property
    def taps(self) -> int:
        """Tokens that the convolution spans."""
        return self.weight.shape[1]


class _Convolution(ctypes.Structure):
    """Mirrored in the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "ring", "weight", "bias", "lengths")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("channels", "first", "second", "gate")),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (("given", _Convolution), ("out", ctypes.c_void_p))


def convolution_refusal(taps: int, channels: int) -> str | None:
    """Why the kernel can't compute a gated convolution of these sizes, in one clause; None if it can."""
    if taps > _MOST_TAPS or channels % VECTOR:
        return (
            f"{taps} taps over {channels} channels; the kernel takes taps to {_MOST_TAPS}, channels in "
            f"multiples of {VECTOR}"
        )
    return None


def gated_convolution(
    x: Tensor, out: Tensor, ring: Tensor, lengths: Tensor, weights: ConvolutionWeights
) -> Prepared:
    """Compute the next token of every sequence; update the convolution's ring.

    If launched dependently, the kernel may read the ring while the stream's previous kernels still run.

    Args:
        x: [B, 3 * channels], the three parts; further columns are padding.
        out: [B, channels]; written.
        ring: [B, taps, channels], contiguous; inputs of the convolution, position p at index p modulo taps.
        lengths: int32 [B], tokens before this one.
        weights: parameters of the convolution.

    Raises:
        ValueError: a tensor has a dtype or shape that the kernel can't load or compute.
    """
    check_rows(x=x, out=out)
    batch, channels = out.shape[0], weights.channels
    refused = convolution_refusal(weights.taps, channels)
    if refused is not None:
        raise ValueError(refused)
    if ring.dtype != out.dtype or x.dtype != out.dtype:
        raise ValueError(f"x, ring: expected {out.dtype} as out")
    if tuple(ring.shape) != (batch, weights.taps, channels) or not ring.is_contiguous():
        raise ValueError(f"ring: expected {[batch, weights.taps, channels]}, found {list(ring.shape)}")
    if x.shape[1] < 3 * channels or out.shape[1] != channels:
        raise ValueError(f"x, out: {list(x.shape)} and {list(out.shape)} for {channels} channels")
    first, second = (index for index in range(3) if index != weights.gate)
    parameters: Parameters = (
        ("Element", ELEMENTS[out.dtype]),
        ("THREADS", _THREADS),
        ("TAPS", weights.taps),
    )
    given = _Convolution(
        x=x.data_ptr(),
        ring=ring.data_ptr(),
        weight=weights.weight.data_ptr(),
        bias=address(weights.bias),
        lengths=lengths.data_ptr(),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        channels=channels,
        first=first * channels,
        second=second * channels,
        gate=weights.gate * channels,
    )
    instantiation = Instantiation("step/convolution.cuh", "step_convolution", parameters)
    grid = batch * -(-channels // 2 // _THREADS)
    return Prepared(instantiation, grid, _THREADS, _Arguments(given, out.data_ptr()))
