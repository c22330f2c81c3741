"""The few calls of the CUDA driver that launching needs, through ctypes.

A launch must cost microseconds of host time, and neither CuPy nor torch offers dependent launches and
tensor maps.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.version import CUDA_PACKAGES
from marlinq.kernels.contract.arguments import TENSOR_MAP_BYTES
from marlinq.kernels.contract.device import GpuProperties

# Enumerators of cuda.h.
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
# CUDA_ERROR_INVALID_IMAGE, _NO_BINARY_FOR_GPU, _INVALID_SOURCE, _FILE_NOT_FOUND, _NOT_FOUND (of a kernel)
_REFUSALS = (200, 209, 300, 301, 500)
_INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE
_MAP_TYPES = {1: 0, 2: 1, 4: 2}  # CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT16 and _UINT32, by size
_SWIZZLE_128B = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTE_128B, _PROMOTE_256B = 2, 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_*
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
_MOVE_REFERENCE = 1  # CU_GRAPH_USER_OBJECT_MOVE
# CU_DEVICE_ATTRIBUTE_CLOCK_RATE, _MEMORY_CLOCK_RATE, _GLOBAL_MEMORY_BUS_WIDTH and _L2_CACHE_SIZE.
_ATTRIBUTES = (13, 36, 37, 38)
_SEMAPHORE_BYTES = 64  # no less than a sem_t
_TENSOR_MAP_ALIGNMENT = 64
_Structure = TypeVar("_Structure", bound=ctypes.Structure)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes, of which up to three ints are used."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int * 3),
        ("rest", ctypes.c_int * 13),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("threads_y", ctypes.c_uint),
        ("threads_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class _Thread(threading.local):
    """State of a host thread: whether it is known to have a CUDA context."""

    def __init__(self) -> None:
        self.has_context = False


_thread = _Thread()
_HERE = nullcontext()

_OVERLAPPING = _Attribute(_PROGRAMMATIC, 0, (1, 0, 0))
_AT_ONCE = _Attribute(_COOPERATIVE, 0, (1, 0, 0))

_Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
_allocator: _Allocator | None = None


def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory on the current device, by shape, strides in elements and type."""
    return (_allocator or _find_allocator())(shape, strides, dtype)


def _find_allocator() -> _Allocator:
    """The private function that torch's compiled code allocates with; the public one if it is gone.

    The public ``torch.empty_strided`` takes several times as long, at every product of a decode step.
    """
    global _allocator  # noqa: PLW0603
    try:
        allocator = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    except AttributeError:
        warnings.warn(
            f"torch {torch.__version__} has no _empty_strided_cuda; torch.empty_strided is used instead, and "
            "every product costs the host some microseconds more",
            stacklevel=3,
        )
        allocator = _public_empty_strided
    _allocator = allocator
    return _allocator


def _public_empty_strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EnvironmentProblem(
            f"the CUDA driver can't be loaded ({error}); install the NVIDIA driver"
        ) from None


class RefusedCubin(Exception):
    """The driver rejects a file as a cubin for this GPU."""


@dataclass(frozen=True)
class Function:
    """A kernel loaded in a device's context; ``owner`` keeps its module alive."""

    owner: Any
    handle: ctypes.c_void_p
    device_index: int
    context: int | None


def load_function(cubin: Path, name: str, device_index: int, shared_bytes: int = 0) -> Function:
    """Load ``cubin`` on a device and allow its kernel ``name`` ``shared_bytes`` of dynamic shared memory.

    Raises:
        EnvironmentProblem: CuPy is missing.
        RefusedCubin: the file is missing, or is no cubin for this GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise EnvironmentProblem(f"CuPy is not installed ({error}); {CUDA_PACKAGES}") from None
    with torch.cuda.device(device_index), cupy.cuda.Device(device_index):
        try:
            function = cupy.RawModule(path=str(cubin)).get_function(name)
        except cupy.cuda.driver.CUDADriverError as error:
            if error.status not in _REFUSALS:
                raise
            raise RefusedCubin(f"the driver refuses {cubin.name} ({error})") from None
        # CuPy returns the same kernel object for the same file, so the limit must never shrink.
        if shared_bytes > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
        handle = ctypes.c_void_p(int(function.kernel.ptr))
        return Function(function, handle, device_index, _current_context())


def _current_context() -> int | None:
    context = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    return context.value


def on_device(index: int) -> AbstractContextManager[object]:
    """Make a device the current one of the calling thread."""
    return _HERE if torch.cuda.current_device() == index else torch.cuda.device(index)


def _enter_context(function: Function) -> None:
    # A new thread has no context until it makes a CUDA call; torch's device index and cached memory need
    # none.
    if _current_context() is None:
        _driver().cuCtxSetCurrent(ctypes.c_void_p(function.context))
    _thread.has_context = True


class Launch:
    """A launch's C structures, filled once, which may be started any number of times.

    Only one thread may use a launch at a time (:class:`Launches`).

    Args:
        function: the kernel.
        config: CUlaunchConfig; the stream is filled in at every start.
        arguments: the kernel's parameters.

    Attributes:
        arguments: the kernel's parameters; may be changed before every start.
        x: address of the activations that ``arguments`` were filled for, kept by the caller; 0 at first.
    """

    __slots__ = ("_config", "_given", "_index", "_launch", "arguments", "x")

    def __init__(self, function: Function, config: _Config, arguments: ctypes.Structure) -> None:
        layout = type(arguments)
        start = ctypes.addressof(arguments)
        # One pointer a parameter: the driver aligns tensor maps in constant memory as C structures would not.
        places = [start + getattr(layout, field[0]).offset for field in layout._fields_]
        pointers = (ctypes.c_void_p * len(places))(*places)
        self.arguments = arguments
        self.x = 0
        self._config = config
        self._index = function.device_index
        self._launch = _driver().cuLaunchKernelEx
        # Converted once: ctypes takes longer to convert arguments than the driver to launch.
        self._given = ctypes.byref(config), function.handle, ctypes.byref(pointers), None

    def start(self) -> None:
        """Launch on torch's current stream of the kernel's device, inside :func:`on_device`.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        config = self._config
        # torch.cuda.current_stream makes an object, which takes as long as all other lines together.
        config.stream = torch._C._cuda_getCurrentRawStream(self._index)
        status = self._launch(*self._given)
        if status != 0:
            raise RuntimeError(
                f"cuLaunchKernelEx failed with CUDA error {status}: {config.grid} blocks of "
                f"{config.threads} threads, {config.shared_bytes} bytes of shared memory"
            )


