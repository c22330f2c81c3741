from __future__ import annotations

import pytest
import torch

from marlinq.calibration import Batch
from marlinq.operations.quantize.original import compared_batches, compared_share


def batches(count: int, tokens: int) -> list[Batch]:
    return [Batch(torch.zeros(2, tokens, dtype=torch.int64), (tokens, tokens // 2)) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "tokens", "shards", "expected"),
    [
        (3, 512, 1, [0, 1, 2]),
        (31, 2048, 1, list(range(31))),  # 95,232 tokens: less than twice as many as are enough
        (32, 2048, 1, list(range(0, 32, 2))),
        (86, 2048, 1, list(range(0, 86, 5))),
        (43, 2048, 2, list(range(0, 43, 5))),
        (1, 1 << 20, 1, [0]),
    ],
)
def test_of_a_long_text_some_batches_are_compared(
    count: int, tokens: int, shards: int, expected: list[int]
) -> None:
    assert compared_batches(batches(count, tokens), shards) == expected


@pytest.mark.parametrize("count", [1, 31, 32, 86, 500])
def test_the_share_is_that_of_the_batches(count: int) -> None:
    found = batches(count, 2048)
    tokens = sum(sum(batch.lengths) for batch in found)
    assert compared_share(tokens) * count <= len(compared_batches(found)) < compared_share(tokens) * count + 1
