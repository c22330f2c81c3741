"""Judges weights of floating-point elements against the original, in pieces of weights with one scale.

Rounding to nearest has a bound: no weight is farther from its code's value than half the step between values
there. A quotient or scale computed in bfloat16 adds 2 * 2**-9 of the value, at most an eighth of half a step
of E4M3, the finest element. If most pieces of a module keep this bound, a value beyond it is damage: a
flipped bit of one code, or the scale of one block. A module that was not rounded to nearest is compared with
itself: pieces are reported whose error stands out.

Zeros tell what large weights beside them may not: GPTQ moves a zero by a correction that is far too small to
move a large weight. So most pieces must keep the bound with their zeros too. And where most weights are
zeros, many zeros moved by one step are a sign of such a method: damaged scales move no zero, and damaged
codes move most by more than a step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from marlinq.core.scheme import Element
from marlinq.core.weight import QuantizedWeight
from marlinq.operations.verify.statistics.evidence import Evidence
from marlinq.operations.verify.statistics.finding import SuspectPlace

_NEAREST = 1.125
"""Largest distance, in half steps, that rounding to nearest leaves (1 + an eighth for bfloat16)."""
_BEYOND = 1.5
"""Distance, in half steps, above which a value of a rounded module is damaged. It allows for NVFP4 scales
that were rounded to E4M3 after the division, which move a quotient by 2**-4 of it (three eighths of half a
step)."""
_ROUNDED_SHARE = 0.5
"""Share of pieces within :data:`_NEAREST` above which a module counts as rounded to nearest; with other
methods nearly no piece of 16 weights or more is."""
_CLEARLY_ROUNDED = 0.75
"""Share of such pieces above which the values that lie little beyond the bound are not counted."""
_LITTLE_OVER_BEYOND = 2 / 3
"""Largest ratio of the values between :data:`_NEAREST` and :data:`_BEYOND` to those above where fewer pieces
are within the bound. Damage moves a code by a step or more: 0.25 or less. GPTQ's NVFP4 weights: 1.47 and
more."""
_TINY = 4
"""Ratio of an output channel's largest piece to a piece above which that piece counts as tiny."""
_TELLING = 8
"""Ratio of the smallest half step to a weight above which its distance does not tell how it was rounded."""
_ONE_STEP = 1.25
"""Distance, in steps, up to which a zero counts as moved by one step. Corrections for the errors of other
weights are seldom larger; a damaged code is anywhere."""
_MOSTLY_ZEROS = 0.5
"""Share of weights that are not zero below which zeros moved by one step are a sign of a method."""
_FEWEST_MOVED = 1 / 32
"""Share of pieces with moved zeros up to which these are damage; after GPTQ it is 1 / 8 and more."""
_STANDS_OUT = 4.0
"""Ratio of a piece's root mean square error to the module's 99.9 % quantile above which it is a warning, in
modules that were not rounded to nearest."""
_PIECE = 128
_ROWS = 512
_FAR_FACTOR = 0.03
"""Distance from 1 of the factor that fits a module's values to the original best, above which it can be
damage. GPTQ's MXFP4 values have factors of 0.93 to 1, others 0.98 to 1.01."""
_EXPLAINED = 0.85
"""Ratio of the error with the best factor to the error as stored below which the factor is damage; in sound
modules it is 0.97 and more."""
_SHIFTED = 0.7
"""Ratio of the error with shifted scales to the error as stored below which the scales were shifted; in sound
modules any shift adds to the error."""


