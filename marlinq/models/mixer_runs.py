"""Run a recurrent mixer alone on random numbers, with stubs for its linears."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marlinq.models.linears import linear_shape

_TOKENS = 5
_SEED = 5_501
# Exceptions of modules that take other arguments, or need a missing package.
_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, ImportError)


class Source(nn.Module):
    """Stub in the place of a linear: returns random numbers and stores its input.

    Attributes:
        name: name of the linear in the mixer.
        width: output columns.
        given, output: input and output of the last call.
        calls: stubs that were called, in order.
        shift: number added to the last columns of the output; and how many those are.
    """

    def __init__(self, name: str, width: int, calls: list[Source], shift: tuple[float, int]) -> None:
        super().__init__()
        self.name, self.width, self.calls, self.shift = name, width, calls, shift
        self.given = self.output = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        self.output = torch.randn(*x.shape[:-1], self.width)
        amount, columns = self.shift
        if columns:
            self.output[..., -columns:] += amount
        self.calls.append(self)
        return self.output.clone()


@dataclass(frozen=True, eq=False)
class MixerRun:
    """A run of a mixer.

    Attributes:
        probe: copy of the mixer with float32 parameters, random and between -1/2 and 1/2.
        x: input [1, T, hidden].
        calls: stubs of its linears, in the order of their calls.
    """

    probe: nn.Module
    x: Tensor
    calls: list[Source]


def run_mixer(
    module: nn.Module, linears: Sequence[str], shift: tuple[float, int] = (0.0, 0)
) -> MixerRun | None:
    """A run of ``module`` with stubs for its ``linears``; None if it takes other arguments than hidden
    states.

    Args:
        module: mixer with parameters on any device, also meta, and buffers on the CPU; not changed.
        linears: names of its linears.
        shift: number added to the last output columns of each linear, and how many those are.
    """
    hidden = linear_shape(module.get_submodule(linears[0]))[0] if linears else 0
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(_SEED)
        calls: list[Source] = []
        sources = {
            name: Source(name, linear_shape(module.get_submodule(name))[1], calls, shift) for name in linears
        }
        probe = _materialised(module, sources)
        x = torch.randn(1, _TOKENS, hidden)
        try:
            probe(hidden_states=x)
        except _ERRORS:
            return None
    return MixerRun(probe, x, calls)


def _materialised(module: nn.Module, sources: dict[str, Source]) -> nn.Module:
    """A float32 copy of ``module`` with stubs for its linears and random values for other parameters."""
    # deepcopy takes the stubs for the linears, whose weights are not copied.
    memo: dict[int, Any] = {id(module.get_submodule(name)): source for name, source in sources.items()}
    probe = deepcopy(module, memo)
    for name, source in sources.items():
        owner, _, key = name.rpartition(".")
        setattr(probe.get_submodule(owner), key, source)
    for each in probe.modules():
        # How many tokens are multiplied at once changes no result; a chunk of hundreds takes gigabytes.
        if isinstance(getattr(each, "chunk_size", None), int):
            vars(each)["chunk_size"] = _TOKENS
        for key, value in list(each.named_parameters(recurse=False)):
            setattr(each, key, nn.Parameter(torch.rand(value.shape) * 2 - 0.5, requires_grad=False))
    return probe.eval()


def floats_of(module: nn.Module) -> list[float]:
    """The module's attributes that are floats, ascending."""
    return sorted({value for value in vars(module).values() if isinstance(value, float)})
