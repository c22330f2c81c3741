"""GPTQ for many layers of one shape at once, such as a mixture's experts.

A step of one small layer takes a GPU microseconds, less than the host needs to launch it, and there are
hundreds of steps. So each step is one operation for all layers, and the host waits for the GPU a few times a
batch:

    finite? which channels are dead? means of the diagonals     one wait
    order, damped Hessians, roots                               one wait
    panels, each for all layers
    losses                                                      one wait

A layer whose Hessian can't be factorised at the first attempt, or that no token reached, is solved by itself
(:func:`marlinq.methods.gptq.solve_gptq_shared`), whose report names the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.scheme import Element, Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.kernels.solve import PANEL_ROWS, PanelTensors, round_panels
from marlinq.methods.factor import inverse_triangles
from marlinq.methods.grid import minmax_grid, search_factors
from marlinq.methods.hessian import tensor_cores
from marlinq.methods.method import SolveReport
from marlinq.methods.quantity import ErrorQuantity
from marlinq.methods.solution import Solution

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

RoundPanels = Callable[[PanelTensors, Scheme, "Tensor"], None]
Solved = list[tuple[QuantizedWeight, SolveReport]]


@dataclass(frozen=True, eq=False)
class JointWeights:
    """Weights that read one input.

    Attributes:
        weights: float [N_i, K] each.
        hessian: float32 [K, K], symmetric.
    """

    weights: Sequence[Tensor]
    hessian: Tensor


def solve_many(
    layers: Sequence[JointWeights],
    size: int,
    g: int,
    scheme: Scheme,
    *,
    damp: float,
    act_order: bool,
    clip_search: bool,
    launch: RoundPanels = round_panels,
) -> list[Solved | None]:
    """GPTQ of layers of one shape, on their GPU.

    Args:
        layers: layers whose weights have equal shapes in the same order; at most ``size``.
        size: layers of a batch. Fewer layers are repeated until there are so many, since products of batches
            of another size may round differently, and results must not depend on the number of layers.
        g: channels of a group, at most 128, a divisor of K.
        scheme: scheme of the results.
        damp: share of the mean of a Hessian's diagonal that is added to it.
        act_order: groups by falling mean of the diagonal, and channels by falling diagonal within.
        clip_search: search the scales and fit them to the codes, instead of spanning each group's range.
        launch: function that rounds a panel of each layer; tests pass the emulated kernel.

    Returns:
        For each layer the result of :func:`marlinq.methods.gptq.solve_gptq_shared`, up to the rounding of
        matrix products. None for a layer that has to be solved by itself: its values are not finite, or its
        Hessian is zero or can't be factorised with this damping.
    """
    if not 1 <= g <= PANEL_ROWS:
        raise ValueError(f"expected groups of 1 to {PANEL_ROWS} channels, found {g}")
    diagonal = torch.stack([layer.hessian.diagonal() for layer in layers])
    sound, shifts = _soundness(layers, diagonal, damp, scheme)
    chosen = [number for number, good in enumerate(sound) if good]
    results: list[Solved | None] = [None] * len(layers)
    if not chosen:
        return results
    filled = chosen + chosen[-1:] * (size - len(chosen))
    layers = [layers[number] for number in filled]
    diagonal = diagonal[filled]
    shift = torch.tensor([shifts[number] for number in filled], device=diagonal.device)
    order = _orders(diagonal, g, act_order)
    w, norms, root, factorised = _prepared(layers, order, shift)
    solution = _solve(w, root, shift, g, scheme, clip_search=clip_search, launch=launch)
    del root, w
    dead = (diagonal <= 0).sum(dim=1)
    widths = [weight.shape[0] for weight in layers[0].weights]
    sums = [
        part.sum(dim=1, keepdim=True)
        for each in (solution.loss.clamp(min=0), norms)
        for part in torch.split(each, widths, dim=1)
    ]
    last = (factorised.unsqueeze(1).double(), dead.unsqueeze(1).double())
    figures = torch.cat((*sums, *last), dim=1).tolist()
    for place, (number, row) in enumerate(zip(chosen, figures, strict=False)):
        losses, powers = row[: len(widths)], row[len(widths) : -2]
        if row[-2]:
            quantized = solution.layer(place).weights(order[place], widths, g, scheme, [None] * len(widths))
            told = {"damp": damp, "dead_channels": int(row[-1])}
            results[number] = [
                (
                    solved,
                    SolveReport(
                        loss / power if power > 0 else 0.0, ErrorQuantity.OUTPUTS, figures=told, norm=power
                    ),
                )
                for solved, loss, power in zip(quantized, losses, powers, strict=True)
            ]
    return results


@dataclass(frozen=True, eq=False)
class _Solution:
    """Codes uint8 [B, K, N], scales and zeros float32 [B, G, N] in processing order; loss float64 [B, N]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    loss: Tensor
    element: Element

    def layer(self, place: int) -> Solution:
        """The solution of one layer."""
        return Solution(
            self.codes[place], self.scales[place], self.zeros[place], self.loss[place], self.element
        )


