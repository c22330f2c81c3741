"""The entries for marlinq in transformers' two tables of quantisation methods.

transformers finds the class that parses a ``quantization_config`` by its ``quant_method``, and the quantizer
by the parsed config's ``quant_method``. For every method that marlinq reads, the first table therefore gets a
class whose ``from_dict`` chooses between :class:`MarlinqConfig` and transformers' own class. The second table
gets one new entry, ``marlinq``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from marlinq.core.errors import MarlinqError
from marlinq.formats.dialects import DIALECTS, Keys, dialect_of
from marlinq.integrations.transformers.quantizer import METHOD, MarlinqConfig, MarlinqQuantizer

_before: dict[str, type | None] = {}
"""quant_method -> transformers' own config class, or None if it has none; empty while not registered"""


def add(operator: str, *, compile_kernels: bool) -> None:
    """Adds the entries, with the settings of :func:`marlinq.integrations.transformers.register`."""
    remove()
    register_quantizer(METHOD)(MarlinqQuantizer)
    for method in {method for dialect in DIALECTS.values() for method in dialect.quant_methods}:
        own = _before[method] = AUTO_QUANTIZATION_CONFIG_MAPPING.pop(method, None)
        register_quantization_config(method)(_choice(own, operator, compile_kernels))


def remove() -> None:
    """Restores both tables."""
    if not _before:
        return
    AUTO_QUANTIZER_MAPPING.pop(METHOD)
    for method, own in _before.items():
        if own is None:
            del AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        else:
            AUTO_QUANTIZATION_CONFIG_MAPPING[method] = own
    _before.clear()


def _choice(own: type[Any] | None, operator: str, compile_kernels: bool) -> type[Any]:
    """A config class for the table, instead of ``own``."""

    def from_dict(config_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        if own is not None and (refusal := _refusal(config_dict)) is not None:
            warnings.warn(
                f"marlinq does not load this checkpoint, transformers' own quantizer does: {refusal}",
                stacklevel=2,
            )
            return own.from_dict(config_dict, *arguments, **options)
        # transformers has no class of its own: the quantizer will refuse with the same reason.
        config = MarlinqConfig.from_dict(config_dict)
        config.operator, config.compile_kernels = operator, compile_kernels
        return config

    parent = own or MarlinqConfig
    return type(parent.__name__, (parent,), {"from_dict": staticmethod(from_dict)})


def _refusal(stored: Mapping[str, Any]) -> str | None:
    """Why marlinq does not read checkpoints with this ``quantization_config``, or None."""
    try:
        dialect_of(stored, "quantization_config").read(Keys(dict(stored), "quantization_config"))
    except MarlinqError as error:
        return str(error)
    return None
