"""The short convolution of a recurrent mixer in torch, with its last inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.models.convolution import convolve


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
