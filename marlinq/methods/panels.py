"""GPTQ's solve on a GPU: a launch for each panel of channels, a matrix product between panels.

    for each block of up to 512 channels, or each larger group
        for each panel: a group, or 128 channels of a larger one
            u = w + R_pp^-T carried               matrix product
            codes, scales, w - q                  one launch (kernels/cuda/solve/round_panel.cuh)
            carried of the block's rest           matrix product
        carried of all that follows               matrix product

All products are in float32, the last ones on tensor cores, which is nearly as exact
(:func:`~marlinq.methods.hessian.add_float32_products`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.scheme import Scheme
from marlinq.kernels.solve import PANEL_ROWS, PanelTensors, round_panel
from marlinq.methods.factor import Factor, inverse_triangles
from marlinq.methods.grid import minmax_grid, search_factors, search_grid
from marlinq.methods.hessian import add_float32_products
from marlinq.methods.solution import Solution, refit

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

RoundPanel = Callable[[PanelTensors, Scheme, float], None]

# Channels of a block: wide enough for tensor cores in the products between blocks, narrow enough that
# products inside a block are small.
_BLOCK = 512


@dataclass(frozen=True, eq=False)
class _Panel:
    """A panel of channels, with the part of the root that the kernel needs.

    Attributes:
        part: the channels.
        own: float32 [rows, rows], the root's diagonal block.
        inverse: inverse of ``own``.
        feedback, diagonal: as in :class:`marlinq.kernels.solve.PanelTensors`.
    """

    part: slice
    own: Tensor
    inverse: Tensor
    feedback: Tensor
    diagonal: Tensor


Blocks = list[tuple[slice, list[_Panel]]]


def solve_panels(
    w: Tensor,
    factor: Factor,
    g: int,
    scheme: Scheme,
    *,
    clip_search: bool,
    launch: RoundPanel = round_panel,
    blocks: Blocks | None = None,
) -> Solution:
    """GPTQ on a GPU; arguments as :func:`marlinq.methods.slices.solve_slices`.

    Args:
        w: float32 [K, N], contiguous.
        blocks: :func:`cut` of the factor's root, if several solves share it.
        launch: function that rounds a panel; tests pass the emulated kernel.
    """
    solution = Solution.empty(w, g, scheme.element)
    # Row j is (R^T D)_j, summed over the channels quantised so far.
    carried = torch.zeros_like(w)
    solve = _solve_large_group if g > PANEL_ROWS else _solve_groups
    factors = torch.tensor(search_factors(), device=w.device) if clip_search else None
    for block, panels in cut(factor.root, g) if blocks is None else blocks:
        difference = solve(_Problem(w, carried, factor, scheme, factors, launch), block, panels, solution, g)
        if block.stop < w.shape[0]:
            add_float32_products(carried[block.stop :], factor.root[block, block.stop :], difference)
    return solution


@dataclass(frozen=True, eq=False)
class _Problem:
    w: Tensor
    carried: Tensor
    factor: Factor
    scheme: Scheme
    factors: Tensor | None
    launch: RoundPanel

    def updated(self, panel: _Panel) -> Tensor:
        """The panel's weights after the updates for all channels before it."""
        if panel.part.start == 0:
            return self.w[panel.part]
        return torch.addmm(self.w[panel.part], panel.inverse.t(), self.carried[panel.part])

    def carry(self, panel: _Panel, stop: int, difference: Tensor) -> None:
        """Add the panel's errors to ``carried`` of the channels behind it, up to ``stop``."""
        if panel.part.stop < stop:
            rest = slice(panel.part.stop, stop)
            self.carried[rest].addmm_(self.factor.root[panel.part, rest].t(), difference)


