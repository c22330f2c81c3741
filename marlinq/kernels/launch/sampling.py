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
from marlinq.kernels.driver.gpu import device_numbers
from marlinq.kernels.driver.module import load_kernel

THREADS = 512
"""Of a block."""
_BINS = 32
_CLUSTER = 8
_ELEMENTS = {torch.float16: "Half", torch.bfloat16: "Bfloat16", torch.float32: "Float32"}


class SampleConfig(NamedTuple):
    """A variant of the kernel.

    Attributes:
        element: the CUDA type of the logits.
        element_bytes: its size.
        ring: tokens of a row that the ring holds.
        draws: tokens are drawn; else the most likely one is taken.
        filters: top-k, top-p or min-p is on.
        penalty: tokens that were there already are penalised.
        aligned: four neighbours of every row can be loaded at once.
        clusters: eight blocks work on a row, instead of one.
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
        """Dynamic shared memory of a block: a histogram of every thread, and what the blocks exchange."""
        warps = THREADS // 32
        exchanged = 4 * (2 * _BINS + 2 * 4 + _BINS + 2 * 2 * warps + 2)
        histogram = 4 * (_BINS * THREADS if self.filters else 1)
        return -(-(exchanged + histogram) // 16) * 16

    def instantiation(self) -> Instantiation:
        """What is compiled."""
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
    """What a sampler reads and writes beside the logits; all are contiguous, and none of them moves.

    Attributes:
        values: float32 [B, 4], read: reciprocal of the temperature, top-p, the largest distance that min-p
            leaves (in nats), repetition penalty.
        numbers: int64 [B, 3], read: seed (as a signed number), stream, top-k (0 for all).
        drawn: int32 [B], read and written: tokens that each row has drawn.
        seen: uint8 [B, V], read and written: 1 for tokens that the row has; [B, 0] without a penalty.
        tokens: int64 [B], written: the last ones.
        ring: int64 [ring, B], written at each row's ``drawn`` modulo ring: the token, or -1 where the row's
            logits are NaN or infinite.
    """

    values: Tensor
    numbers: Tensor
    drawn: Tensor
    seen: Tensor
    tokens: Tensor
    ring: Tensor


class SampleTensors(NamedTuple):
    """What the kernel reads and writes.

    Attributes:
        logits: [B, V], unit stride along rows, read.
        state: the sampler's.
    """

    logits: Tensor
    state: SamplerState

    def arguments(self) -> SampleArguments:
        """As the kernel takes them."""
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
    """The variant for these tensors.

    Raises:
        ValueError: logits that the kernel can't read.
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
    """Compile, if the cache lacks it, the variant for logits [B, vocabulary] in rows that lie together.

    Returns:
        How many variants were compiled.

    Raises:
        EnvironmentProblem: it does not compile, or the cache can't be written.
    """
    if dtype not in _ELEMENTS:
        return 0
    device = device_numbers(device_index)
    # torch's memory begins at a multiple of 512 bytes.
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
