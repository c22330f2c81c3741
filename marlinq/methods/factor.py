"""The damped root of a layer's Hessian, in the order in which GPTQ takes the channels."""

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
# Channels whose triangle is solved at once; what follows from them for the others is a matrix product.
_STRIP = 1024


@dataclass(frozen=True, eq=False)
class Factor:
    """The root of a damped Hessian in processing order, or of a named stand-in for it.

    Attributes:
        order: int64 [K], the channel that is processed i-th.
        root: float32 [K, K], upper triangular, in processing order: hessian + shift * I = root @ root.T.
        shift: value added to the diagonal.
        damp: ``shift`` as a share of the diagonal's mean.
        fallback: substitute for the Hessian, and why; None where nothing does.
        diagonal: float32 [K], of the stand-in, in the channels' own order; None where nothing stands in.
        dead_channels: channels that were zero in all of the calibration.
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
        """The quantity of an error that is measured with what the root is of."""
        if self.diagonal is None:
            return ErrorQuantity.OUTPUTS
        return ErrorQuantity.WEIGHTS if self.dead_channels == len(self.diagonal) else ErrorQuantity.INPUTS

    def divide(self, right: Tensor) -> Tensor:
        """x with (hessian + shift * I) x = ``right``, float32 [K, n] both, in the channels' own order; with
        the stand-in for the Hessian where there is one. A GPU rounds the operands of products to TF32, by a
        share of 2**-11 each."""
        x = right[self.order]
        with tensor_cores():
            _substitute(self.root, x, upper=True)
            _substitute(self.root.mT, x, upper=False)
        return x[torch.argsort(self.order)]


def _substitute(triangle: Tensor, x: Tensor, *, upper: bool) -> None:
    """Makes x, float32 [K, n], what ``triangle`` [K, K] times it is x.

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
    # A dead channel has a zero row and column: it takes no part in the compensation, and the damping alone
    # gives it the small weight with which it counts in the choice of scales.
    mean = float(diagonal[alive].mean())
    # The upper root of a matrix is the lower root of the matrix turned around, turned around once more. Of
    # a wide layer each copy takes as much memory as its Hessian, so there are few.
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
    """The inverses of many small upper triangles, float32 [..., n, n], in a few products of all of them.

    With A and C the inverses of two triangles next to each other on a diagonal and B what lies between them,
    -A B C lies between the inverses: so blocks of one, two, four, ... channels are inverted.
    """
    n = upper.shape[-1]
    size = 1 << (n - 1).bit_length()
    whole = torch.eye(size, device=upper.device).repeat(*upper.shape[:-2], 1, 1)
    whole[..., :n, :n] = upper
    found = torch.diag_embed(whole.diagonal(dim1=-2, dim2=-1).reciprocal())
    half = 1
    while half < size:
        first, second = slice(0, half), slice(half, 2 * half)
        # [..., size / (2 * half), 2 * half, 2 * half], views.
        between, inverse = (
            each.unfold(-2, 2 * half, 2 * half)
            .unfold(-2, 2 * half, 2 * half)
            .diagonal(dim1=-4, dim2=-3)
            .movedim(-1, -3)
            for each in (whole, found)
        )
        products = inverse[..., first, first] @ between[..., first, second] @ inverse[..., second, second]
        inverse[..., first, second] = products.neg_()
        half *= 2
    return found[..., :n, :n]
