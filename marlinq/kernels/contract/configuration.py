"""What a kernel that multiplies says of itself and of each of its configurations.

A kernel is one file in ``kernels/variants/``: a :class:`Configuration`, and a :class:`Variant` that is
registered (:func:`register_variant`). Decisions, launches and measured choices ask nothing but these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.operands import Operands
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import ScaleKind, WeightFormat
from marlinq.kernels.contract.whole_rows import RowVariant


class ActivationBox(NamedTuple):
    """How a kernel that takes activations by tensor maps reads them; their address alone is left open.

    Attributes:
        m: rows.
        k: channels.
        stride: elements from one row to the next.
        tile_m: rows of a tile.
    """

    m: int
    k: int
    stride: int
    tile_m: int


class Configuration(Protocol):
    """The compile-time parameters of one kernel: a frozen dataclass, whose fields measured choices record."""

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
        """Parts that K is split into, over blocks and what they are made of."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def min_blocks(self) -> int:
        """Blocks that a multiprocessor has room for, at least."""

    def grid(self, problem: Problem) -> int:
        """Blocks of a launch."""

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of dynamic shared memory of a block."""

    def instantiation(self, problem: Problem) -> Instantiation:
        """What is compiled for the problem."""

    def arguments(self, operands: Operands, dependent: bool) -> ctypes.Structure:
        """The kernel's parameters, with fields ``x`` and ``out``."""

    def activation_box(self, problem: Problem, stride: int) -> ActivationBox | None:
        """How it reads activations; None where the parameter ``x`` is their address."""

    def handover(self, problem: Problem) -> Handover | None:
        """Memory in which blocks that share a tile leave sums; None where they need none."""

    def activates(self, problem: Problem) -> bool:
        """Whether it can do what :attr:`Problem.activation` wants behind the product."""

    def row_variant(self, problem: Problem, *, normed: bool, adds: bool) -> RowVariant | None:
        """The kernel that takes or leaves rows that are not normalised yet; None where there is none.

        Args:
            problem: the product.
            normed: the activations' norm is still to be taken.
            adds: the results are added to the residual stream.
        """

    def order_of_sums(self, problem: Problem) -> tuple[object, ...]:
        """What decides in which order, and with which roundings, a sum is taken; begins with the variant."""

    def describe(self) -> str:
        """Tile and split, for people."""


def _none(problem: Problem, device: Device) -> Iterator[Configuration]:
    return iter(())


class Suits(Protocol):
    """Whether a kernel is considered beside others."""

    def __call__(self, problem: Problem, device: Device, *, dependent: bool) -> bool:
        """``dependent``: launches overlap with their neighbours."""


class Candidates(Protocol):
    """The configurations of a kernel that are worth estimating, all of which fit the device."""

    def __call__(
        self, problem: Problem, device: Device, batch_invariant: bool = False
    ) -> Iterator[Configuration]:
        """With ``batch_invariant`` those whose roundings and splits of K exist for every M."""


@dataclass(frozen=True)
class Variant:
    """One kernel that multiplies: what it suits, its candidates and what each of them costs.

    Attributes:
        configuration: class of its configurations.
        runs_on: whether a device has what the kernel needs.
        suits: whether it is considered beside others.
        candidates: the configurations worth estimating.
        estimate: seconds of a launch of one of its configurations, and what the busiest multiprocessor spends
            most of them on.
        common_candidates: few configurations that serve many batches, where the problem's is one of those;
            else none.
        scales: kinds of scales that it reads.
        any_batch: whether it has, on every GPU, tiles that sum in the same order whatever the batch.
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
        """Whether it multiplies with weights of a format: one that has a codec and scales that it reads."""
        return weight_format.codec is not None and weight_format.scale in self.scales


VARIANTS: dict[str, Variant] = {}
"""Every kernel that multiplies, by name. Of equal estimates the earlier kernel's is taken."""


def register_variant(variant: Variant) -> Variant:
    """Let decisions consider a kernel; returns it.

    Raises:
        ValueError: another kernel has the name.
    """
    if VARIANTS.setdefault(variant.name, variant) is not variant:
        raise ValueError(f"kernel {variant.name!r} is registered already")
    return variant
