"""Norms without a kernel of their own: which they are, and a step whose products do their work, in torch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from marlinq.kernels import Problem
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.whole_rows import PlainRowArguments, RowVariant, RowWork
from marlinq.runtime.step import links, recorded_step, walk
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.products import Product, Start
from marlinq.runtime.step.reference_forward import ReferenceForward
from tests.runtime.step import torch_kernels
from tests.runtime.step.test_chain import TOLERANCE, differences, halved, quantized, recognised
from tests.testing.tiny_models import tiny_model


class Products:
    """Products with work on rows, in torch, which count themselves.

    ``columns`` are squared together; with none of them no product does such work.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, columns: int) -> None:
        self.started: Counter[str] = Counter()
        for module in (walk, recorded_step):
            monkeypatch.setattr(module, "kernels", torch_kernels)
        monkeypatch.setattr(links, "precompile_instantiations", lambda *_: 0)
        found = self

        def variant(_: Product, __: Problem, ___: int, *, normed: bool, adds: bool) -> RowVariant | None:
            assert normed != adds
            kernel = Instantiation("rows.cuh", "rows", ())
            return RowVariant(kernel, columns, PlainRowArguments) if columns else None

        def bind_rows(
            product: Product, x: Tensor, out: Tensor, work: RowWork, activation: str | None = None
        ) -> Start:
            assert activation is None
            return lambda: found.run(product, x, out, work)

        monkeypatch.setattr(Product, "row_variant", variant)
        monkeypatch.setattr(Product, "bind_rows", bind_rows)

    def run(self, product: Product, x: Tensor, out: Tensor, work: RowWork) -> None:
        result = product.run(x)[:, : out.shape[1]].double()
        normed, added = work.normed, work.added
        if normed is not None:
            self.started["behind a norm"] += 1
            squares = normed.squares.double().sum(1, keepdim=True)
            result = result * normed.unit * torch.rsqrt(squares / normed.width + normed.eps)
        if added is not None:
            self.started["added"] += 1
            added.stored.copy_(added.residual.double() + added.factor * result)
            kept = added.stored.double()
            parts = added.squares.shape[1]
            added.squares.copy_(kept.square().view(len(kept), parts, -1).sum(-1))
            result = kept * added.weight.double()
        out.copy_(result)


# Which norms the products compute instead of a kernel: all but a model's first and last, but none where
# a block has norms behind its attention and MLP, and none in a parallel block.
@pytest.mark.parametrize(
    ("name", "linked", "columns"),
    [
        ("llama", "all", 64),
        ("llama", "all", 16),
        ("qwen3", "all", 64),
        ("gemma", "all", 64),
        ("gemma2", "none", 64),
        ("cohere", "none", 64),
        ("phi", "none", 64),
    ],
)
def test_products_take_over_the_residual_stream_and_its_norms(
    name: str, linked: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = Products(monkeypatch, columns=columns)
    # Keys and values fill whole tiles, so that q, k and v are one product.
    model = tiny_model(name, head_dim=64) if linked == "all" else tiny_model(name)
    anatomy = recognised(model)
    quantized(model)
    half, wide = halved(model)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    found = differences(own, reference, model.config.vocab_size)
    assert max(found) < TOLERANCE, found
    steps, norms = 4, 2 * len(anatomy.layers) - 1 if linked == "all" else 0
    assert products.started == Counter({"added": steps * norms, "behind a norm": steps * norms})


def test_other_kernels_leave_norms_to_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products(monkeypatch, columns=0)
    model = tiny_model("llama")
    anatomy = recognised(model)
    quantized(model)
    half, wide = halved(model)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    found = differences(own, ReferenceForward(wide, anatomy, batch=3, capacity=24), model.config.vocab_size)
    assert max(found) < TOLERANCE, found
    assert not products.started.total()
