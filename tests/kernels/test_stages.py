"""How many chunks are on their way at once."""

from __future__ import annotations

import pytest

from marlinq.kernels.variants.stages import chunks_on_their_way

KIB = 1024


@pytest.mark.parametrize(
    ("chunk", "stages", "blocks", "expected"),
    [
        (8 * KIB, 12, 1, 12),  # 96 KiB in all: nothing to hold back
        (8 * KIB, 14, 1, 8),
        (8 * KIB, 7, 2, 4),  # two blocks share what is on its way
        (32 * KIB, 5, 1, 2),
        (200 * KIB, 1, 1, 1),  # one at least
        (50 * KIB, 3, 1, 1),
        (20 * KIB, 6, 1, 3),  # the nearest number
    ],
)
def test_large_rings_are_not_asked_for_at_once(chunk: int, stages: int, blocks: int, expected: int) -> None:
    assert chunks_on_their_way(chunk, stages, blocks, 64 * KIB) == expected
