"""``from_pretrained`` of transformers gives models with marlinq's linears, after :func:`register`.

Importing this package imports neither transformers nor torch, and registers nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module

from marlinq.core.errors import EnvironmentProblem

_REGISTRY = "marlinq.integrations.transformers.registry"

__all__ = ["register", "unregister"]


def register(*, operator: str = "auto", compile_kernels: bool = True) -> None:
    """Makes ``from_pretrained`` and ``pipeline`` of transformers load marlinq's formats with marlinq's
    linears.

    This holds for this process until :func:`unregister`. It adds entries to transformers' two tables of
    quantisation methods and changes nothing else. A checkpoint that marlinq does not read is loaded by
    transformers' own quantizer, with a warning that gives the reason. Another call changes the two settings.

    Args:
        operator: name of the operator for quantised weights, used where it can be; see
            :func:`marlinq.runtime.decide`.
        compile_kernels: compile the model's GPU kernels while it is loaded, and not at their first use.

    Raises:
        EnvironmentProblem: transformers is not installed, or has no such tables (it is older than 5.17).
        UsageError: there is no operator with this name.
    """
    from marlinq.runtime.operator_choice import require_operator

    require_operator(operator)
    try:
        registry = import_module(_REGISTRY)
    except ImportError as error:
        raise EnvironmentProblem(
            f"transformers can't be extended: {error}; install transformers 5.17 or newer, or load with "
            "marlinq.load"
        ) from error
    registry.add(operator, compile_kernels=compile_kernels)


def unregister() -> None:
    """Undoes :func:`register`: ``from_pretrained`` uses transformers' own quantizers again.

    Loaded models don't change. Without an earlier :func:`register` nothing happens.
    """
    if _REGISTRY in sys.modules:
        sys.modules[_REGISTRY].remove()
