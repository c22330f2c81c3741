"""Recognises norms, activations and rotary embeddings by running them on random numbers.

A name says little about a module: the same ``RMSNorm`` adds one to its weight in one model and rounds at
another place in the next. Each function here compares the module with formulas and returns the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

TOLERANCE = 1e-5
"""largest relative difference between float32 results in another order of operations: 80 roundings of
2**-24"""

_ROWS = 16
_SEED = 20_260

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ExpertActivation = Activation | Literal["clamped_swiglu"]
GateActivation = Literal["sigmoid", "softplus"]
"""Function of a gate of attention's result."""
GATES: Mapping[GateActivation, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """GPT-OSS's activation between an expert's gate and up projections and its down projection."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@dataclass(frozen=True)
class NormFormula:
    """The fields of :class:`marlinq.models.anatomy.Norm` that a probe can see."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float
    narrow_first: bool


def close(given: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of one shape differ only by rounding, relative to the largest value."""
    if given.shape != expected.shape or not bool(torch.isfinite(given).all()):
        return False
    bound = TOLERANCE * float(expected.abs().max().clamp_min(1e-30))
    return float((given - expected).abs().max()) <= bound


def factor(given: Tensor, base: Tensor) -> float | None:
    """The number c with ``found = c * base`` up to rounding, or None; both have one shape."""
    if given.shape != base.shape:
        return None
    wide, narrow = given.double(), base.double()
    square = float((narrow * narrow).sum())
    if square == 0:
        return None
    value = float((wide * narrow).sum()) / square
    # Rounded, so that recordings of one model give the same number.
    return tidy_root(value) if value and close(wide, value * narrow) else None


def tidy(value: float) -> float:
    """``value``, or a number with few digits that differs from it only by rounding."""
    for digits in range(1, 6):
        short = float(f"{value:.{digits}g}")
        if abs(short - value) <= 1e-7 * abs(value):
            return short
    return value


def tidy_root(value: float) -> float:
    """``value``, or a number with few digits or the root of one, that differs from it only by rounding."""
    short, square = tidy(value), tidy(value * value)
    if short != value:
        return short
    return math.copysign(math.sqrt(square), value) if square != value * value else float(f"{value:.7g}")


def norm_formula(module: nn.Module, width: int) -> NormFormula | None:
    """The formula of the norm ``module`` on [..., width], or None for anything else.

    The input's rows have very different sizes, so that a wrong ``eps`` shows.
    """
    generator = torch.Generator().manual_seed(_SEED)
    parameters = {
        name: 1 + 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in module.named_parameters()
    }
    sizes = torch.logspace(-4, 2, _ROWS)[:, None]
    x = sizes * (0.2 + torch.randn(_ROWS, width, generator=generator))
    output = _run(module, parameters, x)
    if output is None or output.shape != x.shape:
        return None
    for kind, eps, offset in product(("rms", "layer"), _small_numbers(module), (0.0, 1.0)):
        formula = NormFormula(kind, eps, offset, False)  # type: ignore[arg-type]
        expected = normalise(formula, x.double(), parameters.get("weight"), parameters.get("bias"))
        if all(close(a, b) for a, b in zip(output.double(), expected, strict=True)):
            return _rounding(module, formula, parameters, x)
    return None


def _run(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            output = functional_call(module, dict(parameters), (x,))
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
        # A norm takes a single tensor.
        return None
    return output if isinstance(output, Tensor) else None


def _small_numbers(module: nn.Module) -> list[float]:
    """Numbers among a module's attributes that may be an epsilon, and the usual ones."""
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1}
    # Usual epsilons too, because Olmo's is not an attribute.
    return [*sorted(numbers), *sorted({1e-5, 1e-6} - numbers)]


def normalise(
    formula: NormFormula,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The formula in the dtype of ``x``; ``dtype`` is that of the activations, where results are rounded."""
    if formula.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    result = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + formula.eps)
    if dtype is not None and formula.narrow_first:
        result = result.to(dtype).to(x.dtype)
    if weight is not None:
        result = result * (weight.to(x.dtype) + formula.offset)
    if bias is not None:
        result = result + bias.to(x.dtype)
    return result if dtype is None else result.to(dtype)


def _rounding(
    module: nn.Module, formula: NormFormula, parameters: Mapping[str, Tensor], x: Tensor
) -> NormFormula:
    """Whether the normalised value is rounded before it is multiplied by the weight: the order of rounding
    that agrees with the module in more elements."""
    narrow = torch.bfloat16
    rounded = {name: value.to(narrow) for name, value in parameters.items()}
    output = _run(module, rounded, x.to(narrow))
    wide = x.to(narrow).float()
    weight, bias = rounded.get("weight"), rounded.get("bias")

    def differing(narrow_first: bool) -> int:
        candidate = NormFormula(formula.kind, formula.eps, formula.offset, narrow_first)
        expected = normalise(candidate, wide, weight, bias, narrow)
        return int((expected != output).sum()) if output is not None else 0

    first = differing(True) < differing(False)
    return NormFormula(formula.kind, formula.eps, formula.offset, first)


def rotate(x: Tensor, frequencies: Tensor, positions: Tensor, *, interleaved: bool, scaling: float) -> Tensor:
    """x [..., T, D] with its first channels rotated: pairs of neighbours, or of halves.

    Args:
        x: heads, float.
        frequencies: [C / 2], radians per position, for the first C channels.
        positions: [T].
        interleaved, scaling: as in :class:`marlinq.models.anatomy.Rotary`.
    """
    half = frequencies.shape[0]
    angles = positions.float()[:, None] * frequencies.float()
    cosines, sines = angles.cos() * scaling, angles.sin() * scaling
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    one, two = first * cosines - second * sines, second * cosines + first * sines
    turned = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    return torch.cat((turned, rest), -1)
