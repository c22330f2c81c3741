"""Too little memory, on a device or the host, as marlinq's own error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from marlinq.core.boundaries import reason
from marlinq.core.errors import EnvironmentProblem

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_HOST = "DefaultCPUAllocator: can't allocate memory"
"""First words of torch's RuntimeError about the host's memory, which has no class of its own."""


def tells_of_little_memory(
    advice: str,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorator of an operation, in which too little memory becomes an :class:`EnvironmentProblem`.

    The library's exception is its cause. torch's and CuPy's are told by the name of their class, so that
    neither library is imported.

    Args:
        advice: end of the message: what needs less memory.
    """

    def decorated(operation: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @wraps(operation)
        def run(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
            try:
                return operation(*arguments, **options)
            except Exception as error:
                on_device = type(error).__name__ == "OutOfMemoryError"
                if not (on_device or isinstance(error, MemoryError) or _HOST in str(error)):
                    raise
                place = "device" if on_device else "host"
                name = operation.__name__.removeprefix("plan_")
                raise EnvironmentProblem(
                    f"{name}: the {place} has too little memory ({reason(error)}); {advice}"
                ) from error

        return run

    return decorated
