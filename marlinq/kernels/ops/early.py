"""marlinq's operators for graphs of other libraries, whose kernels start before the kernel ahead has ended.

``torch.ops.marlinq_early.NAME`` is ``torch.ops.marlinq.NAME`` inside :func:`marlinq.kernels.early_launches`.
The context is entered inside an operator, so that it also holds in compiled graphs and in every thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from marlinq.kernels.contract.demands import early_launches

_LIBRARY = torch.library.Library("marlinq_early", "FRAGMENT")  # type: ignore[no-untyped-call]


@cache
def early_operator(name: str) -> Any:
    """The default overload of ``torch.ops.marlinq_early.<name>``, defined at the first call.

    Args:
        name: an operator of ``torch.ops.marlinq``.
    """
    overload = getattr(torch.ops.marlinq, name).default

    def launched(*given: Any) -> Any:
        with early_launches():
            return overload(*given)

    schema = str(overload._schema).removeprefix("marlinq::")
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    for function, key in ((launched, "CUDA"), (launched, "CPU"), (overload, "Meta")):
        _LIBRARY.impl(name, function, key)  # type: ignore[no-untyped-call]
    return getattr(torch.ops.marlinq_early, name).default
