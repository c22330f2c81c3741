"""Products of 4-bit weights with FP8 activations, on the emulation, with planted faults."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from marlinq.kernels.launch.eight_bit_product import quantize_rows
from marlinq.kernels.launch.w4a8_product import fp8_arguments
from marlinq.kernels.variants.warpgroup_fp8 import WarpgroupFp8Config
from tests.emulation.gemm import SOURCES, apart_operand
from tests.emulation.tensor_maps import emulated_tensor_maps
from tests.kernels.problems import BOUND, random_operands, relative_error

ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Channels of 16 in the order in which activations lie (``cuda/codec/int4_e4m3.cuh``)."""


@dataclass(frozen=True)
class Case:
    """One launch of :attr:`m` rows with a [k, n] weight; ``seed`` is that of operands and schedule."""

    m: int
    n: int
    k: int
    config: WarpgroupFp8Config
    dtype: torch.dtype = torch.float16
    bias: bool = True
    seed: int = 0


# Rows past a tile, columns past a tile, and a ring that goes round.
WHOLE = Case(19, 192, 512, WarpgroupFp8Config(16, 2, 1, 1, 8, 1, 2, 1, 132))
CASES = {
    "a tile a block": WHOLE,
    "scales of rows": replace(WHOLE, config=replace(WHOLE.config, chunk_scales=False), bias=False),
    "bfloat16, one word": replace(WHOLE, config=replace(WHOLE.config, words=1), dtype=torch.bfloat16),
    "stream-K": replace(WHOLE, config=replace(WHOLE.config, most_blocks=3, stream_k=True)),
    "stream-K, scales of rows": replace(
        WHOLE, config=replace(WHOLE.config, most_blocks=3, stream_k=True, chunk_scales=False)
    ),
    "store warps": replace(WHOLE, config=replace(WHOLE.config, warpgroups_n=2, stages=3, most_blocks=1)),
    "fewer rows than a tile": replace(WHOLE, m=3),
    "two units with the same operands": replace(
        WHOLE, m=150, k=256, n=64, config=replace(WHOLE.config, tile_m=256, words=1)
    ),
}


def fragments(codes: Tensor) -> Tensor:
    """Codes [M, K] with the channels of every 16 in :data:`ORDER`."""
    return codes.view(len(codes), -1, 16)[..., ORDER].reshape(codes.shape)


def run(builder: Builder, case: Case, planted: Planted | None = None) -> float:
    """The relative error against float64 products of the rounded activations."""
    torch.manual_seed(case.seed)
    config, k = case.config, case.k
    group = 128 if config.chunk_scales else 0
    made = random_operands(k, case.n, 128, case.dtype, bias=case.bias, device="cpu")
    x = (
        torch.randn(case.m, k)
        * torch.exp2(torch.randint(-3, 4, (case.m, k // 128)).float()).repeat_interleave(128, 1)
    ).to(case.dtype)
    codes, scales = quantize_rows(x, group)
    rounded = (codes.double().view(case.m, -1, group or k) * scales.double()[..., None]).view(case.m, k)
    pitch = -(-case.m // 4) * 4
    # As the launcher has them: a row of M scales for each group.
    of_rows = apart(torch.nn.functional.pad(scales.t(), (0, pitch - case.m), value=torch.nan))
    weight = apart_operand(made.operand)
    bytes_of_x = apart(fragments(codes.view(torch.uint8)))
    out = apart(torch.full((case.m, case.n), torch.nan, dtype=case.dtype))
    bias = None if made.bias is None else apart(made.bias)
    with emulated_tensor_maps():
        arguments = fp8_arguments(bytes_of_x, of_rows, weight, bias, out, config)
    problem = weight.problem(case.m)
    memory = [
        Memory("x", bytes_of_x),
        Memory("row scales", of_rows),
        Memory("words", weight.words),
        Memory("scales", weight.scales),
        Memory("out", out, writable=True),
    ]
    if bias is not None:
        memory.append(Memory("bias", bias))
    handover = config.handover(problem)
    flags = apart(torch.zeros(handover.flags if handover else 0, dtype=torch.int32))
    if handover is not None:
        sums = apart(torch.full((handover.floats,), torch.nan))
        arguments.share(sums.data_ptr(), flags.data_ptr())
        memory += [Memory("sums", sums, writable=True), Memory("flags", flags, writable=True, flags=True)]
    text = config.instantiation(problem).text()
    EmulatedKernel(builder.kernel(text, config.function, SOURCES, 90, planted)).launch(
        config.grid(problem),
        config.threads,
        config.shared_bytes(problem),
        arguments,
        memory,
        registers=config.launch_registers,
        seed=case.seed,
        resident=3 if handover else 1,
    )
    if flags.any():
        raise KernelFault("flags are left set")
    return relative_error(out, made.reference(rounded))


@pytest.mark.parametrize("name", CASES)
def test_it_multiplies_rounded_activations(builder: Builder, name: str) -> None:
    case = CASES[name]
    assert run(builder, case) < BOUND[case.dtype]


FAULTS = {
    "channels in another order": (WHOLE, Planted("e4m3_channels", "0x6240u")),
    "scales of other rows": (WHOLE, Planted("rows_of_scales", "0")),
    "no fence": (WHOLE, Planted("fp8_fence")),
    "a step of 16 channels": (WHOLE, Planted("fp8_step", "1")),
    "operands overwritten early": (WHOLE, Planted("fp8_step_done")),
    "a stage that is not given back": (WHOLE, Planted("fp8_stage_released")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_reported(builder: Builder, name: str) -> None:
    case, planted = FAULTS[name]
    try:
        error = run(builder, case, planted)
    except KernelFault:
        return
    assert not error < BOUND[case.dtype]
