"""The CPU's solve: one thread a slice, and the same bits however many threads there are."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from marlinq.methods import slices
from marlinq.methods.gptq import solve_gptq
from tests.testing.layers import make_layer
from tests.testing.schemes import scheme


@pytest.mark.parametrize("n", [1, 16, 511, 512, 513, 1200, 4096])
def test_slices_cover_all_channels_once(n: int) -> None:
    found = list(slices.even_slices(n))
    assert found[0].start == 0
    assert found[-1].stop == n
    assert all(a.stop == b.start for a, b in itertools.pairwise(found))
    widths = [part.stop - part.start for part in found]
    assert max(widths) <= 512
    # Multiples of 16 but the last, so at most 15 a slice are missing there.
    assert max(widths) - min(widths) < 16 * len(found)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = make_layer(1100, 64)
    before = torch.get_num_threads()
    used: dict[int, set[int]] = {}
    results = []
    solve = slices._solve_slice
    for threads in (1, 2, 3):
        seen = used.setdefault(threads, set())

        def noting(*args: object, seen: set[int] = seen) -> None:
            # A slice's operations are the business of its own thread.
            assert torch.get_num_threads() == 1
            seen.add(threading.get_ident())
            solve(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(slices, "_solve_slice", noting)
        torch.set_num_threads(threads)
        try:
            results.append(solve_gptq(weight, hessian, scheme())[0])
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    assert len(used[1]) == 1
    assert 1 <= len(used[3]) <= 3
    for result in results[1:]:
        assert torch.equal(result.codes, results[0].codes)
        assert torch.equal(result.scales, results[0].scales)
