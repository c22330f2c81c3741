"""From a problem to a launch: decide, compile or load, pack the arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.errors import EnvironmentProblem, UnsupportedError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.decide.decision import (
    DEQUANTIZE,
    KernelConfig,
    blocks_together,
    buckets,
    decide,
    demands,
    gains_by_overlap,
)
from marlinq.kernels.decide.device import Device, device_of
from marlinq.kernels.decide.problem import Problem
from marlinq.kernels.decide.stream import StreamConfig
from marlinq.kernels.decide.warpgroup import WarpgroupConfig
from marlinq.kernels.jit.cache import compile_missing
from marlinq.kernels.jit.instantiation import Instantiation, cold_read
from marlinq.kernels.launch.complete import is_complete, note_complete
from marlinq.kernels.launch.dense import dequantized_gemm
from marlinq.kernels.launch.driver import Function, Launches, active_clusters, gpu_properties, on_device
from marlinq.kernels.launch.handover import Handover
from marlinq.kernels.launch.loading import load_kernel
from marlinq.kernels.launch.operands import Arguments, Operands, activation_maps
from marlinq.kernels.launch.rows import RowArguments, RowWork
from marlinq.kernels.weights import INT4, WeightFormat


@dataclass(frozen=True, slots=True)
class Call:
    """A launch of one variant on one weight, for any activations of the same shape and strides.

    Attributes:
        launches: of the variant, all but complete.
        box: what :func:`marlinq.kernels.launch.operands.activation_maps` takes behind the address; None
            where the kernel takes the address itself.
        handover: what blocks need to hand sums to each other, where they do.
    """

    launches: Launches
    box: tuple[int, int, int, int] | None
    handover: Handover | None

    def start(self, x: int, out: int) -> None:
        """Launch on the current stream, inside :func:`marlinq.kernels.launch.driver.on_device`.

        Args:
            x: the activations' address.
            out: the result's address.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        launch = self.launches.take()
        arguments = launch.arguments
        if launch.x != x:
            launch.x = x
            arguments.x = x if self.box is None else activation_maps(x, *self.box)
        arguments.out = out
        if self.handover is None:
            launch.start()
        else:
            sums, flags = self.handover.memory(self.launches.function.device_index)
            arguments.share(sums.data_ptr(), flags)
            launch.start()
            # Now the launch is in the stream, and whoever takes the memory comes behind it.
            del sums
        self.launches.give(launch)


@lru_cache(maxsize=16)
def device_numbers(index: int) -> Device:
    """The numbers of CUDA device ``index`` that decisions rest on.

    Raises:
        EnvironmentProblem: the GPU is older than compute capability 8.0.
    """
    found = device_of(gpu_properties(index))
    if found.capability < 80:
        major, minor = divmod(found.capability, 10)
        raise EnvironmentProblem(
            f"GPU {index} has compute capability {major}.{minor}; the kernels need 8.0 or later"
        )
    if not found.has_clusters:
        return found
    return replace(found, clusters=_clusters(found.architecture, found.shared_bytes, index))


