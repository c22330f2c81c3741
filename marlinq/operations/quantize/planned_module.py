"""The plan for one linear: its names in source and output, method, layout and scheme."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from marlinq.checkpoint import Checkpoint, TensorPlan
from marlinq.core.dtypes import FLOATS
from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.formats import Format, Layout, ModuleSpec
from marlinq.methods import METHODS, Method, MethodOptions
from marlinq.models import Projection, TensorNames
from marlinq.operations.quantize.module_settings import AUTO_GROUP_SIZES, ModuleSettings, common_group_size


@dataclass(frozen=True)
class PlannedModule:
    """One projection that will be quantised.

    Attributes:
        projection: the projection in the model.
        stored: name of the module in the output; the layout adds suffixes for its tensors.
        source: name of the checkpoint's tensor with its weight; for a tied head, the embedding's.
        method: method that quantises its weight.
        options: options of the method.
        layout: layout of its tensors.
        spec: shape and scheme in the output.
        reason: source of scheme and options, as text.
        granularity: weights that share a scale, as asked for; where a group would be as wide as the module or
            wider, :attr:`spec` has one scale per channel instead.
    """

    projection: Projection
    stored: str
    source: str
    method: Method[Any, Any]
    options: MethodOptions
    layout: Layout
    spec: ModuleSpec
    reason: str
    granularity: Granularity


@dataclass(frozen=True)
class AutomaticGroups:
    """The group size of all modules whose group size is ``auto``.

    Attributes:
        size: input channels per scale.
        in_features: distinct K of these modules, ascending.
    """

    size: int
    in_features: tuple[int, ...]

    @classmethod
    def of(cls, in_features: Iterable[int]) -> AutomaticGroups | None:
        """The largest automatic size that divides all of ``in_features``; None where there is none."""
        different = tuple(sorted(set(in_features)))
        size = common_group_size(different)
        return None if not different or size is None else cls(size, different)

    def describe(self) -> str:
        """Size and reason in one line."""
        sizes = f"{', '.join(map(str, AUTO_GROUP_SIZES[:-1]))} and {AUTO_GROUP_SIZES[-1]}"
        different = ", ".join(map(str, self.in_features))
        return f"{self.size}: the largest of {sizes} that divides every linear's input channels ({different})"


def plan_module(
    checkpoint: Checkpoint,
    names: TensorNames,
    form: Format,
    projection: Projection,
    settings: ModuleSettings,
    automatic: AutomaticGroups | None = None,
) -> PlannedModule | str:
    """The plan for one projection, or why ``form`` can't hold it.

    Args:
        checkpoint, names: the source and the names of its tensors.
        form: format of the output.
        projection: projection to quantise.
        settings: its scheme, method and options.
        automatic: group size for settings whose group size is ``auto``.

    Raises:
        UnsupportedError: the source's weight is not a dense one.
    """
    if (reason := settings.group_refusal(projection.in_features)) is not None:
        return reason
    if settings.granularity is None and automatic is not None:
        settings = replace(settings, granularity=Granularity.group(automatic.size))
    stored = names.holder(projection)
    layout = settings.layout(form)
    spec = _spec(layout, projection, settings, checkpoint.tensors[stored].dtype, stored)
    if (reason := layout.shape_refusal(spec)) is not None:
        return reason
    return PlannedModule(
        projection,
        names.module(projection),
        stored,
        METHODS[settings.method],
        settings.options,
        layout,
        spec,
        settings.reason,
        settings.granularity or spec.granularity,
    )


def _spec(
    layout: Layout, projection: Projection, settings: ModuleSettings, stored: str, name: str
) -> ModuleSpec:
    if stored not in FLOATS:
        raise UnsupportedError(
            f"tensor {name!r}: expected float32, bfloat16 or float16 weights, found {stored}; "
            "pass the unquantised model"
        )
    # Scales take the model's dtype where the layout does not fix theirs; float16 for a float32 model.
    own = stored if stored != "float32" else "float16"
    scheme = settings.scheme(projection.in_features, layout.scale_dtype or own)
    scheme = replace(scheme, tensor_scale=layout.as_stored(scheme).tensor_scale)
    return ModuleSpec(projection.in_features, projection.out_features, scheme)


def packed_tensors(planned: PlannedModule) -> list[TensorPlan]:
    """The output tensors of a quantised module."""
    return [
        TensorPlan(f"{planned.stored}.{suffix}", tensor.dtype, tensor.shape)
        for suffix, tensor in planned.layout.expected(planned.spec).items()
    ]


def module_note(planned: PlannedModule) -> str:
    """Key of the writer's note about a quantised module."""
    return f"module {planned.stored}"


def described_scheme(planned: PlannedModule | None) -> str:
    """The scheme of a linear in words; ``planned`` is None where it is not quantised."""
    if planned is None:
        return "not quantised"
    # Where one group covers all channels, its size is shown: the experts' other matrices have more groups.
    asked, spec = planned.granularity, planned.spec
    if asked.kind == "group":
        asked = Granularity.group(spec.channels_per_group)
    return replace(spec.scheme, granularity=asked).describe()
