"""Operators in both namespaces; those of one start kernels before the kernel ahead of them has ended."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.kernels.contract.demands import Demands, batch_invariant, demands
from marlinq.kernels.ops.definition import define_operator


def test_an_early_operator_is_the_operator_inside_its_context() -> None:
    seen: list[Demands] = []

    def noted(x: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(demands())
        return x + 1

    found = define_operator(
        "noted", "(Tensor x, Tensor? bias=None) -> Tensor", noted, noted, torch.empty_like
    )
    assert found is torch.ops.marlinq.noted.default
    early = torch.ops.marlinq_early.noted.default
    for operator in (found, early):
        assert torch.equal(operator(torch.zeros(2)), torch.ones(2))
        with batch_invariant():
            operator(torch.zeros(2))
    assert seen == [
        Demands(early=early, batch_invariant=invariant)
        for early in (False, True)
        for invariant in (False, True)
    ]
    assert demands() == Demands()
