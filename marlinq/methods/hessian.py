"""The Hessian of a layer's squared output error, gathered from its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marlinq.core.errors import NumericsError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_CHUNK_ROWS = 8192


class HessianAccumulator:
    """The mean of 2 x x^T over the inputs x of a linear layer: the Hessian of its squared output error.

    A running mean keeps the numbers in range however many tokens come (GPTQ, Frantar et al. 2023, section 3).

    Args:
        in_features: K.
        device: the device that the sum is kept and computed on, in float32.
        name: what error messages call the layer.
    """

    def __init__(self, in_features: int, *, device: torch.device, name: str) -> None:
        self._mean = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        self._name = name
        self.tokens = 0

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Counts the inputs of one call.

        Args:
            x: float [..., K].
            mask: bool [B, T] with true at real tokens, None when all are; x then is [B, T, K] or [B * T, K].

        Raises:
            UnsupportedError: there is a mask, but the rows of x are not the batch's tokens in order.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        if mask is not None:
            if rows.shape[0] != mask.numel():
                raise UnsupportedError(
                    f"{self._name}: expected inputs of {list(mask.shape)} tokens, found {list(x.shape)}; it "
                    "does not see every token once, so padding can't be told apart; skip it with an override"
                )
            rows = rows[mask.to(rows.device).flatten()]
        for chunk in torch.split(rows, _CHUNK_ROWS):
            wide = chunk.to(torch.float32)
            total = self.tokens + wide.shape[0]
            self._mean.addmm_(wide.t(), wide, beta=self.tokens / total, alpha=2.0 / total)
            self.tokens = total

    def merge(self, other: HessianAccumulator) -> None:
        """Counts what ``other`` has seen: another shard of the calibration, of the same layer.

        The result is that of one accumulator for both shards, up to rounding.

        Raises:
            ValueError: ``other`` is of another K.
        """
        if other._mean.shape != self._mean.shape:
            raise ValueError(
                f"{self._name}: expected statistics of {self._mean.shape[0]} channels, "
                f"found {other._mean.shape[0]}"
            )
        total = self.tokens + other.tokens
        if total == 0:
            return
        mine, theirs = self.tokens / total, other.tokens / total
        self._mean.mul_(mine).add_(other._mean.to(self._mean.device), alpha=theirs)
        self.tokens = total

    def blend(self, other: HessianAccumulator, share: float) -> None:
        """Makes ``share`` of the Hessian ``other``'s, whatever the tokens of both; :attr:`tokens` stays.

        Raises:
            ValueError: ``other`` is of another K.
        """
        if other._mean.shape != self._mean.shape:
            raise ValueError(
                f"{self._name}: expected statistics of {self._mean.shape[0]} channels, "
                f"found {other._mean.shape[0]}"
            )
        if other.tokens == 0:
            return
        share = share if self.tokens else 1.0
        self._mean.mul_(1 - share).add_(other._mean.to(self._mean.device), alpha=share)

    def hessian(self) -> Tensor:
        """float32 [K, K], exactly symmetric; zero when nothing was added.

        Raises:
            NumericsError: the inputs held NaN or infinity, or overflowed float32.
        """
        if not bool(torch.isfinite(self._mean.diagonal()).all()):
            bad = int((~torch.isfinite(self._mean.diagonal())).sum())
            raise NumericsError(
                f"{self._name}: {bad} of {self._mean.shape[0]} input channels are NaN or infinite in the "
                "calibration; check the source checkpoint, and its dtype's range"
            )
        # Matrix products don't promise the same rounding on both sides of the diagonal.
        upper = self._mean.triu()
        return upper + upper.triu(1).t()
