"""Finds quantised tensors in a checkpoint whose files declare no quantisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from marlinq.checkpoint.bitmasks import BITMASK_FORMAT, has_bitmask
from marlinq.checkpoint.draft_head import is_of_draft_head
from marlinq.checkpoint.header import TensorInfo
from marlinq.checkpoint.reader import Checkpoint
from marlinq.core.dtypes import FLOATS
from marlinq.core.errors import CheckpointError
from marlinq.core.scheme import ELEMENTS
from marlinq.formats import FORMATS, LAYOUTS, Format, Layout
from marlinq.formats.dialects import DIALECTS
from marlinq.formats.layouts.layout import UNQUANTIZED
from marlinq.formats.stacks import is_stack

_CODES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that no buffer of a model has."""
_PLAIN = (*FLOATS, "float64")


class UndeclaredError(CheckpointError):
    """Tensors are quantised, or sparse, and no config says how."""


def check_declared(checkpoint: Checkpoint) -> None:
    """Check that a checkpoint without ``quantization_config`` has no tensors that need one.

    Raises:
        UndeclaredError: it has; the message names one, the formats that have such, and the missing settings;
            or that scales are missing too.
    """
    found = _first_undeclared(checkpoint)
    if found is None:
        for name in checkpoint.tensors:
            reason = bare_codes(checkpoint, name)
            if reason is not None:
                raise UndeclaredError(reason)
        return
    name, formats = found
    ways = [f"quant_method {method} with {settings}" for method, settings in dict(formats.values()).items()]
    raise UndeclaredError(
        f"{checkpoint.path}: tensors such as {name} look like {' or '.join(formats)}, but config.json has no "
        f"quantization_config; restore it: {'; or '.join(ways)}"
    )


def bare_codes(checkpoint: Checkpoint, name: str) -> str | None:
    """What is wrong with the tensor ``name``, of no quantised linear, if it holds codes without scales.

    None if it holds none, and for draft heads: text goes on without one that is damaged.
    """
    info = checkpoint.tensors[name]
    if not _holds_codes(info) or is_of_draft_head(name, checkpoint.config):
        return None
    return (
        f"{checkpoint.path}: {name}: expected floating point {list(info.shape)}, found {info.dtype} without "
        "scales; copy the checkpoint again, or take the unquantised model"
    )


def damaged_draft(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    """A sentence about the first of ``names``, of no quantised linear, by which a draft head holds codes
    without scales; None without such."""
    for name in names:
        info = checkpoint.tensors[name]
        if _holds_codes(info) and is_of_draft_head(name, checkpoint.config):
            return (
                f"{name}: expected floating point {list(info.shape)}, found {info.dtype} without scales; the "
                "draft head is damaged: its drafts are rejected, so text is the same but takes longer"
            )
    return None


def _holds_codes(info: TensorInfo) -> bool:
    """Whether a tensor is codes: by its dtype, or by the name of a parameter. Buffers may be integers, GPT-2
    calls its mask of bytes ``attn.bias``, and zero points of activations and caches are int8 or FP8."""
    module, _, suffix = info.name.rpartition(".")
    if info.dtype in _CODES:
        return not suffix.endswith("zero_point")
    parameter = suffix == UNQUANTIZED or (suffix == "bias" and len(info.shape) == 1)
    return info.dtype not in _PLAIN and (parameter or module.endswith("experts"))


def _first_undeclared(checkpoint: Checkpoint) -> tuple[str, dict[str, tuple[str, str]]] | None:
    """The name of one tensor of a quantised linear, and of each format that stores such tensors: the
    ``quant_method`` and the other settings of its config. None if there is no such tensor."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        if is_stack(name):
            return name, _settings(form for form in FORMATS.values() if form.stacked)
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = info
    scales = {layout.scale_key for layout in LAYOUTS.values()}
    for module, tensors in modules.items():
        if has_bitmask(tensors):
            return f"{module}.bitmask", {BITMASK_FORMAT: ("compressed-tensors", "sparsity_config")}
        if scales.isdisjoint(tensors):
            continue
        keys = {form: _code_suffix(form, tensors) for form in FORMATS.values() if not form.stacked}
        fitting = {form: key for form, key in keys.items() if key is not None}
        if fitting:
            return f"{module}.{next(iter(fitting.values()))}", _settings(fitting)
    return None


def _settings(forms: Iterable[Format]) -> dict[str, tuple[str, str]]:
    """Format -> its ``quant_method``, and the other settings of its config in one string."""
    dialects = {form.name: DIALECTS[form.dialect] for form in forms}
    return {name: (each.quant_methods[0], ", ".join(each.settings)) for name, each in dialects.items()}


def _code_suffix(form: Format, tensors: Mapping[str, TensorInfo]) -> str | None:
    """The suffix of the codes among a module's ``tensors`` (by suffix); None if they are not ``form``'s."""
    owned = {suffix for layout in LAYOUTS.values() for suffix in layout.suffixes} & set(tensors)
    for layout in form.layouts:
        if (
            layout.key in tensors
            and tensors[layout.key].dtype == layout.code_dtype
            and layout.scale_key in tensors
            and layout.sparsity == form.sparsity
            and owned <= set(layout.suffixes)
            and _outputs_agree(layout, tensors)
        ):
            return layout.key
    return None


def _outputs_agree(layout: Layout, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether codes packed into words have as many outputs as the scales: AWQ packs another axis than GPTQ
    under the same names."""
    if layout.code_dtype != "int32":
        return True
    shapes = {suffix: info.shape for suffix, info in tensors.items() if suffix in layout.suffixes}
    if len(shapes[layout.key]) != 2:
        return False
    elements = (ELEMENTS[name] for name in layout.elements)
    return any(layout.infer_shape(shapes, element)[1] in shapes[layout.scale_key] for element in elements)
