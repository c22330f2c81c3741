"""GPTQ's panels on the emulation, over memory that is watched."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, Memory, apart
from marlinq.core.scheme import Scheme
from marlinq.kernels.solve import PanelTensors, prepare_panel, prepare_panels
from marlinq.kernels.solve.panel import THREADS, PreparedPanel
from tests.emulation.gemm import SOURCES

_READ = ("updated", "base", "weight", "feedback", "diagonal", "factors")
_WRITTEN = ("difference", "terms")


def emulated_panel(
    builder: Builder, *, seed: int = 0, planted: Planted | None = None
) -> Callable[[PanelTensors, Scheme, float], None]:
    """A stand-in for :func:`marlinq.kernels.solve.round_panel` on the CPU."""

    def launch(given: PanelTensors, scheme: Scheme, shift: float) -> None:
        tensors = PanelTensors(*(None if tensor is None else apart(tensor) for tensor in given))
        _run(builder, prepare_panel(tensors, scheme, shift), given, tensors, [], seed, planted)

    return launch


def emulated_panels(
    builder: Builder, *, seed: int = 0, planted: Planted | None = None
) -> Callable[[PanelTensors, Scheme, Tensor], None]:
    """A stand-in for :func:`marlinq.kernels.solve.round_panels` on the CPU."""

    def launch(given: PanelTensors, scheme: Scheme, shifts: Tensor) -> None:
        tensors = PanelTensors(*(None if tensor is None else apart(tensor) for tensor in given))
        shifts = apart(shifts)
        more = [Memory("shifts", shifts)]
        _run(builder, prepare_panels(tensors, scheme, shifts), given, tensors, more, seed, planted)

    return launch


def _run(
    builder: Builder,
    prepared: PreparedPanel,
    given: PanelTensors,
    tensors: PanelTensors,
    memory: list[Memory],
    seed: int,
    planted: Planted | None,
) -> None:
    """Runs a launch on ``tensors``, and puts what becomes of them into ``given``."""
    searched = given.factors is not None
    memory += [Memory(name, tensor) for name in _READ if (tensor := getattr(tensors, name)) is not None]
    memory += [
        Memory(name, tensor, writable=True)
        for name in _WRITTEN
        if (tensor := getattr(tensors, name)) is not None
    ]
    # The emulation tracks pairs of bytes, which two lanes share here.
    memory.append(Memory("codes", tensors.codes, writable=True, untracked=True))
    memory += [Memory(name, getattr(tensors, name), writable=searched) for name in ("scales", "zeros")]
    if tensors.loss is not None:
        memory.append(Memory("loss", tensors.loss, writable=True, holds_values=True))
    library = builder.kernel(
        prepared.instantiation.text(), prepared.instantiation.function, SOURCES, planted=planted
    )
    EmulatedKernel(library).launch(
        prepared.grid, THREADS, prepared.shared_bytes, prepared.arguments, memory, seed=seed
    )
    for mine, theirs in zip(given, tensors, strict=True):
        if mine is not None:
            mine.copy_(theirs)
