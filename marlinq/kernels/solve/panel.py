"""GPTQ's inner step on a GPU (``cuda/solve/round_panel.cuh``)."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from marlinq.core.scheme import Scheme
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel

PANEL_ROWS = 128
"""Input channels of a panel at most, so that its shared memory fits every supported GPU."""

SCALES = {"float16": "Half", "bfloat16": "Bfloat16", "float32": "Single"}
"""CUDA types of stored scales, by dtype."""

# Of the kernel: output channels of a block, warps of a block, and rows rounded before the rows below are
# updated.
_COLUMNS, _WARPS, _LEAF = 32, 4, 16


class PanelTensors(NamedTuple):
    """Inputs and outputs of one panel: ``rows`` input channels (w) of N output channels.

    R is the upper triangular factor of the damped Hessian. All tensors are contiguous.

    Attributes:
        updated: float32 [rows, N], weights after the updates for all channels before the panel.
        base: float32 [rows, N], R^T w of the panel plus the terms of earlier panels; None where scales are
            given.
        weight: float32 [rows, N], the original weights.
        feedback: float32 [rows, rows], lower triangular; entry [j, k] is subtracted from channel j for each
            code unit of error of channel k.
        diagonal: float32 [rows], diagonal of R.
        factors: float32, shares of the full range that the scale search tries; None where scales are given.
        scales: float32 [N]; written by a search, else read.
        zeros: zero points float32 [N]; written by a search, else read.
        codes: uint8 [rows, N], written.
        difference: float32 [rows, N], written: original weights minus dequantised ones.
        terms: float32 [rows, N] or None; written: R^T of all differences so far.
        loss: float64 [N] or None; the panel's loss is added to it.
    """

    updated: Tensor
    base: Tensor | None
    weight: Tensor
    feedback: Tensor
    diagonal: Tensor
    factors: Tensor | None
    scales: Tensor
    zeros: Tensor
    codes: Tensor
    difference: Tensor
    terms: Tensor | None = None
    loss: Tensor | None = None


class PanelArguments(ctypes.Structure):
    """The parameters of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("u", "base", "w", "feedback", "diagonal", "factors")),
        *((name, ctypes.c_void_p) for name in ("scales", "zeros", "codes", "terms", "difference", "loss")),
        ("rows", ctypes.c_int),
        ("n", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("top", "middle", "shift")),
    )


class PreparedPanel(NamedTuple):
    """One launch of a solver's kernel.

    Attributes:
        instantiation: the kernel.
        grid: blocks, of 128 threads.
        shared_bytes: bytes of dynamic shared memory of a block.
        arguments: the kernel's parameters; they hold addresses but keep no tensor alive.
    """

    instantiation: Instantiation
    grid: int
    shared_bytes: int
    arguments: ctypes.Structure


THREADS = 32 * _WARPS
"""Threads of a block."""


