"""Short convolutions in torch with their last inputs: of a recurrent mixer, and between gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from marlinq.models.convolution import GatedConvolution, convolve


class ShortConvolution:
    """A causal depthwise convolution that keeps the last inputs of every row.

    Args:
        weight: float32 [C, taps].
        bias: float32 [C], or None.
        batch: B.
        dtype: dtype of activations.

    Attributes:
        before: inputs of the last tokens, [B, taps - 1, C].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, batch: int, dtype: torch.dtype) -> None:
        self._weight, self._bias = weight, bias
        channels, taps = weight.shape
        self.before = torch.zeros((batch, taps - 1, channels), dtype=dtype, device=weight.device)

    def prompts(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The convolution of prompts x [B, T, C] from their first token on; each row has ``lengths`` [B]
        tokens, then padding."""
        self.before.zero_()
        result = convolve(x, self.before, self._weight, self._bias)
        padded = torch.cat((self.before, x), 1)
        places = lengths[:, None].long() + torch.arange(self.before.shape[1], device=x.device)
        self.before.copy_(padded.gather(1, places[..., None].expand(-1, -1, x.shape[-1])))
        return result

    def step(self, x: Tensor) -> Tensor:
        """The convolution of every row's next token x [B, 1, C]."""
        result = convolve(x, self.before, self._weight, self._bias)
        self.before.copy_(torch.cat((self.before[:, 1:], x), 1))
        return result


def convolution_weights(model: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """(weight [C, taps], bias [C] or None) of the depthwise convolution ``name``, in float32."""
    held = dict(model.get_submodule(name).named_parameters())
    bias = held.get("bias")
    weight = held["weight"].detach()[:, 0].float().contiguous()
    return weight, None if bias is None else bias.detach().float().contiguous()


class ConvolutionLayer:
    """A gated convolution in the place of attention, with the last inputs of every row.

    Args:
        model: the model with the modules that ``mixer`` names.
        mixer: description of the gated convolution.
        inputs: function of its input projection, which returns the parts.
        batch: B.
        dtype: dtype of activations.
    """

    def __init__(
        self,
        model: nn.Module,
        mixer: GatedConvolution,
        inputs: Callable[[Tensor], Sequence[Tensor]],
        batch: int,
        dtype: torch.dtype,
    ) -> None:
        self.mixer, self._inputs = mixer, inputs
        weight, bias = convolution_weights(model, mixer.convolution)
        self._convolution = ShortConvolution(weight, bias, batch, dtype)

    def prompts(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Forget earlier inputs and read prompts x [B, T, hidden]; each row has ``lengths`` [B] tokens, then
        padding.

        Returns:
            [B, T, 1, width].
        """
        given, gate = self.mixer.parts(self._inputs(x))
        return (gate * self._convolution.prompts(given, lengths))[:, :, None]

    def step(self, x: Tensor) -> Tensor:
        """The next token of every row: x [B, 1, hidden] to [B, 1, 1, width]."""
        given, gate = self.mixer.parts(self._inputs(x))
        return (gate * self._convolution.step(given))[:, :, None]

    def states(self) -> tuple[Tensor, ...]:
        """A copy of the last inputs of the convolution."""
        return (self._convolution.before.clone(),)

    def restore(self, states: tuple[Tensor, ...]) -> None:
        """Return to what :meth:`states` has given."""
        self._convolution.before.copy_(states[0])
