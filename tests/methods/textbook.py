"""GPTQ as the paper's algorithm 1 states it: on the inverse's Cholesky factor, one column after another.

Everything is float64 and nothing is shared with the package but the min-max rule, so equal codes mean that
two different roads arrive at one solution.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def textbook_gptq(
    weight: Tensor, hessian: Tensor, *, group_size: int, symmetric: bool, damp: float
) -> Tensor:
    """Codes, int64 [K, N], with min-max scales from the updated weights."""
    w = weight.to(torch.float64).clone()
    n, k = w.shape
    g = k if group_size == -1 else group_size
    h = hessian.to(torch.float64).clone()
    h += damp * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    codes = torch.empty(k, n, dtype=torch.int64)
    for column in range(k):
        if column % g == 0:
            group = w[:, column : column + g]
            if symmetric:
                s = 2 * group.abs().amax(dim=1) / 15
                z = torch.full_like(s, 8)
            else:
                high, low = group.amax(dim=1).clamp(min=0), group.amin(dim=1).clamp(max=0)
                s = (high - low) / 15
                z = torch.round(-low / s.half())
            s = s.half().double()
        c = torch.clamp(torch.round(w[:, column] / s) + z, 0, 15)
        error = (w[:, column] - (c - z) * s) / u[column, column]
        w[:, column:] -= error[:, None] * u[column, column:]
        codes[column] = c.long()
    return codes


def textbook_floats(
    weight: Tensor,
    hessian: Tensor,
    *,
    group_size: int,
    scale: Callable[[Tensor], Tensor],
    values: Tensor,
    damp: float,
) -> Tensor:
    """A solved weight, float64 [N, K], on a grid of ``values`` times scales.

    ``scale`` gives those of a group, [N], from the largest of the updated weights of each output channel.
    """
    w = weight.to(torch.float64).clone()
    k = w.shape[1]
    h = hessian.to(torch.float64).clone()
    h += damp * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    found = torch.empty_like(w)
    for column in range(k):
        if column % group_size == 0:
            s = scale(w[:, column : column + group_size].abs().amax(dim=1))
        distances = (w[:, column, None] / s[:, None] - values).abs()
        found[:, column] = values[distances.argmin(dim=1)] * s
        w[:, column:] -= ((w[:, column] - found[:, column]) / u[column, column])[:, None] * u[column, column:]
    return found


def layer_loss(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T) in float64."""
    d, w, h = (weight - quantized).double(), weight.double(), hessian.double()
    return float(((d @ h) * d).sum() / ((w @ h) * w).sum())


def searched_gptq(
    weight: Tensor, hessian: Tensor, *, group_size: int, symmetric: bool, damp: float
) -> Tensor:
    """The values, [K, N], that searched and fitted scales lead to, in the channels' own order.

    A group's scales are those of the listed shares of its range with the least rounding error, each channel
    weighed with 1 / U[k, k]**2: what its error costs after the later channels have made up for it. When the
    group's codes are known, the scales become the least-squares fit to its part of the loss, and the errors
    follow.
    """
    w = weight.to(torch.float64).clone()
    n, k = w.shape
    g = k if group_size == -1 else group_size
    h = hessian.to(torch.float64).clone()
    h += damp * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    root = torch.linalg.inv(u)
    values = torch.empty(k, n, dtype=torch.float64)
    shares = [1.06 - 0.03 * step for step in range(13)]
    done = torch.zeros(n, k, dtype=torch.float64)
    for group in range(k // g):
        part = slice(group * g, (group + 1) * g)
        # The correction of the group for all errors before, from the beginning: no running update.
        carried = done[:, : part.start] @ root[: part.start, part]
        now = weight.to(torch.float64)[:, part] + torch.linalg.solve_triangular(
            root[part, part], carried, upper=True, left=False
        )
        own = root[part, part]
        s, z = _least(now, own.diagonal().square(), shares, symmetric)
        local, levels = now.clone(), torch.empty_like(now)
        for place in range(g):
            levels[:, place] = torch.clamp(torch.round(local[:, place] / s) + z, 0, 15) - z
            error = local[:, place] - levels[:, place] * s
            ratio = torch.linalg.inv(own)[place, place:] * own[place, place]
            local[:, place:] -= error[:, None] * ratio
        reached = levels @ own
        wanted = weight.to(torch.float64)[:, part] @ own + carried
        power = reached.square().sum(dim=1)
        fitted = ((wanted * reached).sum(dim=1) / power).half().double()
        quantized = levels * torch.where(power > 0, fitted, s)[:, None]
        done[:, part] = weight.to(torch.float64)[:, part] - quantized
        values[part] = quantized.t()
    return values


def _least(group: Tensor, importance: Tensor, shares: list[float], symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zeros [N] with the least weighed error for a group [N, g]."""
    best = torch.full((len(group),), torch.inf, dtype=torch.float64)
    scales, zeros = torch.zeros_like(best), torch.zeros_like(best)
    # Where both signs cost the same, the one with the code -8 on the side of the largest weight.
    first = torch.where(group.amax(dim=1) > -group.amin(dim=1), -1.0, 1.0)
    for share in shares:
        found = torch.full_like(best, torch.inf)
        for sign in (1, -1) if symmetric else (1,):
            if symmetric:
                s = (2 * group.abs().amax(dim=1) / 15 * share * sign * first).half().double()
                z = torch.full_like(s, 8)
            else:
                high = group.amax(dim=1).clamp(min=0) * share
                low = group.amin(dim=1).clamp(max=0) * share
                s = ((high - low) / 15).half().double()
                z = torch.round(-low / s)
                s = torch.where(z < 1, (high / 14).half().double(), s)
                z = z.clamp(1, 15)
            q = (torch.clamp(torch.round(group / s[:, None]) + z[:, None], 0, 15) - z[:, None]) * s[:, None]
            cost = ((group - q).square() * importance).sum(dim=1)
            other = cost < found * (1 - 1e-4)
            found = torch.where(other, cost, found)
            better = other & (cost < best)
            best = torch.where(better, cost, best)
            scales, zeros = torch.where(better, s, scales), torch.where(better, z, zeros)
    return scales, zeros