def _clusters(architecture: str, shared_bytes: int, index: int) -> tuple[tuple[int, ...], ...]:
    """:attr:`Device.clusters`: the driver's answers for blocks that fill a multiprocessor's shared memory."""
    threads = 32
    function = load_kernel(cold_read(threads, unroll=1), architecture, index, shared_bytes)
    # The driver keeps a kilobyte of every block.
    rooms = [shared_bytes, *((shared_bytes + 1024) // blocks - 1024 for blocks in (2, 3))]
    try:
        return tuple(
            tuple(active_clusters(function, cluster, threads, room) for cluster in range(1, 9))
            for room in rooms
        )
    except RuntimeError as error:
        warnings.warn(f"{error}; how many clusters run at once is estimated", stacklevel=2)
        return ()


def _decided(problem: Problem, device_index: int) -> KernelConfig:
    decision = decide(problem, device_numbers(device_index))
    if decision.config is None:
        raise ValueError(f"the {decision.kernel} kernel is not compiled")
    return decision.config


def dequantizes(
    shape: tuple[int, int, int],
    group_size: int,
    zeros: Tensor | None,
    dtype: torch.dtype,
    device_index: int,
    weight_format: WeightFormat,
) -> bool:
    """Whether the decision is to dequantise the weight and let cuBLAS multiply; ``shape`` is M, N, K."""
    problem = Problem(*shape, group_size, zeros is not None, dtype == torch.bfloat16, weight_format)
    return decide(problem, device_numbers(device_index)).kernel == DEQUANTIZE


@lru_cache(maxsize=8192)
def _load(instantiation: Instantiation, shared_bytes: int, device_index: int) -> Function:
    architecture = device_numbers(device_index).architecture
    return load_kernel(instantiation, architecture, device_index, shared_bytes)


def overlaps(device_index: int, behind_own: bool = False) -> bool:
    """Whether a kernel that is launched now may begin while its predecessor runs.

    Args:
        device_index: of the GPU; older ones than compute capability 9.0 know no such launch.
        behind_own: the predecessor allows it, whatever the context says.
    """
    return (behind_own or demands().dependent) and device_numbers(device_index).has_clusters


def prepare(
    operands: Operands,
    group_size: int,
    config: KernelConfig | None = None,
    *,
    weight_format: WeightFormat = INT4,
    behind_own: bool = False,
    activation: str | None = None,
    work: RowWork | None = None,
) -> Call:
    """Decide, compile or load, and pack what does not change from call to call.

    Args:
        operands: ``x`` [M, K] and ``out`` [M, N] have unit stride along their rows; rows of ``x`` are
            16-byte aligned.
        group_size: 32, 64, 128 or -1.
        config: overrides the decision.
        weight_format: of the words.
        behind_own: the stream's previous kernel is
            :func:`marlinq.kernels.launch.gather.gather_channels` and wrote ``x``: the launch then overlaps
            with it.
        activation: of :attr:`marlinq.kernels.decide.problem.Problem.activation`.
        work: on whole rows.

    Raises:
        UnsupportedError: the decision is for a variant that does no such work.
    """
    x = operands.x
    index = x.device.index
    problem = Problem(
        x.shape[0],
        operands.scales.shape[1],
        x.shape[1],
        group_size,
        operands.zeros is not None,
        x.dtype == torch.bfloat16,
        weight_format,
        activation,
    )
    device = device_numbers(index)
    chosen = config or _decided(problem, index)
    shared = chosen.shared_bytes(problem)
    dependent = overlaps(index, behind_own) and (behind_own or gains_by_overlap(chosen))
    together = blocks_together(problem, device, chosen) if dependent else None
    if together:
        # Blocks are started where the previous kernel's have ended: without this too many would crowd on the
        # multiprocessors that are free first, and everybody would wait for those.
        shared = max(shared, device.shared_bytes // (together + 1) + 1)
    instantiation = chosen.instantiation(problem)
    plain = chosen.arguments(operands, dependent)
    arguments: Arguments | RowArguments = plain
    if work is not None:
        variant = work.variant(chosen, problem)
        if variant is None:
            raise UnsupportedError(f"{chosen}: no such work on whole rows")
        instantiation, arguments = variant.instantiation, work.arguments(plain)
    function = _load(instantiation, shared, index)
    return Call(
        Launches(
            function,
            chosen.grid(problem),
            chosen.threads,
            shared,
            arguments,
            dependent=dependent,
        ),
        None if isinstance(chosen, StreamConfig) else (problem.m, problem.k, x.stride(0), chosen.tile_m),
        chosen.handover(problem) if isinstance(chosen, WarpgroupConfig) else None,
    )


def launch_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
    config: KernelConfig | None = None,
    *,
    weight_format: WeightFormat = INT4,
    behind_own: bool = False,
) -> None:
    """Run ``out = x @ W + bias`` on the device and current stream of ``x``; arguments as :func:`prepare`.

    Raises:
        RuntimeError: the driver refused the launch.
    """
    operands = Operands(x, words, scales, zeros, bias, out)
    shape = x.shape[0], out.shape[1], x.shape[1]
    index = x.device.index
    if config is None and dequantizes(shape, group_size, zeros, x.dtype, index, weight_format):
        dequantized_gemm(operands, weight_format)
        return
    call = prepare(operands, group_size, config, weight_format=weight_format, behind_own=behind_own)
    with on_device(index):
        call.start(x.data_ptr(), out.data_ptr())


def precompile(
    problems: Iterable[Problem], device_index: int = 0, progress: ReportProgress = no_progress
) -> int:
    """Compile every variant that ``problems`` need on a device and the cache lacks, in parallel.

    ``progress`` is called after each that is compiled.

    Returns:
        How many variants were compiled.

    Raises:
        EnvironmentProblem: a variant does not compile, or the cache can't be written.
    """
    device = device_numbers(device_index)
    return compile_missing(device.architecture, _instantiations(problems, device), progress)


class LayerShape(NamedTuple):
    """What decides which variants a weight needs.

    Attributes:
        n: columns of the stored weight, padding included: a multiple of 64.
        k: channels, a multiple of 64.
        group_size: 32, 64, 128, or -1 for a single group.
        zeros: whether zero points are stored.
    """

    n: int
    k: int
    group_size: int
    zeros: bool


def precompile_model(
    layers: Iterable[LayerShape],
    dtype: torch.dtype,
    device_index: int = 0,
    *,
    most_rows: int = 8192,
    progress: ReportProgress = no_progress,
) -> int:
    """Compile what a model's products need for any batch of up to ``most_rows`` rows, in parallel.

    A model has about 40 variants. To decide which takes half a second, the first time; a note in the cache
    (:mod:`marlinq.kernels.launch.complete`) saves later calls the trouble. Contexts count: call it inside
    :func:`dependent_launches` or :func:`batch_invariant` where the products will run inside, too.

    Args:
        layers: of all weights; equal ones count once.
        dtype: float16 or bfloat16, of activations and results.
        device_index: of the GPU.
        most_rows: rows of the largest batch.
        progress: called after each variant that is compiled.

    Returns:
        How many variants were compiled.

    Raises:
        EnvironmentProblem: a variant does not compile, or the cache can't be written.
        UnsupportedError: a layer that no kernel takes.
    """
    bfloat16 = dtype == torch.bfloat16
    wanted = sorted(set(layers))
    device = device_numbers(device_index)
    premises = wanted, bfloat16, most_rows, demands(), device
    if is_complete(premises):
        return 0
    problems = (
        Problem(m, layer.n, layer.k, layer.group_size, layer.zeros, bfloat16)
        for layer in wanted
        for m in buckets(most_rows)
    )
    instantiations = _instantiations(problems, device)
    compiled = compile_missing(device.architecture, instantiations, progress)
    note_complete(premises, instantiations, device.architecture)
    return compiled


def _instantiations(problems: Iterable[Problem], device: Device) -> list[Instantiation]:
    """What the decisions for ``problems`` launch; nothing where a weight is dequantised."""
    decisions = ((problem, decide(problem, device).config) for problem in problems)
    return list(
        dict.fromkeys(config.instantiation(problem) for problem, config in decisions if config is not None)
    )


def precompile_instantiations(
    wanted: Iterable[Instantiation], device_index: int = 0, progress: ReportProgress = no_progress
) -> int:
    """As :func:`precompile`, for kernels as they are compiled."""
    return compile_missing(device_numbers(device_index).architecture, list(dict.fromkeys(wanted)), progress)


def precompile_variants(variants: Iterable[tuple[Problem, KernelConfig]], device_index: int = 0) -> int:
    """As :func:`precompile`, for chosen configurations."""
    wanted = dict.fromkeys(config.instantiation(problem) for problem, config in variants)
    return compile_missing(device_numbers(device_index).architecture, list(wanted))
