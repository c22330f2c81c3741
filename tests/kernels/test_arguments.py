"""The structures that hold kernel parameters against what the compiled kernels say of theirs."""

from __future__ import annotations

import ctypes
import struct

import pytest

from marlinq.kernels import Device, Problem, compile_kernel, decide, forced_kernel
from marlinq.kernels.decide.decision import KERNELS, Kernel
from marlinq.kernels.launch.operands import MappedArguments, PlainArguments, WarpgroupArguments

H200 = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)
LAYOUTS: dict[Kernel, type[ctypes.Structure]] = {
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
def test_parameters_are_those_of_the_compiled_kernel(kernel: Kernel) -> None:
    problem = Problem(8, 4096, 4096, 128, zeros=False, bfloat16=False)
    with forced_kernel(kernel):
        config = decide(problem, H200).config
    assert config is not None
    compiled = compile_kernel(config.instantiation(problem), H200.architecture)
    layout = LAYOUTS[kernel]
    expected = [getattr(layout, field[0]).size for field in layout._fields_]
    assert parameter_sizes(compiled.cubin, config.function) == expected
