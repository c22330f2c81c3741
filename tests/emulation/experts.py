"""A routed layer on the emulation: the host's decision, workspace and arguments, the kernels' sources."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, Memory, apart
from marlinq.kernels.experts import ExpertWeights
from marlinq.kernels.experts.configurations import ExpertsDecision
from marlinq.kernels.experts.steps import placed_steps, shape_of
from marlinq.kernels.experts.workspace import ExpertsWorkspace
from tests.emulation.gemm import SOURCES
from tests.emulation.tensor_maps import emulated_tensor_maps
from tests.kernels.experts_problems import with_tensors


@dataclass(frozen=True)
class Routed:
    """Results of a layer.

    Attributes:
        out: [M, H].
        workspace: workspace of its launches.
    """

    out: Tensor
    workspace: ExpertsWorkspace


def run_layer(
    builder: Builder,
    decision: ExpertsDecision,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    *,
    further: int = 0,
    seed: int = 0,
    planted: tuple[str, Planted] | None = None,
) -> Routed:
    """Every launch of the layer, dependently, each with what it may touch.

    Args:
        builder: compiles the kernels.
        decision: the launches' variants.
        x, ids, weights, experts, activation, expert_map: as
            :func:`marlinq.kernels.experts.routed_experts`.
        further: number of the last experts that lie in other memory.
        seed: seed of the schedule.
        planted: a kernel's function and a fault in its sources, or None.

    Raises:
        KernelFault: a kernel did something wrong.
    """
    x, ids, weights = apart(x), apart(ids), apart(weights)
    expert_map = None if expert_map is None else apart(expert_map)
    own = len(experts.down.words) - further
    more = with_tensors(experts, lambda value: apart(value[own:]))
    experts = with_tensors(experts, lambda value: apart(value[:own]))
    others = more if further else None
    out = apart(torch.full(x.shape, torch.nan, dtype=x.dtype))
    shape = shape_of(x, ids, experts, others)
    made = ExpertsWorkspace.of(shape, decision, torch.device("cpu"))
    for tensor in made:
        tensor.view(torch.uint8).fill_(255)
    workspace = ExpertsWorkspace(*(apart(tensor) for tensor in made))
    with emulated_tensor_maps():
        steps = placed_steps(
            shape,
            decision,
            x,
            ids,
            weights,
            experts,
            activation,
            expert_map,
            out,
            workspace,
            dependent=True,
            further=others,
        )
    given = {"x": x, "ids": ids, "weights": weights, "map": expert_map, "out": out, **workspace._asdict()}
    for product in ExpertWeights._fields:
        for kind, held in (("", experts), ("further ", more)):
            tensors: dict[str, Tensor | None] = getattr(held, product).tensors
            given |= {f"{kind}{product} {name}": value for name, value in tensors.items()}
    for number, step in enumerate(steps):
        function = step.instantiation.function
        parameters = dict(step.instantiation.parameters)
        memory = _touched(function, parameters, given)
        fault = planted[1] if planted is not None and planted[0] == function else None
        library = builder.kernel(step.instantiation.text(), function, SOURCES, planted=fault)
        EmulatedKernel(library).launch(
            step.grid,
            step.threads,
            step.shared_bytes,
            step.arguments,
            memory,
            registers=step.registers,
            dependent=True,
            seed=seed + number,
            resident=1,
        )
    return Routed(out, workspace)


def _touched(function: str, parameters: dict[str, object], given: dict[str, Tensor | None]) -> list[Memory]:
    """Memory that a launch may read and write, with that which the previous one may still be writing."""
    constant: list[str]
    if function == "experts_route":
        # Ids and activations are the previous kernel's; nothing is to be touched before it has ended.
        constant, previous = ["map"], ["ids", "x"]
        written = ["counts", "records", "tiles", "places", "rows"]
        if parameters["STEP"] == "RouteStep::PLACE":
            previous.append("counts")
            written.remove("counts")
        if parameters["STEP"] == "RouteStep::COUNT":
            written = ["counts"]
    elif function in ("experts_stream", "experts_shared") and parameters["GATED"]:
        constant = ["gate_up words", "gate_up scales", "gate_up zeros", "gate_up bias", "map"]
        previous, written = ["x", "ids", "weights"], ["inner"]
    elif function in ("experts_stream", "experts_shared"):
        # Ids are older than the previous kernel.
        constant = ["down words", "down scales", "down zeros", "down bias", "map", "ids", "weights"]
        previous, written = ["inner"], ["out"]
    elif function == "experts_wgmma" and parameters["GATED"] and parameters["HERE"]:
        constant = ["gate_up words", "gate_up scales", "gate_up zeros", "gate_up bias", "map"]
        previous, written = ["x", "ids"], ["inner", "places"]
    elif function == "experts_wgmma" and parameters["HERE"]:
        # Ids are older than the previous kernel.
        constant = ["down words", "down scales", "down zeros", "down bias", "map", "ids"]
        previous, written = ["inner"], ["rows"]
    elif function == "experts_wgmma" and parameters["GATED"]:
        constant = ["gate_up words", "gate_up scales", "gate_up zeros", "gate_up bias"]
        previous, written = ["records", "tiles", "rows"], ["inner"]
    elif function == "experts_wgmma":
        # Records are older than the previous kernel, and so is the last reader of the rows' memory.
        constant = ["down words", "down scales", "down zeros", "down bias", "records", "tiles"]
        previous, written = ["inner"], ["rows"]
    else:
        # Places and weights are older than the previous kernel.
        constant, previous, written = ["places", "weights"], ["rows"], ["out"]
    memory = []
    constant += [f"further {name}" for name in constant if f"further {name}" in given]
    for name in (*constant, *previous, *written):
        tensor = given[name]
        if tensor is not None and tensor.numel():
            after = name in previous or (name in written and function != "experts_wgmma")
            memory.append(Memory(name, tensor, writable=name in written, after_previous=after))
    return memory
