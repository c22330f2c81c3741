"""Reorder the words of GPTQ, AWQ and compressed-tensors into Marlin tiles on a GPU, one launch a weight."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel

THREADS = 128
"""Threads of a block; a block writes one tile of 16 channels x 64 columns."""
TILE_K, TILE_N = 16, 64

SOURCES = {
    "gptq": "Source::ALONG_K",
    "compressed-tensors": "Source::ALONG_K_TRANSPOSED",
    "awq": "Source::ALONG_N_INTERLEAVED",
}
"""Enumerator of the order of 4-bit codes in words, by family of layouts
(:attr:`marlinq.formats.Layout.family`)."""


class Arguments(ctypes.Structure):
    """The parameters of ``cuda/kernels/tile_words.cuh``."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("k", ctypes.c_int),
        ("n", ctypes.c_int),
    )


def instantiation(family: str) -> Instantiation:
    """The kernel for the words of a family of layouts."""
    parameters = (("THREADS", THREADS), ("SOURCE", SOURCES[family]))
    return Instantiation("kernels/tile_words.cuh", "tile_words", parameters)


@lru_cache(maxsize=64)
def _function(family: str, device_index: int) -> Function:
    architecture = device_numbers(device_index).architecture
    return load_kernel(instantiation(family), architecture, device_index)


def tile_words(words: Tensor, family: str, k: int, n: int) -> Tensor:
    """The 4-bit codes of a weight as Marlin words, int32 [K/16, 2N], on the current stream.

    Args:
        words: int32, contiguous, as the layouts of ``family`` store them, on a GPU.
        family: a key of :data:`SOURCES`.
        k: channels, a multiple of 16.
        n: columns, a multiple of 64.

    Raises:
        EnvironmentProblem: CuPy or NVRTC is missing.
        RuntimeError: the driver refused the launch.
    """
    if k % TILE_K or n % TILE_N or words.numel() * 8 != k * n or not words.is_contiguous():
        raise ValueError(
            f"words: expected {k * n // 8} in one piece, K={k} a multiple of {TILE_K}, N={n} of {TILE_N}; "
            f"found {list(words.shape)}, strides {list(words.stride())}"
        )
    index = words.get_device()
    tiles = torch.empty((k // TILE_K, 2 * n), dtype=torch.int32, device=words.device)
    arguments = Arguments(words.data_ptr(), tiles.data_ptr(), k, n)
    grid = (k // TILE_K) * (n // TILE_N)
    with on_device(index):
        launches = Launches(_function(family, index), grid, THREADS, 0, arguments, dependent=False)
        launches.take().start()
    return tiles
