"""The quantise operation: block by block, with a journal, resumable.

Exports are imported on first use, so that the command line reads recipes without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marlinq.operations.quantize.plan_report import PlanReport, plan_quantize
    from marlinq.operations.quantize.quantize_model import quantize
    from marlinq.operations.quantize.quantize_report import ModuleReport, QuantizeReport
    from marlinq.operations.quantize.recipe import Recipe, read_recipe

_HOMES = {
    "ModuleReport": "quantize_report",
    "PlanReport": "plan_report",
    "QuantizeReport": "quantize_report",
    "Recipe": "recipe",
    "plan_quantize": "plan_report",
    "quantize": "quantize_model",
    "read_recipe": "recipe",
}
__all__ = [
    "ModuleReport",
    "PlanReport",
    "QuantizeReport",
    "Recipe",
    "plan_quantize",
    "quantize",
    "read_recipe",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
