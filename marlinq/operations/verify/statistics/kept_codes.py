"""The kept codes of a 2:4 sparse weight, as the dense weight that the words of a sparse layout hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import QuantizedWeight
from marlinq.formats.layouts.marlin_24 import places

CHANNELS_PER_CODE = TWO_OF_FOUR.span // TWO_OF_FOUR.kept
"""Input channels for each kept code of an output channel."""


@dataclass(frozen=True, eq=False)
class KeptCodes:
    """Kept codes of a sparse weight; codes of zero that fill spans with fewer than two weights count too.

    Attributes:
        q: kept codes [K / 2, N] in the groups of the sparse weight.
        w: float32 [K / 2, N], original weights in their places.
        channels: int64 [K / 2, N], input channel of each kept code.
    """

    q: QuantizedWeight
    w: Tensor
    channels: Tensor

    @classmethod
    def of(cls, w: Tensor, q: QuantizedWeight) -> KeptCodes:
        """The kept codes of ``q``, symmetric and 2:4 sparse, with the original ``w``, float32 [K, N]."""
        span = TWO_OF_FOUR.span
        first = torch.arange(0, q.in_features, span, device=w.device).reshape(-1, 1, 1)
        channels = (first + places(q.codes, q.element.midpoint)).flatten(0, 1)
        granularity = q.scheme.granularity
        if granularity != Granularity.channel():
            granularity = Granularity.group(q.channels_per_group // CHANNELS_PER_CODE)
        scheme = replace(q.scheme, granularity=granularity, sparsity=None)
        kept = QuantizedWeight.from_codes(scheme, q.codes.gather(0, channels), scales=q.scales)
        return cls(kept, w.gather(0, channels), channels)
