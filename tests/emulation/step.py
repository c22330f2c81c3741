"""The kernels between products on the emulation: prepared launches, run over memory that is watched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marlinq.kernels.step import Prepared
from tests.emulation.build import Builder
from tests.emulation.gemm import SOURCES
from tests.emulation.launching import EmulatedKernel, Memory


def start(
    builder: Builder,
    prepared: Prepared,
    memory: Sequence[Memory],
    *,
    dependent: bool = True,
    seed: int = 0,
    resident: int = 1,
    capability: int = 90,
    sources: Path = SOURCES,
) -> None:
    """Run a prepared launch; as :meth:`tests.emulation.launching.EmulatedKernel.launch`."""
    instantiation = prepared.instantiation
    library = builder.kernel(instantiation.text(), instantiation.function, sources, capability)
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
