"""Expected times of a decode step and of a prefill, and the memory that both take.

The time of a step of M sequences is the sum over layers of

* products: the kernels' expected times (:mod:`marlinq.kernels.choose`) times a factor; a 16-bit product takes
  the longer of reading its weight and its operations, plus a launch;
* reading the cache in attention, and moving activations in the kernels between products;
* norms beyond two per layer; and, above 32 rows, launches, which then don't overlap;

plus the output head. With INT4 weights, one sequence and compute capability 9.0, all layers are one launch
with constants of its own. :class:`StepCosts` are fitted to steps measured on an H200
(``docs/results/recommend-h200.json``, ``lab/recommend/fit.py``). For other GPUs their seconds are kept, and
rates are published peaks times the share of its peak that an H200 reaches.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

from marlinq.kernels.choose.decision import decide
from marlinq.kernels.contract.demands import dependent_launches
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.experts.configurations import ExpertsShape
from marlinq.kernels.experts.experts_decision import direct, sorted_variants
from marlinq.operations.recommend.gpus import Gpu
from marlinq.operations.recommend.shape import DecoderLayer, ModelShape, ProductSize, Routed
from marlinq.operations.recommend.weight_types import Weights

DEPENDENT_ROWS = 32
"""rows up to which launches of a layer's products overlap (programmatic dependent launch)"""
_FEW_ROWS = 64
_DENSE_SHARE = 0.767
"""share of the published 16-bit rate that cuBLAS reaches on an H200 (docs/results/experts-h200.json: 759 to
761 of 989.5 TFLOPS); taken for FP8 too"""
_PIECE = 2048
"""rows of a prompt that run through a layer at once (runtime/step/prompts.py)"""
RESERVED_BYTES = 1.5e9
"""bytes besides weights and cache: the driver's context, graphs, buffers for a piece of a prompt"""
_USABLE = 0.97


@dataclass(frozen=True)
class StepCosts:
    """Constants of the model, fitted to an H200.

    Attributes:
        few_rows, many_rows: factors on the kernels' expected times, up to 64 rows and above; above, the power
            limit lowers the clock.
        dense: factor on the time for bytes or operations of a 16-bit product.
        dense_launch: seconds per 16-bit product for its launch.
        late: seconds per layer when launches don't overlap.
        norm: seconds per norm beyond a layer's first two.
        cache: factor on the time to read the cache at the memory's bandwidth.
        activations: factor on the time to move activations at the memory's bandwidth.
        quantised_inputs: seconds per FP8 product for its launch and the launch that quantises its inputs.
        router: seconds per layer with experts for choosing them.
        ends: seconds per step for the first and last kernels and the sampler.
        joined: seconds per layer of the single launch of all layers (docs/decode.md, "Other shapes").
        joined_bytes: factor on the time to read that launch's bytes.
        joined_norm: seconds in that launch per norm beyond a layer's first two.
        prompt, prompt_activations: factors on products and activations in a prefill.
        prompt_layer: seconds per layer that a short prompt waits for the host.
    """

    few_rows: float = 1.09
    many_rows: float = 1.29
    dense: float = 1.12
    dense_launch: float = 5.8e-6
    late: float = 7.5e-6
    norm: float = 4.0e-6
    cache: float = 0.89
    activations: float = 4.8
    quantised_inputs: float = 5.0e-6
    router: float = 8e-6
    ends: float = 7e-6
    joined: float = 7.2e-6
    joined_bytes: float = 1.2
    joined_norm: float = 3.1e-6
    prompt: float = 1.22
    prompt_activations: float = 2.2
    prompt_layer: float = 4.5e-4


COSTS = StepCosts()


@dataclass(frozen=True)
class Times:
    """Expected figures of a decode step.

    Attributes:
        step: seconds of the step.
        step_bytes: bytes of weights, scales and cache that it reads.
        operations: multiplications and additions, two per weight and row.
    """

    step: float
    step_bytes: float
    operations: float


