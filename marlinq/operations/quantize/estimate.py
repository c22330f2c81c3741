"""Estimates the memory and time of a run.

Memory is counted. Time is counted work over two rates that are measured on the device in less than a second:
one product and one solve in the model's shapes. It is right within a factor of two on an idle machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from marlinq.core.devices import read_clock
from marlinq.kernels import device_numbers
from marlinq.operations.quantize.budget import (
    TextBudget,
    Work,
    gradient_tokens,
    gradient_work,
    states_on_device,
)
from marlinq.operations.quantize.original import compared_share
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.runtime.writing import expected_steps

_PROBE_ROWS = 512
"""rows of activations in the measured product"""
_PROBE_K, _PROBE_N = 512, 512
"""largest K and N of the measured solve"""
_PROBE_SECONDS = 0.2
"""seconds that the product is repeated for"""
_EVEN_CHANNELS = 1024
"""K at which a solve's error feedback, which grows with K, takes as long as its search for scales"""
_WRITING_SHARE = 0.5
"""share of a GPU's memory bandwidth at which a step of writing text reads the weights"""
_DISK_RATE = 1e9
"""bytes a second that are copied, hashed and written"""
_PROCESS_BYTES = 600e6
"""bytes of host memory for the interpreter, torch and transformers"""
_SOLVE_COPIES = 6
"""float32 copies of a weight during its solve: the weight, its transpose, codes, losses and others"""


@dataclass(frozen=True)
class RunEstimate:
    """Estimated time and peak memory of a run.

    Attributes:
        writing_seconds: seconds while the model writes calibration text.
        block_seconds: seconds for forward passes and their statistics.
        solve_seconds: seconds for the method's solves.
        tuning_seconds: seconds for the steps of tuning.
        copy_seconds: seconds for reading and writing files.
        text_bytes: device bytes while the model writes text.
        block_bytes: device bytes while the largest block is quantised.
        tuning_bytes: device bytes while codes are tuned.
        host_bytes: host bytes, with hidden states that don't fit the device; on a CPU all memory of the run.
    """

    writing_seconds: float
    block_seconds: float
    solve_seconds: float
    tuning_seconds: float
    copy_seconds: float
    text_bytes: float
    block_bytes: float
    tuning_bytes: float
    host_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return (
            self.writing_seconds
            + self.block_seconds
            + self.solve_seconds
            + self.tuning_seconds
            + self.copy_seconds
        )


def estimate(
    plan: OutputPlan,
    work: Work,
    blocks: Sequence[Sequence[PlannedModule]],
    *,
    tokens: int,
    writing: TextBudget | None,
    parameters: int,
    hidden_size: int,
    batch_tokens: int,
    source_bytes: int,
    device: torch.device,
    dtype: torch.dtype,
    products: torch.dtype,
    writing_dtype: torch.dtype,
    ends: bool,
    tuning: tuple[float, float] = (0.0, 0.0),
) -> RunEstimate:
    """Counts the work of a run, measures the device's rates, and returns time and memory.

    Args:
        plan: plan of the output.
        work: work per token of the model.
        blocks: quantised modules of each block.
        tokens: tokens of calibration text; 0 for a method without calibration.
        writing: text that the model writes; None for none.
        parameters: number of parameters of the whole model.
        hidden_size: channels of the hidden states.
        batch_tokens: tokens of a forward pass.
        source_bytes: bytes of the source checkpoint.
        device, dtype: device and dtype that blocks run in.
        products: dtype that linear layers multiply in.
        writing_dtype: dtype in which the model writes text.
        ends: whether the model has an end token, with which a document may end early.
        tuning: (operations, device bytes) of tuning.
    """
    modules = list(plan.modules.values())
    rate = _product_rate(modules, device, dtype)
    low_precision = rate if products == dtype else _product_rate(modules, device, products)
    # A sequential method runs each block twice: for its linears' inputs, and quantised for its outputs.
    passes = 2.0 if plan.method.sequential else 1.0
    outer = 1.0
    if any(each.method.paired(each.options) for each in modules):
        # Two more passes on the compared share of the text: one through the original, one for projections
        # that are solved after the block's others. The products for the drift are not symmetric and cost
        # twice those of the Hessian.
        share = compared_share(tokens)
        passes, outer = passes + 2 * share, outer + 2 * share
    seconds = (
        passes * 2 * work.linear_weights / low_precision + outer * work.hessian_products / rate
    ) * tokens
    streams = 0
    if any(each.method.uses_output_gradients(each.options) for each in modules):
        seconds += gradient_work(tokens, work, device) / rate
        streams = gradient_tokens(tokens, work, device) * hidden_size * dtype.itemsize * (len(blocks) + 1)
    output_bytes = sum(tensor.nbytes for tensor in plan.tensors)
    largest = max((sum(_weights(each) for each in members) for members in blocks), default=0)
    widest = max((_weights(each) for each in modules), default=0)
    statistics = sum({each.spec.in_features: each.spec.in_features**2 for each in modules}.values()) * 4
    activations = batch_tokens * max((each.spec.out_features for each in modules), default=0) * dtype.itemsize
    block_bytes = largest * dtype.itemsize + widest * 4 * _SOLVE_COPIES + statistics * 2 + activations * 6
    block_bytes += streams
    hidden = tokens * hidden_size * dtype.itemsize
    if on_device := hidden <= states_on_device(device):
        block_bytes += hidden
    text_bytes = 0.0
    writing_seconds = 0.0
    if writing is not None:
        cache = writing.rows * writing.max_length * work.cache_bytes * writing_dtype.itemsize / 2
        text_bytes = parameters * writing_dtype.itemsize + cache
        writing_seconds = _writing_seconds(work, writing, modules, device, writing_dtype, ends=ends)
    on_cpu = device.type == "cpu"
    calibrated = plan.method.calibrated
    return RunEstimate(
        writing_seconds=writing_seconds,
        block_seconds=seconds if calibrated else 0.0,
        solve_seconds=_solve_seconds(plan, modules, device),
        tuning_seconds=_tuning_seconds(tuning[0], modules, device),
        copy_seconds=(source_bytes + output_bytes) / _DISK_RATE,
        text_bytes=text_bytes,
        block_bytes=block_bytes,
        tuning_bytes=tuning[1],
        host_bytes=_PROCESS_BYTES
        + (0.0 if on_device else hidden)
        + (max(text_bytes, block_bytes, tuning[1]) if on_cpu else 0.0),
    )


