"""Constraints on the choice of kernels inside a ``with`` block: a kernel, batch invariance, overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import NamedTuple, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Demands(NamedTuple):
    """Constraints that decisions respect in the current context.

    Attributes:
        kernel: name of the only kernel to choose from, or ``dequantise``; None for all.
        batch_invariant: True for sums in an order that does not depend on the batch size M.
        dependent: True for programmatic dependent launch among own kernels: they overlap, which the choice of
            kernels takes into account.
        early: True for programmatic dependent launch behind another library's kernel: only the launch
            overlaps, so the choice of kernels ignores it.
    """

    kernel: str | None = None
    batch_invariant: bool = False
    dependent: bool = False
    early: bool = False


_demands: ContextVar[Demands] = ContextVar("marlinq_kernel_demands", default=Demands())  # noqa: B039
demands = _demands.get
"""The demands of the current context."""


@contextmanager
def _demanding(changed: Demands) -> Iterator[None]:
    token = _demands.set(changed)
    try:
        yield
    finally:
        _demands.reset(token)


@contextmanager
def forced_kernel(kernel: str) -> Iterator[None]:
    """Decide for ``kernel`` inside, however slow its estimate: for tests and measurements."""
    with _demanding(demands()._replace(kernel=kernel)):
        yield


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Sum in the same order whatever the batch, inside: a row's result has the same bits in any batch.

    Without it the result has the same bits whenever shapes and inputs are the same. The order is chosen for
    speed over a range of batches, so single ones are slower than they could be (docs/kernels.md, "Same
    bits").
    """
    with _demanding(demands()._replace(batch_invariant=True)):
        yield


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Launch the kernels inside with programmatic dependent launch (compute capability 9.0 and later).

    A kernel may then start, and request its weights and scales, while the previous kernel of the stream still
    runs; it waits for that kernel before it touches activations or the output. So no kernel inside may
    write the weights of a later one.
    """
    with _demanding(demands()._replace(dependent=True)):
        yield


@contextmanager
def early_launches() -> Iterator[None]:
    """Launch the kernels inside as :func:`dependent_launches` does, between kernels of another library.

    Those kernels do not let a successor start before they end, so that only the launch latency is hidden, and
    no work overlaps. Therefore the same kernels are chosen as outside the block.
    """
    with _demanding(demands()._replace(early=True)):
        yield


@cache
def _early(demanded: Demands) -> Demands:
    return demanded._replace(early=True)


def launched_early(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """``function`` inside :func:`early_launches`, without the time that a context manager takes."""

    @wraps(function)
    def launched(*given: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
        token = _demands.set(_early(_demands.get()))
        try:
            return function(*given, **named)
        finally:
            _demands.reset(token)

    return launched
