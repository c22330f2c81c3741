"""Finds the experts of a decoder block, and the modules and parameters that may choose among them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from marlinq.core.errors import UnsupportedError
from marlinq.models.formulas import ACTIVATIONS, ExpertActivation, clamped_swiglu, close
from marlinq.models.fused_experts import find_experts
from marlinq.models.linears import is_linear
from marlinq.models.recording import Refusal


@dataclass(frozen=True)
class RoutedExperts:
    """A module of experts.

    Attributes:
        count: number of experts.
        gated: whether the first product has a gate.
        activation: activation between an expert's products, of the gate if there is one.
        routers: full names of the modules beside it that may make the router's logits.
        correction: full name of the buffer beside it with one number per expert; None without one.
    """

    count: int
    gated: bool
    activation: ExpertActivation
    routers: tuple[str, ...]
    correction: str | None


def find_routed(name: str, block: nn.Module) -> dict[str, RoutedExperts]:
    """Full name -> description of the modules of experts in ``block``, proved on random weights."""
    routed: dict[str, RoutedExperts] = {}
    for inner, module in block.named_modules():
        if not any(value.dim() == 3 for value in module.parameters(recurse=False)):
            continue
        full = f"{name}.{inner}"
        try:
            experts = find_experts(full, module, (), _proved_experts)
        except UnsupportedError:
            continue  # Their parameters have no known use, which ends recognition.
        if experts is None or not experts.routed:
            continue
        between = experts.activation(module)
        activation = _expert_activation(between) if experts.gated else _plain_activation(between)
        if activation is None:
            raise Refusal(full, "the function between its products is no known activation")
        parent = inner.rpartition(".")[0]
        around = block.get_submodule(parent) if parent else block
        around_name = ".".join(part for part in (name, parent) if part)
        # A block's own buffers of one number multiply the residual stream.
        beside_experts = {
            key: buffer for key, buffer in around.named_buffers() if parent or tuple(buffer.shape) != (1,)
        }
        buffers = [f"{around_name}.{key}" for key in beside_experts]
        for key, buffer in beside_experts.items():
            if tuple(buffer.shape) != (experts.count,) or not buffer.is_floating_point() or len(buffers) > 1:
                raise Refusal(f"{around_name}.{key}", "a buffer beside routed experts")
        routers = []
        for beside, other in around.named_modules():
            shapes = [tuple(value.shape) for value in other.parameters(recurse=False)]
            # With any number of columns, because some experts read fewer channels than their router.
            weight, bias = (experts.count, *(shapes[0][1:] if shapes else ())), (experts.count,)
            if not is_linear(other) and len(weight) == 2 and shapes in ([weight], [weight, bias]):
                routers.append(".".join(part for part in (around_name, beside) if part))
        correction = buffers[0] if buffers else None
        found = (experts.count, experts.gated, activation, tuple(routers), correction)
        routed[full] = RoutedExperts(*found)
    return routed


# Classes and layouts of experts that were proved already.
_proved_experts: set[tuple[object, ...]] = set()


def _expert_activation(gate: Callable[[Tensor], Tensor]) -> ExpertActivation | None:
    """The activation that ``gate`` ([T, 2I] to [T, I]) applies to the first half; None if it is unknown."""
    first = torch.linspace(-9.0, 9.0, 96).view(3, 32)
    second = first.flip(1) + 0.5
    with torch.no_grad():
        given = gate(torch.cat((first, second), -1))
    for activation, function in ACTIVATIONS.items():
        if close(given, function(first) * second):
            return activation
    return "clamped_swiglu" if close(given, clamped_swiglu(first, second)) else None


def _plain_activation(function: Callable[[Tensor], Tensor]) -> ExpertActivation | None:
    """The activation that ``function`` is; None if it is unknown."""
    x = torch.linspace(-9.0, 9.0, 96)
    with torch.no_grad():
        given = function(x)
    return next((name for name, known in ACTIVATIONS.items() if close(given, known(x))), None)


def routing_vectors(
    name: str,
    block: nn.Module,
    experts: Mapping[str, RoutedExperts],
    norms: Collection[str],
    hidden: int | None,
) -> dict[str, tuple[int, ...]]:
    """Full names and shapes of parameters that a router may use besides its product: a number for each expert
    or for each of ``hidden`` channels, in modules beside the experts or around them."""
    found: dict[str, tuple[int, ...]] = {}
    for expert, routed in experts.items():
        if not expert.startswith(f"{name}."):
            continue
        inner = expert.removeprefix(f"{name}.").rpartition(".")[0]
        around = block.get_submodule(inner) if inner else block
        prefix = f"{name}.{inner}" if inner else name
        for beside, module in around.named_modules():
            full = f"{prefix}.{beside}" if beside else prefix
            if is_linear(module) or full in norms or full in experts:
                continue
            for key, value in module.named_parameters(recurse=False):
                if value.numel() == max(value.shape) and value.numel() in (routed.count, hidden):
                    found[f"{full}.{key}"] = tuple(value.shape)
    return found
