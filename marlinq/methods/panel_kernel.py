"""Whether a GPU can run the kernel that rounds panels of channels (``kernels/cuda/solve``)."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, Scheme
from marlinq.methods.grid import search_factors

if TYPE_CHECKING:
    import torch

_TRIED = Scheme(INT4, Granularity.group(128), "midpoint")
"""The scheme whose kernel is compiled as a test: a GPU can run the kernels of all schemes or of none."""


@lru_cache(maxsize=16)
def has_panel_kernel(device: torch.device) -> bool:
    """Whether the kernel for panels runs on a device; if it does not on a GPU, warns once with the reason."""
    if device.type != "cuda":
        return False
    # Imported late: it imports torch, which reading a recipe must not do.
    from marlinq.kernels.solve import check_panels

    try:
        check_panels(device.index, _TRIED, len(search_factors()))
    except EnvironmentProblem as problem:
        warnings.warn(
            f"{device}: the solvers' kernel can't be used ({problem}); torch's operations solve instead, "
            "some ten times slower",
            stacklevel=4,
        )
        return False
    return True
