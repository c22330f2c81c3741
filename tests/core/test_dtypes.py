"""Which dtypes hold every value of which."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from marlinq.core.dtypes import SCALES, holds, torch_dtype

WIDE = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize(("wide", "narrow"), list(product(WIDE, SCALES)))
def test_a_dtype_holds_another_when_a_round_trip_changes_nothing(wide: str, narrow: str) -> None:
    dtype = torch_dtype(narrow)
    bits = 8 * dtype.itemsize
    raw = torch.arange(1 << min(bits, 16)).to(torch.int32)
    if bits == 32:
        raw = raw << 16 | 1  # signs and exponents of all sizes, with the last bit set
    patterns = raw.view(torch.uint8).reshape(-1, 4)[:, : bits // 8].contiguous()
    values = patterns.view(dtype).flatten().float()
    values = values[values.isfinite()]
    same = torch.equal(values.to(torch_dtype(wide)).float(), values)
    assert holds(torch_dtype(wide), dtype) == same
