"""Asymmetric calibration: weights that make up for what quantised blocks before them did to their inputs.

GPTQ keeps W x for the inputs x that the quantised model gives a layer. What should be kept is W o for the
inputs o that the original gives it. With the Hessian H, the mean of 2 x x^T, and the drift C, the mean of
2 (o - x) x^T, the least-squares solution of W' x = W o over the calibration is

    W' = W + W C (H + shift * I)^-1

and any solver that goes on from W' instead of W quantises for the original's outputs (Li et al. 2025, GPTAQ,
solve the same problem column by column). A projection that writes to the residual stream can do more. What
is read from there is the stream h + W x, which should be the original's s = g + W o: all that the blocks
before have done to the stream is in h - g. With the drift D of the stream, the mean of 2 (s - h - W x) x^T,

    W' = W + D (H + shift * I)^-1

All of it overfits: W' makes up for noise of the calibration too. So only a share of the way is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from marlinq.methods.base import real_rows
from marlinq.methods.factor import Factor
from marlinq.methods.hessian import HessianAccumulator, add_rounded_products, tensor_cores

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_CHUNK_ROWS = 8192


class PairedHessian(HessianAccumulator):
    """The Hessian of a layer's inputs, and their drift from the original's, or that of the residual stream
    that the layer writes to (:meth:`write_to_stream`).

    Args: as for :class:`HessianAccumulator`.
    """

    def __init__(self, in_features: int, *, device: torch.device, name: str) -> None:
        super().__init__(in_features, device=device, name=name)
        # Of inputs that come without the original's, such as an expert's, there is none.
        self._drift: Tensor | None = None
        self._pairs = 0
        # While shards are added up, the drift is a sum, and this is the tokens it is of.
        self._shared: Tensor | None = None
        self._layer = name
        self._stream: int | None = None

    def write_to_stream(self, channels: int) -> None:
        """Says that the layer's output is added to a residual stream of N = ``channels``. Inputs then come
        through :meth:`add_stream`, not :meth:`add_pair`. Called before the first; with shards, on each."""
        self._stream = channels

    @property
    def of_stream(self) -> bool:
        """Whether :meth:`drift` is that of the residual stream."""
        return self._stream is not None

    def add_pair(self, x: Tensor, original: Tensor, mask: Tensor | None = None) -> None:
        """Counts the inputs of one call. Tokens that only :meth:`add` sees have no part in the drift.

        Args:
            x: float [..., K], of the quantised model.
            original: float, of the same shape, of the original for the same tokens.
            mask: as for :meth:`add`.
        """
        difference = original.to(torch.float32) - x.to(torch.float32)
        self._add(x, difference.to(x.dtype), mask)

    def add_stream(
        self, x: Tensor, stream: Tensor, original: Tensor | None, mask: Tensor | None = None
    ) -> None:
        """Counts the inputs of one call of a layer that writes to a residual stream.

        A token counts by the inverse of its stream's root mean square. Whatever reads the stream norms it
        first, so that an error matters by its size relative to the stream, and a few tokens have streams a
        hundred times as large as all others (Sun et al. 2024, Massive Activations). The inverse of the mean
        square would follow from that alone, but loses on texts unlike the calibration
        (docs/lab-notes/quality.md).

        Args:
            x: float [..., K], of the quantised model.
            stream: float [..., N], of the quantised model, with the layer's output added.
            original: float, of the same shape, of the original for the same tokens; None where it is not
                known.
            mask: as for :meth:`add`.
        """
        x, stream = x.reshape(-1, x.shape[-1]), stream.reshape(-1, stream.shape[-1])
        norm = partial(torch.linalg.vector_norm, dim=1, keepdim=True, dtype=torch.float32)
        sizes = norm(stream) / stream.shape[1] ** 0.5
        # A stream of zeros has nothing to be measured by, and an input must not overflow 16 bits. Weights are
        # rounded as inputs are: all of a token has the same one.
        most = torch.finfo(x.dtype).max / 2 / norm(x, ord=math.inf)
        # Products of two weighted tensors are what is summed: each has the root of what the token counts.
        weights = torch.where(sizes > 0, sizes.rsqrt(), 0.0).minimum(most).to(x.dtype)
        if original is None:
            self.add(x * weights, mask)
        else:
            difference = original.reshape(stream.shape).to(torch.float32) - stream.to(torch.float32)
            self._add(x * weights, difference.to(x.dtype) * weights, mask)

    def _add(self, x: Tensor, difference: Tensor, mask: Tensor | None) -> None:
        """Counts inputs with the difference to the original, in the same dtype. Where that has 16 bits it was
        rounded by a share of 2**-9 at most, of what is a small correction."""
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
        # Another shard may have a drift: all of them add up the same tensors.
        total = self._sum().mul_(self._pairs)
        self._shared = torch.tensor([self._pairs], device=total.device)
        return [*super().as_share(tokens), total, self._shared]

    @property
    def pairs(self) -> int:
        """Tokens whose inputs came with the original's."""
        self._end_sharing()
        return self._pairs

    def drift(self) -> Tensor | None:
        """float32 [K, K], the mean of 2 (o - x) x^T over the tokens that came with the original's; of a
        residual stream [N, K], the mean of 2 (original - stream) x^T. The accumulator's own; None where
        nothing drifted."""
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
    """What is left of ``share`` where few tokens were seen: a least-squares fit of K unknowns to T tokens
    explains K / T of them by chance."""
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
    """The weights that give the original's outputs, or residual stream, on the quantised model's inputs.

    Args:
        weights: float32 [N_i, K] each.
        factor: factor of the damped Hessian of the inputs.
        drift: float32 [K, K]; [N, K] of the residual stream that the only weight writes to.
        share: share of the correction, 0 to 1.
        limits: what the norm of each weight's correction is held to. One that is larger than what rounding
            does to the weight fits the calibration, not the drift.
        of_stream: the drift is that of the residual stream.

    Returns:
        New weights; None where something stands in for the Hessian or the correction is not finite.
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
