"""Launches a routed layer: sort and gather pairs, gate and up, down, sum."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from marlinq.kernels.contract.demands import demands
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.cuda_driver import Function, Launches, empty_strided, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel
from marlinq.kernels.experts.configurations import ExpertsDecision, ExpertsShape
from marlinq.kernels.experts.experts_decision import decide_experts
from marlinq.kernels.experts.steps import (
    Addresses,
    Inputs,
    Step,
    WeightAddresses,
    inputs_of,
    instantiations,
    layer_steps,
    shape_of,
)
from marlinq.kernels.experts.stored_experts import ExpertWeights
from marlinq.kernels.experts.workspace import WorkspacePlaces
from marlinq.kernels.launch.prepared import VECTOR, address


@lru_cache(maxsize=1024)
def _function(instantiation: Instantiation, device_index: int, shared_bytes: int) -> Function:
    return load_kernel(instantiation, device_numbers(device_index).architecture, device_index, shared_bytes)


def precompile_experts(shapes: Iterable[ExpertsShape], activation: str, device_index: int) -> int:
    """Compile in parallel the kernels of routed layers that the cache lacks; returns their number.

    Kernels for ids of 32 bits.

    Args:
        shapes: shapes of layers and batches.
        activation: name of the function between the products.
        device_index: index of the GPU.

    Raises:
        EnvironmentProblem: a kernel does not compile, or the cache can't be written.
        UnsupportedError: no configuration fits a layer.
    """
    device = device_numbers(device_index)
    wanted = [
        instantiation
        for shape in shapes
        for instantiation in instantiations(
            shape,
            decide_experts(shape, device),
            activation,
            wide=False,
        )
    ]
    return compile_missing(device.architecture, list(dict.fromkeys(wanted)))


def start(steps: list[Step], device_index: int) -> None:
    """Launch steps with addresses on the current stream, inside
    :func:`marlinq.kernels.driver.cuda_driver.on_device`.

    Each launch may begin before its predecessor of the same layer has ended. The first does so only inside
    :func:`marlinq.kernels.contract.demands.dependent_launches` or ``early_launches``.
    """
    for launches in _launches(steps, device_index, overlaps=first_overlaps()):
        launches.take().start()


def first_overlaps() -> bool:
    """Whether a layer's first launch may begin before its predecessor in the stream has ended."""
    demanded = demands()
    return demanded.dependent or demanded.early


def _launches(steps: list[Step], device_index: int, *, overlaps: bool) -> list[Launches]:
    return [
        Launches(
            _function(step.instantiation, device_index, step.shared_bytes),
            step.grid,
            step.threads,
            step.shared_bytes,
            step.arguments,
            dependent=number > 0 or overlaps,
        )
        for number, step in enumerate(steps)
    ]


class LayerCall:
    """The launches of a routed layer, complete but for addresses.

    Args:
        shape: sizes and types of the layer and the batch.
        decision: variants of the launches.
        inputs: properties of the inputs.
        device_index: index of the GPU.
        overlaps: whether the first launch may begin before its predecessor in the stream has ended.
    """

    __slots__ = ("_dtype", "_launches", "_nbytes", "_out", "_starts")

    def __init__(
        self,
        shape: ExpertsShape,
        decision: ExpertsDecision,
        inputs: Inputs,
        device_index: int,
        *,
        overlaps: bool,
    ) -> None:
        steps = layer_steps(shape, decision, inputs, dependent=True)
        launches = _launches(steps, device_index, overlaps=overlaps)
        self._launches = [(each, step.place) for each, step in zip(launches, steps, strict=True)]
        workspace = WorkspacePlaces.of(shape, decision)
        self._nbytes, self._starts = (workspace.nbytes,), workspace.starts
        self._out = shape.m, shape.hidden
        self._dtype = torch.bfloat16 if shape.bfloat16 else torch.float16

    def run(
        self,
        x: int,
        ids: int,
        weights: int,
        expert_map: int,
        gate_up: WeightAddresses,
        down: WeightAddresses,
    ) -> Tensor:
        """The layer's result [M, H], on the current stream, inside
        :func:`marlinq.kernels.driver.cuda_driver.on_device`; arguments are addresses.

        Raises:
            RuntimeError: the driver refused a launch.
        """
        # Every eager call runs these lines; lab/kernels/host_cost.py measures their time.
        out = empty_strided(self._out, (self._out[1], 1), self._dtype)
        memory = empty_strided(self._nbytes, (1,), torch.uint8)
        base = memory.data_ptr()
        addresses = Addresses(
            *(x, ids, weights, out.data_ptr(), expert_map, gate_up, down),
            *[base + start for start in self._starts],
        )
        for launches, place in self._launches:
            launch = launches.take()
            place(launch.arguments, addresses)
            launch.start()
            launches.give(launch)
        return out


@lru_cache(maxsize=1024)
def layer_call(shape: ExpertsShape, inputs: Inputs, device_index: int, *, overlaps: bool) -> LayerCall:
    """The launches of the decision for ``shape``, which layers of the same sizes share."""
    decision = decide_experts(shape, device_numbers(device_index))
    return LayerCall(shape, decision, inputs, device_index, overlaps=overlaps)


def launch_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str,
    expert_map: Tensor | None,
    decision: ExpertsDecision | None = None,
) -> Tensor:
    """:func:`marlinq.kernels.experts.routed_experts` on a GPU, for operands that have been checked.

    ``decision`` overrides :func:`decide_experts`.
    """
    if not x.shape[0] or not ids.shape[1]:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(1) != 1 or x.stride(0) % VECTOR or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    index, shape = x.get_device(), shape_of(x, ids, experts)
    inputs, overlaps = inputs_of(x, ids, activation, expert_map), first_overlaps()
    call = (
        layer_call(shape, inputs, index, overlaps=overlaps)
        if decision is None
        else LayerCall(shape, decision, inputs, index, overlaps=overlaps)
    )
    with on_device(index):
        return call.run(
            *(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), address(expert_map)),
            *map(WeightAddresses.of, experts),
        )
