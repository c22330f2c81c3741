"""Short constructors of schemes and quantised weights."""

from __future__ import annotations

from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, Element, Scheme, integer_element
from marlinq.core.sparsity import Sparsity
from marlinq.core.weight import QuantizedWeight


def scheme(
    group_size: int = 32,
    *,
    symmetric: bool = True,
    bits: int = 4,
    scale_dtype: str = "float16",
    sparsity: Sparsity | None = None,
) -> Scheme:
    """An integer scheme; ``group_size`` is -1 for one scale per channel, as in configs."""
    return Scheme(
        integer_element(bits),
        Granularity.from_group_size(group_size),
        "midpoint" if symmetric else "stored",
        scale_dtype,
        sparsity=sparsity,
    )


def quantized(
    codes: Tensor, scales: Tensor, zeros: Tensor, g_idx: Tensor, size: int, element: Element = INT4
) -> QuantizedWeight:
    """A quantised weight with ``size`` channels per group."""
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        zeros=zeros,
        g_idx=g_idx,
        element=element,
        granularity=Granularity.group(size),
        out_features=codes.shape[1],
    )
