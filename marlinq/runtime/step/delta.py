"""A gated delta net in torch, with its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models.delta_net import DeltaNet, delta_rule, delta_step, heads_of
from marlinq.runtime.step.convolution import ShortConvolution

Parts = Callable[[Tensor], Sequence[Tensor]]
Function = Callable[[Tensor], Tensor]


class DeltaLayer:
    """A gated delta net with its state: for every row the last inputs of the convolution and a matrix for
    each head.

    Args:
        model: the model with the modules that ``net`` names.
        net: description of the net.
        inputs, rates: functions of its projections.
        norm: function of its norm, for activations of ``dtype``; of float32 with decays by channel.
        batch: B.
        dtype: dtype of activations.
        second: functions of its second projections, of steps and of gates; None without decays by channel.
    """

    def __init__(
        self,
        model: nn.Module,
        net: DeltaNet,
        inputs: Parts,
        rates: Parts,
        norm: Callable[[Tensor], Tensor],
        batch: int,
        dtype: torch.dtype,
        second: tuple[Function, Function] | None = None,
    ) -> None:
        self.net = net
        self._inputs, self._rates, self._norm, self._second = inputs, rates, norm, second
        weight = model.get_submodule(net.convolution).get_parameter("weight").detach()
        self._convolution = ShortConvolution(weight[:, 0].float().contiguous(), None, batch, dtype)
        self._decay = model.get_parameter(net.decay).detach().float().flatten()
        self._step_bias = model.get_parameter(net.step_bias).detach().float()
        device = weight.device
        self.state = torch.zeros((batch, net.value_heads, net.key_dim, net.value_dim), device=device)

    def prompts(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Clear the state and read prompts x [B, T, hidden]; each row has ``lengths`` [B] tokens, then
        padding.

        Returns:
            [B, T, value heads, value channels].
        """
        joined, gate, beta, step = self._projected(x)
        self.state.zero_()
        convolved = F.silu(self._convolution.prompts(joined, lengths))
        heads = heads_of(self.net, convolved, beta, step, self._decay, self._step_bias)
        heads = heads.without(torch.arange(x.shape[1], device=x.device) >= lengths[:, None])
        return self._gated(delta_rule(heads, self.state), gate)

    def step(self, x: Tensor) -> Tensor:
        """The next token of every row: x [B, 1, hidden] to [B, 1, value heads, value channels]."""
        joined, gate, beta, step = self._projected(x)
        convolved = F.silu(self._convolution.step(joined))
        heads = heads_of(self.net, convolved, beta, step, self._decay, self._step_bias)
        return self._gated(delta_step(heads, self.state), gate)

    def states(self) -> tuple[Tensor, ...]:
        """Copies of the state and the last inputs of the convolution."""
        return self.state.clone(), self._convolution.before.clone()

    def restore(self, states: tuple[Tensor, ...]) -> None:
        """Return to what :meth:`states` has given."""
        for own, kept in zip((self.state, self._convolution.before), states, strict=True):
            own.copy_(kept)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, *others = self._inputs(x)
        beta, *steps = self._rates(x)
        if self._second is None:
            return torch.cat((q, k, v), -1), others[0], beta, steps[0]
        step, gate = (function(part) for function, part in zip(self._second, others, strict=True))
        return torch.cat((q, k, v), -1), gate, beta, step

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        wide = gate.float().reshape(mixed.shape)
        result: Tensor
        if self._second is None:
            result = self._norm(mixed.to(gate.dtype)).float() * F.silu(wide)
        else:
            result = self._norm(mixed.to(gate.dtype).float()) * wide.sigmoid()
        return result.to(gate.dtype)
