"""Launching an emulated kernel with the host's own configuration and arguments."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from marlinq.kernels.contract.arguments import TENSOR_MAP_BYTES
from marlinq.kernels.driver import tensor_maps

_MAX_FRAMES = 16
_GAP = 1 << 16  # bytes between operands, so that running over one never reaches another
POISON = 0xFF  # every byte of it makes NaN


class KernelFault(Exception):
    """What the emulation found wrong with a kernel, the thread and the source line first."""


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
    """What the machine reads in a tensor map's 128 bytes; mirrored in machine/copies.cpp."""

    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("element_bytes", ctypes.c_int64),
        ("swizzled", ctypes.c_int64),
        ("extents", ctypes.c_int64 * 3),
        ("strides", ctypes.c_int64 * 3),
        ("box", ctypes.c_int64 * 3),
    )


def _encode_tensor_map(
    address: int,
    element_bytes: int,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzled: bool,
) -> bytes:
    """Stands for :func:`marlinq.kernels.driver.cuda_driver.encode_tensor_map`, whose map only a GPU reads."""
    # What cuTensorMapEncodeTiled refuses, as far as it concerns these maps.
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
        name: for messages.
        tensor: on the CPU.
        writable: an output; else read-only.
        after_previous: belongs to the stream's previous kernel until that has ended.
        holds_values: may be read before it is written, though it is an output.
        flags: words by which blocks wait for each other, for instructions with an order and a scope.
        messages: words that say themselves whether they have been written (``persistent/message.cuh``).
        untracked: holds something already, of which the kernel replaces parts; reads are not checked.
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
    """A copy of ``tensor`` with the same strides, 256-byte aligned; NaN between its rows and around it."""
    size = _extent(tensor) * tensor.element_size()
    memory = torch.full((size + 2 * _GAP,), POISON, dtype=torch.uint8)
    start = _GAP + -(memory.data_ptr() + _GAP) % 256
    inside = memory[start : start + size].view(tensor.dtype)
    copy = inside.as_strided(tensor.shape, tensor.stride(), inside.storage_offset())
    return copy.copy_(tensor)


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass(frozen=True)
class EmulatedKernel:
    """A compiled variant, ready to be launched."""

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
        """Run a grid; as :func:`marlinq.kernels.driver.cuda_driver.Launches`, with what the kernel may touch.

        Args:
            grid: blocks.
            threads: threads of a block.
            shared_bytes: dynamic shared memory of a block.
            arguments: the kernel's parameters, one field each.
            memory: everything that the kernel may touch.
            registers: of a thread at launch.
            dependent: whether a previous kernel still runs when this one starts.
            seed: of the schedule.
            shared_limit: static and dynamic shared memory a block may have.
            resident: clusters that may run at once; more than one only where a cluster is one block.

        Raises:
            KernelFault: the kernel did something wrong.
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
    """What instructions may touch it; mirrored in machine/memory.cpp."""
    return 2 if operand.messages else 3 if operand.untracked else int(operand.flags)


def _source_line(library: str, frames: list[int]) -> str:
    """Where in the kernel's sources a failure arose; nothing where that can't be found out."""
    tool = shutil.which("addr2line")
    # A frame is a return address, one behind its call.
    offsets = [hex(frame - 1) for frame in frames if frame]
    if tool is None or not offsets:
        return ""
    command = [tool, "-i", "-e", library, *offsets]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    places = [Path(line.split(" ")[0]).name for line in lines]
    return next((f"{place}: " for place in places if ".cu:" in place or ".cuh:" in place), "")


@contextmanager
def emulated_tensor_maps() -> Iterator[None]:
    """Let the host make tensor maps for the emulation, and keep none of them."""
    caches = tensor_maps.activation_maps, tensor_maps.sorted_rows_map, tensor_maps.weight_maps
    for cache in caches:
        cache.cache_clear()
    try:
        with mock.patch("marlinq.kernels.driver.tensor_maps.encode_tensor_map", _encode_tensor_map):
            yield
    finally:
        for cache in caches:
            cache.cache_clear()