class Launches:
    """A pool of equal launches, as many as were in use at the same time.

    Callers take a launch and give it back, without a lock: a launch blocks while the GPU's queue is full, and
    must not block other streams; a signal handler or garbage collection may launch between any two lines.

    Args:
        function: the kernel.
        grid: blocks.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        arguments: the kernel's parameters, one field each; copied.
        dependent: let the kernel start before the stream's previous one has ended; it waits for that one
            itself (``griddepcontrol.wait``).
        cooperative: launch cooperatively: all blocks run at once, and the driver refuses a grid that does not
            fit. Not together with ``dependent``.
    """

    __slots__ = ("_arguments", "_config", "_idle", "function", "give")

    def __init__(
        self,
        function: Function,
        grid: int,
        threads: int,
        shared_bytes: int,
        arguments: ctypes.Structure,
        *,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> None:
        self.function = function
        attribute = _AT_ONCE if cooperative else _OVERLAPPING
        self._config = _Config(
            grid,
            1,
            1,
            threads,
            1,
            1,
            shared_bytes,
            None,
            ctypes.pointer(attribute),
            dependent or cooperative,
        )
        self._arguments = arguments
        self._idle: list[Launch] = []
        self.give: Callable[[Launch], None] = self._idle.append

    def take(self) -> Launch:
        """A launch that only the caller uses until it gives it back; its thread has a CUDA context."""
        if not _thread.has_context:
            _enter_context(self.function)
        try:
            return self._idle.pop()
        except IndexError:
            return Launch(self.function, _copy(self._config), _copy(self._arguments))


def _copy(structure: _Structure) -> _Structure:
    return type(structure).from_buffer_copy(structure)


class Capture(NamedTuple):
    """A graph capture in progress: its number, unique in this process, and the handle of its graph."""

    number: int
    graph: int


def capture_of(stream: int) -> Capture | None:
    """The capture that ``stream`` is part of; None where it isn't capturing.

    Raises:
        RuntimeError: the capture is invalid, or not to be mixed with this stream.
    """
    active, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    status = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream),
        ctypes.byref(active),
        ctypes.byref(number),
        ctypes.byref(graph),
        None,
        None,
    )
    if status != 0:
        raise RuntimeError(f"cuStreamGetCaptureInfo failed with CUDA error {status}")
    return Capture(number.value, graph.value or 0) if active.value == _CAPTURE_ACTIVE else None


def stream_id(stream: int) -> int:
    """Number of a stream, never used again in this process, unlike the handle.

    The default stream of a thread (``CU_STREAM_PER_THREAD``) has a different number in every thread.

    Raises:
        RuntimeError: the driver does not know the stream.
    """
    number = ctypes.c_uint64()
    status = _driver().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number))
    if status != 0:
        raise RuntimeError(f"cuStreamGetId failed with CUDA error {status}")
    return number.value


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    return libc


