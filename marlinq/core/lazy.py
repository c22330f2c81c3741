"""``torch`` as a module that is imported at the first use of one of its names.

Importing torch takes seconds. Modules that some commands use only for names, shapes and dtypes take torch
from here, so that ``marlinq inspect`` and ``--help`` don't import it:

    if TYPE_CHECKING:
        import torch
    else:
        from marlinq.core.lazy import torch
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache
def _module() -> Any:
    return import_module("torch")


class _Torch:
    def __getattr__(self, name: str) -> Any:
        return getattr(_module(), name)


torch = _Torch()
