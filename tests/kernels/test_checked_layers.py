"""Repeated calls of routed layers, without a GPU: launches are shared, addresses are each call's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from ctypes import c_void_p
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from marlinq.kernels import Device
from marlinq.kernels.driver import cuda_driver
from marlinq.kernels.driver.cuda_driver import Function, Launch
from marlinq.kernels.experts import ExpertWeights, checked_layers, launch
from marlinq.kernels.experts.experts_decision import decide_experts
from marlinq.kernels.experts.experts_op import _cuda
from marlinq.kernels.experts.steps import placed_steps, shape_of
from marlinq.kernels.experts.workspace import ExpertsWorkspace
from tests.emulation.tensor_maps import emulated_tensor_maps
from tests.kernels.experts_problems import Layer, Shape, random_layer, random_routing

H200 = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)
SHAPE = Shape(8, 2, 128, 128, 64, True)
# Rows for which decisions sort pairs or not.
ROWS = (1, 40, 600)


@dataclass
class Stream:
    """Launches and allocations.

    Attributes:
        launched: parameters of each launch.
        memory: results and workspaces, in turn.
    """

    launched: list[bytes] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """Tensors on the CPU are taken for a GPU's; nothing is launched."""
    stream = Stream()

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        stream.memory.append(torch.empty_strided(shape, strides, dtype=dtype))
        return stream.memory[-1]

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(cuda_driver._thread, "has_context", True)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: pytest.MonkeyPatch)
    monkeypatch.setattr(pytest.MonkeyPatch, "cuLaunchKernelEx", None, raising=False)
    monkeypatch.setattr(launch, "on_device", lambda _: nullcontext())
    monkeypatch.setattr(launch, "device_numbers", lambda _: H200)
    monkeypatch.setattr(launch, "_function", lambda *_: Function(None, c_void_p(1), 0, 1))
    monkeypatch.setattr(launch, "empty_strided", allocate)
    monkeypatch.setattr(Launch, "start", lambda self: stream.launched.append(bytes(self.arguments)))
    launch.layer_call.cache_clear()
    with emulated_tensor_maps():
        yield stream
    launch.layer_call.cache_clear()


def call(
    layer: Layer, rows: int, expert_map: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    x, ids, weights = random_routing(layer.shape, rows)
    x = x.contiguous()
    gate_up, down = layer.weights
    kind = down.format.name, layer.shape.group_size, "silu"
    operands = gate_up.words, gate_up.scales, gate_up.zeros, down.words, down.scales, down.zeros
    return (x, ids, weights), _cuda(x, ids, weights, *operands, *kind, expert_map, None, None)


def expected(
    given: tuple[Tensor, Tensor, Tensor],
    experts: ExpertWeights,
    expert_map: Tensor | None,
    out: Tensor,
    memory: Tensor,
) -> list[bytes]:
    """Parameters of a call's launches with these tensors."""
    shape = shape_of(given[0], given[1], experts)
    decision = decide_experts(shape, H200)
    whole = ExpertsWorkspace.of(shape, decision, torch.device("cpu"))
    starts = [tensor.storage_offset() * tensor.itemsize for tensor in whole]
    workspace = ExpertsWorkspace(*(memory[start:] for start in starts))
    behind = experts, "silu", expert_map, out, workspace
    steps = placed_steps(shape, decision, *given, *behind, dependent=True)
    return [bytes(step.arguments) for step in steps]


def test_calls_share_launches_and_pass_their_own_tensors(stream: Stream) -> None:
    torch.manual_seed(0)
    layers = [random_layer(SHAPE) for _ in range(2)]
    maps = [None, torch.arange(8, dtype=torch.int32)]
    for _ in range(3):
        for layer in layers:
            for rows in ROWS:
                for expert_map in maps:
                    stream.launched.clear()
                    given, out = call(layer, rows, expert_map)
                    wanted = expected(given, layer.weights, expert_map, *stream.memory[-2:])
                    assert out is stream.memory[-2]
                    assert stream.launched == wanted
    # One decision for each batch, with a map and without. A layer asks for launches at the call that checks
    # its weights, and then once for each batch.
    asked, kinds = launch.layer_call.cache_info(), len(ROWS) * len(maps)
    assert asked.misses == kinds
    assert asked.hits + asked.misses == len(layers) * (len(maps) + kinds)


def test_weights_that_move_are_checked_again(stream: Stream) -> None:
    layer = random_layer(SHAPE)
    call(layer, 4)
    words = layer.weights.down.words
    words.data = words.data.clone()
    stream.launched.clear()
    given, _ = call(layer, 4)
    assert stream.launched == expected(given, layer.weights, None, *stream.memory[-2:])
    words.data = words.data[:-1].clone()
    with pytest.raises(ValueError, match="down"):
        call(layer, 4)


@pytest.mark.usefixtures("stream")
def test_a_checked_layer_refuses_what_the_operator_refuses() -> None:
    layer = random_layer(SHAPE)
    (x, ids, weights), _ = call(layer, 4)
    gate_up, down = layer.weights
    operands = gate_up.words, gate_up.scales, gate_up.zeros, down.words, down.scales, down.zeros
    behind = *operands, down.format.name, SHAPE.group_size, "silu", None, None, None
    for wrong, words in (
        ((x[:, :64].contiguous(), ids, weights), "x: expected"),
        ((x[:2], ids, weights), "ids: expected"),
        ((x, ids.short(), weights), "ids: expected"),
        ((x, ids, weights.half()), "weights: expected"),
        ((x.bfloat16(), ids, weights), "scales: expected"),
    ):
        with pytest.raises(ValueError, match=words):
            _cuda(*wrong, *behind)
    assert not _cuda(x[:0], ids[:0], weights[:0], *behind).numel()


@pytest.mark.usefixtures("stream")
def test_a_layer_is_forgotten_with_its_weights() -> None:
    before = set(checked_layers._layers)
    layer = random_layer(SHAPE)
    call(layer, 4)
    assert len(set(checked_layers._layers) - before) == 1
    del layer
    gc.collect()
    assert set(checked_layers._layers) <= before
