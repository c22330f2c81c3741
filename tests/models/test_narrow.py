from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from marlinq.models import BlockReplay, ModelInstance, build_blueprint
from marlinq.models.narrow import NarrowLinears
from tests.testing.tiny_models import in_memory, tiny_model


def test_only_float32_linear_layers_are_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator)
    layer = nn.Linear(16, 8)
    exact = layer(x)
    square = x @ x.t()
    with NarrowLinears(torch.bfloat16):
        rounded = layer(x)
        named = functional.linear(input=x, weight=layer.weight, bias=layer.bias)
        other = functional.linear(x.double(), layer.weight.double())
        kept = x @ x.t()
    operands = (each.to(torch.bfloat16) for each in (x, layer.weight, layer.bias))
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, functional.linear(*operands).float())
    assert torch.equal(rounded, named)
    assert not torch.equal(rounded, exact)
    assert torch.equal(other, functional.linear(x.double(), layer.weight.double()))
    assert torch.equal(kept, square)
    assert torch.equal(layer(x), exact)


def test_a_replay_rounds_products_and_listens_to_unrounded_inputs() -> None:
    model = tiny_model("llama")
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    block = blueprint.blocks[0]
    projections = [each for each in blueprint.projections() if each.name.startswith(f"{block.name}.")]
    ids = torch.arange(3, 23)[None]
    outputs: list[Tensor] = []
    inputs: list[dict[str, Tensor]] = []
    for products in (None, torch.bfloat16):
        replay = BlockReplay(instance, products)
        (hidden,) = replay.record([ids])
        seen: dict[str, Tensor] = {}
        with instance.loaded(block.name):
            output = replay.inputs(0, 0, hidden, projections, seen.__setitem__)
        assert output is not None
        assert all(x.dtype == torch.float32 for x in (output, *seen.values()))
        outputs.append(output)
        inputs.append(seen)
    exact, rounded = outputs
    # The first layers' inputs come from a norm, which no product precedes.
    first = projections[0].name
    assert torch.equal(inputs[0][first], inputs[1][first])
    assert not torch.equal(inputs[1][first], inputs[1][first].bfloat16().float())
    assert not torch.equal(exact, rounded)
    # Seven layers, each of three roundings by a share of at most 2**-9, that fall either way.
    assert float((exact - rounded).norm() / exact.norm()) < 7 * 3 * 2**-9