def _soundness(
    layers: Sequence[JointWeights], diagonal: Tensor, damp: float, scheme: Scheme
) -> tuple[list[bool], list[float]]:
    """For each layer whether all values are finite and any channel is not zero; and the number added to its
    diagonal."""
    limit = torch.finfo(torch_dtype(scheme.scale_dtype)).max
    alive = diagonal > 0
    mean = diagonal.where(alive, 0).sum(dim=1) / alive.sum(dim=1)
    good = torch.stack(
        [
            torch.stack(
                [torch.isfinite(layer.hessian.sum())]
                # Also false for NaN.
                + [weight.abs().amax() <= limit for weight in layer.weights]
            ).all()
            for layer in layers
        ]
    )
    facts = torch.stack((good & alive.any(dim=1), mean)).tolist()
    return [bool(each) for each in facts[0]], [damp * each for each in facts[1]]


def _orders(diagonal: Tensor, g: int, act_order: bool) -> Tensor:
    """:func:`marlinq.methods.factor.channel_order` of each layer, int64 [B, K]."""
    count, k = diagonal.shape
    if not act_order:
        return torch.arange(k, device=diagonal.device).expand(count, k)
    grouped = diagonal.reshape(count, k // g, g)
    groups = torch.argsort(grouped.mean(dim=2), dim=1, descending=True, stable=True)
    within = torch.argsort(grouped, dim=2, descending=True, stable=True)
    within = within.gather(1, groups.unsqueeze(2).expand_as(within))
    return (groups.unsqueeze(2) * g + within).reshape(count, k)


def _prepared(
    layers: Sequence[JointWeights], order: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights float32 [B, K, N] in processing order; their norms w^T H w, float64 [B, N]; upper roots [B, K,
    K]; and whether the factorisation succeeded, bool [B]."""
    count, k = order.shape
    n = sum(weight.shape[0] for weight in layers[0].weights)
    w = torch.empty(count, k, n, device=order.device)
    damped = torch.empty(count, k, k, device=order.device)
    norms = torch.empty(count, n, dtype=torch.float64, device=order.device)
    for place, layer in enumerate(layers):
        mine = order[place]
        start = 0
        for weight in layer.weights:
            w[place, :, start : start + weight.shape[0]] = weight.t()[mine]
            start += weight.shape[0]
        # Upper root = flip(cholesky(flip(H))), where flip reverses rows and columns.
        turned = mine.flip(0)
        damped[place] = layer.hessian.index_select(0, turned).index_select(1, turned)
        with tensor_cores():
            product = damped[place] @ w[place].flip(0)
        norms[place] = product.flip(0).mul_(w[place]).sum(dim=0)
    damped.diagonal(dim1=1, dim2=2).add_(shift.unsqueeze(1))
    lower, info = torch.linalg.cholesky_ex(damped)
    del damped
    done = (info == 0) & torch.isfinite(lower.diagonal(dim1=1, dim2=2)).all(dim=1)
    return w, norms, lower.flip(1, 2), done


def _solve(
    w: Tensor,
    root: Tensor,
    shift: Tensor,
    g: int,
    scheme: Scheme,
    *,
    clip_search: bool,
    launch: RoundPanels,
) -> _Solution:
    """:func:`marlinq.methods.panels.solve_panels` for w [B, K, N] and roots [B, K, K]."""
    count, k, n = w.shape
    device = w.device
    scales = torch.empty(count, k // g, n, device=device)
    solution = _Solution(
        torch.empty(count, k, n, dtype=torch.uint8, device=device),
        scales,
        torch.empty_like(scales),
        torch.zeros(count, n, dtype=torch.float64, device=device),
        scheme.element,
    )
    carried = torch.zeros_like(w)
    factors = torch.tensor(search_factors(), device=device) if clip_search else None
    own = root.unfold(1, g, g).unfold(2, g, g).diagonal(dim1=1, dim2=2).permute(0, 3, 1, 2).contiguous()
    diagonals = own.diagonal(dim1=2, dim2=3).contiguous()
    inverses = inverse_triangles(own)
    feedback = (inverses * diagonals.unsqueeze(3)).transpose(2, 3).contiguous()
    width = PANEL_ROWS // g * g
    difference = torch.empty(count, min(width, k), n, device=device)
    for start in range(0, k, width):
        stop = min(start + width, k)
        for at in range(start, stop, g):
            part, group = slice(at, at + g), at // g
            updated, base = w[:, part], None
            if at:
                updated = torch.baddbmm(updated, inverses[:, group].transpose(1, 2), carried[:, part])
            if factors is None:
                solution.scales[:, group], solution.zeros[:, group] = minmax_grid(updated, scheme)
            else:
                base = torch.baddbmm(carried[:, part], own[:, group].transpose(1, 2), w[:, part])
            mine = slice(at - start, at - start + g)
            tensors = PanelTensors(
                updated,
                base,
                w[:, part],
                feedback[:, group],
                diagonals[:, group],
                factors,
                solution.scales[:, group],
                solution.zeros[:, group],
                solution.codes[:, part],
                difference[:, mine],
                loss=solution.loss,
            )
            launch(tensors, scheme, shift)
            if part.stop < stop:
                rest = slice(part.stop, stop)
                carried[:, rest].baddbmm_(root[:, part, rest].transpose(1, 2), difference[:, mine])
        if stop < k:
            known = difference[:, : stop - start]
            carried[:, stop:].baddbmm_(root[:, start:stop, stop:].transpose(1, 2), known)
    return solution
