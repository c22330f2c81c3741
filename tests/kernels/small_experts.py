"""A small set of routed layers for compute-sanitizer to watch: every kind of variant, group size and routing.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.kernels.small_experts

Operands are made, and results checked, on the CPU in float64, so that the GPU runs little but our kernels.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT8
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.experts.experts_decision import decisions
from marlinq.kernels.experts.launch import launch_experts
from marlinq.kernels.experts.steps import instantiations, shape_of
from tests.kernels.experts_problems import Layer, Shape, random_layer, random_routing, with_tensors
from tests.kernels.problems import BOUND, relative_error

# K of both products ends inside a chunk or not, N inside a tile; the last is divided among two runs of pairs.
LAYERS = (
    (1, Shape(5, 2, 192, 320, 64, True)),
    (3, Shape(4, 2, 256, 128, 32, False, torch.bfloat16)),
    (9, Shape(4, 3, 192, 320, -1, True, torch.float16, True)),
    (40, Shape(6, 3, 320, 192, 64, True, torch.bfloat16)),
    (70, Shape(3, 1, 128, 256, -1)),
    (530, Shape(3, 2, 128, 128, 128, False, torch.bfloat16, True)),
    (3, Shape(4, 2, 192, 128, 64, True, format=INT8)),
    (40, Shape(4, 2, 192, 320, -1, False, torch.bfloat16, format=E4M3)),
    (9, Shape(4, 2, 192, 320, 32, False, torch.bfloat16, format=E2M1)),
    (70, Shape(4, 2, 192, 128, 16, format=E2M1)),
)


def wrong_variants(m: int, layer: Layer) -> tuple[int, int]:
    """How many variants ran, and how many of them were wrong."""
    shape = layer.shape
    # One expert more than there are.
    x, ids, weights = random_routing(replace(shape, experts=shape.experts + 1), m)
    expected = layer.reference(x, ids, weights)
    experts = with_tensors(layer.weights, torch.Tensor.cuda)
    given = x.cuda(), ids.cuda(), weights.cuda()
    problem = shape_of(x, ids, layer.weights)
    device = device_numbers(0)
    listed = decisions(problem, device)
    kernels = [one for decision in listed for one in instantiations(problem, decision, "silu", wide=False)]
    compile_missing(device.architecture, list(dict.fromkeys(kernels)))
    wrong = 0
    for decision in listed:
        error = relative_error(launch_experts(*given, experts, "silu", None, decision).cpu(), expected)
        if not error < 2 * BOUND[shape.dtype]:
            wrong += 1
            print(f"WRONG by {error:.1e}: M={m} {shape} {decision.reason}")
    return len(listed), wrong


def main() -> int:
    torch.manual_seed(0)
    counts = [wrong_variants(m, random_layer(shape)) for m, shape in LAYERS]
    wrong = sum(count for _, count in counts)
    print(f"{len(LAYERS)} layers, {sum(count for count, _ in counts)} variants, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
