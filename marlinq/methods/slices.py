"""GPTQ's solve on a CPU: slices of the output channels, each by one thread.

Output channels don't influence each other, so each slice is solved by one thread from the first channel to
the last. The alternative, several threads for each of the loop's thousands of small operations, would
synchronise thousands of times and wait for the slowest thread each time. Slices depend on the layer's shape
alone, so the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.scheme import Element, Scheme
from marlinq.methods.factor import Factor
from marlinq.methods.grid import minmax_grid, search_grid
from marlinq.methods.pruning import Pruning, expected
from marlinq.methods.solution import Solution, refit

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

# Output channels of a slice at most, and a multiple for widths: wide enough that calls of operations cost
# little, narrow enough that a group of channels stays in a core's cache.
_WIDTH, _ALIGNMENT = 512, 16

# Channels up to which a loop over columns is faster than halving once more for a matrix product.
_LEAF = 16


def solve_slices(w: Tensor, factor: Factor, g: int, scheme: Scheme, *, clip_search: bool) -> Solution:
    """GPTQ on the CPU.

    Args:
        w: float32 [K, N], in processing order.
        factor: factor of the Hessian, in the same order.
        g: channels of a group, a divisor of K.
        scheme: scheme of the result.
        clip_search: search the scales and fit them to the codes, instead of spanning each group's range.
    """
    solution = Solution.empty(w, g, scheme.element)
    # Each group's inverse is the same for all slices.
    roots = factor.root.unfold(0, g, g).unfold(1, g, g)
    own = torch.stack([roots[group, group] for group in range(w.shape[0] // g)])
    inverses = torch.linalg.solve_triangular(own, torch.eye(g, device=w.device), upper=True)

    def one(columns: slice) -> None:
        _solve_slice(w[:, columns].contiguous(), factor, inverses, scheme, clip_search, solution, columns)

    if w.device.type != "cpu":
        # Other devices, and GPUs without the kernel for panels: one slice, for as few operations as possible.
        one(slice(0, w.shape[1]))
        return solution
    slices = list(even_slices(w.shape[1]))
    threads = min(torch.get_num_threads(), len(slices))
    with (
        _single_threaded(),
        ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        for _ in pool.map(one, slices):
            pass
    return solution


def even_slices(n: int) -> Iterator[slice]:
    """Slices of nearly equal width, at most 512, that cover n output channels."""
    count = -(-n // _WIDTH)
    width = -(-n // (count * _ALIGNMENT)) * _ALIGNMENT
    return (slice(start, min(start + width, n)) for start in range(0, n, width))


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Restore torch's number of threads afterwards; a pool's threads change it for some libraries."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _solve_slice(
    w: Tensor,
    factor: Factor,
    inverses: Tensor,
    scheme: Scheme,
    clip_search: bool,
    solution: Solution,
    columns: slice,
) -> None:
    """GPTQ on w, float32 [K, n], the output channels ``columns``; each input channel is a row of n."""
    k, g = w.shape[0], inverses.shape[1]
    element = scheme.element
    root, sparsity = factor.root, scheme.sparsity
    # Row j is (R^T D)_j, summed over the channels quantised so far.
    carried = torch.zeros_like(w)
    for group, inverse in enumerate(inverses):
        part = slice(group * g, (group + 1) * g)
        own = root[part, part]
        diagonal = own.diagonal()
        # Nothing is carried into the first group; skipping the product saves much if it is the only group.
        updated = torch.addmm(w[part], inverse.t(), carried[part]) if group else w[part]
        kept = expected(updated, diagonal, sparsity)
        if clip_search:
            s, z = search_grid(kept, diagonal.square(), scheme)
        else:
            s, z = minmax_grid(kept, scheme)
        pruning = None if sparsity is None else Pruning(sparsity, z, diagonal)
        # In units of values the feedback of an error does not depend on the scale.
        rounded = torch.empty_like(updated)
        errors = updated.div(s).add_(z)
        _round_channels(errors, rounded, inverse * diagonal.unsqueeze(1), element, pruning)
        codes = rounded.to(torch.uint8) if element.table is None else element.nearest(rounded)
        solution.codes[part, columns] = codes
        levels = rounded.sub_(z)
        terms = errors.mul_(diagonal.unsqueeze(1)).mul_(s)
        if clip_search:
            s = refit(s, own.t() @ levels, terms, torch_dtype(scheme.scale_dtype))
        solution.scales[group, columns], solution.zeros[group, columns] = s, z
        difference = torch.addcmul(w[part], levels, s, value=-1)
        solution.loss[columns] += terms.square().sum(dim=0)
        solution.loss[columns] -= difference.square().sum(dim=0).mul_(factor.shift)
        if part.stop < k:
            carried[part.stop :].addmm_(root[part, part.stop :].t(), difference)


def _round_channels(
    v: Tensor, rounded: Tensor, feedback: Tensor, element: Element, pruning: Pruning | None
) -> None:
    """Round the rows of v, float32 [g, n] in units of the element's values, in order, to such values.

    v is left with the errors.

    ``feedback`` [g, g] is upper triangular: entry [k, j] is subtracted from row j per code unit of error of
    row k. Recursive halving turns most rank-1 updates into matrix products. ``pruning`` prunes each span when
    it is processed.
    """
    g = v.shape[0]
    if g > _LEAF:
        half = g // 2 if pruning is None else pruning.halved(g)
        first, second = slice(0, half), slice(half, g)
        parts = (None, None) if pruning is None else (pruning.part(first), pruning.part(second))
        _round_channels(v[first], rounded[first], feedback[first, first], element, parts[0])
        v[second].addmm_(feedback[first, second].t(), v[first], alpha=-1)
        _round_channels(v[second], rounded[second], feedback[second, second], element, parts[1])
        return
    for k, (row, codes) in enumerate(zip(v.unbind(), rounded.unbind(), strict=True)):
        if element.table is None:
            torch.round(row, out=codes).clamp_(0, element.codes - 1)
        else:
            codes.copy_(element.rounded(row))
        if pruning is not None:
            place = k % pruning.sparsity.span
            if place == 0:
                pruned = pruning.pruned(v[k : k + pruning.sparsity.span], k)
            torch.where(pruned[place], pruning.zeros, codes, out=codes)
        row.sub_(codes)
        if k + 1 < g:
            v[k + 1 :].addr_(feedback[k, k + 1 :], row, alpha=-1)