def find_float_faults(weight: Tensor, q: QuantizedWeight) -> Evidence:
    """Judges one module of floating-point weights.

    Args:
        weight: original, float32 [N, K].
        q: stored weight, its scales finite, on the device of ``weight``.
    """
    w, size = weight.t(), min(q.channels_per_group, _PIECE)
    pieces = -(-q.in_features // size)
    shape = (pieces, q.out_features)
    beyond, far, unrounded, squares, sizes, telling, moved_zeros, far_zeros, largest_zero, largest_step = (
        torch.zeros(shape, device=w.device) for _ in range(10)
    )
    piece = torch.arange(q.in_features, device=w.device) // size
    # An activation order would mix scales within a piece, but not distances.
    for start in range(0, q.in_features, _ROWS):
        rows = slice(start, start + _ROWS)
        r, tells, values, step = _distances(w[rows], q, rows)
        counted = (
            (beyond, r > _BEYOND),
            (far, (r > _BEYOND) & tells),
            (unrounded, (r > _NEAREST) & tells),
            (squares, r.square()),
            (sizes, w[rows].abs()),
            (telling, tells),
            (moved_zeros, (r > _NEAREST) & ~tells),
            (far_zeros, (r > 2 * _ONE_STEP) & ~tells),
        )
        for total, each in counted:
            total.index_add_(0, piece[rows], each.float())
        places = piece[rows].unsqueeze(1).expand(r.shape)
        largest_zero.scatter_reduce_(0, places, values.abs().where(~tells, 0.0), "amax")
        largest_step.scatter_reduce_(0, places, step.where(tells, 0.0), "amax")
    # The scale of zeros may be anything, so a piece of them does not tell how the others were rounded.
    live = (sizes > 0) | (sizes.sum() == 0)
    # Corrections of large weights' errors move tiny weights by many steps, and those of tiny ones move no
    # large weight: each alone could pass for a module that is rounded and in parts damaged.
    large = live & (sizes >= sizes.amax(dim=0) / _TINY)
    rounded = all(
        _rounded(unrounded[judged], far[judged], float(telling[judged].mean()) / size)
        for judged in (live, large)
    )
    # Groups of zeros or of tiny weights have small scales: a correction that moves a zero there by many steps
    # moves none of a large group.
    far_zeros = (far_zeros > 0) & (large | (largest_zero > _ONE_STEP * largest_step.amax(dim=0)))
    # An output channel of zeros has no errors to correct.
    nonzero = sizes.sum(dim=0) > 0
    rounded = rounded and not _corrected(
        beyond[:, nonzero],
        (unrounded + moved_zeros)[:, nonzero],
        (far + far_zeros)[:, nonzero],
        float(telling[live].mean()) / size,
    )
    findings = _damage(beyond, size) if rounded else _outliers(squares, size)
    return Evidence(tuple(findings), 0, 0, 0.0, 1.0, len(findings), values=weight.numel(), rounded=rounded)


def whole_module_faults(weight: Tensor, q: QuantizedWeight) -> list[str]:
    """Faults of all scales of a module at once, which leave no piece that stands out from the others.

    Args:
        weight: original, float32 [N, K].
        q: stored weight, its scales finite, on the device of ``weight``.
    """
    values = q.dequantize().float()
    error = float((weight - values).norm())
    factor = float((weight * values).sum() / values.square().sum().clamp(min=torch.finfo(torch.float32).tiny))
    rest = float((weight - factor * values).norm())
    faults = []
    if abs(factor - 1) > _FAR_FACTOR and rest < _EXPLAINED * error:
        faults.append(
            f"all values should be {factor:.3g} times the stored ones, so scales are another weight's"
        )
    by_block = q.scales.shape[1] < q.out_features
    for axis, what in enumerate(("group", "block of channels" if by_block else "channel")):
        # Of one scale no shift changes anything; of two both shifts are the same.
        for step in (1, -1)[: q.scales.shape[axis] - 1]:
            # Not every operation knows 8-bit floats.
            same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[q.scales.dtype.itemsize]
            moved = replace(q, scales=q.scales.view(same_size).roll(step, axis).view(q.scales.dtype))
            if float((weight - moved.dequantize().float()).norm()) < _SHIFTED * error:
                faults.append(f"scales are shifted by one {what}")
    return faults


def _rounded(unrounded: Tensor, far: Tensor, telling: float) -> bool:
    """Whether most pieces were rounded to nearest, of which some may be damaged since.

    Args:
        unrounded: values above :data:`_NEAREST` of each piece.
        far: values above :data:`_BEYOND` of each piece.
        telling: share of the pieces' weights that these counts are of.
    """
    share = float((unrounded == 0).float().mean())
    if share < _ROUNDED_SHARE:
        return False
    little_far = float((unrounded - far).sum())
    # Pieces with zeros keep the bound more often; the power makes the share that of pieces without.
    clearly = share ** (1 / max(telling, 1 / _PIECE)) >= _CLEARLY_ROUNDED
    if not clearly and little_far > _LITTLE_OVER_BEYOND * float(far.sum()):
        return False
    # GPTQ on inputs that hardly go together moves few weights, most of them little past half a step; damage
    # moves a code by a step or more.
    little = int(((unrounded > 0) & (far == 0)).sum())
    return little <= int((far > 0).sum())


def _corrected(beyond: Tensor, unrounded: Tensor, far: Tensor, telling: float) -> bool:
    """Whether zeros were moved by a method, in a module whose other weights seem rounded to nearest.

    With few weights beside the zeros, those may all lie too near their codes to be moved by what moves zeros.

    Args:
        beyond: values above :data:`_BEYOND` of each piece, zeros included.
        unrounded: values above :data:`_NEAREST` of each piece, zeros included.
        far: zeros of each piece moved by more than a step, by which no method moves them alone.
        telling: share of the weights that are not zero.
    """
    if float((beyond == 0).float().mean()) < _ROUNDED_SHARE:
        return True
    if telling >= _MOSTLY_ZEROS:
        return False
    little = int(((unrounded > 0) & (far == 0)).sum())
    return little > max(int((far > 0).sum()), _FEWEST_MOVED * unrounded.numel())


def _distances(w: Tensor, q: QuantizedWeight, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four facts about each weight, shaped as ``w``.

    Its distance from its code's value, in half steps between values there, float32; 0 for a weight beyond the
    element's largest value that has this value. Whether the distance tells how the weight was rounded: zero,
    and what is far below half a step, moves by whole steps or not at all. The stored value. The smallest step
    between values.
    """
    groups = q.g_idx[rows].long()
    scales = q.per_output(q.scales.float())[groups]
    if q.tensor_scale is not None:
        scales = scales / q.tensor_scale if q.tensor_scale_divides else scales * q.tensor_scale
    values = q.element.decode(q.codes[rows])
    low, high = q.element.ends
    place = (w / scales).clamp_(low, high)
    # 0 / 0: a weight of zero is exact with any scale.
    place = torch.where(place.isnan(), values, place)
    bounds, halves = (part.to(w.device) for part in _steps(q.element))
    # The step between the two values around the farther one.
    far = torch.where(values.abs() > place.abs(), values, place)
    tells = place.abs() > halves.min() / _TELLING
    distance = (place - values).abs_().div_(halves[torch.bucketize(far.contiguous(), bounds)])
    return distance, tells, values * scales, 2 * halves.min() * scales.abs()


@lru_cache(maxsize=16)
def _steps(element: Element) -> tuple[Tensor, Tensor]:
    """(values of the element without its ends, ascending; half of each step between neighbours)."""
    assert element.table is not None
    values = torch.tensor(sorted({value for value in element.table if not math.isnan(value)}))
    return values[1:-1].contiguous(), (values[1:] - values[:-1]) / 2


def _damage(beyond: Tensor, size: int) -> list[SuspectPlace]:
    """A failure for every piece of a rounded module that has values beyond rounding to nearest."""
    findings = []
    for piece, n in (beyond > 0).nonzero().tolist():
        count = int(beyond[piece, n])
        what = f"{_place(piece, n, size)}: {count} value{'s'[: count > 1]} not nearest to the original's"
        findings.append(SuspectPlace(what, math.inf, 0.0, fails=True))
    return findings


def _outliers(squares: Tensor, size: int) -> list[SuspectPlace]:
    """A warning for every piece whose error is far above the 99.9 % quantile of its module's pieces."""
    errors = (squares / size).sqrt_()
    count = max(1, errors.numel() // 1000)
    usual = float(errors.flatten().topk(count + 1).values[-1]) if errors.numel() > 1 else math.inf
    findings = []
    for piece, n in (errors > _STANDS_OUT * usual).nonzero().tolist():
        times = float(errors[piece, n]) / usual if usual else math.inf
        what = f"{_place(piece, n, size)}: errors {times:.1f} times those of nearly all others"
        findings.append(SuspectPlace(what, math.inf, 0.0, fails=False))
    return findings


def _place(piece: int, n: int, size: int) -> str:
    return f"input channels {piece * size} to {(piece + 1) * size - 1} of output channel {n}"
