"""Which linear of a model each quantised module of a checkpoint is."""

from __future__ import annotations

import re

from marlinq.checkpoint import QuantizedCheckpoint, without_quantization_config
from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.models.blueprint import Blueprint, build_blueprint
from marlinq.models.names import TensorNames


def quantized_linears(blueprint: Blueprint, view: QuantizedCheckpoint) -> dict[str, str]:
    """Projection name -> the checkpoint's name for it, for every projection that is quantised there.

    Modules that the architecture tells loaders to ignore, such as the draft layers of some families, are
    left out.

    Raises:
        CheckpointError: a quantised module is no linear of the model, or a linear of another shape.
    """
    names = TensorNames(blueprint, view.checkpoint.tensors.keys(), source=str(view.checkpoint.path))
    found: dict[str, str] = {}
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
        found[name] = stem
    strangers = set(view.modules) - set(found.values())
    homeless = sorted(module for module in strangers if not is_ignored(blueprint, view, module))
    if homeless:
        raise CheckpointError(
            f"{view.checkpoint.path}: quantised module {homeless[0]} ({len(homeless)} such) is no linear of "
            f"{blueprint.architecture}{_instead(blueprint, names, view, homeless[0])}"
        )
    return found


def check_linears(view: QuantizedCheckpoint) -> str | None:
    """Refuse quantised modules that are no linears of the model that ``config.json`` describes.

    Returns:
        None, or why it can't be told: the model can't be built.

    Raises:
        CheckpointError: as :func:`quantized_linears`.
    """
    checkpoint = view.checkpoint
    try:
        blueprint = build_blueprint(
            without_quantization_config(checkpoint.config),
            source=str(checkpoint.path),
            tensors=checkpoint.tensors,
        )
    except MarlinqError as error:
        return f"{view.doubtful_linears()[0]}: can't be told to be a linear of the model: {error}"
    quantized_linears(blueprint, view)
    return None


def is_ignored(blueprint: Blueprint, view: QuantizedCheckpoint, module: str) -> bool:
    """Whether every tensor of a quantised module is one that the architecture has no place for."""
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in blueprint.ignored))
    return all(ignored.search(name) for name in view.tensor_names(module).values())


def _instead(blueprint: Blueprint, names: TensorNames, view: QuantizedCheckpoint, module: str) -> str:
    """What the model has in the place of ``module``, and what to do."""
    for kept, keep in blueprint.kept.items():
        if names.quantized(kept, view) == module:
            return (
                f", but its {keep.reason.partition(':')[0]}; `marlinq convert --to dense` stores every "
                "module in 16 bits, and `marlinq quantize` quantises those that can be"
            )
    return "; config.json describes another model"
