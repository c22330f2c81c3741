"""Schemes by name: what ``--scheme`` and ``--override 'REGEX=scheme=...'`` choose from."""

from __future__ import annotations

from dataclasses import dataclass

from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, INT8, Activations, Element, Scheme


@dataclass(frozen=True)
class NamedScheme:
    """A name on the command line, and the parts of a scheme that it decides.

    Attributes:
        name: name in recipes and on the command line.
        meaning: description for help texts.
        element: type of a code.
        granularity: granularity of the scales; None where the group size is a setting of its own.
        scale_dtype: name of the scales' dtype; None where the layout decides it.
        two_levels: whether scales are multiplied by a second-level scale per tensor.
        activations: how servers quantise the inputs; None for 16-bit activations.
    """

    name: str
    meaning: str
    element: Element
    granularity: Granularity | None
    scale_dtype: str | None = None
    two_levels: bool = False
    activations: Activations | None = None

    def example(self, other: Scheme) -> Scheme:
        """A scheme with this name; what the name leaves open is taken from ``other``."""
        return Scheme(
            element=self.element,
            granularity=self.granularity or other.granularity,
            zero_point=self.element.zero_point,
            scale_dtype=self.scale_dtype or "float16",
            tensor_scale="multiplies" if self.two_levels else "none",
            activations=self.activations,
        )


SCHEMES: dict[str, NamedScheme] = {}
"""Every named scheme."""


def named_scheme(scheme: Scheme) -> str:
    """Name of ``scheme``, by its element, granularity and activations; empty where it has none.

    Scale dtypes and zero points are not compared, nor NVFP4's activations, which loaders may leave in 16
    bits.
    """
    for name, named in SCHEMES.items():
        inputs = named.two_levels or scheme.activations == named.activations
        wide = named.granularity is None or named.granularity == scheme.granularity
        levels = named.two_levels == (scheme.tensor_scale != "none")
        if named.element == scheme.element and wide and inputs and levels:
            return name
    return ""


def register_scheme(scheme: NamedScheme) -> NamedScheme:
    """Make ``scheme`` known to recipes and the command line; returns it."""
    SCHEMES[scheme.name] = scheme
    return scheme


_TENSOR, _CHANNEL = Granularity.tensor(), Granularity.channel()
_BLOCK = Granularity.block(128, 128)
MX_GROUP = Granularity.group(32)
"""Granularity of the MX formats."""

for _scheme in (
    NamedScheme("int4", "4-bit integers in groups", INT4, None),
    NamedScheme("int8", "8-bit integers in groups", INT8, None),
    NamedScheme("fp8", "E4M3, a scale per output channel, 16-bit activations", E4M3, _CHANNEL),
    NamedScheme(
        "fp8-dynamic",
        "E4M3, a scale per output channel; servers quantise activations, a scale per token",
        E4M3,
        _CHANNEL,
        activations=Activations(E4M3, Granularity.channel(), dynamic=True),
    ),
    NamedScheme(
        "fp8-static",
        "E4M3, a scale per tensor; a scale for all activations from the calibration",
        E4M3,
        _TENSOR,
        activations=Activations(E4M3, Granularity.tensor(), dynamic=False),
    ),
    NamedScheme(
        "fp8-block",
        "E4M3, a scale per 128 x 128 block; servers quantise activations, a scale per token and 128 channels",
        E4M3,
        _BLOCK,
        activations=Activations(E4M3, Granularity.group(128), dynamic=True),
    ),
    NamedScheme(
        "mxfp8",
        "E4M3 in groups of 32, scales are powers of two",
        E4M3,
        MX_GROUP,
        "float8_e8m0fnu",
    ),
    NamedScheme(
        "mxfp4",
        "E2M1 in groups of 32, scales are powers of two",
        E2M1,
        MX_GROUP,
        "float8_e8m0fnu",
    ),
    NamedScheme(
        "nvfp4",
        "E2M1 in groups of 16, E4M3 scales and a scale per tensor",
        E2M1,
        Granularity.group(16),
        "float8_e4m3fn",
        two_levels=True,
    ),
):
    register_scheme(_scheme)
