"""GPTQ's inner step on a GPU: ``cuda/solve/round_panel.cuh``."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from marlinq.core.scheme import Scheme
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu import device_numbers
from marlinq.kernels.driver.module import load_kernel

PANEL_ROWS = 128
"""The most input channels of a panel: what it needs of shared memory then fits every supported GPU."""

SCALES = {"float16": "Half", "bfloat16": "Bfloat16", "float32": "Single"}
"""What the kernels call the dtype of stored scales."""

# Of the kernel: output channels of a block, its warps, and rows that are rounded before the others follow.
_COLUMNS, _WARPS, _LEAF = 32, 4, 16


class PanelTensors(NamedTuple):
    """What the kernel reads and writes; [rows, N] are contiguous.

    Attributes:
        updated: float32 [rows, N], the weights with the updates of all channels before the panel.
        base: float32 [rows, N], R^T w with what is carried in; None where scales are given.
        weight: float32 [rows, N], as they were.
        feedback: float32 [rows, rows], lower triangular: by how much an error of channel k, a column, lowers
            channel j, a row, in code units.
        diagonal: float32 [rows], of R.
        factors: float32, shares of the full range that the search tries; None where scales are given.
        scales, zeros: float32 [N]; written by a search, else read.
        codes: uint8 [rows, N], written.
        difference: float32 [rows, N], written: the weights less what the codes stand for.
        terms: float32 [rows, N], written where it is not None: R^T of all differences so far.
        loss: float64 [N], added to where it is not None.
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
    """One launch.

    Attributes:
        instantiation: the kernel.
        grid: blocks, of 128 threads.
        shared_bytes: bytes of shared memory of a block.
        arguments: the kernel's parameters, in its own structure; they keep no tensor alive.
    """

    instantiation: Instantiation
    grid: int
    shared_bytes: int
    arguments: ctypes.Structure


THREADS = 32 * _WARPS
"""Of a block."""


def shared_bytes(rows: int) -> int:
    """Dynamic shared memory of a block: feedback, values, diagonal, what warps exchange, and codes."""
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
    """The launch for a panel; :func:`round_panel` says what it does.

    Raises:
        ValueError: tensors that the kernel can't read.
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

    With factors the panel is a whole quant group, whose scales are searched first and fitted to the codes
    afterwards.

    Args:
        tensors: tensors that are read and written.
        scheme: integer element, zero points and dtype of the scales.
        shift: the damping, by which the loss of the undamped Hessian is less.

    Raises:
        ValueError: tensors that the kernel can't read.
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
    """Make sure that the kernel runs on a GPU; ``factors`` is how many a search of ``scheme`` tries.

    Raises:
        EnvironmentProblem: the GPU is too old, or CuPy or NVRTC is missing, or the cache can't be written.
    """
    loaded(instantiation(scheme, factors), shared_bytes(PANEL_ROWS), device_index)


@lru_cache(maxsize=64)
def loaded(instantiation: Instantiation, shared: int, device_index: int) -> Function:
    """The kernel on a GPU, with as much shared memory for a block as its largest panel takes."""
    # The largest panel's memory is asked for once; the driver then allows every smaller one.
    architecture = device_numbers(device_index).architecture
    return load_kernel(instantiation, architecture, device_index, max(shared, shared_bytes(PANEL_ROWS)))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