def _solve_groups(
    problem: _Problem, block: slice, panels: Sequence[_Panel], solution: Solution, g: int
) -> Tensor:
    """Solve a block of whole groups; returns w - q of its channels."""
    difference = torch.empty_like(problem.w[block])
    for panel in panels:
        part, group = panel.part, panel.part.start // g
        updated, base = problem.updated(panel), None
        scales, zeros = solution.scales[group], solution.zeros[group]
        if problem.factors is None:
            s, z = minmax_grid(updated, problem.scheme)
            scales.copy_(s)
            zeros.copy_(z)
        else:
            base = torch.addmm(problem.carried[part], panel.own.t(), problem.w[part])
        mine = difference[part.start - block.start : part.stop - block.start]
        tensors = PanelTensors(
            updated,
            base,
            problem.w[part],
            panel.feedback,
            panel.diagonal,
            problem.factors,
            scales,
            zeros,
            solution.codes[part],
            mine,
            loss=solution.loss,
        )
        problem.launch(tensors, problem.scheme, problem.factor.shift)
        problem.carry(panel, block.stop, mine)
    return difference


def _solve_large_group(
    problem: _Problem, block: slice, panels: Sequence[_Panel], solution: Solution, g: int
) -> Tensor:
    """Solve a group of more channels than a panel; returns w - q of its channels.

    Its scales are chosen from all its channels first, and fitted to all its codes afterwards.
    """
    w, scheme = problem.w[block], problem.scheme
    own = problem.factor.root[block, block]
    updated = w
    if block.start:
        updated = w + torch.linalg.solve_triangular(own.t(), problem.carried[block], upper=False)
    if problem.factors is None:
        s, z = minmax_grid(updated, scheme)
    else:
        s, z = search_grid(updated, own.diagonal().square(), scheme)
    difference, terms = torch.empty_like(w), torch.empty_like(w)
    for panel in panels:
        mine = slice(panel.part.start - block.start, panel.part.stop - block.start)
        tensors = PanelTensors(
            problem.updated(panel),
            None,
            problem.w[panel.part],
            panel.feedback,
            panel.diagonal,
            None,
            s,
            z,
            solution.codes[panel.part],
            difference[mine],
            terms=terms[mine],
        )
        problem.launch(tensors, scheme, problem.factor.shift)
        problem.carry(panel, block.stop, difference[mine])
    if problem.factors is not None:
        levels = solution.codes[block].to(torch.float32).sub_(z)
        s = refit(s, own.t() @ levels, terms, torch_dtype(scheme.scale_dtype))
        difference = torch.addcmul(w, levels, s, value=-1)
    group = block.start // g
    solution.scales[group], solution.zeros[group] = s, z
    solution.loss.add_(terms.square().sum(dim=0))
    solution.loss.sub_(difference.square().sum(dim=0).mul_(problem.factor.shift))
    return difference


def cut(root: Tensor, g: int) -> Blocks:
    """Blocks of channels and their panels, for a root in groups of g channels."""
    k = root.shape[0]
    rows = min(g, PANEL_ROWS)
    width = g if g > PANEL_ROWS else _BLOCK // g * g
    blocks = list(_cut(slice(0, k), width))
    parts = [list(_cut(block, rows)) for block in blocks]
    panels = iter(_panels(root, [part for of_block in parts for part in of_block]))
    return [(block, [next(panels) for _ in of_block]) for block, of_block in zip(blocks, parts, strict=True)]


def _cut(whole: slice, width: int) -> Iterator[slice]:
    return (slice(at, min(at + width, whole.stop)) for at in range(whole.start, whole.stop, width))


def _panels(root: Tensor, parts: Sequence[slice]) -> list[_Panel]:
    """The panels ``parts``, whose inverses are computed together; some may have fewer rows than the first."""
    rows = parts[0].stop - parts[0].start
    own = torch.zeros(len(parts), rows, rows, device=root.device)
    # A smaller block is padded with the identity, whose inverse is the identity.
    own.diagonal(dim1=1, dim2=2).fill_(1)
    for place, part in enumerate(parts):
        height = part.stop - part.start
        own[place, :height, :height] = root[part, part]
    inverses = inverse_triangles(own)
    diagonals = own.diagonal(dim1=1, dim2=2).contiguous()
    feedback = (inverses * diagonals.unsqueeze(2)).transpose(1, 2).contiguous()
    panels = []
    for place, part in enumerate(parts):
        height = slice(0, part.stop - part.start)
        square = (place, height, height)
        panels.append(
            _Panel(
                part, own[square], inverses[square], feedback[square].contiguous(), diagonals[place, height]
            )
        )
    return panels
