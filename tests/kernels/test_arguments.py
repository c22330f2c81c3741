"""The structures that hold kernel parameters against what the compiled kernels say of theirs."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

import pytest

from marlinq.kernels import Device, compile_kernel, decide, forced_kernel
from marlinq.kernels.contract.arguments import MappedArguments, PlainArguments, WarpgroupArguments
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.whole_rows import MappedRowArguments, PlainRowArguments
from marlinq.kernels.variants import KERNELS
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.kernels.problems import int4_problem

H200 = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)
LAYOUTS: dict[str, type[ctypes.Structure]] = {
    "stream": PlainArguments,
    "bulk": MappedArguments,
    "warpgroup": WarpgroupArguments,
}
_SIZED, _PARAMETER = 4, 0x17  # EIFMT_SVAL, EIATTR_KPARAM_INFO


def section(cubin: bytes, name: str) -> bytes:
    """A section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<II2Q2Q", cubin, table + size * index) for index in range(count)]
    strings = headers[names][4]
    for start, _, _, _, offset, length in headers:
        if cubin[strings + start :].split(b"\0", 1)[0].decode() == name:
            return cubin[offset : offset + length]
    raise AssertionError(f"no section {name}")


def parameter_sizes(cubin: bytes, kernel: str) -> list[int]:
    """Bytes of every parameter, in order."""
    info = section(cubin, f".nv.info.{kernel}")
    sizes = {}
    position = 0
    while position < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, position)
        if form == _SIZED:
            if attribute == _PARAMETER:
                _, ordinal, _, flags = struct.unpack_from("<IHHI", info, position + 4)
                sizes[ordinal] = flags >> 18
            position += length
        position += 4
    return [sizes[ordinal] for ordinal in range(len(sizes))]


@pytest.mark.parametrize("kernel", KERNELS)
def test_parameters_are_those_of_the_compiled_kernel(kernel: str) -> None:
    problem = int4_problem(8, 4096, 4096, 128, zeros=False, bfloat16=False)
    with forced_kernel(kernel):
        config = decide(problem, H200).config
    assert config is not None
    compiled = compile_kernel(config.instantiation(problem), H200.architecture)
    layout = LAYOUTS[kernel]
    expected = [getattr(layout, field[0]).size for field in layout._fields_]
    assert parameter_sizes(compiled.cubin, config.function) == expected


ROW_LAYOUTS: dict[str, type[ctypes.Structure]] = {
    "stream": PlainRowArguments,
    "bulk": MappedRowArguments,
    "warpgroup": MappedRowArguments,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_parameters_of_work_on_rows_are_those_of_the_compiled_kernel(kernel: str) -> None:
    problem = int4_problem(8, 4096, 4096, 128, zeros=False, bfloat16=False)
    with forced_kernel(kernel):
        config = decide(problem, H200).config
    assert config is not None
    variant = config.row_variant(problem, normed=False, adds=True)
    assert variant is not None
    compiled = compile_kernel(variant.instantiation, H200.architecture)
    layout = ROW_LAYOUTS[kernel]
    expected = [getattr(layout, field[0]).size for field in layout._fields_]
    assert parameter_sizes(compiled.cubin, variant.instantiation.function) == expected


# (variant, activation, columns of a sum of squares in front of a norm, and of results behind one)
STREAM = StreamConfig(2, 2, 1, 8, True, 1, 3, 1)
PUSHED = WarpgroupConfig(16, 1, 1, 3, 8, 2, 6, 1, 132)
MEETING = WarpgroupConfig(16, 2, 1, 2, 8, 1, 4, 1, 132)
ALONE = WarpgroupConfig(16, 2, 1, 1, 8, 1, 4, 1, 132)
ROW_WORK: list[tuple[Configuration, str | None, int | None, int | None]] = [
    (STREAM, None, 64, 64),
    (STREAM, "silu", None, 64),
    (replace(STREAM, blocks_m=2), None, None, None),
    (BulkConfig(1, 4, 2, 8, 2, 8, 1), None, 16, None),
    (PUSHED, None, 16, 16),
    (MEETING, None, 64, 64),
    # Whole tiles are stored without meeting; before an activation they meet.
    (ALONE, None, None, None),
    (ALONE, "silu", None, 64),
    (replace(ALONE, stream_k=True), None, None, None),
]


@pytest.mark.parametrize(("config", "activation", "adds", "normed"), ROW_WORK)
def test_which_variants_work_on_rows(
    config: Configuration, activation: str | None, adds: int | None, normed: int | None
) -> None:
    problem = int4_problem(16, 4096, 4096, 128, False, False, activation=activation)
    found = [config.row_variant(problem, normed=not adding, adds=adding) for adding in (True, False)]
    assert [one and one.squared_columns for one in found] == [adds, normed]