class EndOfGraph:
    """Tells when a CUDA graph, its copies and its executables have all been destroyed.

    They share references to a CUDA user object. After the last one is destroyed and its last launch has
    ended, the driver calls the object's destructor on a thread of its own, where neither Python nor CUDA may
    be called. So the destructor is the C library's ``sem_post``. Its semaphore is never freed, since the
    driver may call it after the interpreter's end.
    """

    __slots__ = ("_semaphore",)

    def __init__(self) -> None:
        self._semaphore = ctypes.c_void_p(_libc().calloc(1, _SEMAPHORE_BYTES))
        _libc().sem_init(self._semaphore, 0, 0)

    def watch(self, graph: int) -> None:
        """Begin to watch ``graph``, which may still be capturing.

        Raises:
            RuntimeError: the driver refused; :meth:`has_come` may then answer True too early.
        """
        driver, owned = _driver(), ctypes.c_void_p()
        destructor = ctypes.cast(_libc().sem_post, ctypes.c_void_p)
        status = driver.cuUserObjectCreate(
            ctypes.byref(owned), self._semaphore, destructor, 1, _NO_DESTRUCTOR_SYNC
        )
        if status == 0:
            status = driver.cuGraphRetainUserObject(ctypes.c_void_p(graph), owned, 1, _MOVE_REFERENCE)
            if status != 0:
                driver.cuUserObjectRelease(owned, 1)
        if status != 0:
            raise RuntimeError(f"CUDA error {status} at giving a graph memory of its own")

    def has_come(self) -> bool:
        """Whether the graph has been destroyed; True once for every :meth:`watch`."""
        return bool(_libc().sem_trywait(self._semaphore) == 0)


def zeroed_memory(size: int) -> int:
    """Address of ``size`` bytes of zeros on the current device, never freed; call inside :func:`on_device`.

    The current stream may be capturing a graph; the allocation does not become part of it.

    Raises:
        RuntimeError: the device has no such memory left.
    """
    driver = _driver()
    mode, address, stream = ctypes.c_int(_RELAXED), ctypes.c_uint64(), ctypes.c_void_p()
    # A capture in global mode, of any thread, forbids allocations unless this thread's mode is relaxed.
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        if status == 0:
            # A new stream waits for no other and belongs to no capture.
            status = driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING)
        if status == 0:
            driver.cuMemsetD8Async(address, ctypes.c_ubyte(0), ctypes.c_size_t(size), stream)
            status = driver.cuStreamSynchronize(stream)
            driver.cuStreamDestroy_v2(stream)
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status != 0:
        raise RuntimeError(f"CUDA error {status} at allocating {size} bytes")
    return address.value


def gpu_properties(index: int) -> GpuProperties:
    """Properties of a CUDA device from torch and the driver."""
    properties = torch.cuda.get_device_properties(index)
    device = ctypes.c_int()
    # torch and the driver number the visible devices alike.
    known = _driver().cuInit(0) == 0 and _driver().cuDeviceGet(ctypes.byref(device), index) == 0
    clock, memory_clock, bus, cache = (_attribute(device, one) if known else 0 for one in _ATTRIBUTES)
    return GpuProperties(
        name=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        clock_khz=clock,
        memory_clock_khz=memory_clock,
        memory_bus_bits=bus,
        cache_bytes=cache,
    )


def _attribute(device: ctypes.c_int, attribute: int) -> int:
    """A device attribute; 0 if the driver refuses."""
    number = ctypes.c_int()
    return number.value if _driver().cuDeviceGetAttribute(ctypes.byref(number), attribute, device) == 0 else 0


def active_clusters(function: Function, cluster: int, threads: int, shared_bytes: int) -> int:
    """Clusters of ``cluster`` blocks that the device runs at once; 0 where it has no clusters of that size.

    The kernel must not be compiled for a fixed cluster size.

    Raises:
        RuntimeError: the driver refused the question.
    """
    attribute = _Attribute(_CLUSTER, 0, (cluster, 1, 1))
    config = _Config(cluster, 1, 1, threads, 1, 1, shared_bytes, None, ctypes.pointer(attribute), 1)
    count = ctypes.c_int()
    with on_device(function.device_index):
        status = _driver().cuOccupancyMaxActiveClusters(
            ctypes.byref(count), function.handle, ctypes.byref(config)
        )
    if status == _INVALID_CLUSTER_SIZE:
        return 0
    if status != 0:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters failed with CUDA error {status}")
    return count.value


def encode_tensor_map(
    address: int,
    element_bytes: int,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzled: bool,
) -> bytes:
    """A CUtensorMap, with which TMA copies boxes of a tensor; elements outside the tensor arrive as zeros.

    Args:
        address: address of the first element, a multiple of 16.
        element_bytes: 1, 2 or 4.
        extents: elements per dimension, the contiguous dimension first.
        strides: bytes between neighbours in every dimension but the first, multiples of 16.
        box: elements per dimension that one copy brings, at most 256 each.
        swizzled: whether rows of 128 bytes are stored with the 128-byte swizzle.

    Raises:
        RuntimeError: the driver refused the map.
    """
    rank = len(extents)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
    start = -(-ctypes.addressof(memory) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        _MAP_TYPES[element_bytes],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*extents),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLE_128B if swizzled else 0,
        _PROMOTE_128B if swizzled else _PROMOTE_256B,
        0,
    )
    if status != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {status} for {list(extents)}")
    return ctypes.string_at(start, TENSOR_MAP_BYTES)
