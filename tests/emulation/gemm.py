"""A multiplication on the emulation: the host's configuration, packing and arguments, the kernel's source."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from marlinq.kernels import Device, Operand, Problem
from marlinq.kernels.contract.arguments import WarpgroupArguments
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.instantiation import CUDA_SOURCES
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.emulation.tensor_maps import emulated_tensor_maps
from tests.kernels.problems import BOUND, Operands, random_operands, relative_error

SOURCES = CUDA_SOURCES
H200 = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)
AMPERE = Device("sm_86", multiprocessors=84, shared_bytes=101_376)


LOUD = (3, 40, 41)
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        problem: shapes, groups and types.
        config: the variant.
        dependent: whether the previous kernel of the stream still runs.
        bias: whether there is one.
        x_padding: elements between the rows of the activations, a multiple of 8.
        seed: seed of operands and schedule.
        capability: ten times the compute capability that the source is compiled for.
        resident: how many blocks run at once where they hand sums to each other.
        launches: number of launches with equal operands, one after another; results must have the same bits.
        spread: spread of the scales, one of :data:`tests.kernels.problems.SPREADS`.
        loud: whether a few activations are 2^24 times larger than the others, at channels without weights.
    """

    problem: Problem
    config: Configuration
    dependent: bool = False
    bias: bool = True
    x_padding: int = 0
    seed: int = 0
    capability: int = 90
    resident: int = 3
    launches: int = 1
    spread: str = "even"
    loud: bool = False


def operands_of(case: Case) -> Operands:
    """The weight and bias of a case, and activations' seed set behind them."""
    problem = case.problem
    torch.manual_seed(case.seed)
    return random_operands(
        problem.k,
        problem.n,
        problem.granularity.group_size,
        _dtype(problem),
        zeros=problem.zeros,
        bias=case.bias,
        spread=case.spread,
        silent=LOUD if case.loud else (),
        device="cpu",
        weight_format=problem.format,
    )


def run(builder: Builder, case: Case, planted: Planted | None = None) -> float:
    """The relative error of the result against float64; NaN when an element was not written.

    Args:
        builder: compiles the variant.
        case: operands and configuration of the launch.
        planted: a fault in the kernel's sources, or None.

    Raises:
        KernelFault: the kernel did something wrong, left flags set, or gave other bits in another launch.
    """
    problem, config = case.problem, case.config
    text = config.instantiation(problem).text()
    library = builder.kernel(text, config.function, SOURCES, case.capability, planted)
    dtype = _dtype(problem)
    made = operands_of(case)
    wide = torch.randn(problem.m, problem.k + case.x_padding, dtype=dtype)
    if case.loud:
        wide *= 2.0**-8
        wide[:, LOUD] = 50000.0
    columns = problem.n if problem.activation is None else problem.n // 2
    given = ProductTensors(
        apart(wide[:, : problem.k]),
        apart_operand(made.operand),
        None if made.bias is None else apart(made.bias),
        torch.full((problem.m, columns), torch.nan, dtype=dtype),
    )
    handover = config.handover(problem) if isinstance(config, WarpgroupConfig) else None
    flags = apart(torch.zeros(handover.flags if handover else 0, dtype=torch.int32))
    results = []
    for number in range(case.launches):
        operands = given._replace(out=apart(given.out))
        memory = memory_of(operands)
        with emulated_tensor_maps():
            arguments = config.arguments(operands, case.dependent)
        if handover and isinstance(arguments, WarpgroupArguments):
            sums = apart(torch.full((handover.floats,), torch.nan))
            arguments.share(sums.data_ptr(), flags.data_ptr())
            memory.append(Memory("sums", sums, writable=True, after_previous=True))
            memory.append(Memory("flags", flags, writable=True, after_previous=True, flags=True))
        EmulatedKernel(library).launch(
            config.grid(problem),
            config.threads,
            config.shared_bytes(problem),
            arguments,
            memory,
            registers=config.launch_registers if isinstance(config, WarpgroupConfig) else 255,
            dependent=case.dependent,
            seed=case.seed + number,
            resident=case.resident if handover else 1,
        )
        if flags.any():
            raise KernelFault(f"{int(flags.count_nonzero())} flags are left set")
        results.append(operands.out)
        if not torch.equal(results[0].view(torch.int16), operands.out.view(torch.int16)):
            raise KernelFault(f"launch {number} gives other bits than the first")
    expected = made.reference(given.x)
    if problem.activation is not None:
        gate, up = expected.view(problem.m, -1, 2, 64).unbind(2)
        expected = (ACTIVATIONS[problem.activation](gate) * up).flatten(1)
    return relative_error(results[0], expected)


def apart_operand(weight: Operand) -> Operand:
    """The weight with each tensor in memory of its own."""
    zeros = None if weight.zeros is None else apart(weight.zeros)
    return replace(weight, words=apart(weight.words), scales=apart(weight.scales), zeros=zeros)


def bound(problem: Problem) -> float:
    """The relative error that rounding may cause."""
    # Both factors have a product's error; the activation's slope is at most 1.13, and 2 for a square.
    factors = {None: 1.0, "relu2": 3.0}.get(problem.activation, 2.13)
    return factors * BOUND[_dtype(problem)]


def _dtype(problem: Problem) -> torch.dtype:
    return torch.bfloat16 if problem.bfloat16 else torch.float16


def memory_of(operands: ProductTensors) -> list[Memory]:
    """The kernel's memory; the previous kernel writes the activations and may still use the output."""
    previous = {"x", "out"}
    weight = operands.weight
    named = {
        "x": operands.x,
        "words": weight.words,
        "scales": weight.scales,
        "zeros": weight.zeros,
        "bias": operands.bias,
        "out": operands.out,
    }
    return [
        Memory(name, tensor, writable=name == "out", after_previous=name in previous)
        for name, tensor in named.items()
        if tensor is not None
    ]
