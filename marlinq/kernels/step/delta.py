"""New tokens of a gated delta net, behind its input projections (``cuda/step/delta.cuh``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation, Parameters
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, Prepared, address, check_rows

_PARTS = 4
# Limits of the kernel: taps, and channels of keys and values. A block has four threads for each channel of a
# value, which keep the state in registers.
_MOST_TAPS, _WIDEST_KEY, _WIDEST_VALUE = 8, 128, 192
_LARGEST_STATE = 96 * 192
"""numbers of a head's state that fit into registers without spilling"""
_WIDEST_VALUE_WITH_RATES = 128
"""channels of a value up to which weights of rates fit into registers as well"""
_MOST_VECTORS = 4
"""vectors of a row of :class:`RateWeights` that a thread keeps, at most"""


@dataclass(frozen=True, eq=False)
class RateWeights:
    """Weights of the projections of betas and steps, which the kernel multiplies itself.

    Row ``2 * each * (h // each) + h % each`` of each tensor belongs to head h, where ``each`` is the number
    of value heads over :attr:`DeltaWeights.turns`: row h with one run. With several, both tensors are views
    of one weight that holds the betas' and the steps' rows in runs.

    Attributes:
        betas, steps: [rows, K], contiguous, in the dtype of activations.
    """

    betas: Tensor
    steps: Tensor

    @property
    def inner(self) -> int:
        """Channels K of the projections' input."""
        return self.betas.shape[1]


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """Parameters of a gated delta net besides its projections.

    Attributes:
        weight: weights of the convolution over queries, keys and values, float32 [channels, taps].
        decay: float32 [value heads]; its exponential multiplies the steps.
        step_bias: float32, a number for each step, added to the steps.
        norm: weight of the RMS norm of the result, [value channels] in the dtype of activations.
        eps: number added to the norm's mean square.
        key_heads: heads of queries and keys.
        value_heads: heads of values.
        key_dim: channels of a key.
        turns: runs in which the columns of both projections alternate (:class:`marlinq.models.parts.Slices`).
        rates: weights of the projections of betas and steps, or None where their results are given.
        beta_scale: factor of betas behind their sigmoid, a power of two.
        by_channel: whether each channel of a head's key has a step, and the sigmoid of a gate multiplies the
            norm's result before it is rounded. There are as many heads of keys as of values then, a single
            turn, and both weights of ``rates`` are those of betas.
    """

    weight: Tensor
    decay: Tensor
    step_bias: Tensor
    norm: Tensor
    eps: float
    key_heads: int
    value_heads: int
    key_dim: int
    turns: int
    rates: RateWeights | None = None
    beta_scale: float = 1.0
    by_channel: bool = False

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.norm.shape[0]

    @property
    def taps(self) -> int:
        """Tokens that the convolution spans."""
        return self.weight.shape[1]


_STRIDES = ("x_stride", "rates_stride", "out_stride", "next_stride", "steps_stride", "gates_stride")


class _Net(ctypes.Structure):
    """Mirrored in the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "rates", "ring", "state", "next", "weight", "decay"),
                *("step_bias", "norm", "lengths", "beta_weight", "step_weight", "steps", "gates"),
            )
        ),
        *((name, ctypes.c_longlong) for name in _STRIDES),
        *((name, ctypes.c_int) for name in ("key_heads", "value_heads", "turns", "tokens")),
        ("eps", ctypes.c_float),
        ("beta_scale", ctypes.c_float),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (("net", _Net), ("out", ctypes.c_void_p))


def delta_refusal(taps: int, key_dim: int, value_dim: int) -> str | None:
    """Why the kernel can't compute a net of these sizes, in one clause; None if it can."""
    too_wide = value_dim > _WIDEST_VALUE or key_dim > _WIDEST_KEY or key_dim * value_dim > _LARGEST_STATE
    if value_dim % 32 or too_wide or taps > _MOST_TAPS:
        return (
            f"keys of {key_dim} and values of {value_dim} channels, {taps} taps; the kernel takes values of "
            f"a multiple of 32 to {_WIDEST_VALUE}, keys to {_WIDEST_KEY}, a product of both to "
            f"{_LARGEST_STATE}, taps to {_MOST_TAPS}"
        )
    return None


def makes_rates(inner: int, value_dim: int) -> bool:
    """Whether the kernel can multiply :class:`RateWeights` of ``inner`` channels for values of
    ``value_dim`` channels."""
    if value_dim > _WIDEST_VALUE_WITH_RATES:
        return False
    return inner % VECTOR == 0 and inner <= _MOST_VECTORS * VECTOR * _PARTS * value_dim // 2


