"""The Cholesky root of a layer's damped Hessian, in the order in which GPTQ processes the channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.methods.hessian import tensor_cores
from marlinq.methods.quantity import ErrorQuantity

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_SMALLEST_DAMP, _LARGEST_DAMP = 1e-4, 1.0
# Channels of a strip, whose triangle is solved at once; a matrix product then updates the other channels.
_STRIP = 1024


@dataclass(frozen=True, eq=False)
class Factor:
    """The root of a damped Hessian in processing order, or of a diagonal stand-in for it.

    Attributes:
        order: int64 [K], the channel that is processed i-th.
        root: float32 [K, K], upper triangular, in processing order: hessian + shift * I = root @ root.T.
        shift: value added to the diagonal.
        damp: ``shift`` as a share of the diagonal's mean.
        fallback: name of the stand-in, and why it is used; None for the Hessian itself.
        diagonal: float32 [K], diagonal of the stand-in, in the channels' own order; None for the Hessian
            itself.
        dead_channels: number of channels that are zero on all of the calibration.
    """

    order: Tensor
    root: Tensor
    shift: float
    damp: float
    fallback: str | None
    diagonal: Tensor | None
    dead_channels: int

    @property
    def quantity(self) -> ErrorQuantity:
        """The quantity of an error that is measured with this Hessian or stand-in."""
        if self.diagonal is None:
            return ErrorQuantity.OUTPUTS
        return ErrorQuantity.WEIGHTS if self.dead_channels == len(self.diagonal) else ErrorQuantity.INPUTS

    def divide(self, right: Tensor) -> Tensor:
        """The solution x of (hessian + shift * I) x = ``right``, both float32 [K, n] in the channels' own
        order.

        With a stand-in, it takes the place of the Hessian. A GPU rounds operands of products to TF32, by a
        share of 2**-11 each.
        """
        x = right[self.order]
        with tensor_cores():
            _substitute(self.root, x, upper=True)
            _substitute(self.root.mT, x, upper=False)
        return x[torch.argsort(self.order)]


def _substitute(triangle: Tensor, x: Tensor, *, upper: bool) -> None:
    """Solve ``triangle`` [K, K] times y = x for y, which overwrites x, float32 [K, n].

    In strips, so that most of the work is matrix products: a GPU's triangular solve of a wide layer takes
    twice as long.
    """
    k = len(x)
    strips = [slice(start, min(start + _STRIP, k)) for start in range(0, k, _STRIP)]
    for strip in reversed(strips) if upper else strips:
        x[strip] = torch.linalg.solve_triangular(triangle[strip, strip], x[strip], upper=upper)
        rest = slice(0, strip.start) if upper else slice(strip.stop, k)
        x[rest].addmm_(triangle[rest, strip], x[strip], alpha=-1)


def channel_order(hessian: Tensor, g: int, act_order: str, span: int = 1) -> Tensor:
    """int64 [K]: the channel that is processed i-th, with the channels of a group next to each other.

    Args:
        hessian: float [K, K].
        g: channels of a group.
        act_order: see :class:`~marlinq.methods.gptq.GPTQOptions`.
        span: channels that are pruned together and stay next to each other too, a divisor of ``g``.
    """
    k = hessian.shape[0]
    if act_order == "none":
        return torch.arange(k, device=hessian.device)

    def falling(run: int, of: int) -> Tensor:
        means = hessian.diagonal().reshape(k // of, of // run, run).mean(dim=2)
        return torch.argsort(means, dim=1, descending=True, stable=True)

    order = falling(g, k)[0]
    for run, of in ((span, g), (1, span)):
        order = (order.unsqueeze(1) * (of // run) + falling(run, of)[order]).flatten()
    return order


def factorise(hessian: Tensor, order: Tensor, damp: float) -> Factor:
    """The upper triangular root of the damped Hessian, or of a named stand-in for it.

    Args:
        hessian: float32 [K, K], symmetric; left as it is.
        order: from :func:`channel_order`.
        damp: share of the mean of the diagonal that is added to it; raised tenfold, up to 1, while the
            Hessian can't be factorised.
    """
    diagonal = hessian.diagonal()
    alive = diagonal > 0
    dead = int((~alive).sum())
    if dead == hessian.shape[0]:
        eye = torch.eye(dead, device=hessian.device)
        reason = "round-to-nearest: the calibration never reached this layer"
        return Factor(order, eye, 0.0, 0.0, reason, torch.ones_like(diagonal), dead)
    # A dead channel has a zero row and column: it takes no part in the compensation. Only the damping gives
    # it a small weight in the choice of scales.
    mean = float(diagonal[alive].mean())
    # Upper root = flip(cholesky(flip(H))), where flip reverses rows and columns. Few copies are made: each
    # takes as much memory as the Hessian.
    turned = order.flip(0)
    damped = hessian.index_select(0, turned).index_select(1, turned)
    tried, shift = damp, 0.0
    while tried <= _LARGEST_DAMP:
        damped.diagonal().add_(tried * mean - shift)
        shift = tried * mean
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            del damped
            return Factor(order, lower.flip(0, 1), shift, tried, None, None, dead)
        tried = max(tried * 10, _SMALLEST_DAMP)
    reason = f"diagonal Hessian: not positive definite with damping up to {_LARGEST_DAMP:g}"
    positive = diagonal.clamp(min=0)
    root = torch.diag((positive[order] + damp * mean).sqrt())
    return Factor(order, root, damp * mean, damp, reason, positive, dead)


def inverse_triangles(upper: Tensor) -> Tensor:
    """The inverses of many small upper triangles, float32 [..., n, n], by a few products of all of them.

    The inverse of [[X, B], [0, Y]] is [[X^-1, -X^-1 B Y^-1], [0, Y^-1]]. So diagonal blocks of one, two,
    four, ... channels are inverted in turn.
    """
    n = upper.shape[-1]
    size = 1 << (n - 1).bit_length()
    whole = torch.eye(size, device=upper.device).repeat(*upper.shape[:-2], 1, 1)
    whole[..., :n, :n] = upper
    triangles = torch.diag_embed(whole.diagonal(dim1=-2, dim2=-1).reciprocal())
    half = 1
    while half < size:
        first, second = slice(0, half), slice(half, 2 * half)
        # [..., size / (2 * half), 2 * half, 2 * half], views.
        between, inverse = (
            each.unfold(-2, 2 * half, 2 * half)
            .unfold(-2, 2 * half, 2 * half)
            .diagonal(dim1=-4, dim2=-3)
            .movedim(-1, -3)
            for each in (whole, triangles)
        )
        products = inverse[..., first, first] @ between[..., first, second] @ inverse[..., second, second]
        inverse[..., first, second] = products.neg_()
        half *= 2
    return triangles[..., :n, :n]
