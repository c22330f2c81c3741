"""A checkpoint format: the layouts that its tensors have, and the dialect of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from marlinq.core.errors import ConversionRefused
from marlinq.core.scheme import Scheme
from marlinq.core.sparsity import Sparsity
from marlinq.formats.layouts import Layout, register_layout


@dataclass(frozen=True)
class Format:
    """A checkpoint format, as it is named on the command line.

    Attributes:
        name: name on the command line and in recipes.
        dialect: name of the ``quantization_config`` dialect in :data:`marlinq.formats.dialects.DIALECTS`.
        layouts: layouts of its modules. Where two of them can hold a scheme, a reader takes the one whose
            tensors exist, and a writer the first.
        read_only: reason why no checkpoint is written in this format; None for one that is written.
        stacked: whether files hold the experts of a layer in one tensor (:mod:`marlinq.formats.stacks`).
    """

    name: str
    dialect: str
    layouts: tuple[Layout, ...]
    read_only: str | None = None
    stacked: bool = False

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes that any of its layouts owns."""
        return tuple(dict.fromkeys(suffix for layout in self.layouts for suffix in layout.suffixes))

    @property
    def keys(self) -> tuple[str, ...]:
        """Suffixes under which codes are stored."""
        return tuple(dict.fromkeys(layout.key for layout in self.layouts))

    @property
    def elements(self) -> tuple[str, ...]:
        """Names of the element types that its layouts hold."""
        return tuple(dict.fromkeys(name for layout in self.layouts for name in layout.elements))

    @property
    def sparsity(self) -> Sparsity | None:
        """Sparsity that weights must have; None for a format of dense weights."""
        return self.layouts[0].sparsity

    @property
    def original_kernel(self) -> bool:
        """Whether a layout has an original kernel that takes fewer shapes than the layout can hold."""
        return any(layout.original_kernel is not None for layout in self.layouts)

    def is_codes(self, suffix: str, dtype: str) -> bool:
        """Whether a tensor of this suffix and dtype holds a quantised linear's codes."""
        return any(layout.is_codes(suffix, dtype) for layout in self.layouts)

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        """Why no weight of this scheme can be stored, whatever its shape, or None."""
        if len(self.layouts) == 1:
            return self.layouts[0].scheme_refusal(scheme)
        if scheme.element.name not in self.elements:
            return f"{scheme.element.name} weights; {self.name} holds {_listed(self.elements)} only"
        near = [layout for layout in self.layouts if scheme.element.name in layout.elements]
        reasons = [layout.scheme_refusal(layout.as_stored(scheme)) for layout in near]
        return None if None in reasons else reasons[0]

    def layout_of(self, scheme: Scheme) -> Layout:
        """The layout that a writer stores a weight of ``scheme`` in.

        A format's only layout is returned unchecked, since its own refusals are more precise.

        Raises:
            ConversionRefused: no layout holds it; the message has the reason of :meth:`scheme_refusal`.
        """
        if len(self.layouts) == 1:
            return self.layouts[0]
        for layout in self.layouts:
            if layout.scheme_refusal(layout.as_stored(scheme)) is None:
                return layout
        raise ConversionRefused(f"{self.name}: {self.scheme_refusal(scheme)}")

    def stored_layout(self, dtypes: Mapping[str, str], scheme: Scheme) -> Layout:
        """The layout of a module that is stored.

        Args:
            dtypes: dtype of each of its tensors by suffix; one of them holds codes of this format.
            scheme: scheme that the config gives it.

        Raises:
            ConversionRefused: its codes are not those of ``scheme``; the message names the stored ones.
        """
        there = [
            layout
            for layout in self.layouts
            if layout.key in dtypes and layout.is_codes(layout.key, dtypes[layout.key])
        ]
        fitting = [each for each in there if each.scheme_refusal(each.as_stored(scheme)) is None]
        if not fitting:
            kinds = _listed(tuple(dict.fromkeys(name for layout in there for name in layout.elements)))
            raise ConversionRefused(
                f"its codes are stored as {there[0].key} {dtypes[there[0].key]}, which {self.name} uses for "
                f"{kinds}; the config says {scheme.describe()}"
            )
        return next((each for each in fitting if each.scale_key in dtypes), fitting[0])


FORMATS: dict[str, Format] = {}
"""Every format by its name on the command line."""


def register_format(form: Format) -> Format:
    """Make ``form`` and its layouts known to every command; returns it."""
    FORMATS[form.name] = form
    for layout in form.layouts:
        register_layout(layout)
    return form


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
