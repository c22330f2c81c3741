"""A fourth kernel that multiplies, in one file: a configuration, a variant, and its registration."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from marlinq.kernels import Problem
from marlinq.kernels.contract.configuration import VARIANTS, ActivationBox, Variant, register_variant
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.whole_rows import RowVariant


class ToyArguments(ctypes.Structure):
    """The kernel's parameters: two addresses and the number of rows."""

    _fields_ = (("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("m", ctypes.c_int))


@dataclass(frozen=True)
class ToyConfig:
    """Blocks of 64 columns and all rows."""

    tile_m: int
    variant: ClassVar[str] = "toy"
    tile_n: ClassVar[int] = 64
    cluster: ClassVar[int] = 1
    parts: ClassVar[int] = 1
    threads: ClassVar[int] = 96
    min_blocks: ClassVar[int] = 1

    def grid(self, problem: Problem) -> int:
        return problem.n // self.tile_n

    def shared_bytes(self, problem: Problem) -> int:
        return 128 * self.tile_m

    def instantiation(self, problem: Problem) -> Instantiation:
        return Instantiation("kernels/toy.cuh", "toy", (*problem.parameters, ("TILE_M", self.tile_m)))

    def arguments(self, operands: ProductTensors, dependent: bool) -> ToyArguments:
        return ToyArguments(operands.x.data_ptr(), operands.out.data_ptr(), operands.x.shape[0])

    def activation_box(self, problem: Problem, stride: int) -> ActivationBox | None:
        return None

    def handover(self, problem: Problem) -> Handover | None:
        return None

    def activates(self, problem: Problem) -> bool:
        return problem.activation is None

    def row_variant(self, problem: Problem, *, normed: bool, adds: bool) -> RowVariant | None:
        return None

    def order_of_sums(self, problem: Problem) -> tuple[object, ...]:
        return (self.variant,)

    def describe(self) -> str:
        return f"toy tile of {self.tile_m} rows"


TOY = Variant(
    ToyConfig,
    runs_on=lambda device: True,
    suits=lambda problem, device, *, dependent: problem.m <= 4,
    candidates=lambda problem, device, batch_invariant=False: iter([ToyConfig(problem.m)]),
    estimate=lambda problem, device, configuration: (1e-9, "nothing"),
)
"""Said to be faster than all others, for batches of up to three rows."""


@contextmanager
def toy_variant() -> Iterator[None]:
    """The kernel is registered inside."""
    register_variant(TOY)
    try:
        yield
    finally:
        del VARIANTS[TOY.name]
