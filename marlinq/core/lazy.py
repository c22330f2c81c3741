"""torch, imported at the first use of one of its names.

Importing torch takes seconds. Rooms that describe tensors (names, shapes, dtypes) and also compute with them
use this module, so that ``marlinq inspect`` and ``--help`` never wait for it:

    if TYPE_CHECKING:
        import torch
    else:
        from marlinq.core.lazy import torch
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _Torch:
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch"), name)


torch = _Torch()