def decode(
    shape: ModelShape, weights: Weights, gpu: Gpu, rows: int, context: float, costs: StepCosts = COSTS
) -> Times:
    """A decode step of ``rows`` sequences with ``context`` tokens each.

    Raises:
        UnsupportedError: none of marlinq's kernels multiplies these weights on this GPU.
    """
    device = gpu.device()
    head_bytes = 2.0 * shape.vocabulary * shape.hidden
    cache_bytes = 2.0 * rows * shape.cached(context, windows=True)
    nbytes = head_bytes + cache_bytes
    operations = 2.0 * rows * shape.vocabulary * shape.hidden
    seconds = costs.ends + costs.dense * _dense_seconds(gpu, device, rows, shape.vocabulary, shape.hidden)
    joined = _is_joined(shape, weights, device, rows)
    for layer, count in shape.layers:
        read, worked = _layer_totals(layer, weights, rows)
        nbytes += count * read
        operations += count * worked
        extra = max(layer.norms - 2, 0)
        if joined:
            own = 2.0 * layer.cached * min(context, layer.window or context)
            each = costs.joined + costs.joined_bytes * (read + own) / device.bandwidth
            seconds += count * (each + extra * costs.joined_norm)
            continue
        each = _products(layer, weights, gpu, device, rows, costs) + extra * costs.norm
        each += costs.activations * _activation_bytes(shape, layer, rows) / device.bandwidth
        if rows > DEPENDENT_ROWS:
            each += costs.late
        seconds += count * each
    if not joined:
        seconds += costs.cache * cache_bytes / device.bandwidth
    return Times(seconds, nbytes, operations)


def prefill(shape: ModelShape, weights: Weights, gpu: Gpu, rows: int, prompt: int) -> float:
    """Seconds from ``rows`` prompts of ``prompt`` tokens to their first new tokens.

    Raises:
        UnsupportedError: none of marlinq's kernels multiplies these weights on this GPU.
    """
    device = gpu.device()
    tokens = rows * prompt
    piece = min(tokens, _PIECE)
    seconds = 0.0
    for layer, count in shape.layers:
        each = COSTS.prompt * _mixed_products(layer, weights, gpu, device, piece) * tokens / piece
        each += COSTS.prompt_activations * _activation_bytes(shape, layer, tokens) / device.bandwidth
        seen = min(prompt, 2 * layer.window) if layer.window else prompt
        each += 2.0 * tokens * seen * layer.queries / (gpu.half * _DENSE_SHARE / 2)
        seconds += count * max(each, COSTS.prompt_layer)
    return seconds + _dense_seconds(gpu, device, rows, shape.vocabulary, shape.hidden)


def weight_bytes(shape: ModelShape, weights: Weights) -> float:
    """Bytes of all weights and scales."""
    of_experts, linears = shape.expert_sizes, weights.of_linears
    return 2.0 * shape.others + sum(
        of_experts[size] * weights.bytes_of(*size) + (count - of_experts[size]) * linears.bytes_of(*size)
        for size, count in shape.sizes.items()
    )


def memory(shape: ModelShape, weights: Weights, rows: int, tokens: float) -> float:
    """Bytes of weights, of the cache of ``rows`` sequences with ``tokens`` tokens each, and of buffers."""
    cache = 2.0 * rows * shape.cached(tokens, windows=False)
    return weight_bytes(shape, weights) + cache + 6.0 * rows * shape.vocabulary + RESERVED_BYTES


def fits(gpu: Gpu, nbytes: float) -> bool:
    """Whether ``nbytes`` fit a GPU's memory beside what the driver keeps."""
    return nbytes <= _USABLE * gpu.memory


def _is_joined(shape: ModelShape, weights: Weights, device: Device, rows: int) -> bool:
    """Whether all layers run as one launch (``runtime/step/persistent.py``)."""
    dense = all(layer.routed is None for layer, _ in shape.layers)
    return rows == 1 and dense and weights.format is INT4 and device.has_warpgroups


def _layer_totals(layer: DecoderLayer, weights: Weights, rows: int) -> tuple[float, float]:
    """(bytes of weights that a layer reads, its operations)."""
    read = sum(weights.of_linears.bytes_of(one.n, one.k) for one in layer.products)
    worked = 2.0 * rows * sum(one.n * one.k for one in layer.products)
    if layer.routed is not None:
        routed = layer.routed
        each = weights.bytes_of(routed.parts * routed.inner, routed.hidden)
        read += routed.touched(rows) * (each + weights.bytes_of(routed.hidden, routed.inner))
        worked += 2.0 * rows * routed.top * routed.weights
    return read, worked


def _products(
    layer: DecoderLayer, weights: Weights, gpu: Gpu, device: Device, rows: int, costs: StepCosts
) -> float:
    """Seconds of a layer's products in a step."""
    if weights.experts_only and layer.routed is not None:
        linears = replace(layer, routed=None)
        experts = replace(layer, products=())
        return _products(linears, weights.of_linears, gpu, device, rows, costs) + _products(
            experts, replace(weights, experts_only=False), gpu, device, rows, costs
        )
    weights = weights.of_linears
    seconds = _plain_products(layer, weights, gpu, device, rows)
    if layer.routed is not None:
        seconds += costs.router
    if weights.format is None:
        # 16-bit projections are not joined: each is a launch.
        launches = sum(len(one.parts) for one in layer.products) + (0 if layer.routed is None else 4)
        return costs.dense * seconds + costs.dense_launch * launches
    return (costs.few_rows if rows <= _FEW_ROWS else costs.many_rows) * seconds


