"""What a decoder runs, whoever computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor


class Forward(ABC):
    """The forward passes of decoding over a cache of fixed capacity.

    Every row of the batch has a length of its own, kept on the device, and sees its own tokens only.

    Attributes:
        batch: B.
        capacity: L, tokens that a row can hold.
        lengths: int32 [B], tokens in each row's cache.
        reason: one clause, for people: who computes, and why.
        capturable: whether :meth:`step` may be captured into a CUDA graph.
        observe: where set, it is called with the index of each layer and the hidden states behind it, in
            order; [B, T, hidden] of a prefill, [B, 1, hidden] of a step. An executor that keeps them to
            itself calls nothing. Never set while a step is captured.
        most_verified: tokens that :meth:`verify` takes at once; 0 where it can't be called.
        verification_cost: about how many steps take as long as one :meth:`verify`.
        verification_tolerance: relative distance of a verification's logits from those of steps that
            rounding explains.
        observe_routing: where set, it is called with the index of each routed layer and the experts' numbers
            and weights, both [B, T, top], before they are multiplied.
    """

    batch: int
    capacity: int
    lengths: Tensor
    reason: str
    capturable: bool
    most_verified: int = 0
    verification_cost: float = 1.0
    verification_tolerance: float = 0.03
    observe: Callable[[int, Tensor], None] | None = None
    observe_routing: Callable[[int, Tensor, Tensor], None] | None = None

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Forget everything and read prompts.

        Args:
            ids: int64 [B, T], padded on the right with any token.
            lengths: int32 [B] on the CPU, 1..T.

        Returns:
            logits [B, vocabulary] behind each row's last token.
        """

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens``, int64 [B] on the device, to the rows; no host synchronisation.

        Returns:
            logits [B, vocabulary]; on a GPU the same memory every time, valid until the next step.
        """

    def verify(self, tokens: Tensor) -> Tensor:
        """Append ``tokens``, int64 [R] on the device, to the only row of a batch of one, all at once.

        The row's length stays what it was; :meth:`keep` then says how many of them count. The cache must have
        room for all.

        Returns:
            logits [R, vocabulary] behind each of them, those that :meth:`step` would give one by one; on a
            GPU the same memory every time.

        Raises:
            NotImplementedError: ``most_verified`` is 0.
        """
        raise NotImplementedError(f"{type(self).__name__} computes one token of a row at a time")

    def keep(self, length: int) -> None:
        """Let every row's cache end behind its first ``length`` tokens."""
        self.lengths.fill_(length)

    def assume(self, length: int) -> None:
        """Let every row's cache count as holding ``length`` tokens, whatever lies there.

        For timing: steps take as long as they would behind so many tokens, and their results mean nothing
        until the next :meth:`prefill`. A forward whose cache can't be set so ignores the call.
        """
        self.keep(length)

    def check_prompts(self, ids: Tensor, lengths: Tensor) -> list[int]:
        """The lengths as numbers, where :meth:`prefill` can read the prompts.

        Raises:
            ValueError: ``ids`` is of another batch or longer than the capacity, or a length is not 1..T.
        """
        counts: list[int] = lengths.tolist()
        batch, width = ids.shape
        if batch != self.batch or width > self.capacity:
            raise ValueError(f"ids {[batch, width]}: expected at most {[self.batch, self.capacity]}")
        if len(counts) != batch or not all(1 <= count <= width for count in counts):
            raise ValueError(f"lengths {counts}: expected {batch} of 1..{width}")
        return counts

    def device(self) -> torch.device:
        """Where the cache is."""
        return self.lengths.device
