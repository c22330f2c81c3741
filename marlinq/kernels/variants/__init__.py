"""The kernels that multiply, one file each: candidates, cost, configuration and parameters."""

from __future__ import annotations

from marlinq.kernels.contract.configuration import VARIANTS, register_variant
from marlinq.kernels.variants.bulk import BULK
from marlinq.kernels.variants.stream import STREAM
from marlinq.kernels.variants.warpgroup import WARPGROUP

for _variant in (STREAM, BULK, WARPGROUP):
    register_variant(_variant)

KERNELS = tuple(VARIANTS)
"""Names of the kernels in this folder."""
