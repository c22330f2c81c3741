"""A Mamba-2 mixer in torch, with its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.kernels.step import MambaWeights
from marlinq.models.mamba import Mamba, gated, scan, tokens_of
from marlinq.runtime.step.convolution import ShortConvolution


def mamba_weights(model: nn.Module, mixer: Mamba, result_scale: float = 1.0) -> MambaWeights:
    """The parameters of ``mixer`` in ``model``, with a factor on its result. Its weights include the
    factors on the convolution's inputs."""
    convolution = model.get_submodule(mixer.convolution)
    weight = convolution.get_parameter("weight").detach()[:, 0].float()
    bias = getattr(convolution, "bias", None)
    scales, keys = mixer.scales, mixer.groups * mixer.state_dim
    counts = torch.tensor([mixer.width, keys, keys], device=weight.device)
    factors = torch.tensor([scales.value, scales.key, scales.query], device=weight.device)

    def parameter(name: str) -> Tensor:
        return model.get_parameter(name).detach().float().contiguous()

    return MambaWeights(
        weight=(weight * factors.repeat_interleave(counts)[:, None]).contiguous(),
        bias=weight.new_zeros(len(weight)) if bias is None else bias.detach().float().contiguous(),
        rates=-parameter(mixer.decay).exp(),
        step_bias=parameter(mixer.step_bias),
        skip=parameter(mixer.skip),
        norm=None if mixer.norm is None else parameter(f"{mixer.norm.module}.weight"),
        norm_width=mixer.width if mixer.norm is None else mixer.norm.width,
        norm_first=mixer.norm_first,
        eps=0.0 if mixer.norm is None else mixer.norm.eps,
        heads=mixer.heads,
        head_dim=mixer.head_dim,
        groups=mixer.groups,
        state_dim=mixer.state_dim,
        least_step=mixer.least_step,
        most_step=math.inf if mixer.most_step is None else mixer.most_step,
        gate_scale=scales.gate,
        step_scale=scales.step,
        result_scale=result_scale,
    )


class MambaLayer:
    """A Mamba-2 mixer with its state: for every row the last inputs of the convolution and a matrix for each
    head.

    Args:
        model: the model with the modules that ``mixer`` names.
        mixer: description of the mixer.
        inputs: function of its input projection, which returns the parts.
        batch: B.
        dtype: dtype of activations.
    """

    def __init__(
        self,
        model: nn.Module,
        mixer: Mamba,
        inputs: Callable[[Tensor], Sequence[Tensor]],
        batch: int,
        dtype: torch.dtype,
    ) -> None:
        self.mixer, self._inputs = mixer, inputs
        self._weights = mamba_weights(model, mixer)
        self._convolution = ShortConvolution(self._weights.weight, self._weights.bias, batch, dtype)
        shape = (batch, mixer.heads, mixer.state_dim, mixer.head_dim)
        self.state = torch.zeros(shape, device=self._weights.weight.device)

    def prompts(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Clear the state and read prompts x [B, T, hidden]; each row has ``lengths`` [B] tokens, then
        padding.

        Returns:
            [B, T, 1, width].
        """
        gate, joined, step = self._projected(x)
        self.state.zero_()
        padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        return self._mixed(self._convolution.prompts(joined, lengths), gate, step, padding[..., None])

    def step(self, x: Tensor) -> Tensor:
        """The next token of every row: x [B, 1, hidden] to [B, 1, 1, width]."""
        gate, joined, step = self._projected(x)
        return self._mixed(self._convolution.step(joined), gate, step, None)

    def states(self) -> tuple[Tensor, ...]:
        """Copies of the state and the last inputs of the convolution."""
        return self.state.clone(), self._convolution.before.clone()

    def restore(self, states: tuple[Tensor, ...]) -> None:
        """Return to what :meth:`states` has given."""
        for own, kept in zip((self.state, self._convolution.before), states, strict=True):
            own.copy_(kept)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, values, keys, queries, step = self._inputs(x)
        return gate, torch.cat((values, keys, queries), -1), step

    def _mixed(self, convolved: Tensor, gate: Tensor, step: Tensor, padding: Tensor | None) -> Tensor:
        weights = self._weights
        tokens = tokens_of(self.mixer, F.silu(convolved), step, weights.step_bias)
        if padding is not None:
            # Padding must neither decay nor change the state.
            tokens = tokens._replace(steps=tokens.steps.masked_fill(padding, 0.0))
        mixed = scan(tokens, weights.rates, weights.skip, self.state)
        return gated(self.mixer, mixed, gate, weights.norm).to(gate.dtype)[:, :, None]
