from __future__ import annotations

import pytest
import torch

from marlinq.methods.factor import factorise, inverse_triangles


@pytest.mark.gpu
def test_a_gpu_divides_wide_hessians_as_float64_does() -> None:
    k = 3000
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2 * k, k, device="cuda", generator=generator)
    hessian = x.t() @ x / len(x)
    found = factorise(hessian, torch.randperm(k, device="cuda", generator=generator), 0.01)
    damped = hessian.double() + found.shift * torch.eye(k, device="cuda", dtype=torch.float64)
    right = torch.randn(k, 64, device="cuda", generator=generator)
    expected = torch.linalg.solve(damped, right.double())
    # Two operands are rounded by 2**-11 in each of two steps; the matrix's condition makes that worse.
    bound = 4 * 2**-11 * float(torch.linalg.cond(damped))
    assert float((found.divide(right) - expected).norm() / expected.norm()) < bound < 0.1


@pytest.mark.parametrize("n", [1, 2, 3, 32, 96, 100, 128])
def test_many_triangles_are_inverted_as_float64_does(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    upper = torch.randn(2, 3, n, n, generator=generator).triu() / n
    upper.diagonal(dim1=-2, dim2=-1).add_(1.0)
    expected = torch.linalg.inv(upper.double())
    # Sums of n products at most in each of log2(n) steps of two.
    bound = 2 * n.bit_length() * n * 2**-24 * float(torch.linalg.cond(upper.double()).max())
    assert float((inverse_triangles(upper) - expected).abs().max()) < bound < 0.01
