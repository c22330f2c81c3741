"""A small set of problems for compute-sanitizer to watch: every kernel, element, group size, split and form
of call.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.kernels.small_problems

Operands are made, and results checked, on the CPU in float64, so that the GPU runs little but our kernels.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from dataclasses import replace

import torch

from marlinq.kernels import (
    GEMMS,
    Device,
    Problem,
    batch_invariant,
    decide,
    dependent_launches,
    forced_kernel,
)
from marlinq.kernels.choose.decision import available
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.product_tensors import ProductTensors as Tensors
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.launch.call import launch_gemm
from marlinq.kernels.launch.precompile import precompile_variants
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.kernels.problems import (
    Operands,
    bound_of,
    even_splits,
    int4_problem,
    random_operands,
    relative_error,
    tile_after_tile,
)

# K, N, group size, zero points, type, format. K ends inside a chunk or before every part has one, N inside a
# tile.
WEIGHTS = (
    (576, 448, 32, True, torch.float16, INT4),
    (1088, 576, 64, False, torch.bfloat16, INT4),
    (2048, 704, 128, True, torch.bfloat16, INT4),
    (4032, 320, -1, False, torch.float16, INT4),
    (192, 64, -1, True, torch.float16, INT4),
    (576, 448, 64, True, torch.bfloat16, INT8),
    (1088, 320, -1, False, torch.float16, E4M3),
    (576, 448, 16, False, torch.float16, E2M1),
)
BATCHES = (1, 9, 17, 70)
# Demands on the decision and the launch, one a batch in turn, so that each meets every weight and kernel.
DEMANDS = ("none", "dependent", "batch_invariant", "order")


def cases(device: Device) -> list[tuple[int, str, int, str]]:
    """(index of the weight, kernel, batch, demand)."""
    listed = itertools.product(range(len(WEIGHTS)), available(device), enumerate(BATCHES))
    found = [
        (weight, kernel, m, DEMANDS[(weight + turn) % len(DEMANDS)]) for weight, kernel, (turn, m) in listed
    ]
    # Variants of the warpgroup kernel whose blocks share tiles, ordinarily and dependently launched.
    for weight, (turn, m) in itertools.product(range(len(WEIGHTS)), enumerate(BATCHES)):
        if even_splits(_problem(weight, m), device):
            found.append((weight, "warpgroup", m, ("even", "even, dependent")[(weight + turn) % 2]))
        # And whose blocks take several whole ones.
        if _several_tiles(_problem(weight, m), device):
            found.append((weight, "warpgroup", m, ("several", "several, dependent")[(weight + turn) % 2]))
    return found


def _several_tiles(problem: Problem, device: Device) -> list[WarpgroupConfig]:
    """Variants that store tiles apart: for even batches those that deal out the last ones in chunks of K."""
    found = tile_after_tile(problem, device, 3)
    return [config for config in found if config.stream_k == (problem.m % 2 == 0)]


def _problem(weight: int, m: int) -> Problem:
    k, n, group, zeros, dtype, weight_format = WEIGHTS[weight]
    return int4_problem(m, n, k, group, zeros, dtype == torch.bfloat16, weight_format)


def demanded(kernel: str, demand: str) -> ExitStack:
    """The context of one case."""
    stack = ExitStack()
    stack.enter_context(forced_kernel(kernel))
    if demand.endswith("dependent"):
        stack.enter_context(dependent_launches())
    if demand == "batch_invariant":
        stack.enter_context(batch_invariant())
    return stack


def variant(weight: int, kernel: str, m: int, demand: str, device: Device) -> tuple[Problem, Configuration]:
    """Configuration that the case runs."""
    problem = _problem(weight, m)
    if demand.startswith("even"):
        return problem, even_splits(problem, device)[0]
    if demand.startswith("several"):
        found = _several_tiles(problem, device)
        return problem, found[(weight + m) % len(found)]
    with demanded(kernel, demand):
        config = decide(problem, device).config
    if config is None:
        raise ValueError(f"{kernel} has no variant for {problem}")
    return problem, config


def error_of(operands: Operands, kernel: str, m: int, demand: str, config: Configuration) -> float:
    """The relative error of one case; its x are columns of wider rows, and four columns are padding."""
    k, n = operands.weight.shape
    x = torch.randn(m, k + 64).to(operands.scales.dtype)
    order = None
    expected = operands.reference(x[:, :k])[:, : n - 4]
    if demand == "order":
        order = torch.randperm(k, dtype=torch.int32)
        order[5] = -1
        gathered = x[:, order].masked_fill(order < 0, 0)
        expected = operands.reference(gathered)[:, : n - 4]
    if demand.startswith(("even", "several")):
        held = operands.operand
        weight = replace(
            held,
            words=held.words.cuda(),
            scales=held.scales.cuda(),
            zeros=None if held.zeros is None else held.zeros.cuda(),
        )
        bias = None if operands.bias is None else operands.bias.cuda()
        out = torch.full((m, n), torch.nan, dtype=x.dtype, device="cuda")
        with demanded(kernel, demand):
            launch_gemm(Tensors(x.cuda()[:, :k], weight, bias, out), config)
        return relative_error(out[:, : n - 4].cpu(), expected)
    bias = None if operands.bias is None else operands.bias[: n - 4]
    given = [
        None if value is None else value.cuda()
        for value in (operands.words, operands.scales, operands.zeros, bias)
    ]
    with demanded(kernel, demand):
        found = GEMMS[operands.format.name](
            x.cuda()[:, :k], *given, operands.group_size, n - 4, None if order is None else order.cuda()
        )
    return relative_error(found.cpu(), expected)


def main() -> int:
    device = device_numbers(0)
    listed = cases(device)
    variants = [variant(*case, device) for case in listed]
    precompile_variants(variants)
    torch.manual_seed(0)
    made = [
        random_operands(k, n, group, dtype, zeros=zeros, bias=True, device="cpu", weight_format=weight_format)
        for k, n, group, zeros, dtype, weight_format in WEIGHTS
    ]
    wrong = 0
    for case, (_, config) in zip(listed, variants, strict=True):
        weight, kernel, m, demand = case
        error = error_of(made[weight], kernel, m, demand, config)
        if not error < bound_of(made[weight]):
            wrong += 1
            print(f"WRONG by {error:.1e}: {WEIGHTS[weight]} {kernel} M={m} {demand} {config}")
    clusters = sorted({config.cluster for _, config in variants})
    print(f"{len(listed)} problems, {len(set(variants))} variants, clusters of {clusters}, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
