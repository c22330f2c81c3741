"""The protocols of a product kernel: its configurations, and how decisions choose among them.

A kernel is one file in ``kernels/variants/``: a :class:`Configuration`, and a :class:`Variant` that is
registered (:func:`register_variant`). Decisions, launches and measured choices use nothing else of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import ScaleKind, WeightFormat
from marlinq.kernels.contract.whole_rows import RowVariant


class ActivationBox(NamedTuple):
    """Shape of a kernel's tensor map of activations: all but the address, which each launch sets.

    Attributes:
        m: rows.
        k: channels.
        stride: elements from one row to the next.
        tile_m: rows of a box, the kernel's TILE_M.
    """

    m: int
    k: int
    stride: int
    tile_m: int


class Configuration(Protocol):
    """The compile-time parameters of one kernel: a frozen dataclass; tables of measured choices store its
    fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    variant: ClassVar[str]
    """Name of the kernel in :data:`VARIANTS`."""

    @property
    def tile_m(self) -> int:
        """Batch rows of a block."""

    @property
    def tile_n(self) -> int:
        """Output columns of a block."""

    @property
    def cluster(self) -> int:
        """Blocks that share a tile."""

    @property
    def parts(self) -> int:
        """Parts that K is split into: over the blocks of a tile, times the warps or warpgroups of a block."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def min_blocks(self) -> int:
        """Blocks that must fit on a multiprocessor at once (``__launch_bounds__``)."""

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch."""

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of dynamic shared memory of a block."""

    def instantiation(self, problem: Problem) -> Instantiation:
        """Template and members of the configuration struct to compile for ``problem``."""

    def arguments(self, operands: ProductTensors, dependent: bool) -> ctypes.Structure:
        """Parameters of a launch, a structure with fields ``x`` and ``out``.

        Args:
            operands: the product's tensors.
            dependent: the launch overlaps with the previous kernel of the stream.
        """

    def activation_box(self, problem: Problem, stride: int) -> ActivationBox | None:
        """Tensor map of activations with ``stride`` elements a row; None: parameter ``x`` is their
        address."""

    def handover(self, problem: Problem) -> Handover | None:
        """Device memory through which blocks of one tile exchange sums; None where they need none."""

    def activates(self, problem: Problem) -> bool:
        """Whether the kernel can apply :attr:`Problem.activation` in its epilogue; true where it is None."""

    def row_variant(self, problem: Problem, *, normed: bool, adds: bool) -> RowVariant | None:
        """The kernel that also applies an RMS norm to its input, or adds its output to the residual stream.

        None where this configuration has no such kernel.

        Args:
            problem: the product.
            normed: the kernel normalises the activations.
            adds: the kernel adds results to the residual stream and sums the squares of the new rows.
        """

    def order_of_sums(self, problem: Problem) -> tuple[object, ...]:
        """Key of the order and the roundings of a sum: equal keys give equal bits. Begins with the
        variant."""

    def describe(self) -> str:
        """Tile and split of K as text for messages and tables."""


def _none(problem: Problem, device: Device) -> Iterator[Configuration]:
    return iter(())


class Suits(Protocol):
    """Whether decisions consider a kernel for a problem where other kernels run, too."""

    def __call__(self, problem: Problem, device: Device, *, dependent: bool) -> bool:
        """``dependent``: launches overlap with the previous and the next kernel of the stream."""


class Candidates(Protocol):
    """The configurations of a kernel that are worth estimating, all of which fit the device."""

    def __call__(
        self, problem: Problem, device: Device, batch_invariant: bool = False
    ) -> Iterator[Configuration]:
        """With ``batch_invariant`` only those whose roundings and split of K are available for every M."""


@dataclass(frozen=True)
class Variant:
    """One product kernel: the problems it suits, its candidate configurations, and the seconds each takes.

    Attributes:
        configuration: class of its configurations.
        runs_on: whether a device has what the kernel needs.
        suits: whether decisions consider it for a problem where other kernels run, too.
        candidates: the configurations worth estimating.
        estimate: seconds of a launch of one of its configurations, and what the busiest multiprocessor spends
            most of them on.
        common_candidates: a few configurations shared by many values of M, so that less is compiled; empty
            where the M of the problem is better served by ``candidates``.
        scales: kinds of scales that it reads.
        any_batch: whether it has batch-invariant candidates, which sum in the same order for every M, on
            every GPU.
    """

    configuration: type[Any]
    runs_on: Callable[[Device], bool]
    suits: Suits
    candidates: Candidates
    estimate: Callable[[Problem, Device, Any], tuple[float, str]]
    common_candidates: Callable[[Problem, Device], Iterator[Configuration]] = _none
    scales: tuple[ScaleKind, ...] = ("quant_group",)
    any_batch: bool = False

    @property
    def name(self) -> str:
        """Name in decisions, measured choices and messages."""
        name: str = self.configuration.variant
        return name

    def takes(self, weight_format: WeightFormat) -> bool:
        """Whether it multiplies weights of a format: the format has a codec, and scales of a kind it
        reads."""
        return weight_format.codec is not None and weight_format.scale in self.scales


VARIANTS: dict[str, Variant] = {}
"""Every product kernel by name. Of equal estimates the kernel registered first wins."""


def register_variant(variant: Variant) -> Variant:
    """Let decisions consider a kernel; returns it.

    Raises:
        ValueError: another kernel has the name.
    """
    if VARIANTS.setdefault(variant.name, variant) is not variant:
        raise ValueError(f"kernel {variant.name!r} is registered already")
    return variant
