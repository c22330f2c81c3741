"""The persistent decode step on the emulated GPU, against float64."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart, encode_tensor_map
from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.launch import persistent
from marlinq.kernels.launch.persistent import BiasedOperand, LayerOperands, Model, PersistentLayers
from tests.emulation.gemm import SOURCES, apart_operand
from tests.kernels.persistent_problems import Features, Reference, Sizes, bound, random_layer
from tests.testing.pairs import slow_but

SIZES = Sizes(512, 640, 8, 2, 64, 128)
DEVICE = torch.device("cpu")
PLAIN = Features()


@dataclass(frozen=True)
class Case:
    """One decode step of a small model.

    Attributes:
        length: positions in the cache.
        features: features of the layers.
        grid: blocks.
        layers: number of layers.
        softcap: cap of the scores, or None.
        team: warps that share a stage, and tiles of the widest sets.
        shared_bytes: bytes of shared memory that a block may have.
        sizes: sizes of the model.
        seed: seed of operands and schedule.
    """

    length: int = 70
    features: Features = PLAIN
    grid: int = 8
    layers: int = 2
    softcap: float | None = None
    team: int = 2
    shared_bytes: int = 100_000
    sizes: Sizes = SIZES
    seed: int = 0


_GROUPS_OF_32 = Features(group=32, zeros=True, bias=True, head_norms=True)
CASES = {
    "two layers": Case(),
    "one group of columns": Case(grid=4, layers=1, seed=4),
    "four groups of columns": Case(grid=16, layers=1, seed=5),
    "sets of four tiles": Case(length=33, team=4, seed=6),
    "sets of four tiles, groups of 64, zero points": Case(
        length=100,
        layers=1,
        team=4,
        features=Features(group=64, zeros=True, head_norms=True),
        seed=8,
    ),
    "more blocks than tiles": Case(length=100, grid=56, shared_bytes=36_000, seed=9),
    # A reader takes four parts at once: here it has one more.
    "five parts of the context": Case(
        length=290, grid=16, layers=1, sizes=replace(SIZES, capacity=300), seed=12
    ),
    "heads of 256 channels": Case(length=40, layers=1, team=4, sizes=Sizes(512, 512, 2, 1, 256, 64), seed=10),
    "norms behind the parts of a block": Case(
        features=Features(post_norms=True, head_norms=True), layers=2, seed=11
    ),
    "bfloat16, window, cap": Case(
        features=Features(dtype=torch.bfloat16, window=40, group=64, zeros=True), softcap=20.0, seed=3
    ),
    # Empty, within the first chunk of the cache, at its end, and at the end of the cache.
    **{
        f"groups of 32, zero points, {length} positions": Case(
            length=length, layers=1, features=_GROUPS_OF_32, seed=length
        )
        for length in (0, 5, 31, 32, 127)
    },
}


def _apart(layer: LayerOperands) -> LayerOperands:
    """The layer with guarded memory around every tensor."""

    def guarded(value: object) -> object:
        if isinstance(value, BiasedOperand):
            bias = None if value.bias is None else apart(value.bias)
            return BiasedOperand(apart_operand(value.weight), bias)
        return apart(value) if isinstance(value, Tensor) else value

    return LayerOperands(*(guarded(getattr(layer, field.name)) for field in fields(layer)))  # type: ignore[arg-type]


def _tensors(operand: BiasedOperand) -> dict[str, Tensor | None]:
    weight = operand.weight
    return {"words": weight.words, "scales": weight.scales, "zeros": weight.zeros, "bias": operand.bias}


def _memory(layers: list[LayerOperands]) -> list[Memory]:
    """The layers' memory that the kernel may touch."""
    found = []
    for number, layer in enumerate(layers):
        for field in fields(layer):
            value = getattr(layer, field.name)
            name = f"{field.name} {number}"
            if isinstance(value, BiasedOperand):
                parts = _tensors(value).items()
                found += [Memory(f"{name} {part}", one) for part, one in parts if one is not None]
            elif field.name in ("keys", "values"):
                found.append(Memory(name, value, writable=True, untracked=True))
            elif isinstance(value, Tensor):
                found.append(Memory(name, value))
    return found


