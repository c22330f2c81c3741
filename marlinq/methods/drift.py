"""Drift correction: change weights to compensate for errors of the quantised blocks before them.

In the quantised model a layer has inputs x, in the original o. GPTQ preserves W x, but W o is wanted. With
the Hessian H, the mean of 2 x x^T, and the drift C, the mean of 2 (o - x) x^T, the least-squares solution of
W' x = W o over the calibration is

    W' = W + W C (H + shift * I)^-1

A solver that quantises W' instead of W so aims at the original's outputs (Li et al. 2025, GPTAQ, solve the
same problem column by column). A projection that writes to the residual stream can compensate for more. The
layers after it read the stream h + W x, which should be the original's s = g + W o, and all errors of earlier
blocks are in h - g. With the drift D of the stream, the mean of 2 (s - h - W x) x^T,

    W' = W + D (H + shift * I)^-1

Both overfit, since W' also compensates for noise of the calibration. So only a share of the correction is
applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from marlinq.methods.factor import Factor
from marlinq.methods.hessian import HessianAccumulator, add_rounded_products, tensor_cores
from marlinq.methods.method import real_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_CHUNK_ROWS = 8192


class PairedHessian(HessianAccumulator):
    """The Hessian of a layer's inputs, and a drift.

    It is the drift of the inputs, or, after :meth:`write_to_stream`, that of the residual stream that the
    layer writes to. Arguments are those of :class:`HessianAccumulator`.
    """

    def __init__(self, in_features: int, *, device: torch.device, name: str) -> None:
        super().__init__(in_features, device=device, name=name)
        # None until inputs of both models are added; an expert's inputs never are.
        self._drift: Tensor | None = None
        self._pairs = 0
        # While shards are summed, the drift is a sum over tokens, and this is their number.
        self._shared: Tensor | None = None
        self._layer = name
        self._stream: int | None = None

    def write_to_stream(self, channels: int) -> None:
        """Declare that the layer's output is added to a residual stream of N = ``channels``.

        Call it before any input, on the statistics of every shard; then :meth:`add_stream` instead of
        :meth:`add_pair`.
        """
        self._stream = channels

    @property
    def of_stream(self) -> bool:
        """Whether :meth:`drift` is that of the residual stream."""
        return self._stream is not None

    def add_pair(self, x: Tensor, original: Tensor, mask: Tensor | None = None) -> None:
        """Add the inputs of one call to Hessian and drift; :meth:`add` adds to the Hessian alone.

        Args:
            x: float [..., K], inputs in the quantised model.
            original: float [..., K], inputs in the original for the same tokens.
            mask: as for :meth:`add`.
        """
        difference = original.to(torch.float32) - x.to(torch.float32)
        self._add(x, difference.to(x.dtype), mask)

    def add_stream(
        self, x: Tensor, stream: Tensor, original: Tensor | None, mask: Tensor | None = None
    ) -> None:
        """Add the inputs of one call of a layer that writes to a residual stream.

        Each token is weighted by the inverse of its stream's root mean square. Layers normalise the stream
        when they read it, so an error matters relative to the stream, and a few tokens have streams a hundred
        times as large as others (Sun et al. 2024, Massive Activations). Weighting by the inverse of the mean
        square would follow from that, but did worse on texts unlike the calibration
        (docs/lab-notes/quality.md).

        Args:
            x: float [..., K], inputs in the quantised model.
            stream: float [..., N], stream in the quantised model, with the layer's output added.
            original: float [..., N], stream in the original for the same tokens; None where it is not known.
            mask: as for :meth:`add`.
        """
        x, stream = x.reshape(-1, x.shape[-1]), stream.reshape(-1, stream.shape[-1])
        norm = partial(torch.linalg.vector_norm, dim=1, keepdim=True, dtype=torch.float32)
        sizes = norm(stream) / stream.shape[1] ** 0.5
        # A stream of zeros gets weight 0, and weighted inputs must not overflow 16 bits. Weights are rounded
        # to the dtype of the inputs, so that all channels of a token have the same weight.
        most = torch.finfo(x.dtype).max / 2 / norm(x, ord=math.inf)
        # Products of two weighted tensors are summed, so each is multiplied by the root of the token's
        # weight.
        weights = torch.where(sizes > 0, sizes.rsqrt(), 0.0).minimum(most).to(x.dtype)
        if original is None:
            self.add(x * weights, mask)
        else:
            difference = original.reshape(stream.shape).to(torch.float32) - stream.to(torch.float32)
            self._add(x * weights, difference.to(x.dtype) * weights, mask)

    def _add(self, x: Tensor, difference: Tensor, mask: Tensor | None) -> None:
        """Add inputs and their difference to the original's, in the same dtype.

        In 16 bits the difference, a small correction, is rounded by a share of at most 2**-9.
        """
        before = self.tokens
        self.add(x, mask)
        if self.tokens == before:
            return
        parts = [torch.split(real_rows(each, mask, self._layer), _CHUNK_ROWS) for each in (x, difference)]
        drift = self._sum()
        for rows, differences in zip(*parts, strict=True):
            total = self._pairs + len(rows)
            add_rounded_products(drift, differences, rows, self._pairs / total, 2.0 / total)
            self._pairs = total

    def merge(self, other: HessianAccumulator) -> None:
        super().merge(other)
        if isinstance(other, PairedHessian) and other._drift is not None:
            total = self._pairs + other._pairs
            mine = self._sum().mul_(self._pairs / total)
            mine.add_(other._drift.to(mine.device), alpha=other._pairs / total)
            self._pairs = total

    def as_share(self, tokens: int) -> list[Tensor]:
        # Created even if this shard has no drift: all shards must sum the same tensors.
        total = self._sum().mul_(self._pairs)
        self._shared = torch.tensor([self._pairs], device=total.device)
        return [*super().as_share(tokens), total, self._shared]

    @property
    def pairs(self) -> int:
        """Tokens that were added with the original's inputs or stream."""
        self._end_sharing()
        return self._pairs

    def drift(self) -> Tensor | None:
        """The drift, not a copy: float32 [K, K], the mean of 2 (o - x) x^T over the tokens added with the
        original's; for a residual stream [N, K], the mean of 2 (original - stream) x^T. None where it is
        zero."""
        self._end_sharing()
        return None if self._drift is None or not bool(self._drift.any()) else self._drift

    def _end_sharing(self) -> None:
        if self._shared is not None:
            self._pairs, self._shared = int(self._shared), None
            self._sum().div_(max(self._pairs, 1))

    def _sum(self) -> Tensor:
        if self._drift is None:
            k = len(self._mean)
            self._drift = self._mean.new_zeros(k if self._stream is None else self._stream, k)
        return self._drift


