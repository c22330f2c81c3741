"""Matches the quantised modules of a checkpoint with the linears of its model."""

from __future__ import annotations

from collections.abc import Collection

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, without_quantization_config
from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.models.blueprint import Blueprint, build_blueprint
from marlinq.models.left_out import left_out
from marlinq.models.names import TensorNames


def quantized_linears(blueprint: Blueprint, view: QuantizedCheckpoint) -> dict[str, str]:
    """Name of each quantised projection -> its name in the checkpoint.

    Modules that the model leaves out on purpose, such as those of draft heads, are left out here too.

    Raises:
        CheckpointError: a quantised module is no linear of the model, or has another shape.
    """
    names = TensorNames(blueprint, view.checkpoint.tensors.keys(), source=str(view.checkpoint.path))
    classes: dict[str, str] = {}
    for name, projection in blueprint.by_name.items():
        stem = names.quantized(name, view)
        if stem is None:
            continue
        spec = view.modules[stem]
        expected = (projection.in_features, projection.out_features)
        if (spec.in_features, spec.out_features) != expected:
            raise CheckpointError(
                f"{view.checkpoint.path}: {stem}: expected K, N = {expected[0]}, {expected[1]} from "
                f"config.json, found {spec.in_features}, {spec.out_features}"
            )
        classes[name] = stem
    strangers = set(view.modules) - set(classes.values())
    left = left_out(blueprint, view.checkpoint.tensors)
    homeless = sorted(
        module for module in strangers if not all(map(left, view.tensor_names(module).values()))
    )
    if homeless:
        raise CheckpointError(
            f"{view.checkpoint.path}: quantised module {homeless[0]} ({len(homeless)} such) is no linear of "
            f"{blueprint.architecture}{_instead(blueprint, names, view, homeless[0])}"
        )
    return classes


def check_linears(view: QuantizedCheckpoint) -> str | None:
    """Checks that every quantised module is a linear of the model that ``config.json`` describes.

    Returns:
        None, or why that can't be checked (the model can't be built).

    Raises:
        CheckpointError: a quantised module is no linear of the model, or has another shape.
    """
    try:
        blueprint = _blueprint_of(view.checkpoint)
    except MarlinqError as error:
        return f"{view.doubtful_linears()[0]}: can't be told to be a linear of the model: {error}"
    quantized_linears(blueprint, view)
    return None


def linears_in_memory(view: QuantizedCheckpoint, quantized: Collection[str]) -> list[str]:
    """The linears of the model that are not quantised, by the names under which transformers looks them up.

    Empty where the model can't be built. ``quantized``: names in the checkpoint.
    """
    try:
        blueprint = _blueprint_of(view.checkpoint)
        stems = quantized_linears(blueprint, view)
    except MarlinqError:
        return []
    return [name for name in blueprint.by_name if stems.get(name) not in quantized]


def _blueprint_of(checkpoint: Checkpoint) -> Blueprint:
    """The blueprint of the model that a quantised checkpoint was made from."""
    return build_blueprint(
        without_quantization_config(checkpoint.config),
        source=str(checkpoint.path),
        tensors=checkpoint.tensors,
    )


def _instead(blueprint: Blueprint, names: TensorNames, view: QuantizedCheckpoint, module: str) -> str:
    """End of a message: what the model has under the name ``module``, and what to do."""
    for kept, keep in blueprint.kept.items():
        if names.quantized(kept, view) == module:
            return (
                f", but its {keep.reason.partition(':')[0]}; `marlinq convert --to dense` stores every "
                "module in 16 bits, and `marlinq quantize` quantises those that can be"
            )
    return "; config.json describes another model"
