"""Times FP8 weights with FP8 and with 16-bit activations, and cuBLAS in bfloat16, on Llama-3-8B's layers.

    python lab/kernels/eight_bits.py

Each product is captured in a CUDA graph over copies of the weight that no cache holds; medians, in us.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from marlinq.core.float_elements import E4M3 as ELEMENT
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations
from marlinq.kernels import GEMMS, device_numbers
from marlinq.kernels.choose.eight_bit_decision import decide_eight_bits, estimate
from marlinq.kernels.contract.weight_formats import E4M3
from marlinq.kernels.launch.eight_bit_product import plain_bytes, quantize_rows
from marlinq.kernels.ops.fp8_a8 import fp8_a8_gemm
from marlinq.operations.bench.shapes import LinearSize, layers_of
from marlinq.operations.bench.timing import capture, copies_for, time_in_turn
from marlinq.operations.bench.weights import random_weight

BATCHES = (16, 64, 128, 256, 512, 1024, 2048, 4096)
CUDA = torch.device("cuda", 0)
LAUNCHES = 16


def times(layer: LinearSize, group_size: int) -> None:
    """A line a batch."""
    device = device_numbers(0)
    granularity = Granularity.from_group_size(group_size)
    group = granularity.channels
    shared = Granularity.group(group) if group else Granularity.channel()
    weight = random_weight(
        layer, granularity, asymmetric=False, dtype=torch.bfloat16, device=CUDA, weight_format=E4M3
    )
    operand = weight.operand
    copies = copies_for(weight.nbytes, CUDA)
    words = [operand.words.clone() for _ in range(copies)]
    dense = operand.dequantize(torch.bfloat16)
    decided = decide_eight_bits(operand.problem(1), Activations(ELEMENT, shared, dynamic=True), device)
    print(f"{layer.name}, {granularity.describe()}: {decided.reason}")
    x = torch.empty(0)

    def rounded(i: int) -> Tensor:
        return fp8_a8_gemm(x, words[i % copies], operand.scales, None, None, group_size, layer.n)

    def wide(i: int) -> Tensor:
        return GEMMS[E4M3.name](x, words[i % copies], operand.scales, None, None, group_size, layer.n)

    contenders: dict[str, Callable[[int], Tensor]] = {
        "W8A8": rounded,
        "W8A16": wide,
        "cuBLAS": lambda _: x @ dense,
        "rows": lambda _: quantize_rows(x, group)[0],
        "bytes": lambda _: plain_bytes(operand),
    }
    for m in BATCHES:
        x = torch.randn(m, layer.k, dtype=torch.bfloat16, device=CUDA)
        recordings = {}
        for name, run in contenders.items():
            run(0)
            recordings[name] = capture(run, LAUNCHES)
        found = time_in_turn(recordings, 1e-4)
        line = "  ".join(f"{name} {1e6 * seconds:8.1f}" for name, seconds in found.items())
        expected = 1e6 * estimate(operand.problem(m), device)
        print(f"  M={m:5}  {line}  expected of W8A8 {expected:8.1f}", flush=True)


def main() -> None:
    for group_size in (-1, 128):
        for layer in layers_of(("llama-3-8b",), (), 128):
            times(layer, group_size)


if __name__ == "__main__":
    main()
