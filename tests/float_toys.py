"""Toys of low-precision floats: byte codes with block scales, nibble codes with scales of two levels.

They have the semantics of real containers (E4M3 with one float32 scale per 128 x 128 block, E2M1 with an E4M3
scale per 16 channels and a float32 scale per tensor) under names that no real one has, but for the codes of
:class:`BlockLayout`: they are called ``weight``, as an unquantised weight is. :func:`registered` adds them
while a test runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep, Rule, Rules
from marlinq.core.scheme import ELEMENTS, Activations, Element, Scheme, TensorScale
from marlinq.core.weight import Grid
from marlinq.formats import (
    FORMATS,
    LAYOUTS,
    ByteLayout,
    Format,
    ModuleSpec,
    TensorSpec,
    WordLayout,
    register_format,
)
from marlinq.formats.dialects import DIALECTS, Dialect, Keys, QuantizationConfig, register_dialect

BLOCK = Granularity.block(128, 128)


class BlockLayout(ByteLayout):
    """``weight`` float8_e4m3fn [N, K] and ``block_scales`` float32 [ceil(N/128), ceil(K/128)]."""

    name = family = "toy-blocks"
    key, code_dtype = "weight", "float8_e4m3fn"
    scale_key = "block_scales"
    suffixes = (key, scale_key)
    elements = ("fp8_e4m3",)
    scale_dtype = "float32"
    granularity, granularities = BLOCK, ("block",)
    holds_activations = True

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        shape = spec.granularity.scales_shape(*spec.shape)
        return {
            self.key: self.codes_spec(spec),
            self.scale_key: TensorSpec(spec.scheme.scale_dtype, shape[::-1]),
        }

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        return {self.scale_key: grid.scales.t().contiguous()}

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        return Grid.of(spec.scheme, spec.shape, scales=tensors[self.scale_key].t().contiguous())


class BlockWords(WordLayout):
    """The same weights in int32 words [K/4, N], ``b_words``, and ``b_scales`` [G, P]."""

    name = family = "toy-block-words"
    key, scale_key = "b_words", "b_scales"
    suffixes = (key, scale_key)
    elements = ("fp8_e4m3",)
    scale_dtype = "float32"
    granularity, granularities = BLOCK, ("block",)
    holds_activations = True

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if spec.in_features % 4:
            return f"K={spec.in_features} is not a multiple of 4"
        return self.scheme_refusal(spec.scheme)

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        shape = spec.granularity.scales_shape(*spec.shape)
        return {
            self.key: TensorSpec("int32", (spec.in_features // 4, spec.out_features)),
            self.scale_key: TensorSpec(spec.scheme.scale_dtype, shape),
        }

    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        rows, columns = shapes[self.key]
        return rows * 4, columns

    def from_natural(self, natural: Tensor) -> Tensor:
        return ~natural

    def to_natural(self, stored: Tensor) -> Tensor:
        return ~stored

    def channels(self, stored: Tensor, start: int, stop: int, element: Element) -> Tensor:
        return stored[start // 4 : stop // 4]

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        return {self.scale_key: grid.scales.contiguous()}

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        return Grid.of(spec.scheme, spec.shape, scales=tensors[self.scale_key])


class NibbleLayout(ByteLayout):
    """``n_codes`` uint8 [N, K/2], ``n_scales`` float8_e4m3fn [N, K/16] and ``n_second`` float32 [1].

    Args:
        name: of the layout.
        use: what the second level does to values times scales.
        swapped: the even channel is in the high nibble.
    """

    key, scale_key = "n_codes", "n_scales"
    suffixes = (key, scale_key, "n_second")
    elements = ("fp4_e2m1",)
    scale_dtype = "float8_e4m3fn"
    granularity, granularities = Granularity.group(16), ("group",)

    def __init__(self, name: str, use: TensorScale, *, swapped: bool = False) -> None:
        self.name = self.family = name
        self.tensor_scales = (use,)
        self._swapped = swapped

    def as_stored(self, scheme: Scheme) -> Scheme:
        return replace(scheme, tensor_scale=self.tensor_scales[0])

    def to_bytes(self, stored: Tensor) -> Tensor:
        return (stored << 4) | (stored >> 4) if self._swapped else stored

    def from_bytes(self, natural: Tensor) -> Tensor:
        return self.to_bytes(natural)

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if spec.in_features % 16:
            return f"K={spec.in_features} is not a multiple of 16"
        return super().shape_refusal(spec)

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        return {
            self.key: self.codes_spec(spec),
            self.scale_key: TensorSpec(spec.scheme.scale_dtype, (spec.out_features, spec.groups)),
            "n_second": TensorSpec("float32", (1,)),
        }

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        assert grid.tensor_scale is not None, "scheme_refusal says so"
        return {self.scale_key: grid.scales.t().contiguous(), "n_second": grid.tensor_scale.reshape(1)}

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        return Grid.of(
            spec.scheme,
            spec.shape,
            scales=tensors[self.scale_key].t().contiguous(),
            tensor_scale=tensors["n_second"].reshape(()),
        )


class FloatDialect(Dialect):
    """``quant_method: toy-floats``: one element, the tile that shares a scale in each module, activations."""

    name = "toy-floats"
    quant_methods = ("toy-floats",)

    def read(self, keys: Keys) -> QuantizationConfig:
        element, dynamic = ELEMENTS[keys.raw["element"]], keys.boolean("dynamic_activations")
        inputs = None if dynamic is None else Activations(element, Granularity.group(128), dynamic)
        rules: list[Rule[Scheme]] = [
            Rule(keys.exact(name), Keep("left out")) for name in keys.names("left_out")
        ]
        for name, tile in keys.mapping("tiles").items():
            scheme = Scheme(element, Granularity(*tile), element.zero_point, activations=inputs)
            rules.append(Rule(keys.exact(name), scheme))
        return QuantizationConfig(keys.raw["layout"], Rules(Keep("not named"), tuple(rules)))

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        schemes = {spec.scheme for spec in modules.values()}
        (element,) = {scheme.element.name for scheme in schemes}
        (inputs,) = {scheme.activations for scheme in schemes}
        return {
            "quant_method": "toy-floats",
            "layout": form.name,
            "element": element,
            "dynamic_activations": None if inputs is None else inputs.dynamic,
            "tiles": {
                name: [spec.granularity.channels, spec.granularity.outputs] for name, spec in modules.items()
            },
            "left_out": list(unquantized),
        }


@contextmanager
def registered() -> Iterator[None]:
    """All toys, in every registry, for a while."""
    registries: tuple[dict[str, Any], ...] = (LAYOUTS, FORMATS, DIALECTS)
    before = [dict(registry) for registry in registries]
    for layout in (
        BlockLayout(),
        BlockWords(),
        NibbleLayout("toy-nibbles", "multiplies"),
        NibbleLayout("toy-nibbles-swapped", "multiplies", swapped=True),
        NibbleLayout("toy-nibbles-divided", "divides"),
    ):
        register_format(Format(layout.name, "toy-floats", (layout,)))
    register_dialect(FloatDialect())
    try:
        yield
    finally:
        for registry, kept in zip(registries, before, strict=True):
            registry.clear()
            registry.update(kept)
