"""Products of 4-bit weights with FP8 activations, on the emulation, with planted faults."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from marlinq.kernels.launch.eight_bit_product import quantize_rows, sums_width
from marlinq.kernels.launch.w4a8_product import fp8_arguments
from marlinq.kernels.variants.warpgroup_fp8 import WarpgroupFp8Config
from tests.emulation.gemm import SOURCES, apart_operand
from tests.emulation.tensor_maps import emulated_tensor_maps
from tests.kernels.problems import BOUND, random_operands, relative_error

ORDER = [half + channel for half in (0, 8) for k in (0, 2, 4, 6) for channel in (k, k + 1, k + 16, k + 17)]
"""Channels of 32 in the order in which activations lie (``cuda/codec/int4_e4m3.cuh``)."""


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
WHOLE = Case(19, 192, 512, WarpgroupFp8Config(16, 1, 1, 1, 8, 1, 2, 1, 132))
CASES = {
    "a tile a block": WHOLE,
    "scales of rows": replace(WHOLE, config=replace(WHOLE.config, chunk_scales=False), bias=False),
    "bfloat16": replace(WHOLE, dtype=torch.bfloat16),
    # Six tiles on four blocks: one has the first chunk of a tile alone, the activations' sums.
    "stream-K": replace(WHOLE, config=replace(WHOLE.config, most_blocks=4, stream_k=True)),
    "stream-K, scales of rows": replace(
        WHOLE, config=replace(WHOLE.config, most_blocks=4, stream_k=True, chunk_scales=False)
    ),
    "two chunks of sums": replace(WHOLE, m=3, n=64, k=4096 + 256),
    "several tiles a block": replace(
        WHOLE, config=replace(WHOLE.config, warpgroups_n=2, stages=3, most_blocks=1)
    ),
    "fewer rows than a tile": replace(WHOLE, m=3),
    "four units with the same operands": replace(
        WHOLE, m=150, k=256, n=64, config=replace(WHOLE.config, tile_m=256)
    ),
}


def fragments(codes: Tensor) -> Tensor:
    """Codes [M, K] with the channels of every 32 in :data:`ORDER`."""
    return codes.view(len(codes), -1, 32)[..., ORDER].reshape(codes.shape)


def pairs_of_sums(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of every 128 codes [M, K] as the kernel takes them: times the group's scale, as pairs of ``dtype``
    that add up to them.

    ``scales``: float32 [M, K / 128], or [M, 1] of rows, which the kernel multiplies by later.
    """
    sums = (
        codes.float().view(len(codes), -1, 128).sum(-1) * (scales if scales.shape[1] > 1 else 1) * -(2.0**-6)
    )
    first = sums.to(dtype)
    pairs = torch.stack([first, (sums - first.float()).to(dtype)], -1).flatten(1)
    return torch.nn.functional.pad(pairs, (0, sums_width(codes.shape[1]) - pairs.shape[1]))


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
    sums = apart(pairs_of_sums(codes, scales, case.dtype))
    out = apart(torch.full((case.m, case.n), torch.nan, dtype=case.dtype))
    bias = None if made.bias is None else apart(made.bias)
    with emulated_tensor_maps():
        arguments = fp8_arguments((bytes_of_x, of_rows, sums), weight, bias, out, config)
    problem = weight.problem(case.m)
    memory = [
        Memory("x", bytes_of_x),
        Memory("row scales", of_rows),
        Memory("sums of x", sums),
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
    "sums times scales of another column": (WHOLE, Planted("sums_scales", "0x3232u")),
    "sums of other groups": (CASES["two chunks of sums"], Planted("sums_of_chunk", "0")),
    "sums without their rows' scales": (CASES["stream-K, scales of rows"], Planted("sums_alone", "false")),
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
