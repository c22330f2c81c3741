"""marlinq: quantise, convert, verify and run 4-bit language models.

The functions below are the Python API; each is imported on first use so that ``import marlinq`` and
``marlinq --help`` stay free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_API = {
    "quantize": "marlinq.pipeline",
    "convert": "marlinq.conversion",
    "verify": "marlinq.verification",
    "inspect": "marlinq.inspection",
    "load": "marlinq.runtime",
    "evaluate": "marlinq.evaluation",
}
__all__ = ["__version__", "convert", "evaluate", "inspect", "load", "quantize", "verify"]

if TYPE_CHECKING:
    from marlinq.conversion import convert
    from marlinq.evaluation import evaluate
    from marlinq.inspection import inspect
    from marlinq.pipeline import quantize
    from marlinq.runtime import load
    from marlinq.verification import verify


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module 'marlinq' has no attribute {name!r}")
