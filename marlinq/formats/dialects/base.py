"""What every ``quantization_config`` dialect offers, and the value that reading one gives."""

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
        rules: what it says of every module. A scheme's ``scale_dtype`` means nothing here: configs don't say
            it, the stored scales do.
        zero_writer: who packed GPTQ v1 zeros, where the config tells (:mod:`marlinq.formats.layouts.gptq`).
        raw: the object as found.
    """

    format: str
    rules: Rules
    zero_writer: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


class Dialect(ABC):
    """One way to say how a checkpoint is quantised, as a family of loaders reads it.

    A dialect maps the ``quantization_config`` object to and from :class:`~marlinq.core.rules.Rules`; it never
    reads files or tensors.
    """

    name: str
    quant_methods: tuple[str, ...]
    """The values of ``quant_method`` that name it."""
    marks: tuple[str, ...] = ()
    """Keys that only this dialect has, for old configs without ``quant_method``."""

    @abstractmethod
    def read(self, keys: Keys) -> QuantizationConfig:
        """The config, without ``raw``.

        Raises:
            UnsupportedError: a version, width or scheme that marlinq does not handle, by name.
            CheckpointError: a key is missing or of the wrong type.
        """

    @abstractmethod
    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint.

        Args:
            form: format of the checkpoint; its ``dialect`` is this one.
            modules: every quantised module and what is stored for it; at least one.
            unquantized: linear modules that stay unquantised, lm_head included.

        Raises:
            ConversionRefused: the dialect can't express these settings.
        """

    def says_head(self, config: QuantizationConfig, name: str) -> bool:
        """Whether loaders that ask for a word of its own take the output head ``name`` for quantised."""
        return config.raw.get("lm_head") is True

    def extra_files(self, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """JSON files beside config.json that some loaders read first, by name."""
        return {}


def declared_schemes(form: Format, modules: Mapping[str, ModuleSpec]) -> dict[str, Scheme]:
    """What a config has to say of every module, modules of equal settings having equal values."""
    sizes = Counter(spec.granularity for spec in modules.values() if spec.granularity.kind == "group")
    usual = sizes.most_common(1)[0][0] if sizes else None
    declared = {}
    for name, spec in modules.items():
        granularity = spec.granularity
        # One scale per channel is the usual group size where that is K, as its neighbours have it.
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
