"""A toy of everything that can be registered: element, layout, dialect, method, operator.

Each is as small as it can be and unlike the real ones where that could hide an assumption: suffixes that no
other layout has, words that are masked, zero points that never exist, codes whose values come from a table,
options of its own, an operator that is no dense matrix. :func:`registered` adds them while a test runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from marlinq.core.dtypes import torch_dtype
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep, Rule, Rules
from marlinq.core.scheme import ELEMENTS, Element, Scheme, register_element
from marlinq.core.schemes import SCHEMES, NamedScheme, register_scheme
from marlinq.core.settings import Fraction, setting
from marlinq.core.weight import Grid, QuantizedWeight
from marlinq.formats import (
    FORMATS,
    LAYOUTS,
    Format,
    ModuleSpec,
    StoredWeight,
    TensorSpec,
    WordLayout,
    register_format,
)
from marlinq.formats.dialects import DIALECTS, Dialect, Keys, QuantizationConfig, register_dialect
from marlinq.formats.layouts.layout import g_idx_refusal
from marlinq.methods import METHODS, Method, MethodOptions, SolveReport, Statistics, register_method
from marlinq.methods.quantity import ErrorQuantity
from marlinq.runtime import OPERATORS, Estimate, Operator, Setting, register_operator

# Values between which the steps grow outwards; code 3 is -1 and code 11 is 1, so no code is its own value.
TOY4 = Element("toy4", 4, tuple(float(v) for v in (-8, -5, -3, -1, -6, -4, -2, 0, 2, 4, 6, 1, 3, 5, 8, 7)))
_MASK = 0x5A5A5A5A


class ToyLayout(WordLayout):
    """Natural words under a mask, ``t_words`` int32 [K/8, N], and ``t_steps`` [G, N]; no zeros, no g_idx."""

    key = "t_words"
    scale_key = "t_steps"
    suffixes = ("t_words", "t_steps")
    scale_dtype = "float32"

    def __init__(self, name: str, element: str) -> None:
        self.name = self.family = name
        self.elements = (element,)

    def as_stored(self, scheme: Scheme) -> Scheme:
        return Scheme(scheme.element, scheme.granularity, scheme.element.zero_point, scheme.scale_dtype)

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        if scheme.stores_zeros:
            return "asymmetric weights; a toy stores no zero points"
        return super().scheme_refusal(scheme)

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if spec.in_features % 8:
            return f"K={spec.in_features} is not a multiple of 8"
        return super().scheme_refusal(spec.scheme)

    def value_refusal(self, grid: Grid) -> str | None:
        if grid.scheme.stores_zeros:
            return "asymmetric: a toy stores no zero points"
        return g_idx_refusal(grid)

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        return {
            "t_words": TensorSpec("int32", (spec.in_features // 8, spec.out_features)),
            "t_steps": TensorSpec(spec.scheme.scale_dtype, (spec.groups, spec.out_features)),
        }

    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        rows, columns = shapes["t_words"]
        return rows * 8, columns

    def from_natural(self, natural: Tensor) -> Tensor:
        return natural ^ _MASK

    def to_natural(self, stored: Tensor) -> Tensor:
        return stored ^ _MASK

    def channels(self, stored: Tensor, start: int, stop: int, element: Element) -> Tensor:
        return stored[start // 8 : stop // 8]

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        return {"t_steps": grid.scales.contiguous()}

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        return Grid.of(spec.scheme, spec.shape, scales=tensors["t_steps"])


class ToyDialect(Dialect):
    """``quant_method: toy``: one element, every group size by name, and what is left out."""

    name = "toy"
    quant_methods = ("toy",)

    def read(self, keys: Keys) -> QuantizationConfig:
        element = ELEMENTS[keys.raw["element"]]
        rules = [Rule(keys.exact(name), Keep("left out")) for name in keys.names("left_out")]
        for name, size in keys.mapping("sizes").items():
            scheme = Scheme(element, Granularity.from_group_size(size), element.zero_point)
            rules.append(Rule(keys.exact(name), scheme))
        default = Keep("not named")
        return QuantizationConfig(keys.raw["layout"], Rules(default, tuple(rules)))

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        (element,) = {spec.scheme.element.name for spec in modules.values()}
        sizes = {name: spec.granularity.group_size for name, spec in modules.items()}
        return {
            "quant_method": "toy",
            "layout": form.name,
            "element": element,
            "sizes": sizes,
            "left_out": list(unquantized),
        }


@dataclass(frozen=True)
class ToyOptions(MethodOptions):
    """How much of a group's range the toy method keeps."""

    keep: float = setting(0.9, Fraction(), "Share of a group's largest weight that the codes reach.")


