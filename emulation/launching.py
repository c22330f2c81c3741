"""Launches an emulated kernel with the arguments that a GPU would be given."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TENSOR_MAP_BYTES = 128
"""Bytes of a ``CUtensorMap``."""
_MAX_FRAMES = 16
_GAP = 1 << 16  # bytes between operands, so that running over one never reaches another
POISON = 0xFF
"""Value of every byte of guard memory: NaN in every float type."""


class KernelFault(Exception):
    """The emulation's report of a fault: source line, thread, and what is wrong."""


class _Range(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("after_previous", ctypes.c_uint32),
        ("holds_values", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("dynamic_bytes", ctypes.c_uint32),
        ("shared_limit", ctypes.c_uint32),
        ("registers", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("ranges", ctypes.POINTER(_Range)),
        ("range_count", ctypes.c_uint32),
        ("message_bytes", ctypes.c_uint32),
        ("message", ctypes.c_char_p),
        ("frames", ctypes.POINTER(ctypes.c_uint64)),
        ("cluster", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
    )


class _EmulatedTensorMap(ctypes.Structure):
    """Fields that the machine reads in a tensor map's 128 bytes; mirrored in machine/copies.cpp."""

    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("element_bytes", ctypes.c_int64),
        ("swizzled", ctypes.c_int64),
        ("extents", ctypes.c_int64 * 3),
        ("strides", ctypes.c_int64 * 3),
        ("box", ctypes.c_int64 * 3),
    )


def encode_tensor_map(
    address: int,
    element_bytes: int,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzled: bool,
) -> bytes:
    """A tensor map that the emulation understands, in the place of ``cuTensorMapEncodeTiled``'s.

    Args:
        address: address of the first element.
        element_bytes: bytes of an element.
        extents: elements along each of one to three dimensions, the fastest first.
        strides: bytes from one element to the next along every dimension but the first.
        box: elements that a copy brings, along each dimension.
        swizzled: True for the swizzle of 128 bytes.

    Raises:
        ValueError: CUDA would refuse such a map.
    """
    # Conditions of cuTensorMapEncodeTiled.
    aligned = not address % 16 and not any(stride % 16 for stride in strides)
    if not aligned or not all(0 < size <= 256 for size in box) or box[0] * element_bytes % 16:
        raise ValueError(f"no tensor map of {list(extents)}, strides {list(strides)}, boxes {list(box)}")
    missing = 3 - len(extents)
    made = _EmulatedTensorMap(
        address,
        element_bytes,
        swizzled,
        (*extents, *[1] * missing),
        (element_bytes, *strides, *[0] * missing),
        (*box, *[1] * missing),
    )
    return bytes(made).ljust(TENSOR_MAP_BYTES, b"\0")


@dataclass(frozen=True)
class Memory:
    """A tensor that a kernel may touch, from its first element to its last.

    Attributes:
        name: name in reports.
        tensor: tensor on the CPU.
        writable: True for an output, False for an input, which the kernel may only read.
        after_previous: True if the previous kernel of the stream may still use it, until this one has waited.
        holds_values: True for an output that may be read before it is written.
        flags: True for words by which blocks wait for each other; only acquire, release and relaxed
            instructions with a scope may touch them.
        messages: True for words that tell by themselves whether they have been written, so that a read
            needs no order.
        untracked: True for memory that holds values of which the kernel replaces some; reads are not checked.
    """

    name: str
    tensor: Tensor
    writable: bool = False
    after_previous: bool = False
    holds_values: bool = False
    flags: bool = False
    messages: bool = False
    untracked: bool = False


def apart(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` with equal strides, 256-byte aligned; NaN between its rows and around it."""
    size = _extent(tensor) * tensor.element_size()
    memory = torch.full((size + 2 * _GAP,), POISON, dtype=torch.uint8)
    start = _GAP + -(memory.data_ptr() + _GAP) % 256
    inside = memory[start : start + size].view(tensor.dtype)
    copy = inside.as_strided(tensor.shape, tensor.stride(), inside.storage_offset())
    return copy.copy_(tensor)


def _extent(tensor: Tensor) -> int:
    """Number of elements from the first to the last, gaps included."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True)
class EmulatedKernel:
    """A compiled kernel, ready to be launched.

    Attributes:
        library: the library that :meth:`emulation.build.Builder.kernel` returned.
    """

    library: ctypes.CDLL

    def launch(
        self,
        grid: int,
        threads: int,
        shared_bytes: int,
        arguments: ctypes.Structure,
        memory: Sequence[Memory],
        *,
        registers: int = 255,
        dependent: bool = False,
        seed: int = 0,
        shared_limit: int = 232_448,
        resident: int = 1,
    ) -> None:
        """Run a grid to its end.

        Args:
            grid: blocks.
            threads: threads of a block.
            shared_bytes: bytes of dynamic shared memory of a block.
            arguments: the kernel's parameters, a field for each.
            memory: all memory that the kernel may touch.
            registers: registers of a thread at launch.
            dependent: True if the stream's previous kernel still runs when this one starts.
            seed: seed of the schedule.
            shared_limit: bytes of static and dynamic shared memory that a block may have.
            resident: clusters that run at once; more than one only if a cluster is one block.

        Raises:
            KernelFault: the kernel did something that a GPU would not forgive, or not always.
        """
        limit = ctypes.c_uint.in_dll(self.library, "emulation_threads").value
        if threads > limit:
            raise KernelFault(f"{threads} threads a block, the kernel's launch bounds allow {limit}")
        fields = [getattr(type(arguments), field[0]) for field in type(arguments)._fields_]
        self._check_parameters([field.size for field in fields])
        base = ctypes.addressof(arguments)
        pointers = (ctypes.c_void_p * len(fields))(*[base + field.offset for field in fields])
        ranges = (_Range * len(memory))(*[_range(operand) for operand in memory])
        message = ctypes.create_string_buffer(4096)
        frames = (ctypes.c_uint64 * _MAX_FRAMES)()
        launch = _Launch(
            grid,
            threads,
            shared_bytes,
            shared_limit,
            registers,
            dependent,
            seed,
            ranges,
            len(memory),
            len(message),
            ctypes.cast(message, ctypes.c_char_p),
            frames,
            ctypes.c_uint.in_dll(self.library, "emulation_cluster").value,
            resident,
        )
        run = self.library.emulation_launch
        run.restype = ctypes.c_bool
        if not run(ctypes.byref(launch), pointers):
            place = _source_line(self.library._name, list(frames))
            raise KernelFault(place + message.value.decode())

    def _check_parameters(self, given: list[int]) -> None:
        self.library.emulation_parameters.restype = ctypes.POINTER(ctypes.c_size_t)
        sizes = self.library.emulation_parameters()
        expected = list(itertools.takewhile(bool, (sizes[index] for index in itertools.count())))
        if len(given) != len(expected):
            raise KernelFault(f"{len(given)} parameters given to a kernel of {len(expected)}")
        for index, pair in enumerate(zip(given, expected, strict=True)):
            if pair[0] != pair[1]:
                raise KernelFault(
                    f"parameter {index} has {pair[0]} bytes in the host, {pair[1]} in the kernel"
                )


def _range(operand: Memory) -> _Range:
    return _Range(
        operand.name.encode(),
        operand.tensor.data_ptr(),
        _extent(operand.tensor) * operand.tensor.element_size(),
        operand.writable,
        operand.after_previous,
        operand.holds_values,
        _kind(operand),
    )


def _kind(operand: Memory) -> int:
    """Number of the kind of memory; mirrored in machine/memory.cpp."""
    return 2 if operand.messages else 3 if operand.untracked else int(operand.flags)


def _source_line(library: str, frames: list[int]) -> str:
    """File and line of the kernel's sources at which a fault arose; empty if unknown."""
    tool = shutil.which("addr2line")
    # A frame is a return address, one behind its call.
    offsets = [hex(frame - 1) for frame in frames if frame]
    if tool is None or not offsets:
        return ""
    command = [tool, "-i", "-e", library, *offsets]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    places = [Path(line.split(" ")[0]).name for line in lines]
    return next((f"{place}: " for place in places if ".cu:" in place or ".cuh:" in place), "")
