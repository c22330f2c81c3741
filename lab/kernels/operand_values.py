"""Measures how a product's time depends on its operands' values: at the power limit zeros are faster.

    python lab/kernels/operand_values.py

One variant of the warpgroup kernel a batch, all multiprocessors, one wave, launches back to back; the same
launch on other weights, scales and activations, in turn. The figures are microseconds a launch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels import Operand
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.launch.call import launch_gemm
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.timing import capture, time_in_turn

_K, _GROUP, _LAUNCHES = 12288, 128, 10
# (tile_m, words, warpgroups_n, parts_k, stages): the shapes that large layers take.
_SHAPES = ((32, 4, 1, 2, 8), (64, 2, 2, 1, 6), (128, 1, 2, 1, 5), (128, 2, 2, 1, 4))
_EIGHTS = -0x77777778  # every nibble 8: a weight of zero


def operands(n: int, m: int, device: torch.device) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By name: words int32 [K/16, 2N], scales float16 [K/128, N], activations float16 [M, K]."""
    words = torch.randint(-(2**31), 2**31 - 1, (_K // 16, n * 2), dtype=torch.int32, device=device)
    scales = (torch.rand(_K // _GROUP, n, device=device) * 0.01 + 0.005).half()
    x = torch.randn(m, _K, device=device).half()
    powers = torch.full_like(scales, 2.0**-7)
    return {
        "random": (words, scales, x),
        "scales 2^-7": (words, powers, x),
        "codes 8": (torch.full_like(words, _EIGHTS), scales, x),
        "activations 1, -1": (words, scales, torch.sign(x)),
        "activations 0": (words, scales, torch.zeros_like(x)),
    }


def _launch(_: int, given: tuple[Tensor, Tensor, Tensor], out: Tensor, config: WarpgroupConfig) -> None:
    words, scales, x = given
    weight = Operand.whole(INT4, Granularity.group(_GROUP), words, scales, None)
    launch_gemm(ProductTensors(x, weight, None, out), config)


def main() -> int:
    if not torch.cuda.is_available():
        raise SystemExit("error: the measurement needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    print(hardware_line(device))
    for tile_m, words, warpgroups_n, parts_k, stages in _SHAPES:
        config = WarpgroupConfig(tile_m, words, warpgroups_n, parts_k, 8, 1, stages, 1, blocks)
        n = config.tile_n * blocks
        out = torch.empty(tile_m, n, dtype=torch.float16, device=device)
        recordings = {}
        for name, given in operands(n, tile_m, device).items():
            launch = partial(_launch, given=given, out=out, config=config)
            launch(0)
            recordings[name] = capture(launch, _LAUNCHES)
        times = time_in_turn(recordings, 1e-4, sustained=True)
        listed = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in times.items())
        print(f"M={tile_m:<4} {words} words, {warpgroups_n} x {parts_k} warpgroups: {listed}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
