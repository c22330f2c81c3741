"""GPTQ: quantise one input channel after the other, letting the later ones make up for the error.

With the Hessian H = X^T X of a layer's inputs, the loss of a quantised weight Q is tr(D H D^T), D = W - Q.
Written with the upper triangular root H = R R^T it is ||D R||^2, and column k of D R depends on the
channels up to k alone. So the loss that channels 0..k fix is known once they are quantised, and each next
channel is rounded to where its own term is smallest: the same solution as Frantar et al. 2023 (GPTQ,
algorithm 1, on the inverse's Cholesky factor), reached without inverting H.

What makes it MARLIN's variant (Frantar et al. 2024): a group's scales are chosen when its first channel
comes up, from weights that carry the updates of all channels before, by a search over shrunken ranges that
weighs errors as the loss does: a rounding error of channel k costs R[k, k]**2, the part of it that later
channels can't make up for. Once the group's codes are known, its scales are fitted to them by least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.core.scheme import Scheme
from marlinq.core.settings import Choice, Flag, Fraction, setting
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.methods.base import Method, MethodOptions, SolveReport, check_weight, whole_groups
from marlinq.methods.grid import minmax_grid, search_grid, storable_scales
from marlinq.methods.hessian import HessianAccumulator

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_SMALLEST_DAMP, _LARGEST_DAMP = 1e-4, 1.0

# Below this many channels the column loop is faster than halving once more for a matrix product.
_LEAF = 16


@dataclass(frozen=True)
class GPTQOptions(MethodOptions):
    """How GPTQ quantises.

    Attributes:
        clip_search: search each group's scales (see the module's text) instead of spanning its range.
        damp: share of the mean of H's diagonal that is added to it; raised tenfold, up to 1, while H can't be
            factorised.
        act_order: ``none``, or ``static``: groups by falling mean of H's diagonal, and channels by falling
            diagonal within their group. Groups keep their channels, so g_idx stays trivial.
    """

    clip_search: bool = setting(True, Flag(), "Search each group's scale for the least output error.")
    damp: float = setting(0.01, Fraction(), "Share of the Hessian's mean diagonal that is added to it.")
    act_order: str = setting(
        "static",
        Choice(("none", "static")),
        "static quantises the channels of the largest activations first; groups keep their channels.",
    )


class GPTQ(Method[GPTQOptions, HessianAccumulator]):
    """GPTQ with MARLIN's choice of scales."""

    name = "gptq"
    options = GPTQOptions

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        if scheme.element.table is not None:
            return f"{scheme.element.name} weights; {self.name} rounds to integers only"
        return super().scheme_refusal(scheme)

    def statistics(
        self, in_features: int, options: GPTQOptions, *, device: torch.device, name: str
    ) -> HessianAccumulator:
        return HessianAccumulator(in_features, device=device, name=name)

    def solve(
        self,
        weights: Sequence[Tensor],
        statistics: HessianAccumulator | None,
        scheme: Scheme,
        options: GPTQOptions,
        *,
        names: Sequence[str],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        if statistics is None:
            raise ValueError("GPTQ needs the Hessian of the weights' input")
        return solve_gptq_shared(weights, statistics.hessian(), scheme, options, names=names)


def solve_gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    options: GPTQOptions | None = None,
    *,
    name: str = "weight",
) -> tuple[QuantizedWeight, SolveReport]:
    """Quantise one weight; see :func:`solve_gptq_shared`."""
    return solve_gptq_shared([weight], hessian, scheme, options, names=[name])[0]


