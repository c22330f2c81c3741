"""marlinq: quantise, convert, verify and run 4-bit language models.

The functions below are the Python API. Each is imported at its first use, so ``import marlinq`` imports
neither torch nor transformers, and changes nothing in the process. :func:`register` makes transformers'
``from_pretrained`` and ``pipeline`` load quantised folders with marlinq's linears; :func:`unregister` undoes
it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from marlinq.core.version import __version__

_API = {
    "Recipe": "marlinq.operations.quantize",
    "convert": "marlinq.operations.convert",
    "evaluate": "marlinq.operations.evaluate",
    "generate": "marlinq.runtime",
    "inspect": "marlinq.operations.inspect",
    "load": "marlinq.operations.loading",
    "quantize": "marlinq.operations.quantize",
    "read_recipe": "marlinq.operations.quantize",
    "register": "marlinq.integrations.transformers",
    "report": "marlinq.operations.report",
    "rotate": "marlinq.operations.rotate",
    "unregister": "marlinq.integrations.transformers",
    "verify": "marlinq.operations.verify",
}
"""Name of each function or class of the Python API -> the module that has it."""

__all__ = [
    "Recipe",
    "__version__",
    "convert",
    "evaluate",
    "generate",
    "inspect",
    "load",
    "quantize",
    "read_recipe",
    "register",
    "report",
    "rotate",
    "unregister",
    "verify",
]

if TYPE_CHECKING:
    from marlinq.integrations.transformers import register, unregister
    from marlinq.operations.convert import convert
    from marlinq.operations.evaluate import evaluate
    from marlinq.operations.inspect import inspect
    from marlinq.operations.loading import load
    from marlinq.operations.quantize import Recipe, quantize, read_recipe
    from marlinq.operations.report import report
    from marlinq.operations.rotate import rotate
    from marlinq.operations.verify import verify
    from marlinq.runtime import generate


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module 'marlinq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
