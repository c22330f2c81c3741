"""``from_pretrained`` of transformers gives models with marlinq's linears.

``import marlinq`` calls :func:`register`; :func:`unregister` takes it back. Neither imports transformers or
torch: while transformers' table of quantizers is not imported, a finder on ``sys.meta_path`` waits for that
one module, adds marlinq when the module has run, and is gone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

_TABLE = "transformers.quantizers.auto"
_QUANTIZER = "marlinq.integrations.transformers.quantizer"
_LAZY = {"MarlinqConfig", "MarlinqQuantizer"}

__all__ = ["MarlinqConfig", "MarlinqQuantizer", "register", "unregister"]

if TYPE_CHECKING:
    from marlinq.integrations.transformers.quantizer import MarlinqConfig, MarlinqQuantizer


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_QUANTIZER), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Waiting(MetaPathFinder):
    """Finds transformers' table of quantizers as the other finders do, and adds marlinq when it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TABLE:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        # The loader serves this module alone, so nothing else sees the change.
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_add(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            add_if_waiting()

        loader.exec_module = run_and_add
        return spec


_waiting = _Waiting()


def register() -> None:
    """Let ``from_pretrained`` load checkpoints of marlinq's formats with marlinq's linears, from now on.

    What marlinq does not read is transformers' business, as is a call with a ``quantization_config`` of
    transformers' own (``GPTQConfig``, ``AwqConfig``, ``CompressedTensorsConfig``). Calling it twice changes
    nothing.

    Warns:
        UserWarning: this transformers can't be extended so (below 5.17, or changed since).
    """
    if _TABLE in sys.modules:
        _add()
    elif _waiting not in sys.meta_path:
        sys.meta_path.insert(0, _waiting)


def unregister() -> None:
    """Leave ``from_pretrained`` to transformers again, until :func:`register` is called.

    Models that were loaded before stay as they are.
    """
    if _waiting in sys.meta_path:
        sys.meta_path.remove(_waiting)
    if _TABLE in sys.modules:
        import_module(_QUANTIZER).remove()


def add_if_waiting() -> None:
    """What :func:`register` left to be done, once transformers' table and our quantizer are imported."""
    # Our own module may be what imports the table; it then calls this function again at its end.
    halfway = _QUANTIZER in sys.modules and not hasattr(sys.modules[_QUANTIZER], "add")
    if _waiting in sys.meta_path and not halfway:
        sys.meta_path.remove(_waiting)
        _add()


def _add() -> None:
    try:
        import_module(_QUANTIZER).add()
    except (ImportError, AttributeError) as error:
        # Whoever imports transformers for other ends must be able to.
        warnings.warn(
            f"marlinq can't extend this transformers ({error}); from_pretrained does not use marlinq: "
            "install transformers 5.17 or newer, or load with marlinq.load",
            stacklevel=2,
        )