def solve_gptq_shared(
    weights: Sequence[Tensor],
    hessian: Tensor,
    scheme: Scheme,
    options: GPTQOptions | None = None,
    *,
    names: Sequence[str] | None = None,
) -> list[tuple[QuantizedWeight, SolveReport]]:
    """Quantise the weights that read the same input, in one solve.

    Output channels don't influence each other, so the result for each weight is that of its own solve, up
    to the rounding of the matrix products.

    Args:
        weights: float [N_i, K] each, on the Hessian's device.
        hessian: float [K, K], the symmetric sum (or mean) of x x^T over the calibration's inputs x.
        scheme: integer element, group size (a divisor of K, or -1), zero points, dtype of the scales.
        options: the defaults when None.
        names: what error messages call the weights.

    Returns:
        The quantised weight, on the device of the weights, and the report, for each weight in order. The
        report's relative error is taken with the Hessian that the solve used: its diagonal or the identity
        in a fallback. Its figures are ``damp``, above what was asked for when the factorisation needed more,
        and ``dead_channels``, input channels that were zero in all of the calibration.

    Raises:
        NumericsError: a weight or the Hessian holds NaN or infinity.
        UnsupportedError: K is not a multiple of the group size, or the shapes don't fit together.
    """
    options = options or GPTQOptions()
    names = names or [f"weight {i}" for i in range(len(weights))]
    k = hessian.shape[0]
    for weight, name in zip(weights, names, strict=True):
        check_weight(weight, scheme, name)
        if tuple(hessian.shape) != (weight.shape[1],) * 2:
            raise UnsupportedError(
                f"{name}: the weight {list(weight.shape)} needs a Hessian [K, K] of its K, "
                f"found {list(hessian.shape)}"
            )
    if not bool(torch.isfinite(hessian).all()):
        raise NumericsError(
            f"{names[0]}: the Hessian of its input holds NaN or infinity; check the calibration's activations"
        )
    g = whole_groups(scheme, k, names[0])
    order = _channel_order(hessian, g, options.act_order)
    factor = _factorise(hessian.to(torch.float32)[order][:, order], options.damp)
    w = torch.cat([weight.t().to(torch.float32) for weight in weights], dim=1)[order]
    solution = _solve(w, factor, g, scheme, options.clip_search)

    back = torch.argsort(order)
    # Groups stay whole in the channel order, so the first channel of each tells where the group went.
    group_back = back[::g] // g
    codes = solution.codes[back]
    scales = solution.scales[group_back].to(torch_dtype(scheme.scale_dtype))
    zeros = solution.zeros[group_back].to(torch.uint8)
    g_idx = trivial_g_idx(k, g).to(w.device)
    results = []
    start = 0
    for weight in weights:
        part = slice(start, start + weight.shape[0])
        start = part.stop
        quantized = QuantizedWeight(
            codes=codes[:, part].contiguous(),
            scales=scales[:, part].contiguous(),
            zeros=zeros[:, part].contiguous(),
            g_idx=g_idx,
            group_size=g,
            element=scheme.element,
        )
        loss, norm = float(solution.loss[part].sum()), float(solution.norm[part].sum())
        report = SolveReport(
            relative_error=loss / norm if norm > 0 else 0.0,
            fallback=factor.fallback,
            figures={"damp": factor.damp, "dead_channels": factor.dead_channels},
            norm=norm,
        )
        results.append((quantized, report))
    return results


@dataclass(frozen=True, eq=False)
class _Factor:
    """A Hessian, in processing order, and its damped root: hessian + shift * I = root @ root.T."""

    hessian: Tensor
    root: Tensor
    shift: float
    damp: float
    fallback: str | None
    dead_channels: int


