"""GPTQ's inner step for many layers of one shape in one launch (``cuda/solve/round_panels.cuh``)."""

from __future__ import annotations

import ctypes
from dataclasses import replace

from torch import Tensor

from marlinq.core.scheme import Scheme
from marlinq.kernels.solve.panel import (
    PANEL_ROWS,
    PanelTensors,
    PreparedPanel,
    instantiation,
    launch,
    shared_bytes,
)

_COLUMNS = 32
_READ = ("updated", "base", "weight", "feedback", "diagonal")
_WRITTEN = ("scales", "zeros", "codes", "difference", "loss")
_POINTERS = ("u", "base", "w", "feedback", "diagonal", "factors", *_WRITTEN, "shifts")


class PanelsArguments(ctypes.Structure):
    """The parameters of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_step", ctypes.c_int64) for name in (*_READ, *_WRITTEN)),
        *((name, ctypes.c_int) for name in ("blocks", "rows", "n")),
        *((name, ctypes.c_float) for name in ("top", "middle")),
    )


def prepare_panels(tensors: PanelTensors, scheme: Scheme, shifts: Tensor) -> PreparedPanel:
    """The launch of :func:`round_panels`, with the same arguments.

    Raises:
        ValueError: a tensor has another shape than the kernel reads, or is not contiguous.
    """
    count, rows, n = tensors.updated.shape
    if not 0 < rows <= PANEL_ROWS:
        raise ValueError(f"expected 1 to {PANEL_ROWS} channels, found {rows}")
    if tensors.terms is not None:
        raise ValueError("the terms of several layers are not written")
    if (tensors.base is None) != (tensors.factors is None):
        raise ValueError("a search needs both the base and the factors")
    wide = ("updated", "base", "weight", "codes", "difference")
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(wide, (count, rows, n))
    expected |= dict.fromkeys(("scales", "zeros", "loss"), (count, n))
    expected |= {"feedback": (count, rows, rows), "diagonal": (count, rows)}
    for name, shape in expected.items():
        tensor = getattr(tensors, name)
        if name == "base" and tensor is None:
            continue
        # Each layer is contiguous, but layers may be any distance apart.
        if tensor is None or tuple(tensor.shape) != shape or not tensor[0].is_contiguous():
            found = None if tensor is None else list(tensor.shape)
            raise ValueError(
                f"{name}: expected {list(shape)}, contiguous but for the first axis, found {found}"
            )
    for name, vector in (("factors", tensors.factors), ("shifts", shifts)):
        if vector is not None and (vector.dim() != 1 or not vector.is_contiguous()):
            raise ValueError(f"{name}: expected a contiguous vector, found {list(vector.shape)}")
    blocks = -(-n // _COLUMNS)
    steps = (getattr(tensors, name) for name in (*_READ, *_WRITTEN))
    arguments = PanelsArguments(
        *(_address(getattr(tensors, name)) for name in (*_READ, "factors", *_WRITTEN)),
        shifts.data_ptr(),
        *(0 if tensor is None else tensor.stride(0) for tensor in steps),
        blocks,
        rows,
        n,
        scheme.element.codes - 1,
        0.0 if scheme.stores_zeros else scheme.element.midpoint,
    )
    factors = 0 if tensors.factors is None else tensors.factors.numel()
    one = instantiation(scheme, factors)
    many = replace(one, header="solve/round_panels.cuh", function="round_panels")
    return PreparedPanel(many, count * blocks, shared_bytes(rows), arguments)


def round_panels(tensors: PanelTensors, scheme: Scheme, shifts: Tensor) -> None:
    """:func:`marlinq.kernels.solve.round_panel` for many layers of one shape in one launch.

    Args:
        tensors: tensors with a first axis of layers, each layer contiguous; ``factors`` has no such axis, and
            ``terms`` is None.
        scheme: scheme of all layers.
        shifts: float32 [layers], damping of each layer.

    Raises:
        ValueError: a tensor has another shape than the kernel reads, or is not contiguous.
        EnvironmentProblem: the kernel can't be compiled or loaded.
    """
    launch(prepare_panels(tensors, scheme, shifts), tensors.updated.get_device())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
