"""The result of an allocation, and its rows in reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from marlinq.core.display import size_text
from marlinq.core.settings import NONE
from marlinq.operations.quantize.recipe import Recipe


@dataclass(frozen=True)
class Uniform:
    """Figures of a model in which all units have the same candidate, for comparison.

    Attributes:
        bits: mean bits per weight, counted as for ``--target-bits``.
        nbytes: bytes of the output's tensors.
        kl: estimated mean KL divergence, nats per token.
    """

    bits: float
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Allocation:
    """The chosen schemes and their estimated figures.

    Attributes:
        modules: candidate -> modules, a recipe's ``allocation``.
        target: bits or bytes that were asked for, such as ``4.5 bits``.
        bits: mean bits per weight of the decoder's linears, with those that overrides decide.
        nbytes: bytes of the output's tensors.
        kl: estimated mean KL divergence, nats per token.
        uniform: name of a candidate that every unit can have -> figures if all had it.
        units: number of units whose scheme was chosen.
        tokens: number of tokens that sensitivities were measured on.
        step: bytes that units' sizes were rounded up to a multiple of.
        exact: whether no size was changed by this rounding.
    """

    modules: Mapping[str, tuple[str, ...]]
    target: str
    bits: float
    nbytes: int
    kl: float
    uniform: Mapping[str, Uniform]
    units: int
    tokens: int
    step: int
    exact: bool

    def record(self) -> dict[str, Any]:
        """Plain values for the manifest; the modules are in the recipe there."""
        values = asdict(self)
        del values["modules"]
        return values

    def rows(self) -> list[tuple[str, str]]:
        """Rows of a report: the choice, its estimate beside those of uniform schemes, and the method."""
        chosen = f"{self.bits:.3f} bits a weight, {size_text(self.nbytes)}, asked for {self.target}"
        rows = [("allocation", f"{chosen}; estimated mean KL {self.kl:.4f}")]
        for name, uniform in self.uniform.items():
            size = f"{uniform.bits:.3f} bits, {size_text(uniform.nbytes)}"
            rows.append(("", f"all {name}: {size}, {uniform.kl:.4f}"))
        rounding = "exact to the byte" if self.exact else f"exact up to {self.step} bytes a unit"
        how = (
            f"gradients of the loss on {self.tokens} tokens, to second order, from each scheme's own "
            f"rounding errors, added up over {self.units} units; the choice is {rounding}"
        )
        return [*rows, ("estimated by", how)]


def target_text(recipe: Recipe) -> str:
    """The target of ``recipe`` for people: ``4.5 bits`` or ``6.00 GB``."""
    bits = recipe.target_bits
    return size_text(int(recipe.target_size)) if bits == NONE else f"{bits:g} bits"
