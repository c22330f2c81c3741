"""Defines the package's torch operators.

``torch.ops.marlinq_early.NAME`` is ``torch.ops.marlinq.NAME`` inside
:func:`marlinq.kernels.contract.demands.early_launches`, for graphs of other libraries: its kernels start
before the kernel ahead has ended. The demand is made inside the operator, so that it also holds in compiled
graphs and in every thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marlinq.kernels.contract.demands import launched_early

_OWN, _EARLY = (
    torch.library.Library(name, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("marlinq", "marlinq_early")
)


def define_operator(
    name: str,
    schema: str,
    cuda: Callable[..., Tensor],
    cpu: Callable[..., Tensor],
    meta: Callable[..., Tensor],
) -> Any:
    """Define an operator in both namespaces; returns the default overload of ``torch.ops.marlinq.<name>``.

    Args:
        name: name of the operator.
        schema: its arguments and result, as in ``(Tensor x) -> Tensor``.
        cuda: the operator on GPUs.
        cpu: the operator on CPUs.
        meta: the operator on tensors without memory.
    """
    for library, wrap in ((_OWN, _unchanged), (_EARLY, launched_early)):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        for function, key in ((wrap(cuda), "CUDA"), (wrap(cpu), "CPU"), (meta, "Meta")):
            library.impl(name, function, key)  # type: ignore[no-untyped-call]
    return getattr(torch.ops.marlinq, name).default


def _unchanged(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return function