def _weights(planned: PlannedModule) -> int:
    return planned.spec.in_features * planned.spec.out_features


def _writing_seconds(
    work: Work,
    writing: TextBudget,
    modules: Sequence[PlannedModule],
    device: torch.device,
    dtype: torch.dtype,
    *,
    ends: bool,
) -> float:
    # As the run expects them: rows whose documents have ended still take steps.
    steps, _ = expected_steps(writing.tokens, writing.rows, writing.max_length, ends=ends)
    if device.type == "cuda":
        cache = writing.rows * writing.max_length / 2 * work.cache_bytes
        moved = work.all_weights * dtype.itemsize + cache
        return steps * moved / (device_numbers(device.index or 0).bandwidth * _WRITING_SHARE)
    rate = _product_rate(modules, device, dtype, rows=writing.rows)
    return steps * writing.rows * 2 * work.all_weights / rate


def _tuning_seconds(operations: float, modules: Sequence[PlannedModule], device: torch.device) -> float:
    if not operations:
        return 0.0
    # On a GPU, tuning multiplies in bfloat16 whatever the model's dtype.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return operations / _product_rate(modules, device, dtype)


def _product_rate(
    modules: Sequence[PlannedModule], device: torch.device, dtype: torch.dtype, *, rows: int = _PROBE_ROWS
) -> float:
    """Measured operations a second of a product in the largest linear's shape, cut to 4096 x 4096."""
    largest = max(modules, key=_weights)
    k, n = min(largest.spec.in_features, 4096), min(largest.spec.out_features, 4096)
    x = torch.ones(rows, k, device=device, dtype=dtype)
    weight = torch.ones(n, k, device=device, dtype=dtype)
    F.linear(x, weight)
    count, start = 0, read_clock(device)
    while (seconds := read_clock(device) - start) < _PROBE_SECONDS or count < 3:
        F.linear(x, weight)
        count += 1
    return 2 * rows * k * n * count / max(seconds, 1e-9)


def _solve_seconds(plan: OutputPlan, modules: Sequence[PlannedModule], device: torch.device) -> float:
    """Seconds of all solves: a measured solve of at most 512 x 512, scaled by K * N * (1024 + K)."""
    first = next(each for each in modules if each.method is plan.method)
    size = first.spec.scheme.channels_per_group(first.spec.in_features)
    k = max(min(_PROBE_K, first.spec.in_features) // size, 1) * size
    n = min(_PROBE_N, first.spec.out_features)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator).to(device)
    inputs = torch.randn(2 * k, k, generator=generator).to(device)
    scheme = first.spec.scheme.for_channels(k)
    seconds = []
    for _ in range(2):
        statistics = None
        if plan.method.calibrated:
            statistics = plan.method.statistics(k, first.options, device=device, name="probe")
            statistics.add(inputs)
        start = read_clock(device)
        plan.method.solve([weight], statistics, scheme, first.options, names=["probe"])
        seconds.append(read_clock(device) - start)

    def cost(in_features: int, out_features: int) -> float:
        growth = _EVEN_CHANNELS + in_features if plan.method.calibrated else _EVEN_CHANNELS
        return float(in_features * out_features * growth)

    total = sum(cost(each.spec.in_features, each.spec.out_features) for each in modules)
    return min(seconds) * total / cost(k, n)
