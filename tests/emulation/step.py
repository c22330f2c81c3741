"""The kernels between products on the emulation: random operands, watched memory, prepared launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, Memory, apart
from marlinq.kernels.step import HeadNorm, Prepared, RowNorm
from tests.emulation.gemm import SOURCES
from tests.kernels.step_problems import random

DTYPES = (torch.float16, torch.bfloat16)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for a result: NaN everywhere."""
    return apart(torch.full(shape, torch.nan, dtype=dtype))


def strided(rows: int, columns: int, stride: int, dtype: torch.dtype) -> Tensor:
    """Random rows [rows, columns], ``stride`` elements apart."""
    return apart(random(rows, stride, dtype=dtype)[:, :columns])


def constants(**tensors: Tensor | None) -> list[Memory]:
    """Tensors that no kernel of the step writes."""
    return [Memory(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def given(**tensors: Tensor | None) -> list[Memory]:
    """Outputs of the previous kernel."""
    return [
        Memory(name, tensor, after_previous=True) for name, tensor in tensors.items() if tensor is not None
    ]


def results(**tensors: Tensor | None) -> list[Memory]:
    """Outputs, which the previous kernel may still read."""
    return [
        Memory(name, tensor, writable=True, after_previous=True)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def row_norm(kind: Any, width: int, dtype: torch.dtype, *, bias: bool = False) -> RowNorm:
    """A normalisation with random weights."""
    return RowNorm(
        kind,
        apart(random(width, dtype=dtype)),
        apart(random(width, dtype=dtype)) if bias else None,
        eps=0.25,  # large enough to be missed
        offset=1.0 if kind == "RMS_WIDE" else 0.0,
    )


def head_norm(kind: Any, size: int, count: int, dtype: torch.dtype, *, wide: bool) -> HeadNorm | None:
    """A norm of ``count`` heads. Each has weights of its own if all are normalised together or a mean is
    subtracted."""
    if kind is None:
        return None
    norm = row_norm(kind, size * (count if wide or kind == "LAYER" else 1), dtype, bias=kind == "LAYER")
    return HeadNorm(**{f.name: getattr(norm, f.name) for f in fields(norm)}, wide=wide)


def weights_of(prefix: str, norm: RowNorm | HeadNorm | None) -> list[Memory]:
    if norm is None:
        return []
    return constants(**{f"{prefix} weight": norm.weight, f"{prefix} bias": norm.bias})


def start(
    builder: Builder,
    prepared: Prepared,
    memory: Sequence[Memory],
    *,
    dependent: bool = True,
    seed: int = 0,
    resident: int = 1,
    capability: int = 90,
    planted: Planted | None = None,
) -> None:
    """Run a prepared launch; as :meth:`emulation.launching.EmulatedKernel.launch`."""
    instantiation = prepared.instantiation
    library = builder.kernel(instantiation.text(), instantiation.function, SOURCES, capability, planted)
    EmulatedKernel(library).launch(
        prepared.grid,
        prepared.threads,
        prepared.shared_bytes,
        prepared.arguments,
        memory,
        dependent=dependent and capability >= 90,
        seed=seed,
        resident=resident,
    )
