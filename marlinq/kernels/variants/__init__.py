"""The product kernels, one file each: candidate configurations, estimated seconds, parameters.

Words that every file uses: a *tile* is the output of one block or cluster; a *row* is 16 channels of K, as
words are stored; a *chunk* is the rows that a warp or warpgroup takes at a time; a *part* is a share of K
whose sums are added to others'; a *stage* is a place for one chunk in the ring buffer in shared memory.
"""

from __future__ import annotations

from marlinq.kernels.contract.configuration import VARIANTS, register_variant
from marlinq.kernels.variants.bulk import BULK
from marlinq.kernels.variants.stream import STREAM
from marlinq.kernels.variants.warpgroup import WARPGROUP

for _variant in (STREAM, BULK, WARPGROUP):
    register_variant(_variant)

KERNELS = tuple(VARIANTS)
"""Names of the kernels in this folder."""
