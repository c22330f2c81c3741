"""Dialects of ``quantization_config``, one file each, and their registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.core.errors import CheckpointError, ConversionRefused, UnsupportedError
from marlinq.formats.dialects.auto_round import AutoRoundDialect
from marlinq.formats.dialects.awq import AWQDialect
from marlinq.formats.dialects.compressed_tensors import CompressedTensorsDialect
from marlinq.formats.dialects.dialect import Dialect, QuantizationConfig
from marlinq.formats.dialects.fp8 import FP8Dialect
from marlinq.formats.dialects.gptq import GPTQDialect
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.dialects.modelopt import ModelOptDialect
from marlinq.formats.dialects.mxfp4 import MXFP4Dialect
from marlinq.formats.dialects.name_patterns import is_head
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec

DIALECTS: dict[str, Dialect] = {}
"""Every dialect by its name."""


def register_dialect(dialect: Dialect) -> Dialect:
    """Make ``dialect`` known to readers and writers of configs by its name; returns it."""
    DIALECTS[dialect.name] = dialect
    return dialect


for _dialect in (
    GPTQDialect(),
    AWQDialect(),
    CompressedTensorsDialect(),
    FP8Dialect(),
    ModelOptDialect(),
    MXFP4Dialect(),
    AutoRoundDialect(),
):
    register_dialect(_dialect)


def dialect_of(raw: Mapping[str, Any], where: str) -> Dialect:
    """The dialect of a config object; ``where`` names it in messages.

    Raises:
        UnsupportedError: marlinq does not read its ``quant_method``.
        CheckpointError: it has none, and other keys don't tell.
    """
    method = raw.get("quant_method")
    known = sorted(name for dialect in DIALECTS.values() for name in dialect.quant_methods)
    if method is None:
        for dialect in DIALECTS.values():
            if any(mark in raw for mark in dialect.marks):
                return dialect
        if "bits" in raw:
            return DIALECTS["gptq"]
        raise CheckpointError(
            f"{where}: quant_method: expected one of {', '.join(known)}, found none; restore it from the "
            "original, or remove the config if the model is not quantised"
        )
    for dialect in DIALECTS.values():
        if method in dialect.quant_methods:
            return dialect
    raise UnsupportedError(
        f"{where}: quant_method {method!r} is not supported; marlinq reads {', '.join(known)}"
    )


def write_quantization_config(
    form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint, in the dialect of its format; see :meth:`Dialect.write`.

    Raises:
        ConversionRefused: there is no quantised module, or the dialect can't express these settings.
    """
    if not modules:
        raise ConversionRefused(f"{form.name}: no module is quantised; nothing to describe")
    return DIALECTS[form.dialect].write(form, modules, unquantized)


__all__ = [
    "DIALECTS",
    "Dialect",
    "Keys",
    "QuantizationConfig",
    "dialect_of",
    "is_head",
    "register_dialect",
    "write_quantization_config",
]
