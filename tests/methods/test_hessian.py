from __future__ import annotations

import functools

import pytest
import torch

from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.methods import hessian as module
from marlinq.methods.hessian import (
    HessianAccumulator,
    add_float32_products,
    add_products,
    add_rounded_products,
)

CPU = torch.device("cpu")


def test_the_hessian_is_twice_the_mean_outer_product_of_real_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(3, 7, 16, generator=generator), torch.randn(2, 5, 16, generator=generator)]
    masks = [torch.rand(x.shape[:2], generator=generator) < 0.6 for x in batches]
    accumulator = HessianAccumulator(16, device=CPU, name="layer")
    rows = []
    for x, mask in zip(batches, masks, strict=True):
        polluted = x.masked_fill(~mask[..., None], float("nan"))
        accumulator.add(polluted, mask)
        rows.append(x[mask])
    tokens = torch.cat(rows).double()
    expected = 2 * tokens.t() @ tokens / len(tokens)
    found = accumulator.hessian()
    assert accumulator.tokens == len(tokens)
    assert torch.equal(found, found.t())
    # A float32 sum of n products is within about n roundings of 2**-24, relative to the sum of magnitudes.
    bound = len(tokens) * 2**-24 * (2 * tokens.abs().t() @ tokens.abs() / len(tokens))
    assert ((found.double() - expected).abs() <= bound).all()


def test_a_wide_hessian_is_summed_above_its_diagonal_alone() -> None:
    k, rows = 600, 40
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(0))
    total = torch.full((k, k), torch.nan)
    for start in range(0, k, 256):
        # The part that is not asked for stays as it is.
        total[start : start + 256, start:] = 0
    add_products(total, x, x, 0.5, 2.0, upper=True)
    expected = 2 * x.double().t() @ x.double()
    # As above: sums of n products, and the factor.
    bound = (rows + 1) * 2**-24 * 2 * x.double().abs().t() @ x.double().abs()
    above = torch.ones(k, k, dtype=torch.bool).triu()
    assert ((total.double() - expected).abs() <= bound)[above].all()
    assert total.isnan().any()
    accumulator = HessianAccumulator(k, device=CPU, name="layer")
    accumulator.add(x)
    assert torch.equal(accumulator.hessian(), accumulator.hessian().t())
    assert ((accumulator.hessian().double() - expected / rows).abs() <= bound / rows).all()


def test_shrinkage_leaves_the_diagonal_and_may_change() -> None:
    accumulator = HessianAccumulator(600, device=CPU, name="layer")
    accumulator.add(torch.randn(40, 600, generator=torch.Generator().manual_seed(1)))
    whole = accumulator.hessian().clone()
    for share in (0.25, 0.25, 0.1, 0.0):
        found = accumulator.hessian(share)
        assert torch.equal(found.diagonal(), whole.diagonal())
        assert torch.equal(found, found.t())
        expected = (1 - share) * whole + share * torch.diag(whole.diagonal())
        # One rounding each time that the share changes.
        assert ((found - expected).abs() <= 4 * 2**-24 * whole.abs()).all()


def test_inputs_added_after_shrinking_join_the_whole_hessian() -> None:
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.randn(40, 64, generator=generator) for _ in range(2))

    def seen(*inputs: torch.Tensor, looked: bool) -> HessianAccumulator:
        accumulator = HessianAccumulator(64, device=CPU, name="layer")
        for x in inputs:
            accumulator.add(x)
            if looked:
                accumulator.hessian(0.25)
        return accumulator

    expected = seen(first, second, looked=False).hessian().clone()
    assert_near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    assert_near(seen(first, second, looked=True).hessian(), expected)
    merged, blended = (seen(first, looked=True) for _ in range(2))
    merged.merge(seen(second, looked=True))
    blended.blend(seen(second, looked=True), share=0.5)
    assert_near(merged.hessian(), expected)
    assert_near(blended.hessian(), expected)
    [share] = seen(first, looked=True).as_share(80)
    assert_near(share.triu(), seen(first, looked=False).hessian().triu() / 2)


def test_corrections_are_rounded_where_a_cpu_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 40
    for k, able, rounded in ((256, True, True), (256, False, False), (64, True, False)):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda device, able=able: able)
        generator = torch.Generator().manual_seed(k)
        left, right, before = (torch.randn(n, k, generator=generator) for n in (rows, rows, k))
        exact = 0.25 * before.double() + 0.5 * left.double().t() @ right.double()
        magnitude = 0.5 * left.double().abs().t() @ right.double().abs()
        found = before.clone()
        add_rounded_products(found, left, right, 0.25, 0.5)
        missed = (found.double() - exact).abs()
        # Two operands and the product, each rounded by a share of 2**-9 at most; and float32's sums.
        sums = (rows + 3) * 2**-24 * (magnitude + before.abs())
        assert (missed <= sums + 3.01 * 2**-9 * magnitude).all()
        assert bool((missed > sums).any()) == rounded


