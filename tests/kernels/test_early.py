"""Operators whose kernels start before the kernel ahead of them has ended."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.kernels import early_operator
from marlinq.kernels.contract.demands import Demands, demands


def test_an_early_operator_is_the_operator_inside_its_context() -> None:
    seen: list[Demands] = []

    def noted(x: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(demands())
        return x + 1

    library = torch.library.Library("marlinq", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("noted(Tensor x, Tensor? bias=None) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("noted", noted, "CPU")  # type: ignore[no-untyped-call]
    found = early_operator("noted")
    assert found is early_operator("noted")
    assert found is torch.ops.marlinq_early.noted.default
    assert torch.equal(found(torch.zeros(2)), torch.ones(2))
    assert seen == [Demands(early=True)]
    assert demands() == Demands()
