"""Choosing the next tokens on a GPU (``cuda/step/sample.cuh``)."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel

THREADS = 512
"""Threads of a block."""
_BINS = 32
_CLUSTER = 8
_ELEMENTS = {torch.float16: "Half", torch.bfloat16: "Bfloat16", torch.float32: "Float32"}


class SampleConfig(NamedTuple):
    """Compile-time parameters of the sampling kernel.

    Attributes:
        element: CUDA type of the logits.
        element_bytes: bytes of a logit.
        ring: tokens per row that the ring of results holds.
        draws: whether tokens are drawn at random; else the most likely one is taken.
        filters: whether top-k, top-p or min-p is on.
        penalty: whether tokens already in a row are penalised.
        aligned: whether four neighbouring logits of every row can be loaded at once.
        clusters: whether eight blocks work on a row, instead of one.
    """

    element: str
    element_bytes: int
    ring: int
    draws: bool
    filters: bool
    penalty: bool
    aligned: bool
    clusters: bool

    @property
    def cluster(self) -> int:
        """Blocks that work on a row."""
        return _CLUSTER if self.clusters else 1

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block: histograms of its threads, and values blocks
        exchange."""
        warps = THREADS // 32
        exchanged = 4 * (2 * _BINS + 2 * 4 + _BINS + 2 * 2 * warps + 2)
        histogram = 4 * (_BINS * THREADS if self.filters else 1)
        return -(-(exchanged + histogram) // 16) * 16

    def instantiation(self) -> Instantiation:
        """The kernel with this configuration."""
        parameters = (
            ("Element", self.element),
            ("ELEMENT_BYTES", self.element_bytes),
            ("CLUSTER", self.cluster),
            ("THREADS", THREADS),
            ("RING", self.ring),
            ("DRAWS", self.draws),
            ("FILTERS", self.filters),
            ("PENALTY", self.penalty),
            ("ALIGNED", self.aligned),
            ("SHARED_BYTES", self.shared_bytes),
        )
        return Instantiation("step/sample.cuh", "sample", parameters)


class SampleArguments(ctypes.Structure):
    """The parameters of the kernel."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        ("vocabulary", ctypes.c_int),
        ("values", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("drawn", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("ring", ctypes.c_void_p),
        ("batch", ctypes.c_int),
    )


class SamplerState(NamedTuple):
    """State of a sampler for B rows; all tensors are contiguous and keep their addresses.

    Attributes:
        values: float32 [B, 4], read: reciprocal of the temperature, top-p, largest distance from the highest
            logit in nats (min-p), repetition penalty.
        numbers: int64 [B, 3], read: seed (as a signed number), stream, top-k (0 for all).
        drawn: int32 [B], read and written: tokens that each row has drawn.
        seen: uint8 [B, V], read and written: 1 for tokens that occur in the row; [B, 0] without a penalty.
        tokens: int64 [B], written: each row's new token.
        ring: int64 [ring, B], written at index ``drawn % ring`` of each row: the new token, or -1 where the
            row's logits are NaN or infinite.
    """

    values: Tensor
    numbers: Tensor
    drawn: Tensor
    seen: Tensor
    tokens: Tensor
    ring: Tensor


class SampleTensors(NamedTuple):
    """Logits and state of one sampling launch.

    Attributes:
        logits: [B, V], adjacent logits of a row one element apart; read.
        state: state of the sampler.
    """

    logits: Tensor
    state: SamplerState

    def arguments(self) -> SampleArguments:
        """Parameters of the kernel."""
        logits, (values, numbers, drawn, seen, tokens, ring) = self
        return SampleArguments(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            *(each.data_ptr() for each in (values, numbers, drawn, seen, tokens, ring)),
            logits.shape[0],
        )


def sample_config(
    tensors: SampleTensors, *, draws: bool, filters: bool, penalty: bool, clusters: bool
) -> SampleConfig:
    """The configuration for these tensors.

    Raises:
        ValueError: logits have another dtype or stride than the kernel reads.
    """
    logits, ring = tensors.logits, tensors.state.ring.shape[0]
    if logits.dtype not in _ELEMENTS or logits.stride(1) != 1:
        raise ValueError(
            f"logits: expected float16, bfloat16 or float32 with unit stride, found {logits.dtype}, strides "
            f"{logits.stride()}"
        )
    size = logits.element_size()
    places = (logits.data_ptr() // size, logits.shape[1], logits.stride(0) if logits.shape[0] > 1 else 0)
    aligned = not any(place % 4 for place in places)
    return SampleConfig(_ELEMENTS[logits.dtype], size, ring, draws, filters, penalty, aligned, clusters)


def precompile_sampling(
    dtype: torch.dtype,
    vocabulary: int,
    ring: int,
    device_index: int,
    *,
    draws: bool,
    filters: bool,
    penalty: bool,
) -> int:
    """Compile, unless it is in the cache, the kernel for contiguous logits [B, vocabulary].

    Returns:
        Number of kernels compiled: 0 or 1.

    Raises:
        EnvironmentProblem: the kernel does not compile, or the cache can't be written.
    """
    if dtype not in _ELEMENTS:
        return 0
    device = device_numbers(device_index)
    # torch allocates at multiples of 512 bytes, so rows are aligned if their length is.
    aligned = vocabulary % 4 == 0
    config = SampleConfig(
        _ELEMENTS[dtype], dtype.itemsize, ring, draws, filters, penalty, aligned, device.has_clusters
    )
    return compile_missing(device.architecture, [config.instantiation()])


@lru_cache(maxsize=64)
def _function(config: SampleConfig, device_index: int) -> Function:
    architecture = device_numbers(device_index).architecture
    return load_kernel(config.instantiation(), architecture, device_index, config.shared_bytes)


def sample_tokens(tensors: SampleTensors, *, draws: bool, filters: bool, penalty: bool) -> None:
    """Choose a token for each row on the current stream; see :mod:`marlinq.runtime.sampling`.

    It may be captured into a graph. On GPUs from compute capability 9.0 on the kernel is launched dependently
    and waits for its predecessor itself.

    Raises:
        ValueError: logits that the kernel can't read.
        EnvironmentProblem: the kernel can't be compiled or loaded.
        RuntimeError: the driver refused the launch.
    """
    index = tensors.logits.get_device()
    clusters = device_numbers(index).has_clusters
    config = sample_config(tensors, draws=draws, filters=filters, penalty=penalty, clusters=clusters)
    launches = Launches(
        _function(config, index),
        tensors.logits.shape[0] * config.cluster,
        THREADS,
        config.shared_bytes,
        tensors.arguments(),
        dependent=clusters,
    )
    with on_device(index):
        launches.take().start()