def delta(
    x: Tensor,
    rates: Tensor,
    out: Tensor,
    ring: Tensor,
    state: Tensor,
    lengths: Tensor,
    weights: DeltaWeights,
    *,
    states: Tensor | None = None,
    second: tuple[Tensor, Tensor] | None = None,
) -> Prepared:
    """Compute the next token of every sequence, and replace its state; or with ``states`` the next T tokens
    of the only sequence, whose state stays. The convolution's ring takes the tokens' inputs either way.

    If launched dependently, the kernel may read the state while the stream's previous kernels still run.

    Args:
        x: [B, or T, 2 * key heads * key channels + 2 * value heads * value channels], queries, keys, values
            and gates, in ``weights.turns`` runs.
        rates: [rows of x, 2 * value heads], betas and steps, in ``weights.turns`` runs; or with
            ``weights.rates`` [rows of x, K], the input of their projections.
        out: [rows of x, value heads * value channels]; written.
        ring: [B, slots, channels], contiguous, of taps + T - 1 slots at least; inputs of the convolution,
            position p at index p modulo slots.
        state: float32 [B, value heads, key channels, value channels], contiguous.
        lengths: int32 [B], tokens before these.
        weights: parameters and sizes of the delta net.
        states: float32 [T, value heads, key channels, value channels], contiguous but for the first axis; the
            states behind the tokens, written. None: one token a sequence.
        second: with ``weights.by_channel`` steps [rows of x, value heads * key channels] and gates [rows of
            x, value heads * value channels], which ``rates`` and ``x`` then lack; else None.

    Raises:
        ValueError: a tensor has a dtype or shape that the kernel can't load or compute.
    """
    check_rows(x=x, out=out)
    size, key_dim, heads = weights.value_dim, weights.key_dim, weights.value_heads
    refused = delta_refusal(weights.taps, key_dim, size)
    if refused is not None:
        raise ValueError(refused)
    if rates.dtype != x.dtype or ring.dtype != x.dtype or weights.norm.dtype != x.dtype:
        raise ValueError(f"rates, ring, norm: expected {x.dtype} as x")
    channels = 2 * weights.key_heads * key_dim + heads * size
    tokens = 1 if states is None else states.shape[0]
    batch, slots = ring.shape[0], ring.shape[1]
    if out.shape[0] != batch * tokens or (states is not None and batch != 1):
        raise ValueError(f"out: {out.shape[0]} rows for {batch} sequences of {tokens} tokens")
    if ring.shape[2] != channels or slots < weights.taps + tokens - 1 or not ring.is_contiguous():
        least = [batch, weights.taps + tokens - 1, channels]
        raise ValueError(f"ring: expected {least} or more slots, found {list(ring.shape)}")
    if states is not None and (states.shape[1:] != state.shape[1:] or not states[0].is_contiguous()):
        raise ValueError(f"states: expected {[tokens, *state.shape[1:]]}, found {list(states.shape)}")
    if tuple(state.shape) != (batch, heads, key_dim, size) or state.dtype != torch.float32:
        raise ValueError(
            f"state: expected float32 {[batch, heads, key_dim, size]}, found {list(state.shape)}"
        )
    made = weights.rates
    columns, numbers = channels + heads * size, 2 * heads
    steps = gates = None
    if weights.by_channel:
        if second is None or weights.key_heads != heads or weights.turns != 1:
            raise ValueError(
                "decays by channel: expected steps and gates, one turn and as many heads of keys"
            )
        (steps, gates), columns, numbers = second, channels, heads
        expected = [[len(x), heads * key_dim], [len(x), heads * size]]
        if [list(each.shape) for each in second] != expected:
            raise ValueError(f"steps, gates: expected {expected}")
        if any(each.dtype != x.dtype or each.stride(1) != 1 for each in second):
            raise ValueError(f"steps, gates: expected {x.dtype} in rows")
    if weights.step_bias.numel() != (heads * key_dim if weights.by_channel else heads):
        raise ValueError(f"step_bias: {weights.step_bias.numel()} numbers for {heads} heads")
    if made is not None:
        check_rows(rates=rates)
        rows = (weights.turns - 1) * (2 * heads // weights.turns) + heads // weights.turns
        if not makes_rates(made.inner, size) or any(
            each.dtype != x.dtype or each.shape[0] < rows or not each.is_contiguous()
            for each in (made.betas, made.steps)
        ):
            raise ValueError(f"weights of rates: expected {x.dtype} {[rows, made.inner]}, contiguous")
    if x.shape[1] < columns or rates.shape[1] < (numbers if made is None else made.inner):
        raise ValueError(f"x, rates: {list(x.shape)} and {list(rates.shape)} for {heads} heads of {size}")
    parameters: Parameters = (
        ("Element", ELEMENTS[x.dtype]),
        ("DK", key_dim),
        ("DV", size),
        ("TAPS", weights.taps),
        ("SLOTS", slots),
        ("PARTS", _PARTS),
        ("ROWS", -(-key_dim // _PARTS)),
        ("INNER", 0 if made is None else made.inner),
        ("BY_CHANNEL", weights.by_channel),
    )
    net = _Net(
        x=x.data_ptr(),
        rates=rates.data_ptr(),
        ring=ring.data_ptr(),
        state=state.data_ptr(),
        next=state.data_ptr() if states is None else states.data_ptr(),
        weight=weights.weight.data_ptr(),
        decay=weights.decay.data_ptr(),
        step_bias=weights.step_bias.data_ptr(),
        norm=weights.norm.data_ptr(),
        lengths=lengths.data_ptr(),
        beta_weight=0 if made is None else made.betas.data_ptr(),
        step_weight=0 if made is None else made.steps.data_ptr(),
        steps=address(steps),
        gates=address(gates),
        x_stride=x.stride(0),
        rates_stride=rates.stride(0),
        out_stride=out.stride(0),
        next_stride=0 if states is None else states.stride(0),
        steps_stride=0 if steps is None else steps.stride(0),
        gates_stride=0 if gates is None else gates.stride(0),
        key_heads=weights.key_heads,
        value_heads=heads,
        turns=weights.turns,
        tokens=tokens,
        eps=weights.eps,
        beta_scale=weights.beta_scale,
    )
    instantiation = Instantiation("step/delta.cuh", "step_delta", parameters)
    return Prepared(instantiation, batch * heads, _PARTS * size, _Arguments(net, out.data_ptr()))