def trusted_share(share: float, tokens: int, in_features: int) -> float:
    """``share``, lowered where few tokens were seen: a least-squares fit of K unknowns to T tokens explains K
    / T of the variance by chance."""
    return share * max(0.0, 1 - in_features / tokens) if tokens else 0.0


def make_up_for_drift(
    weights: Sequence[Tensor],
    factor: Factor,
    drift: Tensor,
    *,
    share: float,
    limits: Sequence[float],
    of_stream: bool = False,
) -> list[Tensor] | None:
    """Weights that bring the outputs, or the residual stream, nearer to the original's on the quantised
    model's inputs.

    Args:
        weights: float32 [N_i, K] each.
        factor: factor of the damped Hessian of the inputs.
        drift: float32 [K, K]; [N, K] of the residual stream that the only weight writes to.
        share: share of the correction, 0 to 1.
        limits: largest norm of each weight's correction. A correction larger than the rounding error fits
            noise of the calibration.
        of_stream: whether the drift is that of the residual stream.

    Returns:
        New weights; None where the factor is of a stand-in for the Hessian, or the correction is not finite.
    """
    if factor.fallback is not None:
        return None
    corrected = []
    # With more output channels than input channels the equations are solved for the drift, once.
    shared = not of_stream and sum(map(len, weights)) > drift.shape[1]
    if shared:
        drift = factor.divide(drift.t()).t()
    for weight, limit in zip(weights, limits, strict=True):
        with tensor_cores():
            asked = drift if of_stream else weight @ drift
        correction = (asked if shared else factor.divide(asked.t()).t()) * share
        norm = float(correction.norm())
        if not math.isfinite(norm):
            return None
        corrected.append(weight + correction * min(1.0, limit / norm if norm else 1.0))
    return corrected
