"""The types of weights that ``recommend`` compares."""

from __future__ import annotations

from dataclasses import dataclass, replace

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.schemes import SCHEMES
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8, WeightFormat


@dataclass(frozen=True)
class Weights:
    """A type of weights.

    Attributes:
        name: name in tables, from ``quantize --scheme`` and ``--group-size``.
        scheme: scheme in checkpoints; None for 16 bits.
        format: weight format of marlinq's kernels; None for 16 bits.
        experts_only: whether only experts have this type, and other weights 16 bits.
    """

    name: str
    scheme: Scheme | None
    format: WeightFormat | None
    experts_only: bool = False

    @property
    def of_linears(self) -> Weights:
        """The type of weights outside of experts."""
        return _PLAIN if self.experts_only else self

    def granularity(self, k: int) -> Granularity:
        """The largest group that divides ``k`` input channels, or one scale per output channel."""
        assert self.scheme is not None
        if self.scheme.granularity.divides(k):
            return self.scheme.granularity.for_channels(k)
        smaller = (Granularity.group(size) for size in (64, 32) if k % size == 0)
        return next(smaller, Granularity.channel())

    def problem(self, m: int, n: int, k: int) -> Problem:
        """The kernels' problem for a product of ``m`` rows, with N and K padded as kernels need it."""
        assert self.format is not None
        k = -(-k // 64) * 64
        return Problem(m, -(-n // 64) * 64, k, self.granularity(k), False, False, self.format)

    def bytes_of(self, n: int, k: int) -> float:
        """Bytes of a weight [n, k] with its scales."""
        if self.scheme is None:
            return 2.0 * n * k
        scale_bytes = 1 if self.scheme.scale_dtype.startswith("float8") else 2
        return n * k * (self.scheme.element.bits / 8) + scale_bytes * n * self.granularity(k).groups(k)

    @property
    def bits(self) -> int:
        """Bits per weight, without scales."""
        return 16 if self.scheme is None else self.scheme.element.bits

    @property
    def quantises_activations(self) -> bool:
        """Whether servers also quantise the activations, and multiply 8 bits by 8 bits."""
        return self.scheme is not None and self.scheme.activations is not None


def _named(name: str, weight_format: WeightFormat, group_size: int | None = None) -> Weights:
    example = Scheme(SCHEMES["int4"].element, Granularity.group(group_size or 128), "midpoint", "float16")
    scheme = SCHEMES[name].example(example)
    label = name if group_size is None else f"{name} g{group_size}"
    if group_size is not None:
        scheme = replace(scheme, zero_point="midpoint")
    return Weights(label, scheme, weight_format)


_PLAIN = Weights("16 bits", None, None)
NATIVE = replace(_named("mxfp4", E2M1), name="mxfp4 experts", experts_only=True)
"""Type of the weights in GPT-OSS's own files."""


def compared() -> tuple[Weights, ...]:
    """All compared types, from the most bits to the fewest."""
    return (
        _PLAIN,
        _named("int8", INT8),
        _named("fp8", E4M3),
        _named("fp8-dynamic", E4M3),
        *(_named("int4", INT4, size) for size in (32, 64, 128)),
        _named("nvfp4", E2M1),
        _named("mxfp4", E2M1),
    )
