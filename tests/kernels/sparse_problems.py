"""Random 2:4 sparse weights."""

from __future__ import annotations

import torch

from marlinq.core.granularity import Granularity
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import QuantizedWeight
from tests.testing.schemes import scheme


def random_sparse(k: int, n: int, group_size: int, *, seed: int = 0) -> QuantizedWeight:
    """Codes over the whole range in random masks, some spans with one value or none, scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    kept = TWO_OF_FOUR.largest(torch.rand(k, n, generator=generator))
    kept &= torch.rand(k, n, generator=generator) > 0.05
    codes = torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8)
    groups = Granularity.from_group_size(group_size).groups(k)
    scales = (0.5 + torch.rand(groups, n, generator=generator)) / 16
    scales *= torch.randint(0, 2, (groups, n), generator=generator) * 2 - 1
    wanted = scheme(group_size, sparsity=TWO_OF_FOUR)
    return QuantizedWeight.from_codes(wanted, torch.where(kept, codes, 8), scales=scales.half())
