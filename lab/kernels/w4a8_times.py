"""Times 4-bit weights with FP8 activations beside 16-bit activations and cuBLAS, on Llama's layers.

    python lab/kernels/w4a8_times.py [--model NAME] [--rows M] [--scales row]

Every product is captured in a CUDA graph over copies of the weight that no cache holds, and replayed
without pauses; medians, in us. W4A8 is the whole product, with the launch that rounds the activations;
``product`` and ``rows`` are its two launches. First the result is compared with float64's of the rounded
activations.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels import GEMMS, Operand, Problem, precompile
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.launch.eight_bit_product import quantize_fragments, quantize_rows
from marlinq.kernels.launch.w4a8_product import launch_product, w4a8_product
from marlinq.kernels.variants.warpgroup_fp8 import GROUP, configuration
from marlinq.operations.bench.shapes import LinearSize, layers_of
from marlinq.operations.bench.timing import capture, copies_for, launches_for, time_in_turn
from marlinq.operations.bench.weights import Weight, random_weight

CUDA = torch.device("cuda", 0)
CHECKED = 64
CUBLAS, W4A8 = "cuBLAS", "W4A8"


def error(x: Tensor, weight: Weight, group: int, out: Tensor) -> float:
    """Relative error of some rows against float64 products of the rounded activations."""
    codes, scales = quantize_rows(x[:CHECKED], group)
    rounded = (codes.double().view(len(codes), -1, group or x.shape[1]) * scales.double()[..., None]).flatten(
        1
    )
    expected = rounded @ weight.operand.dequantize(torch.float32).double()
    return float((out[:CHECKED].double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Contest:
    """A layer's random weight, also as copies that no cache holds and dequantised."""

    layer: LinearSize
    weight: Weight
    copies: list[Operand]
    dense: Tensor

    @classmethod
    def of(cls, layer: LinearSize, dtype: torch.dtype) -> Contest:
        """With random codes and scales."""
        groups = Granularity.group(GROUP)
        weight = random_weight(layer, groups, asymmetric=False, dtype=dtype, device=CUDA, weight_format=INT4)
        operand, count = weight.operand, copies_for(weight.nbytes, CUDA)
        copies = [replace(operand, words=operand.words.clone()) for _ in range(count)]
        return cls(layer, weight, copies, operand.dequantize(dtype))

    def ratio(self, m: int, group: int) -> float:
        """Prints a line; returns cuBLAS's time over the product's."""
        layer, operand = self.layer, self.weight.operand
        config = configuration(operand.problem(m), device_numbers(0), chunk_scales=group > 0)
        x = torch.randn(m, layer.k, dtype=self.dense.dtype, device=CUDA)
        found = error(x, self.weight, group, w4a8_product(x, operand, None, group, config))
        rounded = quantize_fragments(x, group)
        out = x.new_empty((m, layer.n))

        def copy(i: int) -> Operand:
            return self.copies[i % len(self.copies)]

        contenders: dict[str, Callable[[int], object]] = {
            W4A8: lambda i: w4a8_product(x, copy(i), None, group, config),
            "product": lambda i: launch_product(rounded, copy(i), None, out, config),
            "rows": lambda _: quantize_fragments(x, group),
            "W4A16": lambda i: GEMMS[INT4.name](x, copy(i).words, operand.scales, None, None, GROUP, layer.n),
            CUBLAS: lambda _: x @ self.dense,
        }
        recordings = {}
        expected = 2 * m * layer.n * layer.k / 7e14
        for name, run in contenders.items():
            run(0)
            recordings[name] = capture(run, launches_for(expected))
        measured = time_in_turn(recordings, expected, sustained=True)
        ratio = measured[CUBLAS] / measured[W4A8]
        line = "  ".join(f"{name} {1e6 * seconds:8.1f}" for name, seconds in measured.items())
        rate = 2e-12 * m * layer.n * layer.k / measured["product"]
        print(
            f"{layer.name:20} M={m:5} {line}  {rate:5.0f} TFLOP/s  x{ratio:.2f}  error {found:.1e}",
            flush=True,
        )
        return ratio


def main() -> None:
    """Time the layers and print geometric means."""
    options = _options()
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[options.dtype]
    print(torch.cuda.get_device_name(0), options)
    layers, bfloat16 = layers_of(tuple(options.model), (), GROUP), dtype == torch.bfloat16
    groups = Granularity.group(GROUP)
    precompile(
        [Problem(m, each.n, each.k, groups, False, bfloat16, INT4) for each in layers for m in options.rows],
        0,
    )
    found = []
    for layer in layers:
        contest = Contest.of(layer, dtype)
        found.append([contest.ratio(m, 0 if options.scales == "row" else GROUP) for m in options.rows])
    for index, m in enumerate(options.rows):
        mean = math.exp(sum(math.log(ratios[index]) for ratios in found) / len(found))
        print(f"M={m}: {mean:.2f} times as fast as cuBLAS, at least {min(r[index] for r in found):.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help="repeatable; both Llamas without it")
    parser.add_argument(
        "--rows", type=int, action="append", help="repeatable; 1024, 2048 and 4096 without it"
    )
    parser.add_argument("--scales", choices=("group", "row"), default="group")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    options = parser.parse_args()
    options.model = options.model or ["llama-3-8b", "llama-3-70b"]
    options.rows = options.rows or [1024, 2048, 4096]
    return options


if __name__ == "__main__":
    main()
