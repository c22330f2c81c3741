"""The int4 product that comes with torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marlinq.operations.bench.peers.contenders import Run
from marlinq.operations.bench.weights import MIDPOINT, Weight


class Tinygemm:
    """The int4 product that comes with torch."""

    name = "tinygemm"
    any_format = False

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        if dtype != torch.bfloat16:
            return "takes bfloat16 only; choose --dtype bfloat16"
        return "takes groups of 32, 64 and 128" if group_size == -1 else None

    def nbytes(self, weight: Weight) -> int:
        return weight.nbytes + weight.scales.nbytes

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        codes = weight.codes().t().contiguous()
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        scales, zeros = weight.natural_scales(), weight.natural_zeros()
        # It computes (code - 8) * scale + offset.
        offset = torch.zeros_like(scales) if zeros is None else (MIDPOINT - zeros.to(scales.dtype)) * scales
        both = torch.stack((scales, offset), dim=-1).contiguous()
        operands = [(packed.clone(), both.clone()) for _ in range(copies)]
        group_size = weight.group_size

        def run(copy: int, x: Tensor) -> Tensor:
            words, scales_and_offsets = operands[copy]
            result: Tensor = torch.ops.aten._weight_int4pack_mm(x, words, group_size, scales_and_offsets)
            return result

        return run
