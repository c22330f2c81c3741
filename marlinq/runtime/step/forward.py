"""The protocols of forwards, which decoders run: prompts, steps and verifications; and of draft heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Forward(ABC):
    """The forward passes of decoding over a cache of fixed capacity.

    Every row of the batch has a length of its own, kept on the device, and sees only its own tokens.

    Attributes:
        batch: B.
        capacity: L, tokens that a row can hold.
        lengths: int32 [B], tokens in each row's cache.
        reason: one clause of text: name of the forward, and why it was chosen.
        capturable: whether :meth:`step` may be captured into a CUDA graph.
        observe: function, if set, called behind each layer with its index and the hidden states: [B, T,
            hidden] of a prefill, [B, 1, hidden] of a step. Forwards without separate layers don't call it.
            Not set while a step is captured.
        most_verified: tokens that :meth:`verify` takes at once; 0 where it is not supported.
        verification_cost: time of one :meth:`verify`, in steps.
        verification_tolerance: relative difference between the logits of a verification and of steps that
            rounding can explain.
        drafter: forward of the model's draft head; None without one, and for a batch of several.
        hidden_states: [L, hidden], for ``drafter``: hidden states behind the final norm of the tokens in the
            cache of a batch of one. None where they are not kept.
        observe_routing: function, if set, called with the index of each routed layer, and the indices and
            weights of the chosen experts, both [B, T, top], before the experts are multiplied.
    """

    batch: int
    capacity: int
    lengths: Tensor
    reason: str
    capturable: bool
    most_verified: int = 0
    verification_cost: float = 1.0
    verification_tolerance: float = 0.03
    drafter: DraftForward | None = None
    hidden_states: Tensor | None = None
    observe: Callable[[int, Tensor], None] | None = None
    observe_routing: Callable[[int, Tensor, Tensor], None] | None = None

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Clear the cache and read prompts.

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

        The row's length does not change; call :meth:`accept` with the new length. The cache must have room
        for all tokens.

        Returns:
            logits [R, vocabulary] behind each token, as :meth:`step` would give them one by one; on a GPU the
            same memory every time.

        Raises:
            NotImplementedError: ``most_verified`` is 0.
        """
        raise NotImplementedError(f"{type(self).__name__} computes one token of a row at a time")

    def keep(self, length: int) -> None:
        """Truncate every row's cache to its first ``length`` tokens; states of recurrent layers stay."""
        self.lengths.fill_(length)

    def accept(self, length: int) -> None:
        """Behind a :meth:`verify`, truncate the cache to its first ``length`` tokens, the last of which is
        one that was verified; recurrent layers take the state behind that token."""
        self.keep(length)

    def assume(self, length: int) -> None:
        """Set every row's length to ``length``, whatever the cache holds.

        For timing: steps take as long as behind so many tokens, and their results are meaningless until the
        next :meth:`prefill`. Forwards that can't set their length ignore the call.
        """
        self.keep(length)

    def check_prompts(self, ids: Tensor, lengths: Tensor) -> list[int]:
        """Check the arguments of :meth:`prefill`; returns the lengths as numbers.

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
        """The device of the cache."""
        return self.lengths.device


class DraftForward(ABC):
    """The forward of a draft head, for one text.

    Attributes:
        known: tokens of the text whose hidden states, and the tokens behind them, are in the cache.
        cost: time of one more drafted token, in steps of the model.
    """

    known: int
    cost: float

    @abstractmethod
    def begin(self) -> None:
        """Empty the cache."""

    @abstractmethod
    def start(self, tokens: Sequence[int], hidden: Tensor, most: int) -> None:
        """Append pairs of the text to the cache, and begin to draft what follows the last one.

        Args:
            tokens: the text's tokens from number ``known + 1`` on.
            hidden: hidden state of the model behind the token before each, [T, hidden].
            most: number of tokens to draft.
        """

    @abstractmethod
    def drafted(self) -> list[int]:
        """The tokens of the last :meth:`start`, the most likely one each time; waits for them."""

    def draft(self, tokens: Sequence[int], hidden: Tensor, most: int) -> list[int]:
        """:meth:`start`, then :meth:`drafted`."""
        self.start(tokens, hidden, most)
        return self.drafted()