@dataclass(frozen=True, eq=False)
class _Solution:
    """Codes uint8 [K, N], scales and zeros float32 [G, N], loss and norm float64 [N], in processing order."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    loss: Tensor
    norm: Tensor


def _channel_order(hessian: Tensor, g: int, act_order: str) -> Tensor:
    """int64 [K]: the channel that is processed i-th, with the channels of a group next to each other."""
    k = hessian.shape[0]
    if act_order == "none":
        return torch.arange(k, device=hessian.device)
    diagonal = hessian.diagonal().reshape(k // g, g)
    groups = torch.argsort(diagonal.mean(dim=1), descending=True, stable=True)
    within = torch.argsort(diagonal, dim=1, descending=True, stable=True)
    return (groups.unsqueeze(1) * g + within[groups]).reshape(k)


def _factorise(hessian: Tensor, damp: float) -> _Factor:
    """The upper triangular root of the damped Hessian, or of a named stand-in for it."""
    diagonal = hessian.diagonal()
    alive = diagonal > 0
    dead = int((~alive).sum())
    if dead == hessian.shape[0]:
        eye = torch.eye(hessian.shape[0], device=hessian.device)
        return _Factor(eye, eye, 0.0, 0.0, "round-to-nearest: the calibration never reached this layer", dead)
    # A dead channel has a zero row and column: it takes no part in the compensation, and the damping alone
    # gives it the small weight with which it counts in the choice of scales.
    mean = float(diagonal[alive].mean())
    tried = damp
    while tried <= _LARGEST_DAMP:
        root = _upper_root(hessian, tried * mean)
        if root is not None:
            return _Factor(hessian, root, tried * mean, tried, None, dead)
        tried = max(tried * 10, _SMALLEST_DAMP)
    reason = f"diagonal Hessian: not positive definite with damping up to {_LARGEST_DAMP:g}"
    shifted = diagonal.clamp(min=0) + damp * mean
    return _Factor(
        torch.diag(diagonal.clamp(min=0)), torch.diag(shifted.sqrt()), damp * mean, damp, reason, dead
    )


def _upper_root(hessian: Tensor, shift: float) -> Tensor | None:
    """Upper triangular R with R @ R.T = hessian + shift * I, or None when that is not positive definite."""
    damped = hessian.flip(0, 1)
    damped.diagonal().add_(shift)
    lower, info = torch.linalg.cholesky_ex(damped)
    if int(info) != 0 or not bool(torch.isfinite(lower.diagonal()).all()):
        return None
    root: Tensor = lower.flip(0, 1)
    return root


def _solve(w: Tensor, factor: _Factor, g: int, scheme: Scheme, clip_search: bool) -> _Solution:
    """GPTQ on w, float32 [K, N] in processing order; each channel is a contiguous row of N."""
    k, n = w.shape
    top = scheme.element.codes - 1
    root = factor.root
    codes = torch.empty((k, n), dtype=torch.uint8, device=w.device)
    scales = torch.empty((k // g, n), device=w.device)
    zeros = torch.empty_like(scales)
    loss = torch.zeros(n, dtype=torch.float64, device=w.device)
    # Row j holds (R^T D)_j over the channels quantised so far: the loss terms not yet closed.
    carried = torch.zeros_like(w)
    eye = torch.eye(g, device=w.device)
    for group in range(k // g):
        part = slice(group * g, (group + 1) * g)
        own = root[part, part]
        diagonal = own.diagonal()
        inverse = torch.linalg.solve_triangular(own, eye, upper=True)
        # Nothing is carried into the first group, which may be the only one and as large as the layer.
        updated = torch.addmm(w[part], inverse.t(), carried[part]) if group else w[part]
        if clip_search:
            s, z = search_grid(updated, diagonal.square(), scheme)
        else:
            s, z = minmax_grid(updated, scheme)
        # In code units a channel's error moves the later ones by the same factors, whatever its scale.
        rounded = torch.empty_like(updated)
        errors = updated.div(s).add_(z)
        _round_channels(errors, rounded, inverse * diagonal.unsqueeze(1), top)
        codes[part] = rounded.to(torch.uint8)
        levels = rounded.sub_(z)
        terms = errors.mul_(diagonal.unsqueeze(1)).mul_(s)
        if clip_search:
            s = _refit(s, own.t() @ levels, terms, torch_dtype(scheme.scale_dtype))
        scales[group], zeros[group] = s, z
        difference = torch.addcmul(w[part], levels, s, value=-1)
        loss += terms.square().sum(dim=0)
        loss -= difference.square().sum(dim=0).mul_(factor.shift)
        if part.stop < k:
            carried[part.stop :].addmm_(root[part, part.stop :].t(), difference)
    norm = (factor.hessian @ w).mul_(w).sum(dim=0).to(torch.float64)
    return _Solution(codes, scales, zeros, loss.clamp_(min=0), norm)


def _refit(scales: Tensor, reached: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales that minimise the group's loss, now that its codes are known; ``terms`` follow in place.

    Args:
        scales: float32 [N], those that the codes were found with.
        reached: float32 [g, N], R^T (codes - zeros): what a scale of 1 contributes.
        terms: float32 [g, N], the loss terms, R^T (w - q); overwritten with those of the new scales.
        dtype: the scales are rounded to it. The nearest value to the least-squares solution is at least as
            good as the value before.
    """
    overlap, power = (reached * terms).sum(dim=0), reached.square().sum(dim=0)
    best = scales + overlap / power
    solvable = (power > 0) & (best != 0)
    fitted = torch.where(solvable, storable_scales(best, dtype), scales)
    terms.addcmul_(reached, fitted - scales, value=-1)
    return fitted


def _round_channels(v: Tensor, codes: Tensor, feedback: Tensor, top: int) -> None:
    """Round the rows of v, float32 [g, N] in code units, in order, into codes; v is left with the errors.

    ``feedback`` is upper triangular [g, g]: by how much an error of row k lowers row j. Halving turns most
    of the rank-1 updates into matrix products.
    """
    g = v.shape[0]
    if g > _LEAF:
        half = g // 2
        _round_channels(v[:half], codes[:half], feedback[:half, :half], top)
        v[half:].addmm_(feedback[:half, half:].t(), v[:half], alpha=-1)
        _round_channels(v[half:], codes[half:], feedback[half:, half:], top)
        return
    for k in range(g):
        torch.round(v[k], out=codes[k]).clamp_(0, top)
        v[k].sub_(codes[k])
        v[k + 1 :].addr_(feedback[k, k + 1 :], v[k], alpha=-1)
