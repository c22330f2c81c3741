"""The choice is the one that trying everything finds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlinq.operations.quantize.allocation import knapsack
from marlinq.operations.quantize.allocation.knapsack import Item, choose

ITEMS = st.lists(
    st.builds(Item, nbytes=st.integers(0, 60), cost=st.integers(0, 1000).map(float)), min_size=1, max_size=4
)
UNITS = st.lists(ITEMS, min_size=1, max_size=5)


def best(units: list[list[Item]], budget: int) -> tuple[float, int] | None:
    """Cost and bytes of the best choice, by trying all; of equal costs the one of fewest bytes."""
    found = [
        (sum(item.cost for item in picked), sum(item.nbytes for item in picked))
        for picked in itertools.product(*units)
    ]
    fitting = [each for each in found if each[1] <= budget]
    return min(fitting, default=None)


@given(units=UNITS, budget=st.integers(0, 300))
def test_the_choice_is_exact(units: list[list[Item]], budget: int) -> None:
    wanted, choice = best(units, budget), choose(units, budget)
    if wanted is None or choice is None:
        assert wanted is choice is None
        return
    picked = [items[index] for items, index in zip(units, choice.items, strict=True)]
    assert choice.exact
    assert (choice.cost, choice.nbytes) == wanted
    assert (sum(item.cost for item in picked), sum(item.nbytes for item in picked)) == wanted


@given(units=UNITS, budget=st.integers(0, 300), steps=st.integers(1, 8))
def test_a_coarse_choice_fits_and_is_the_best_of_rounded_sizes(
    units: list[list[Item]], budget: int, steps: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "MOST_STEPS", steps)
        choice = choose(units, budget)
    least = [min(item.nbytes for item in items) for items in units]
    if choice is None:
        assert sum(least) > budget
        return
    assert choice.nbytes <= budget
    rounded = [
        [Item(math.ceil((item.nbytes - low) / choice.step), item.cost) for item in items]
        for items, low in zip(units, least, strict=True)
    ]
    wanted = best(rounded, (budget - sum(least)) // choice.step)
    assert wanted is not None
    assert choice.cost == wanted[0]


def test_a_choice_of_a_large_model_comes_near_to_its_budget() -> None:
    # Four blocks of Llama-70B's shapes: sizes have a large common divisor, so no size is rounded.
    shapes = [(8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)]
    units = [
        [Item(k * n // 2 + 2 * k * n // g, 1.0 / g / (1 + block)) for g in (32, 64, 128)]
        + [Item(k * n + 2 * n, 0.001), Item(2 * k * n, 0.0)]
        for block in range(4)
        for k, n in shapes
    ]
    total = sum(k * n for k, n in shapes) * 4
    choice = choose(units, int(total * 4.5 / 8))
    assert choice is not None
    assert choice.exact
    assert total * 4.45 / 8 < choice.nbytes <= total * 4.5 / 8
