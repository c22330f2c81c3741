"""Random 2:4 sparse weights and what their products should be."""

from __future__ import annotations

import torch
from torch import Tensor

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


def expected(q: QuantizedWeight, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product in float64, with scales rounded to ``dtype``."""
    rounded = q.scales.to(dtype).double()
    g = q.in_features // len(rounded)
    weight = (q.codes.double() - 8) * rounded.repeat_interleave(g, dim=0)
    product = x.double() @ weight.to(x.device)
    return product if bias is None else product + bias.double()
