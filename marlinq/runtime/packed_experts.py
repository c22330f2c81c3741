"""Modules that replace transformers' fused experts and keep packed weights, with one operator a matrix."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from marlinq.checkpoint import Checkpoint, ReadAhead
from marlinq.core.errors import CheckpointError
from marlinq.models import Blueprint, Experts, ModelInstance, Projection
from marlinq.models.fused_experts import FIRST, run_experts
from marlinq.runtime.grouped_experts import (
    GroupedExperts,
    activation_name,
    gated_name,
    group_experts,
    grouping_refusal,
)
from marlinq.runtime.quant_linear import QuantLinear


class PackedExperts(nn.Module):
    """Drop-in for a module of fused experts, with the same forward.

    Only the experts that tokens chose are multiplied, one after the other in the order of their indices, and
    their weighted results are added in that order: the same call gives the same bits.

    Args:
        experts: layout of the fused parameters.
        module: transformers' module, which computes the activation between the products; its weights are
            removed.
        first: the linears of each expert's first product: gate and up, or up alone.
        second: the linear of each expert's second product.
    """

    def __init__(
        self,
        experts: Experts,
        module: nn.Module,
        first: Sequence[Sequence[nn.Module]],
        second: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.experts = experts
        self.first = nn.ModuleList(nn.ModuleList(parts) for parts in first)
        self.second = nn.ModuleList(second)
        hollow(module)
        self._activate = experts.activation(module)

    def forward(self, hidden: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """As :func:`marlinq.models.fused_experts.run_experts`."""
        return run_experts(self.experts, self._activate, self._multiply, hidden, index, weights)

    def _multiply(self, expert: int, product: int, x: Tensor) -> Tensor:
        if product != FIRST:
            return self.second[expert](x)  # type: ignore[no-any-return]
        parts: nn.ModuleList = self.first[expert]  # type: ignore[assignment]
        return torch.cat([part(x) for part in parts], dim=-1) if len(parts) > 1 else parts[0](x)

    def extra_repr(self) -> str:
        experts = self.experts
        return f"experts={experts.count}, hidden={experts.hidden}, intermediate={experts.intermediate}"


def hollow(module: nn.Module) -> None:
    """Replace a module's parameters by empty tensors, which code that initialises them still finds."""
    for key in list(module._parameters):
        del module._parameters[key]
        setattr(module, key, torch.empty(0))


def install_experts(model: nn.Module, blueprint: Blueprint, linears: dict[str, nn.Module]) -> None:
    """Replace fused experts by packed ones, for layers all of whose projections are in ``linears``.

    ``linears`` is emptied layer by layer, so that only one layer's words exist twice at a time. On a GPU a
    layer's experts are multiplied together (:mod:`marlinq.runtime.grouped_experts`); a warning says where
    they can't be.
    """
    for block in blueprint.blocks:
        for experts in block.experts:
            if experts.projections[0].name not in linears:
                continue
            members = [experts.of(expert) for expert in range(experts.count)]
            first = [[linears.pop(part.name) for part in parts] for parts, _ in members]
            second = [linears.pop(last.name) for _, last in members]
            module = model.get_submodule(experts.name)
            packed: nn.Module = PackedExperts(experts, module, first, second)
            if isinstance(second[0], QuantLinear) and second[0].words.is_cuda:
                grouped = _grouped(experts, module, first, second)
                if isinstance(grouped, str):
                    warnings.warn(
                        f"{experts.name}: experts are multiplied one after the other: {grouped}", stacklevel=2
                    )
                else:
                    packed = grouped
            model.set_submodule(experts.name, packed)


def _grouped(
    experts: Experts, module: nn.Module, first: Sequence[Sequence[nn.Module]], second: Sequence[nn.Module]
) -> GroupedExperts | str:
    """The experts as one module; or text that says why they can't be one."""
    if not experts.routed:
        return "their module takes inputs sorted by expert"
    between = experts.activation(module)
    activation = activation_name(between) if experts.gated else gated_name(between)
    if activation is None:
        return "the function between the products is none of the kernels' activations"
    gate, up = ([parts[part] for parts in first] for part in (0, experts.parts - 1))
    reason = grouping_refusal(gate, up, second)
    if reason is not None:
        return reason
    weights = group_experts(*(cast("list[QuantLinear]", list(part)) for part in (gate, up, second)))
    return GroupedExperts(weights, activation)


def check_experts(blueprint: Blueprint, quantized: Mapping[str, str], checkpoint: Checkpoint) -> None:
    """Check that the experts of each layer are all quantised, or none is.

    Raises:
        CheckpointError: one is missing; the message names it.
    """
    for block in blueprint.blocks:
        for experts in block.experts:
            missing = [
                projection.name for projection in experts.projections if projection.name not in quantized
            ]
            if 0 < len(missing) < len(experts.projections):
                raise CheckpointError(
                    f"{checkpoint.path}: {missing[0]} ({len(missing)} such) is not quantised, others of "
                    f"{experts.name} are; expected all {experts.count} experts of the layer"
                )


def expert_bias(instance: ModelInstance, reader: ReadAhead, projection: Projection) -> Tensor | None:
    """The bias of one expert: a part of a fused tensor, or a tensor of its own."""
    own = instance.names.own(f"{projection.name}.bias")
    if own is not None:
        bias = reader.tensor(own)
        return bias if projection.bias or bool(bias.any()) else None
    if not projection.bias or projection.expert is None:
        return None
    name = f"{projection.parameter}_bias"
    row = instance.read(name, instance.blueprint.parameters[name])[projection.expert]
    if projection.interleaved:
        return row[projection.part :: projection.parts]
    return row[projection.part * projection.out_features :][: projection.out_features]
