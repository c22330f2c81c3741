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
    """Let ``from_pretrained`` and ``pipeline`` of transformers load marlinq's formats with marlinq's linears.

    From now on, in this process, until :func:`unregister`. Entries are added to the two tables of
    quantisation methods that transformers keeps; nothing else of transformers changes. A checkpoint that
    marlinq does not read falls to transformers' own quantizer, with a warning that says why. Calling it again
    changes the two settings.

    Args:
        operator: name of the operator for quantised weights, where it can be used; see
            :func:`marlinq.runtime.decide`.
        compile_kernels: compile the kernels that the model's products need on a GPU while it is loaded,
            instead of at their first use.

    Raises:
        EnvironmentProblem: transformers is not installed, or has no such tables (it is older than 5.17).
        UsageError: there is no operator of that name.
    """
    from marlinq.runtime.decision import require_operator

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
    """Take back :func:`register`: ``from_pretrained`` uses transformers' own quantizers again.

    Models that are already loaded stay as they are. Without a :func:`register` before it nothing happens.
    """
    if _REGISTRY in sys.modules:
        sys.modules[_REGISTRY].remove()
