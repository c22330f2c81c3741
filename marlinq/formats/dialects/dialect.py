"""The base class of dialects of ``quantization_config``, and the parsed config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marlinq.core.dtypes import FLOATS
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Rules
from marlinq.core.scheme import Scheme
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec


@dataclass(frozen=True)
class QuantizationConfig:
    """A parsed ``quantization_config``.

    Attributes:
        format: name of its format in :data:`marlinq.formats.FORMATS`.
        rules: scheme of every module, or the reason why it is unquantised. ``scale_dtype`` of these schemes
            is meaningless: the stored scales have it, configs don't.
        zero_writer: program that packed GPTQ v1 zeros (:mod:`marlinq.formats.layouts.gptq`); None where the
            config does not name it.
        raw: the object as parsed from JSON.
    """

    format: str
    rules: Rules
    zero_writer: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


class Dialect(ABC):
    """A dialect of ``quantization_config``, as one family of loaders reads it.

    It maps the object to and from :class:`~marlinq.core.rules.Rules`, and never reads files or tensors.
    """

    name: str
    quant_methods: tuple[str, ...]
    """The values of ``quant_method`` that name it."""
    marks: tuple[str, ...] = ()
    """Keys that only this dialect has, for old configs without ``quant_method``."""
    settings: tuple[str, ...] = ()
    """Keys beside ``quant_method`` that say what tensors don't, for a message about a lost config."""

    @abstractmethod
    def read(self, keys: Keys) -> QuantizationConfig:
        """Parse a config; ``raw`` of the result is left empty.

        Raises:
            UnsupportedError: a version, width or scheme that marlinq does not handle; the message names it.
            CheckpointError: a key is missing or of the wrong type.
        """

    @abstractmethod
    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint.

        Args:
            form: format of the checkpoint; its ``dialect`` is this one.
            modules: shape and scheme of every quantised module; at least one.
            unquantized: linear modules that stay unquantised, lm_head included.

        Raises:
            ConversionRefused: the dialect can't express these settings.
        """

    def says_head(self, config: QuantizationConfig, name: str) -> bool:
        """Whether the config marks the output head ``name`` as quantised for loaders that need it named."""
        return config.raw.get("lm_head") is True

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """JSON files beside config.json that some loaders read first, by name."""
        return {}


def declared_schemes(form: Format, modules: Mapping[str, ModuleSpec]) -> dict[str, Scheme]:
    """The scheme that a config gives for every module, so that modules with equal settings have equal
    schemes."""
    sizes = Counter(spec.granularity for spec in modules.values() if spec.granularity.kind == "group")
    usual = sizes.most_common(1)[0][0] if sizes else None
    declared = {}
    for name, spec in modules.items():
        granularity = spec.granularity
        # One scale per channel equals the usual group size where that is K; writing it alike gives fewer
        # schemes.
        if granularity == Granularity.channel() and usual == Granularity.group(spec.in_features):
            granularity = usual
        layout = form.layout_of(spec.scheme)
        if layout.only_groups is not None:
            granularity = Granularity.group(layout.only_groups)
        declared[name] = replace(
            layout.as_stored(spec.scheme),
            granularity=granularity,
            sparsity=layout.sparsity,
            scale_dtype="float16" if spec.scheme.scale_dtype in FLOATS else spec.scheme.scale_dtype,
            act_order=False,
        )
    return declared


def majority(schemes: Mapping[str, Scheme]) -> Scheme:
    """The scheme of most modules; a tie goes to the first, so that equal checkpoints get equal configs."""
    return Counter(schemes.values()).most_common(1)[0][0]