def test_an_input_without_rows_counts_for_nothing() -> None:
    accumulator = HessianAccumulator(8, device=CPU, name="layer")
    accumulator.add(torch.empty(0, 8))
    assert accumulator.tokens == 0
    assert not accumulator.hessian().any()
    x = torch.randn(5, 8)
    accumulator.add(x)
    before = accumulator.hessian().clone()
    accumulator.add(x[None], torch.zeros(1, 5, dtype=torch.bool))
    assert accumulator.tokens == 5
    assert torch.equal(accumulator.hessian(), before)


def test_flattened_inputs_take_the_same_mask() -> None:
    x = torch.randn(2, 4, 8)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    together, flat = (HessianAccumulator(8, device=CPU, name="layer") for _ in range(2))
    together.add(x, mask)
    flat.add(x.view(8, 8), mask)
    assert torch.equal(together.hessian(), flat.hessian())
    with pytest.raises(UnsupportedError, match="layer: expected inputs of"):
        flat.add(x.view(8, 8)[:5], mask)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_activations_are_named(bad: float) -> None:
    accumulator = HessianAccumulator(4, device=CPU, name="model.layers.3.mlp.down_proj")
    accumulator.add(torch.tensor([[1.0, 2.0, bad, 4.0]]))
    with pytest.raises(NumericsError, match=r"model\.layers\.3\.mlp\.down_proj: 1 of 4 input channels"):
        accumulator.hessian()


def test_two_shards_merge_to_the_hessian_of_both() -> None:
    generator = torch.Generator().manual_seed(2)
    parts = [torch.randn(n, 16, generator=generator) for n in (40, 7, 90)]
    whole, left, right = (HessianAccumulator(16, device=CPU, name="layer") for _ in range(3))
    for part in parts:
        whole.add(part)
    left.add(parts[0])
    right.add(parts[1])
    right.add(parts[2])
    left.merge(right)
    assert left.tokens == whole.tokens == 137
    # Both are within about one rounding a token of the exact sum, relative to the sum of magnitudes.
    tokens = torch.cat(parts).double()
    bound = 2 * 137 * 2**-24 * (2 * tokens.abs().t() @ tokens.abs() / 137)
    assert ((left.hessian().double() - whole.hessian().double()).abs() <= bound).all()
    before = left.hessian()
    left.merge(HessianAccumulator(16, device=CPU, name="layer"))
    assert torch.equal(left.hessian(), before)
    empty = HessianAccumulator(16, device=CPU, name="layer")
    empty.merge(right)
    assert torch.equal(empty.hessian(), right.hessian())
    with pytest.raises(ValueError, match="expected statistics of 16 channels, found 8"):
        left.merge(HessianAccumulator(8, device=CPU, name="layer"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [96, 8200])
def test_tensor_cores_sum_as_float32_does(dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    spread = torch.exp(torch.randn(k, device="cuda", generator=generator))
    accumulator = HessianAccumulator(k, device=torch.device("cuda"), name="x")
    expected = torch.zeros(k, 64, dtype=torch.float64, device="cuda")
    for tokens in (4096, 1000):
        x = (torch.randn(tokens, k, device="cuda", generator=generator) * spread).to(dtype)
        accumulator.add(x)
        expected += x.double().t() @ x[:, -64:].double()
    found = accumulator.hessian()
    assert torch.equal(found, found.t())
    expected *= 2 / 5096
    # Products of 16-bit numbers are exact in float32. Tensor cores cut the sum off once in 16 tokens, which
    # loses up to 2**-23 of it: 4096 / 16 times for the longer call.
    error = (found[:, -64:].double() - expected).norm() / expected.norm()
    assert float(error) < 4096 / 16 * 2**-23


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_two_parts_are_those_of_float32(device: str) -> None:
    k, m, n = 16, 300, 200
    generator = torch.Generator().manual_seed(8)
    left, right = (torch.randn(k, wide, generator=generator).exp().to(device) for wide in (m, n))
    total = torch.randn(m, n, generator=generator).to(device)
    expected = total.double() + left.double().t() @ right.double()
    add_float32_products(total, left, right)
    # Sums of 3 k products, all positive, each rounded as float32 is; and of each 2**-20 that is left out, and
    # 2**-21 twice that is rounded. One product of TF32 rounds each operand by up to 2**-11.
    products = left.double().t() @ right.double()
    bound = 3 * k * 2**-24 * (expected.abs() + products) + 2**-19 * products
    assert bool(((total - expected).abs() <= bound).all())
    assert float((bound / products).median()) < 2**-17
