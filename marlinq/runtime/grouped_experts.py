"""The routed part of a mixture layer in a few launches: packed experts as two operands, gate_up and down."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self, cast

import torch
from torch import Tensor, nn

from marlinq.kernels.experts import (
    ACTIVATIONS,
    ExpertWeights,
    StoredExperts,
    interleave_gate_up,
    routed_experts,
)
from marlinq.kernels.experts.experts_reference import gated_product
from marlinq.runtime.quant_linear import QuantLinear

_TENSORS = ("words", "scales", "zeros", "bias")
# Inputs on which activations are compared; the two most similar ones differ by 5e-4 there.
_PROBED = torch.linspace(-9.0, 9.0, 96).view(3, 32)


class GroupedExperts(nn.Module):
    """The routed part of a mixture layer, by :func:`marlinq.kernels.experts.routed_experts`.

    The same call gives the same bits. The host never waits for the GPU, so a CUDA graph can capture it. It
    may also hold the layer's shared expert as further experts, for steps that choose it for every row.

    Args:
        weights: weights of all experts.
        activation: name as in :data:`marlinq.kernels.experts.ACTIVATIONS`.
    """

    def __init__(self, weights: ExpertWeights, activation: str) -> None:
        super().__init__()
        self.granularity, self.format, self.activation = (
            weights.down.granularity,
            weights.down.format,
            activation,
        )
        self._sets = [""]
        self._register("", weights)

    def add_shared(self, weights: ExpertWeights) -> None:
        """Hold :attr:`shared` experts, from :func:`shared_as_experts`."""
        self._sets = ["", "shared_"]
        self._register("shared_", weights)

    def _register(self, prefix: str, weights: ExpertWeights) -> None:
        for product, stored in weights._asdict().items():
            for key, value in stored.tensors.items():
                self.register_buffer(f"{prefix}{product}_{key}", value, persistent=False)

    @property
    def weights(self) -> ExpertWeights:
        """The weights of the routed experts, from the present buffers."""
        return self._weights("")

    @property
    def shared(self) -> ExpertWeights | None:
        """The shared expert as experts behind the routed ones; None unless it was added."""
        return self._weights("shared_") if "shared_" in self._sets else None

    def _weights(self, prefix: str) -> ExpertWeights:
        return ExpertWeights(
            *(
                StoredExperts(
                    self.format,
                    self.granularity,
                    **{key: getattr(self, f"{prefix}{product}_{key}") for key in _TENSORS},
                )
                for product in ExpertWeights._fields
            )
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As a module's; the power of two that scales are stored with follows their dtype."""
        for prefix, product in itertools.product(self._sets, ExpertWeights._fields):
            name = f"{prefix}{product}_scales"
            setattr(self, name, self.format.rescaled(getattr(self, name), fn))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H], experts' indices and weights [T, top-k] to [T, H]; indices of no expert add
        nothing."""
        return routed_experts(
            hidden, index.contiguous(), weights.float().contiguous(), self.weights, self.activation
        )

    def extra_repr(self) -> str:
        experts, inner, hidden = self.weights.down.shape
        shared = self.granularity.describe()
        return f"experts={experts}, hidden={hidden}, intermediate={inner}, granularity={shared!r}"


def grouping_refusal(
    gate: Sequence[nn.Module], up: Sequence[nn.Module], down: Sequence[nn.Module]
) -> str | None:
    """Why these linears, one of each expert, can't be grouped, in one clause; None where they can."""
    if not gate or not len(gate) == len(up) == len(down):
        return f"{len(gate)} gates, {len(up)} ups and {len(down)} downs"
    for linear in (*gate, *up, *down):
        if not isinstance(linear, QuantLinear):
            return f"an expert is multiplied by {type(linear).__name__}"
        if linear.order is not None:
            return "an expert has an activation order"
    for name, linears in (("gate", gate), ("up", up), ("down", down)):
        forms = {
            (
                each.padded_shape,
                each.scales.shape,
                each.zeros is None,
                each.granularity,
                each.format,
                each.scales.dtype,
            )
            for each in linears
            if isinstance(each, QuantLinear)
        }
        if len(forms) > 1:
            return f"the experts' {name} differ in shape, groups or zero points"
    first, second, last = gate[0], up[0], down[0]
    assert isinstance(first, QuantLinear)
    assert isinstance(second, QuantLinear)
    assert isinstance(last, QuantLinear)
    if (first.padded_shape, first.granularity) != (second.padded_shape, second.granularity):
        return f"gate is {first.padded_shape} and up {second.padded_shape}"
    if last.padded_shape != first.padded_shape[::-1]:
        return f"gate is {first.padded_shape} and down {last.padded_shape}"
    if first.in_features != first.padded_shape[0]:
        return f"a hidden size of {first.in_features} is no multiple of 64 and of the group"
    kinds = {(each.granularity, each.format, each.zeros is None) for each in (first, second, last)}
    if len(kinds) > 1:
        return "gate, up and down differ in format, groups or zero points"
    return None