class ToyMethod(Method[ToyOptions, Statistics]):
    """The nearest value on a range that is cut by a share; needs no calibration."""

    name = "toy"
    options = ToyOptions
    calibrated = False

    def solve(
        self,
        weights: Sequence[Tensor],
        statistics: Statistics | None,
        scheme: Scheme,
        options: ToyOptions,
        *,
        names: Sequence[str],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        assert statistics is None
        solved = []
        for weight in weights:
            n, k = weight.shape
            size = scheme.channels_per_group(k)
            groups = weight.float().t().reshape(k // size, size, n)
            highest = max(scheme.element.table) if scheme.element.table else scheme.element.midpoint - 1
            scales = (groups.abs().amax(1).clamp(min=1e-6) * options.keep / highest).to(
                torch_dtype(scheme.scale_dtype)
            )
            values = groups / scales.float().unsqueeze(1) + scheme.element.midpoint
            codes = scheme.element.nearest(values).reshape(k, n)
            quantized = QuantizedWeight.from_codes(scheme, codes, scales=scales)
            loss = (weight.float() - quantized.dequantize()).norm() / weight.float().norm()
            solved.append((quantized, SolveReport(float(loss) ** 2, ErrorQuantity.WEIGHTS)))
        return solved


class _TableLinear(nn.Module):
    """Looks values up at every call: no dense weight is kept."""

    def __init__(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> None:
        super().__init__()
        self.weight_of, self.bias, self.dtype = stored.weight(setting.device), bias, setting.dtype
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        weight = self.weight_of.dequantize(self.dtype)
        return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(self.dtype))


class ToyOperator(Operator):
    """For elements with a table, on the CPU; says that it takes no time, so that it is chosen."""

    name = "toy"

    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        if stored.spec.scheme.element.table is None:
            return f"{stored.spec.scheme.element.name} weights; the toy looks values up in a table"
        return None if setting.device.type == "cpu" else "the toy runs on the CPU"

    def estimate(self, stored: StoredWeight, setting: Setting, rows: int) -> Estimate:
        return Estimate(0.0, "a toy takes no time")

    def build(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> nn.Module:
        return _TableLinear(stored, bias, setting)


@contextmanager
def registered() -> Iterator[None]:
    """All toys, in every registry, for a while."""
    registries: tuple[dict[str, Any], ...] = (
        ELEMENTS,
        SCHEMES,
        LAYOUTS,
        FORMATS,
        DIALECTS,
        METHODS,
        OPERATORS,
    )
    before = [dict(registry) for registry in registries]
    register_element(TOY4)
    register_scheme(NamedScheme("toy4", "4-bit codes of a table", TOY4, None))
    for name, element in (("toy", "int4"), ("toy-table", "toy4")):
        register_format(Format(name, "toy", (ToyLayout(name, element),)))
    register_dialect(ToyDialect())
    register_method(ToyMethod())
    register_operator(ToyOperator())
    # Its options are those of the methods there were when it was imported.
    sys.modules.pop("marlinq.cli.quantize", None)
    try:
        yield
    finally:
        for registry, kept in zip(registries, before, strict=True):
            registry.clear()
            registry.update(kept)
        sys.modules.pop("marlinq.cli.quantize", None)
