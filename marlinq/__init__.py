"""marlinq: quantise, convert, verify and run 4-bit language models.

The functions below are the Python API; each is imported on first use so that ``import marlinq`` and
``marlinq --help`` stay free of torch. Importing the package also makes transformers' ``from_pretrained`` load
quantised folders with marlinq's linears (:mod:`marlinq.integrations.transformers`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from marlinq.integrations.transformers import register as _register_in_transformers

__version__ = "0.1.0"

_API = {
    "rotate": "marlinq.operations.rotate",
    "quantize": "marlinq.operations.quantize",
    "convert": "marlinq.operations.convert",
    "verify": "marlinq.operations.verify",
    "inspect": "marlinq.operations.inspect",
    "load": "marlinq.runtime",
    "evaluate": "marlinq.operations.evaluate",
}
__all__ = ["__version__", "convert", "evaluate", "inspect", "load", "quantize", "rotate", "verify"]

if TYPE_CHECKING:
    from marlinq.operations.convert import convert
    from marlinq.operations.evaluate import evaluate
    from marlinq.operations.inspect import inspect
    from marlinq.operations.quantize import quantize
    from marlinq.operations.rotate import rotate
    from marlinq.operations.verify import verify
    from marlinq.runtime import load


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module 'marlinq' has no attribute {name!r}")


_register_in_transformers()
