"""GPTQ that also weights errors of a layer's outputs by the gradients of the model's loss.

GPTQ's loss tr(D H D^T), D = Q - W, treats the errors of outputs as independent. To second order, and with
inputs and gradients taken as independent (Martens and Grosse 2015), the change of the model's loss is tr(F D
H D^T), where F is the second moment of the loss's gradients at the outputs (Tseng et al. 2025, YAQA). With
the upper triangular root F = R R^T this is the squared norm of R^T D in H's metric, and row d of R^T D
depends only on outputs up to d. So outputs are quantised in parts, and the target of part d is

    W_d - R_dd^-T R_done,d^T D_done

which compensates best for the errors of the parts already done, for any H. Within a part outputs are taken as
independent. Neighbouring outputs, whose gradients are most correlated, are put into different parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from marlinq.core.scheme import Element
from marlinq.methods.factor import factorise
from marlinq.methods.hessian import HessianAccumulator
from marlinq.methods.solution import Solution

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

# Most and fewest parts. More parts compensate for more. Each part is a solve of its own, whose time grows
# with K, so wide layers have fewer. Measured: 8 parts, with less damping, came near to 16.
_MOST_PARTS, _FEWEST_PARTS = 16, 4
_CHANNELS = 24576
# Shrinkage of the second moment towards its diagonal, since gradients of some ten thousand tokens are noisy;
# and damping.
_SHRINKAGE, _DAMP = 0.25, 0.1


def parts(in_features: int) -> int:
    """Number of parts in which the outputs of a layer of K = ``in_features`` are quantised."""
    return max(_FEWEST_PARTS, min(_MOST_PARTS, _CHANNELS // in_features))


def solve_in_parts(
    w: Tensor,
    widths: Sequence[int],
    outputs: Sequence[HessianAccumulator | None],
    g: int,
    element: Element,
    solve: Callable[[Tensor], Solution],
) -> tuple[Solution, Tensor, list[str | None]]:
    """Solve weights that lie side by side, each with the second moment of its outputs' gradients.

    Args:
        w: float32 [K, N], the channels in processing order.
        widths: output channels of each weight.
        outputs: for each weight the second moment of the gradients at its N_i outputs; None for independent
            outputs.
        g: channels of a group.
        element: element type of the codes.
        solve: function that solves some columns of ``w``, float32 [K, n] and contiguous, as independent ones.

    Returns:
        The solution, without losses; the errors Q - W, float32 [K, N]; and for each weight the reason why its
        outputs were taken as independent although their gradients were gathered, or None.
    """
    solution = Solution.empty(w, g, element)
    error = torch.zeros_like(w)
    places, roots, reasons, start = [], [], [], 0
    count = parts(len(w))
    for width, moment in zip(widths, outputs, strict=True):
        own = [torch.arange(width, device=w.device)[part::count] for part in range(count)]
        root, reason = None, None
        if moment is not None:
            factor = factorise(moment.hessian(_SHRINKAGE), torch.cat(own), _DAMP)
            if factor.fallback is None:
                root = factor.root
            else:
                what = "are zero" if factor.dead_channels == width else "have no positive definite moment"
                reason = f"outputs taken for independent: the loss's gradients there {what}"
        places.append([start + part for part in own])
        roots.append(root)
        reasons.append(reason)
        start += width
    for part in range(count):
        columns = torch.cat([places_of[part] for places_of in places])
        if not len(columns):
            break
        aimed = [
            _aim(w, error, places_of[:part], places_of[part], root)
            for places_of, root in zip(places, roots, strict=True)
        ]
        solved = solve(torch.cat(aimed, dim=1).contiguous())
        for name in ("codes", "scales", "zeros"):
            getattr(solution, name)[:, columns] = getattr(solved, name)
        error[:, columns] = solved.dense(g) - w[:, columns]
    return solution, error, reasons


def _aim(w: Tensor, error: Tensor, before: Sequence[Tensor], own: Tensor, root: Tensor | None) -> Tensor:
    """Target [K, n] of the columns ``own``, given the errors of the columns ``before``."""
    target = w[:, own]
    if root is None or not before or not len(own):
        return target
    done = torch.cat(list(before))
    rows = slice(len(done), len(done) + len(own))
    carried = error[:, done] @ root[: len(done), rows]
    return target.sub(torch.linalg.solve_triangular(root[rows, rows], carried, upper=True, left=False))