@dataclass(frozen=True)
class Problem:
    """A case's tensors and its prepared launch."""

    layers: list[LayerOperands]
    given: Tensor
    hidden: Tensor
    lengths: Tensor
    model: Model
    step: PersistentLayers

    def launch(self, builder: Builder, seed: int, *, prepared: bool = True, as_messages: bool = True) -> None:
        """Both kernels; without the first where not ``prepared``."""
        step, config = self.step, self.step.config
        messages = Memory("messages", step.messages, writable=True, messages=as_messages)
        if prepared:
            prepare = persistent.prepare_instantiation(config.bfloat16)
            EmulatedKernel(builder.kernel(prepare.text(), prepare.function, SOURCES)).launch(
                2, 64, 0, step.prepare_arguments, [Memory("hidden", self.hidden), messages]
            )
        kernel = config.instantiation
        EmulatedKernel(builder.kernel(kernel.text(), kernel.function, SOURCES)).launch(
            step.grid,
            config.threads,
            config.shared_bytes,
            step.arguments,
            [
                Memory("layers", step.descriptors),
                Memory("lengths", self.lengths),
                *_memory(self.layers),
                messages,
                Memory("result", self.hidden, writable=True),
            ],
            seed=seed,
            resident=step.grid,
        )


def _problem(case: Case) -> Problem:
    torch.manual_seed(case.seed)
    sizes = case.sizes
    dtype = case.features.dtype
    features = case.features
    model = Model(
        sizes.heads,
        sizes.kv_heads,
        1e-5,
        sizes.head_dim**-0.5,
        narrow_first=not features.post_norms,
        softcap=case.softcap,
        post_norms=features.post_norms,
    )
    layers = [_apart(random_layer(sizes, case.features, 1, DEVICE)) for _ in range(case.layers)]
    given = torch.randn(1, sizes.hidden).to(dtype)
    hidden, lengths = apart(given), apart(torch.tensor([case.length], dtype=torch.int32))
    config = persistent.choose(
        [operand.channels for operand in layers[0].operands],
        model,
        sizes.head_dim,
        Granularity.group(case.features.group),
        zeros=case.features.zeros,
        bfloat16=dtype == torch.bfloat16,
        shared_bytes=case.shared_bytes,
        team=case.team,
    )
    assert config is not None
    with mock.patch("marlinq.kernels.launch.persistent.memory.encode_tensor_map", encode_tensor_map):
        step = PersistentLayers(layers, model, hidden, lengths, grid=case.grid, config=config)
    return Problem(layers, given, hidden, lengths, model, step)


# Every time: one group of columns and several, both team sizes, every kind of norm, group and 16-bit type,
# and the caches at which a block's first and last chunks end.
@pytest.mark.parametrize(
    "name",
    slow_but(
        CASES,
        "two layers",
        "one group of columns",
        "sets of four tiles, groups of 64, zero points",
        "five parts of the context",
        "more blocks than tiles",
        "norms behind the parts of a block",
        "bfloat16, window, cap",
        "groups of 32, zero points, 0 positions",
        "groups of 32, zero points, 127 positions",
    ),
)
def test_step_is_that_of_float64(builder: Builder, name: str) -> None:
    case = CASES[name]
    problem, dtype = _problem(case), case.features.dtype
    expecting = [
        replace(layer, keys=layer.keys.clone(), values=layer.values.clone()) for layer in problem.layers
    ]
    reference = Reference(problem.model, [case.length], dtype)
    expected = reference.step(expecting, problem.given)
    problem.launch(builder, case.seed)
    assert float((problem.hidden.double() - expected).norm() / expected.norm()) < bound(dtype, case.layers)
    for got, want in zip(problem.layers, expecting, strict=True):
        for cache, wanted in ((got.keys, want.keys), (got.values, want.values)):
            error = (cache.double() - wanted.double()).norm() / wanted.double().norm()
            assert float(error) < bound(dtype, case.layers)


def test_a_message_that_nobody_writes_is_reported(builder: Builder) -> None:
    with pytest.raises(KernelFault, match=r"waits for byte \d+ of messages"):
        _problem(Case(grid=4, layers=1)).launch(builder, 0, prepared=False)


def test_messages_are_no_plain_memory(builder: Builder) -> None:
    with pytest.raises(KernelFault, match="messages, which is no message"):
        _problem(Case(grid=4, layers=1)).launch(builder, 0, as_messages=False)


def test_refusals_name_what_does_not_fit() -> None:
    model = Model(SIZES.heads, SIZES.kv_heads, 1e-5, 0.125)
    layer = random_layer(SIZES, Features(), 1, DEVICE)

    def refusal(one: LayerOperands = layer, architecture: str = "sm_90a") -> str | None:
        return persistent.persistent_refusal([one, layer], model, architecture, 232_448)

    assert refusal() is None
    eight_bits = replace(INT4, name="int8", bits=8)
    planted = replace(layer, down=layer.down._replace(weight=replace(layer.down.weight, format=eight_bits)))
    assert refusal(planted) == "weights in int8, the kernel multiplies int4"
    assert "sm_86" in (refusal(architecture="sm_86") or "")
    other = random_layer(SIZES, Features(group=64), 1, DEVICE)
    assert "several granularities" in (refusal(other) or "")
    wide = random_layer(replace(SIZES, intermediate=1024), Features(), 1, DEVICE)
    assert "several shapes" in (refusal(wide) or "")
