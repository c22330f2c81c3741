"""The persistent decode step on the emulated GPU, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from marlinq.kernels.launch import persistent
from marlinq.kernels.launch.persistent import LayerOperands, Model, Operand, PersistentLayers
from marlinq.kernels.ops.reference import dequantize_operands
from tests.emulation.build import Builder
from tests.emulation.gemm import SOURCES
from tests.emulation.launching import (
    EmulatedKernel,
    Memory,
    _encode_tensor_map,
    apart,
)
from tests.kernels.problems import random_operands

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 512, 640, 8, 2, 64, 128


@dataclass(frozen=True)
class Case:
    """One decode step of a small model.

    Attributes:
        lengths: positions in the cache of every row.
        grid: blocks.
        layers: how many.
        group: channels that share a scale.
        zeros, bias, head_norms: whether there are any.
        dtype: of activations.
        window: of the attention.
        softcap: of the scores.
        seed: of operands and schedule.
    """

    lengths: tuple[int, ...] = (70,)
    grid: int = 8
    layers: int = 2
    group: int = 128
    zeros: bool = False
    bias: bool = False
    head_norms: bool = False
    dtype: torch.dtype = torch.float16
    window: int | None = None
    softcap: float | None = None
    seed: int = 0


def _operand(k: int, n: int, case: Case) -> tuple[Operand, Tensor]:
    made = random_operands(
        k, n, case.group, case.dtype, zeros=case.zeros, bias=case.bias, spread="even", silent=(), device="cpu"
    )
    weight = dequantize_operands(made.words, made.scales, made.zeros).double()
    scale = float(1 / (weight.std() * k**0.5))
    # A power of two keeps the scales exact.
    scales = made.scales * 2.0 ** round(torch.tensor(scale).log2().item())
    weight = dequantize_operands(made.words, scales, made.zeros).double()
    zeros = None if made.zeros is None else apart(made.zeros)
    bias = None if made.bias is None else apart(made.bias)
    return Operand(apart(made.words), apart(scales), zeros, bias), weight


def _layer(case: Case) -> tuple[LayerOperands, list[Tensor]]:
    shapes = (
        (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        (HEADS * HEAD_DIM, HIDDEN),
        (HIDDEN, 2 * INTERMEDIATE),
        (INTERMEDIATE, HIDDEN),
    )
    pairs = [_operand(k, n, case) for k, n in shapes]
    rows = len(case.lengths)
    gamma = lambda size: apart(0.5 + torch.rand(size))  # noqa: E731
    cache = lambda: apart(torch.randn(rows, KV_HEADS, CAPACITY, HEAD_DIM).to(case.dtype))  # noqa: E731
    norms = (gamma(HEAD_DIM), gamma(HEAD_DIM)) if case.head_norms else (None, None)
    layer = LayerOperands(
        *(operand for operand, _ in pairs), gamma(HIDDEN), gamma(HIDDEN), cache(), cache(), *norms, case.window
    )
    return layer, [weight for _, weight in pairs]


def reference(
    layers: list[tuple[LayerOperands, list[Tensor]]], model: Model, tables: tuple[Tensor, Tensor], x: Tensor, case: Case
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """What leaves the last layer, and the caches' new entries, in float64 rounded where the kernel rounds."""
    rounded = lambda y: y.to(case.dtype).double()  # noqa: E731
    half = HEAD_DIM // 2

    def norm(y: Tensor, gamma: Tensor, eps: float) -> Tensor:
        return rounded(rounded(y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)) * gamma.double())

    def product(y: Tensor, operand: Operand, weight: Tensor) -> Tensor:
        return rounded(y @ weight + (0 if operand.bias is None else operand.bias.double()))

    lengths = torch.tensor(case.lengths)
    cosines, sines = (table[lengths].double()[:, None] for table in tables)
    appended = []
    x = x.double()
    for layer, weights in layers:
        made = product(norm(x, layer.attention_gamma, model.eps), layer.qkv, weights[0]).view(len(lengths), -1, HEAD_DIM)
        q, k, v = made.split([HEADS, KV_HEADS, KV_HEADS], 1)
        if layer.query_gamma is not None and layer.key_gamma is not None:
            q, k = norm(q, layer.query_gamma, model.query_eps), norm(k, layer.key_gamma, model.query_eps)
        q, k = (
            rounded(
                torch.cat(
                    [
                        y[..., :half] * cosines - y[..., half:] * sines,
                        y[..., half:] * cosines + y[..., :half] * sines,
                    ],
                    -1,
                )
            )
            for y in (q, k)
        )
        appended.append((k, v))
        out = torch.empty_like(q)
        for row, length in enumerate(case.lengths):
            first = 0 if case.window is None else max(0, length + 1 - case.window)
            keys, values = (
                torch.cat([cache[row, :, first:length].double(), new[row][:, None]], 1).repeat_interleave(HEADS // KV_HEADS, 0)
                for cache, new in ((layer.keys, k), (layer.values, v))
            )
            scores = torch.einsum("hd,hld->hl", q[row], keys) * model.scale
            if model.softcap is not None:
                scores = model.softcap * torch.tanh(scores / model.softcap)
            out[row] = torch.einsum("hl,hld->hd", scores.softmax(-1), values)
        x = rounded(x + product(rounded(out.flatten(1)), layer.output, weights[1]))
        made = product(norm(x, layer.mlp_gamma, model.eps), layer.gate_up, weights[2]).view(len(lengths), -1, 2, 64)
        gate, up = made[:, :, 0].flatten(1), made[:, :, 1].flatten(1)
        x = rounded(x + product(rounded(rounded(torch.nn.functional.silu(gate)) * up), layer.down, weights[3]))
    return x, appended


def run(builder: Builder, case: Case) -> tuple[Tensor, Tensor]:
    """What a launch leaves in ``hidden``, and what it should be."""
    torch.manual_seed(case.seed)
    model = Model(HEADS, KV_HEADS, 1e-5, HEAD_DIM**-0.5, softcap=case.softcap)
    made = [_layer(case) for _ in range(case.layers)]
    layers = [layer for layer, _ in made]
    angles = torch.arange(CAPACITY)[:, None] * 100.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    tables = apart(angles.cos()), apart(angles.sin())
    rows = len(case.lengths)
    given = torch.randn(rows, HIDDEN).to(case.dtype)
    hidden, lengths = apart(given), apart(torch.tensor(case.lengths, dtype=torch.int32))
    expected, appended = reference(made, model, tables, given, case)
    config = persistent.choose(
        [operand.channels for operand in layers[0].operands],
        rows,
        model,
        HEAD_DIM,
        case.group,
        zeros=case.zeros,
        bfloat16=case.dtype == torch.bfloat16,
        shared_bytes=100_000,
        team=2,
        teams=2,
    )
    assert config is not None
    with mock.patch("marlinq.kernels.launch.persistent.encode_tensor_map", _encode_tensor_map):
        step = PersistentLayers(layers, model, *tables, hidden, lengths, grid=case.grid, config=config)
    inputs = {"layers": step.descriptors, "lengths": lengths, "cosines": tables[0], "sines": tables[1]}
    memory = [Memory(name, tensor) for name, tensor in inputs.items()]
    caches = []
    for number, layer in enumerate(layers):
        for name, operand in zip(("qkv", "output", "gate_up", "down"), layer.operands, strict=True):
            for part in ("words", "scales", "zeros", "bias"):
                if getattr(operand, part) is not None:
                    memory.append(Memory(f"{name} {part} {number}", getattr(operand, part)))
        for name in ("attention_gamma", "mlp_gamma", "query_gamma", "key_gamma"):
            if getattr(layer, name) is not None:
                memory.append(Memory(f"{name} {number}", getattr(layer, name)))
        memory.append(Memory(f"keys {number}", layer.keys, writable=True, untracked=True))
        memory.append(Memory(f"values {number}", layer.values, writable=True, untracked=True))
        caches.append((layer.keys, layer.values))
    messages = Memory("messages", step.messages, writable=True, messages=True)
    prepare = persistent.prepare_instantiation(config.bfloat16)
    EmulatedKernel(builder.kernel(prepare.text(), prepare.function, SOURCES)).launch(
        2, 64, 0, step.prepare_arguments, [Memory("hidden", hidden), messages]
    )
    kernel = config.instantiation
    EmulatedKernel(builder.kernel(kernel.text(), kernel.function, SOURCES)).launch(
        case.grid,
        config.threads,
        config.shared_bytes,
        step.arguments,
        [*memory, messages, Memory("result", hidden, writable=True)],
        seed=case.seed,
        resident=case.grid,
    )
    for (keys, values), (key, value) in zip(caches, appended, strict=True):
        for row, length in enumerate(case.lengths):
            torch.testing.assert_close(keys[row, :, length].double(), key[row], rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(values[row, :, length].double(), value[row], rtol=1e-2, atol=1e-2)
    return hidden.double(), expected


CASES = {
    "one row": Case(),
    "three rows": Case(lengths=(70, 0, 33), seed=1),
    "eight rows, groups of 32, zero points": Case(
        lengths=(5, 31, 32, 64, 65, 127, 0, 100), layers=1, group=32, zeros=True, bias=True, head_norms=True, seed=2
    ),
    "one row, bfloat16, window": Case(dtype=torch.bfloat16, window=40, group=64, zeros=True, softcap=20.0, seed=3),
}


@pytest.mark.parametrize("name", CASES)
def test_step(builder: Builder, name: str) -> None:
    got, expected = run(builder, CASES[name])
    bound = 1e-3 if CASES[name].dtype == torch.float16 else 8e-3
    assert float((got - expected).norm() / expected.norm()) < bound