def _mixed_products(layer: DecoderLayer, weights: Weights, gpu: Gpu, device: Device, rows: int) -> float:
    """As :func:`_plain_products`, also where only experts have such weights."""
    if not weights.experts_only:
        return _plain_products(layer, weights, gpu, device, rows)
    seconds = _plain_products(replace(layer, routed=None), weights.of_linears, gpu, device, rows)
    if layer.routed is not None:
        whole = replace(weights, experts_only=False)
        seconds += _plain_products(replace(layer, products=()), whole, gpu, device, rows)
    return seconds


def _plain_products(layer: DecoderLayer, weights: Weights, gpu: Gpu, device: Device, rows: int) -> float:
    """Seconds of a layer's products as the kernels' models expect them, without factors."""
    if weights.format is None:
        seconds = sum(
            _dense_seconds(gpu, device, rows, n, one.k) for one in layer.products for n in one.parts
        )
        return seconds + (0.0 if layer.routed is None else _dense_experts(gpu, device, layer.routed, rows))
    if multiplies_in_fp8(weights, gpu) and layer.routed is None:
        assert gpu.fp8 is not None
        rate = gpu.fp8 * _DENSE_SHARE
        return sum(
            COSTS.quantised_inputs
            + max(weights.bytes_of(one.n, one.k) / device.bandwidth, 2.0 * rows * one.n * one.k / rate)
            for one in layer.products
        )
    with dependent_launches() if rows <= DEPENDENT_ROWS and device.has_clusters else nullcontext():
        seconds = sum(_kernel_seconds(weights, device, rows, one) for one in layer.products)
    if layer.routed is not None:
        seconds += _expert_seconds(weights, gpu, device, layer.routed, rows)
    return seconds


def multiplies_in_fp8(weights: Weights, gpu: Gpu) -> bool:
    """Whether times are estimated for FP8 products, as servers run them; marlinq multiplies in 16 bits."""
    return weights.quantises_activations and gpu.fp8 is not None


def _kernel_seconds(weights: Weights, device: Device, rows: int, product: ProductSize) -> float:
    return decide(weights.problem(rows, product.n, product.k), device).seconds


def _expert_seconds(weights: Weights, gpu: Gpu, device: Device, routed: Routed, rows: int) -> float:
    problem = weights.problem(rows, routed.hidden, routed.hidden)
    shape = ExpertsShape(
        rows,
        routed.top,
        routed.experts,
        -(-routed.hidden // 64) * 64,
        -(-routed.inner // 64) * 64,
        problem.granularity,
        False,
        False,
        problem.format,
    )
    alone = direct(shape, device)
    found = [seconds for seconds, _ in sorted_variants(shape, device)]
    found += [] if alone is None else [alone[1]]
    if not found:
        # marlinq has no such kernel: the time is what memory and tensor cores need at least.
        each = weights.bytes_of(routed.parts * routed.inner, routed.hidden)
        read = routed.touched(rows) * (each + weights.bytes_of(routed.hidden, routed.inner))
        worked = 2.0 * rows * routed.top * routed.weights
        return max(read / device.bandwidth, worked / (gpu.half * _DENSE_SHARE))
    return min(found)


def _dense_seconds(gpu: Gpu, device: Device, rows: int, n: int, k: int) -> float:
    """Seconds of a 16-bit product: the longer of reading its bytes and its operations."""
    return max(2.0 * n * k / device.bandwidth, 2.0 * rows * n * k / (gpu.half * _DENSE_SHARE))


def _dense_experts(gpu: Gpu, device: Device, routed: Routed, rows: int) -> float:
    read = 2.0 * routed.touched(rows) * routed.weights / device.bandwidth
    return max(read, 2.0 * rows * routed.top * routed.weights / (gpu.half * _DENSE_SHARE))


def _activation_bytes(shape: ModelShape, layer: DecoderLayer, rows: int) -> float:
    """Bytes that kernels between products read and write: the residual stream eight times, and the inputs and
    outputs of every product inside the layer."""
    inner = sum(one.n for one in layer.products if one.k == shape.hidden)
    inner += sum(one.k for one in layer.products if one.k != shape.hidden)
    if layer.routed is not None:
        inner += 3 * layer.routed.top * layer.routed.inner
    return 2.0 * rows * (8 * shape.hidden + inner)
