"""GPTQ with a metric on a layer's outputs as well as on its inputs.

GPTQ's loss tr(D H D^T), D = Q - W, counts an error of each output by itself. What the loss of the model makes
of errors of several outputs together is, to second order and with inputs and gradients taken for independent
(Martens and Grosse 2015), tr(F D H D^T), F being the second moment of the loss's gradients at the outputs
(Tseng et al. 2025, YAQA). With the upper triangular root F = R R^T it is the squared norm of R^T D in H's
metric, and rows d of R^T D depend on the outputs up to d alone. So outputs are quantised in parts, and each
part aims at

    W_d - R_dd^-T R_done,d^T D_done

which is what makes up best for the errors of the parts before, whatever H is. Within a part outputs are taken
for independent. Neighbours, which go together most, are in different parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from marlinq.methods.factor import factorise
from marlinq.methods.hessian import HessianAccumulator
from marlinq.methods.solution import Solution

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

# More parts make up for more: of P parts each has on average (P - 1) / 2 before it. Each is a solve of its
# own, whose time is that of its channels one after the other, so wide layers have fewer. 8 parts, with less
# damping, came near to 16; fewer were not measured.
_MOST_PARTS, _FEWEST_PARTS = 16, 4
_CHANNELS = 24576
# Gradients of some ten thousand tokens are noisy, so their second moment is moved towards its diagonal.
_SHRINKAGE, _DAMP = 0.25, 0.1


def parts(in_features: int) -> int:
    """In how many parts the outputs of a layer of K = ``in_features`` are quantised."""
    return max(_FEWEST_PARTS, min(_MOST_PARTS, _CHANNELS // in_features))


def solve_in_parts(
    w: Tensor,
    widths: Sequence[int],
    outputs: Sequence[HessianAccumulator | None],
    g: int,
    solve: Callable[[Tensor], Solution],
) -> tuple[Solution, Tensor, list[str | None]]:
    """Solves weights that lie side by side, each with a metric on its outputs.

    Args:
        w: float32 [K, N], the channels in processing order.
        widths: output channels of each weight.
        outputs: for each weight the gathered gradients at its N_i outputs; None for one whose
            outputs are independent.
        g: channels of a group.
        solve: solves some columns of ``w``, float32 [K, n] and contiguous, as if they were independent.

    Returns:
        The solution, without losses; D^T = Q - W, float32 [K, N]; and for each weight why its outputs were
        taken for independent although it has a metric, None where they weren't.
    """
    solution = Solution.empty(w, g)
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
        found = solve(torch.cat(aimed, dim=1).contiguous())
        for name in ("codes", "scales", "zeros"):
            getattr(solution, name)[:, columns] = getattr(found, name)
        error[:, columns] = found.dense(g) - w[:, columns]
    return solution, error, reasons


def _aim(w: Tensor, error: Tensor, before: Sequence[Tensor], own: Tensor, root: Tensor | None) -> Tensor:
    """[K, n], what the columns ``own`` are to become, once those ``before`` have their errors."""
    target = w[:, own]
    if root is None or not before or not len(own):
        return target
    done = torch.cat(list(before))
    rows = slice(len(done), len(done) + len(own))
    carried = error[:, done] @ root[: len(done), rows]
    return target.sub(torch.linalg.solve_triangular(root[rows, rows], carried, upper=True, left=False))