def group_experts(
    gate: Sequence[QuantLinear], up: Sequence[QuantLinear], down: Sequence[QuantLinear]
) -> ExpertWeights:
    """The experts' operands stacked, with columns of gate and up alternating, if :func:`grouping_refusal` is
    None.

    Padding columns of gate and up are zero, so their results, which meet down's padding rows, are zero. If
    one linear has a bias, the others get a bias of zeros.
    """
    biased = any(linear.bias is not None for linear in (*gate, *up, *down))
    stored = [_stacked(linears, biased=biased) for linears in (gate, up, down)]
    return ExpertWeights(interleave_gate_up(*stored[:2]), stored[2])


def shared_as_experts(
    experts: ExpertWeights, gate: nn.Module, up: nn.Module, down: nn.Module
) -> ExpertWeights | str:
    """A shared expert cut into experts of the routed ones' size and format, whose results for a row add up to
    its own, in new memory. Or why it can't be cut so, in one clause.

    Args:
        experts: weights of the routed experts.
        gate, up, down: linears of the shared expert.
    """
    if not all(isinstance(linear, QuantLinear) for linear in (gate, up, down)):
        return "it is not packed"
    linears = [cast("QuantLinear", linear) for linear in (gate, up, down)]
    inner = experts.down.shape[1]
    count, rest = divmod(linears[2].padded_shape[0], inner)
    groups = linears[2].scales.shape[0]
    whole = count == 1 or all(linear.in_features == linear.padded_shape[0] for linear in linears)
    # A single group is stored in another order of columns than several.
    if rest or not count or not whole or (groups > 1 and (groups % count or groups == count > 1)):
        return f"{linears[2].in_features} channels in {groups} groups are not those of whole experts"
    parts = _parts(linears, count) if count > 1 else [[linear] for linear in linears]
    reason = grouping_refusal(*parts)
    if reason is not None:
        return reason
    found = group_experts(*parts)
    for mine, theirs in zip(found, experts, strict=True):
        if (mine.format, mine.granularity) != (theirs.format, theirs.granularity):
            return "its format or groups are not the experts'"
        if {name: _form(value) for name, value in mine.tensors.items()} != {
            name: _form(value) for name, value in theirs.tensors.items()
        }:
            return "its sizes, zero points or biases are not the experts'"
    return found


def _form(value: Tensor | None) -> tuple[object, ...] | None:
    """Shape of one expert's part, and dtype; None without a tensor."""
    return None if value is None else (value.shape[1:], value.dtype)


def _parts(linears: Sequence[QuantLinear], count: int) -> list[list[QuantLinear]]:
    """Gate, up and down in ``count`` parts each: columns of gate and up, rows of down."""
    gate, up, down = (linear.operand for linear in linears)
    size = gate.out_features // count
    columns = [slice(part * size, (part + 1) * size) for part in range(count)]
    biases = [linear.bias for linear in linears]
    sides = [
        [QuantLinear(operand.columns(part), None if bias is None else bias[part]) for part in columns]
        for operand, bias in zip((gate, up), biases, strict=False)
    ]
    shared_groups = down.scales.shape[0] == 1
    rows = [
        replace(
            down,
            words=words,
            scales=down.scales if shared_groups else down.scales.chunk(count)[part],
            zeros=down.zeros if down.zeros is None or shared_groups else down.zeros.chunk(count)[part],
            in_features=size,
        )
        for part, words in enumerate(down.words.chunk(count))
    ]
    # Results of the parts are added up: one of them has the bias of down.
    last = [QuantLinear(row, biases[2] if part == 0 else None) for part, row in enumerate(rows)]
    return [*sides, last]


def _stacked(linears: Sequence[QuantLinear], *, biased: bool) -> StoredExperts:
    bias = None
    if biased:
        bias = linears[0].scales.new_zeros(len(linears), linears[0].padded_shape[1])
        for row, linear in zip(bias, linears, strict=True):
            if linear.bias is not None:
                row[: len(linear.bias)] = linear.bias
    zeros = [linear.zeros for linear in linears if linear.zeros is not None]
    return StoredExperts(
        linears[0].format,
        linears[0].granularity,
        torch.stack([linear.words for linear in linears]),
        torch.stack([linear.scales for linear in linears]),
        torch.stack(zeros) if zeros else None,
        bias,
    )


def activation_name(gate: Callable[[Tensor], Tensor]) -> str | None:
    """Name, in :data:`marlinq.kernels.experts.ACTIVATIONS`, of the function between the products; None if
    unknown.

    Args:
        gate: function from [T, 2I], gate first, to [T, I]; it is recognised by its results.
    """
    up = _PROBED.flip(1) + 0.5
    output = gate(torch.cat((_PROBED, up), dim=1))
    for name in ACTIVATIONS:
        if torch.allclose(output, gated_product(_PROBED, up, name), rtol=1e-5, atol=2e-5):
            return name
    return None


def gated_name(function: Callable[[Tensor], Tensor]) -> str | None:
    """Name of the activation with which experts without a gate run as gated experts whose gate and up are
    the same matrix; None if there is none.

    So ``relu(x)^2`` is ``relu(x) * x``. The kernels read the matrix twice.

    Args:
        function: function between the products, [T, I] to [T, I]; it is recognised by its results.
    """
    expected = _PROBED.relu().square()
    return "relu" if torch.allclose(function(_PROBED), expected, rtol=1e-5, atol=2e-5) else None
