"""Launch a product: decide on a kernel, compile or load it, pack its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.choose.decision import (
    DEQUANTIZE,
    blocks_together,
    decide,
    gains_by_overlap,
)
from marlinq.kernels.contract.configuration import ActivationBox, Configuration
from marlinq.kernels.contract.demands import demands
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.whole_rows import RowWork
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.handover_memory import handover_memory
from marlinq.kernels.driver.module import load_kernel
from marlinq.kernels.driver.tensor_maps import activation_maps
from marlinq.kernels.launch.dequantized_product import dequantized_gemm


@dataclass(frozen=True, slots=True)
class Call:
    """A launch of one variant on one weight, for any activations of the same shape and strides.

    Attributes:
        launches: launches of the kernel, complete but for the addresses of activations and result.
        box: shape of the activations' tensor map; None where the kernel takes their address.
        handover: sizes of the memory through which blocks exchange sums; None where they don't.
    """

    launches: Launches
    box: ActivationBox | None
    handover: Handover | None

    def start(self, x: int, out: int) -> None:
        """Launch on the current stream, inside :func:`marlinq.kernels.driver.cuda_driver.on_device`.

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
            sums, flags = handover_memory(self.handover, self.launches.function.device_index)
            arguments.share(sums.data_ptr(), flags)
            launch.start()
            # Freed now: whoever gets the memory next is behind this launch in the stream.
            del sums
        self.launches.give(launch)


def _decided(problem: Problem, device_index: int) -> Configuration:
    decision = decide(problem, device_numbers(device_index))
    if decision.config is None:
        raise ValueError(f"the {decision.kernel} kernel is not compiled")
    return decision.config


def dequantizes(problem: Problem, device_index: int) -> bool:
    """Whether the decision is to dequantise the weight and let cuBLAS multiply."""
    return decide(problem, device_numbers(device_index)).kernel == DEQUANTIZE


@lru_cache(maxsize=8192)
def _load(instantiation: Instantiation, shared_bytes: int, device_index: int) -> Function:
    architecture = device_numbers(device_index).architecture
    return load_kernel(instantiation, architecture, device_index, shared_bytes)


def overlaps(device_index: int, behind_own: bool = False) -> bool:
    """Whether a kernel launched now may begin while its predecessor runs (compute capability 9.0 and later).

    Args:
        device_index: index of the GPU.
        behind_own: the predecessor is a kernel of this package that allows it, also outside of
            :func:`marlinq.kernels.contract.demands.dependent_launches` and ``early_launches``.
    """
    demanded = demands()
    asked = behind_own or demanded.dependent or demanded.early
    return asked and device_numbers(device_index).has_clusters


def prepare(
    operands: ProductTensors,
    config: Configuration | None = None,
    *,
    behind_own: bool = False,
    activation: str | None = None,
    work: RowWork | None = None,
) -> Call:
    """Decide on a kernel, compile or load it, and pack the arguments that are the same for every call.

    Args:
        operands: ``x`` [M, K] and ``out`` [M, N] have unit stride along their rows; rows of ``x`` are
            16-byte aligned.
        config: overrides the decision.
        behind_own: the stream's previous kernel is
            :func:`marlinq.kernels.launch.gather.gather_channels` and wrote ``x``: the launch then overlaps
            with it.
        activation: name as in :attr:`marlinq.kernels.contract.problem.Problem.activation`.
        work: RMS norm of the input or addition to the residual stream, within the product.

    Raises:
        UnsupportedError: the chosen configuration has no kernel with ``work``.
    """
    x = operands.x
    index = x.device.index
    problem = operands.problem(activation)
    device = device_numbers(index)
    chosen = config or _decided(problem, index)
    shared = chosen.shared_bytes(problem)
    dependent = overlaps(index, behind_own) and (behind_own or gains_by_overlap(chosen))
    together = blocks_together(problem, device, chosen) if dependent else None
    if together:
        # Blocks start wherever the previous kernel's blocks have ended. Asking for more shared memory limits
        # blocks a multiprocessor, or too many would start on the first free ones and finish late.
        shared = max(shared, device.shared_bytes // (together + 1) + 1)
    instantiation = chosen.instantiation(problem)
    plain = chosen.arguments(operands, dependent)
    arguments = plain
    if work is not None:
        variant = chosen.row_variant(problem, normed=work.normed is not None, adds=work.added is not None)
        if variant is None:
            raise UnsupportedError(f"{chosen}: no such work on whole rows")
        instantiation = variant.instantiation
        arguments = work.arguments(variant.arguments, plain)
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
        chosen.activation_box(problem, x.stride(0)),
        chosen.handover(problem),
    )


def launch_gemm(
    operands: ProductTensors, config: Configuration | None = None, *, behind_own: bool = False
) -> None:
    """Run ``out = x @ W + bias`` on the device and current stream of ``x``; arguments as
    :func:`prepare`.

    Raises:
        RuntimeError: the driver refused the launch.
    """
    index = operands.x.device.index
    if config is None and dequantizes(operands.problem(), index):
        dequantized_gemm(operands)
        return
    call = prepare(operands, config, behind_own=behind_own)
    with on_device(index):
        call.start(operands.x.data_ptr(), operands.out.data_ptr())