def shared_bytes(rows: int) -> int:
    """Bytes of dynamic shared memory of a block, for a panel of ``rows`` channels.

    It holds feedback, values, diagonal, sums that warps exchange, and codes.
    """
    padded = -(-rows // _LEAF) * _LEAF
    return 4 * (padded * padded + padded * _COLUMNS + padded + 3 * _WARPS * _COLUMNS) + padded * _COLUMNS


def instantiation(scheme: Scheme, factors: int) -> Instantiation:
    """The kernel for a scheme and a number of scale factors to search; 0 factors: the scales are given."""
    parameters = (
        ("Scale", SCALES[scheme.scale_dtype]),
        ("SEARCH", factors > 0),
        ("SYMMETRIC", not scheme.stores_zeros),
        ("FACTORS", max(factors, 1)),
    )
    return Instantiation("solve/round_panel.cuh", "round_panel", parameters)


def prepare_panel(tensors: PanelTensors, scheme: Scheme, shift: float) -> PreparedPanel:
    """The launch of :func:`round_panel`, with the same arguments.

    Raises:
        ValueError: a tensor has another shape than the kernel reads, or is not contiguous.
    """
    rows, n = tensors.updated.shape
    if not 0 < rows <= PANEL_ROWS:
        raise ValueError(f"expected 1 to {PANEL_ROWS} channels, found {rows}")
    wide = [tensors.updated, tensors.weight, tensors.difference, tensors.codes]
    wide += [tensor for tensor in (tensors.base, tensors.terms) if tensor is not None]
    for tensor in wide:
        if tuple(tensor.shape) != (rows, n) or not tensor.is_contiguous():
            raise ValueError(f"expected a contiguous {[rows, n]}, found {list(tensor.shape)}")
    if tuple(tensors.feedback.shape) != (rows, rows) or not tensors.feedback.is_contiguous():
        raise ValueError(
            f"feedback: expected a contiguous {[rows, rows]}, found {list(tensors.feedback.shape)}"
        )
    if (tensors.base is None) != (tensors.factors is None):
        raise ValueError("a search needs both the base and the factors")
    vectors = (tensors.diagonal, tensors.scales, tensors.zeros, tensors.factors, tensors.loss)
    for vector in vectors:
        if vector is not None and (vector.dim() != 1 or not vector.is_contiguous()):
            raise ValueError(f"expected a contiguous vector, found {list(vector.shape)}")
    top = scheme.element.codes - 1
    arguments = PanelArguments(
        *(_address(tensor) for tensor in tensors[:9]),
        _address(tensors.terms),
        _address(tensors.difference),
        _address(tensors.loss),
        rows,
        n,
        top,
        0.0 if scheme.stores_zeros else scheme.element.midpoint,
        shift,
    )
    factors = 0 if tensors.factors is None else tensors.factors.numel()
    return PreparedPanel(instantiation(scheme, factors), -(-n // _COLUMNS), shared_bytes(rows), arguments)


def round_panel(tensors: PanelTensors, scheme: Scheme, shift: float) -> None:
    """Round a panel's channels in order, on the current stream of the tensors' GPU.

    With ``factors`` the panel is a whole quant group: its scales are searched first, and fitted to the codes
    by least squares afterwards.

    Args:
        tensors: tensors that are read and written.
        scheme: integer element, zero points and dtype of the scales.
        shift: number added to the Hessian's diagonal (damping); ``loss`` is that of the undamped Hessian.

    Raises:
        ValueError: a tensor has another shape than the kernel reads, or is not contiguous.
        EnvironmentProblem: the kernel can't be compiled or loaded.
    """
    launch(prepare_panel(tensors, scheme, shift), tensors.updated.get_device())


def launch(prepared: PreparedPanel, device_index: int) -> None:
    """Start a prepared launch on the current stream of the GPU that holds its tensors.

    Raises:
        EnvironmentProblem: the kernel can't be compiled or loaded.
    """
    function = loaded(prepared.instantiation, prepared.shared_bytes, device_index)
    with on_device(device_index):
        Launches(function, prepared.grid, THREADS, prepared.shared_bytes, prepared.arguments).take().start()


def check_panels(device_index: int, scheme: Scheme, factors: int) -> None:
    """Check that the kernel can run on a GPU; ``factors``: number of scale factors that the search tries.

    Raises:
        EnvironmentProblem: the GPU is too old, or CuPy or NVRTC is missing, or the cache can't be written.
    """
    loaded(instantiation(scheme, factors), shared_bytes(PANEL_ROWS), device_index)


@lru_cache(maxsize=64)
def loaded(instantiation: Instantiation, shared: int, device_index: int) -> Function:
    """The kernel loaded on a GPU, allowed the shared memory of the largest panel, hence of every smaller
    one."""
    architecture = device_numbers(device_index).architecture
    return load_kernel(instantiation, architecture, device_index, max(shared, shared_bytes(PANEL_ROWS)))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
