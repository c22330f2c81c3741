"""Finds the norms of a model by running every module that may be one."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from marlinq.models.anatomy import Norm
from marlinq.models.formulas import NormFormula, norm_formula
from marlinq.models.linears import is_linear

_ANY_WIDTH = 64
"""channels that a norm of any width is tried with"""


def find_norms(model: PreTrainedModel) -> dict[str, Norm]:
    """Full name -> norm, for each module of ``model`` that computes one on random rows."""
    norms: dict[str, Norm] = {}
    probed: dict[tuple[object, ...], NormFormula | None] = {}
    for name, module in model.named_modules():
        if is_linear(module) or any(True for _ in module.children()) or any(True for _ in module.buffers()):
            continue
        shapes = {key: tuple(value.shape) for key, value in module.named_parameters()}
        if any(len(shape) != 1 for shape in shapes.values()) or not shapes.keys() <= {"weight", "bias"}:
            continue
        width = next(iter(shapes.values()))[0] if shapes else _declared_width(module)
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (int, float, bool))}
        key = (type(module), tuple(shapes.items()), width, tuple(sorted(plain.items())))
        if key not in probed:
            probed[key] = norm_formula(module, width or _ANY_WIDTH)
        norm = probed[key]
        if norm is not None:
            norms[name] = Norm(name, norm.kind, norm.eps, norm.offset, norm.narrow_first, width)
    return norms


def _declared_width(module: nn.Module) -> int:
    """Channels of a norm without a weight, from ``normalized_shape``; 0 if it takes any number."""
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if isinstance(shape, (tuple, list)) and shape else 0
