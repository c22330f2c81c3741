"""Drafts of the next tokens, and when checking them pays.

Text repeats itself: names, code, quoted passages of the prompt. What followed the last few tokens where they
stood before is a draft of what follows now (prompt lookup). Some models bring a layer that drafts. A forward
checks a whole draft in one pass over the weights, :meth:`marlinq.runtime.decoding.Decoder.verify`; how a
draft came about has no influence on the text. Nothing in here depends on time, so the same call drafts the
same tokens again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.runtime.step.forward import DraftForward

_LONGEST, _SHORTEST = 4, 2
"""Most and fewest tokens at the end of the text that are looked up; the longest match wins."""
_WEIGHT = 0.25
"""Weight of the newest draft in the moving average of accepted tokens."""
_MARGIN = 1.15
"""Tokens that a verification must give for each token that steps would give in its time, or none is made."""

_FIRST_LOSS, _LOSS_SHARE, _MOST_SAVED = 1.5, 0.01, 8.0
"""Allowance of a draft head, in steps of the model that its drafts may lose: at the start of a text, more for
each token of the text, and the limit that gains can raise it to."""
_FIXED_COST, _BEHIND_STEPS = 0.15, 0.7
"""Times in steps of the model: what a draft takes besides its tokens, and the wait for the host before the
first draft after steps. Measured on an H200: the first 0.13 with Llama-3-8B's shape and 0.2 with SmolLM2; the
second 1.3 with SmolLM2 while the host decoded text before it began a draft."""
_KEPT_SHARE = 0.8
"""Factor on a draft head's counts of accepted and refused tokens before a new draft is counted."""
_PRIOR = 3.0, 1.0
"""Accepted and refused tokens that are assumed in addition to those counted; they matter while few are."""
_UNTRIED = 2
"""A draft has at most this many tokens more than the head's count of accepted ones."""
_READ_FIRST, _READ_LAST = 4, 28
"""Where a head has more tokens to read than both together, it reads only this many from the start of the text
and from its end. The first ones, since attention puts its spare weight on them ("Efficient Streaming Language
Models with Attention Sinks", Xiao et al. 2023)."""
_READ_TOGETHER = 8
"""A head reads this many tokens in no more time than it takes to draft one."""


class Lookup:
    """Drafts from earlier places of a text that end in the same tokens.

    Args:
        tokens: the text so far.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # n-gram -> index of the token behind its latest occurrence.
        self._behind: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with ``token``."""
        place = len(self._tokens)
        for length in range(_SHORTEST, min(_LONGEST, place) + 1):
            self._behind[tuple(self._tokens[place - length :])] = place
        self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """At most ``most`` tokens; none where the last two tokens are new."""
        tokens = self._tokens
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            place = self._behind.get(tuple(tokens[-length:]))
            if place is not None:
                # A draft longer than the repetition repeats it.
                period = len(tokens) - place
                return [tokens[place + index % period] for index in range(most)]
        return []


@dataclass(frozen=True)
class Speculated:
    """Counts of drafts and of the tokens that the model accepted.

    Attributes:
        verifications: drafts that were checked.
        drafted: tokens in them.
        accepted: drafted tokens that the model chose too.
        refusal: why no draft was checked; empty where some were.
        source: name of the drafts' source; empty where no draft could be checked.
    """

    verifications: int
    drafted: int
    accepted: int
    refusal: str = ""
    source: str = ""

    @property
    def share(self) -> float:
        """Accepted tokens of those drafted; 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def __str__(self) -> str:
        if not self.verifications:
            return f"none: {self.refusal}"
        return (
            f"{self.accepted} of {self.drafted} tokens accepted ({100 * self.share:.0f} %), "
            f"{self.verifications} verifications, drafts from {self.source}"
        )


class Speculation(ABC):
    """Decides what to draft, and whether to."""

    source = ""
    """What drafts come from, for reports."""
    unused = ""
    """Why no draft was checked, where that is so."""

    def __init__(self) -> None:
        self._verifications = self._drafted = self._accepted = 0

    @property
    @abstractmethod
    def promising(self) -> bool:
        """Whether drafts are worth being checked."""

    @abstractmethod
    def came(self, token: int) -> None:
        """A step has given ``token``."""

    def start(self, most: int) -> None:  # noqa: B027 - drafts without work of their own begin nothing
        """Begin the work of the next :meth:`draft`, which comes next and has the same ``most``."""

    @abstractmethod
    def draft(self, most: int) -> list[int]:
        """Tokens that may come next, at most ``most``; none where there is no guess."""

    def checked(self, draft: Sequence[int], tokens: Sequence[int]) -> None:
        """A verification of ``draft`` has given ``tokens``: those accepted, and one more."""
        self._verifications += 1
        self._drafted += len(draft)
        self._accepted += len(tokens) - 1

    def result(self) -> Speculated:
        """The counts so far."""
        refusal = "" if self._verifications else self.unused
        return Speculated(self._verifications, self._drafted, self._accepted, refusal, self.source)


class LookupSpeculation(Speculation):
    """Drafts from the text so far (:class:`Lookup`).

    A draft costs nothing until it is checked. So each is first compared with the tokens that steps give. Once
    enough tokens of recent drafts would have been accepted for verifications to be faster than steps, drafts
    are checked, until that average falls again.

    Args:
        prompt: token ids.
        most: tokens of a draft.
        cost: steps that take as long as a verification.
    """

    source = "the text so far"
    unused = "the text repeats itself too little"

    def __init__(self, prompt: Sequence[int], most: int, cost: float) -> None:
        super().__init__()
        self._lookup = Lookup(prompt)
        self._most = most
        self._enough = _MARGIN * cost - 1
        self._accepted_mean = 0.0
        # A draft that is only compared with the tokens of steps, and how many of its tokens have come so far.
        self._watched: list[int] = []
        self._right = 0

    @property
    def promising(self) -> bool:
        return self._accepted_mean >= self._enough

    def came(self, token: int) -> None:
        if self._right < len(self._watched):
            if token == self._watched[self._right]:
                self._right += 1
            else:
                self._count(self._right)
                self._watched = []
        if self._watched and self._right == len(self._watched):
            self._count(self._right)
            self._watched = []
        self._lookup.push(token)
        if not self._watched:
            self._watched, self._right = self._lookup.draft(self._most), 0

    def draft(self, most: int) -> list[int]:
        return self._lookup.draft(min(most, self._most))

    def checked(self, draft: Sequence[int], tokens: Sequence[int]) -> None:
        super().checked(draft, tokens)
        self._count(len(tokens) - 1)
        self._watched = []
        for token in tokens:
            self._lookup.push(token)

    def _count(self, accepted: int) -> None:
        self._accepted_mean += _WEIGHT * (accepted - self._accepted_mean)


class LayerSpeculation(Speculation):
    """Drafts from the model's own draft head (:mod:`marlinq.checkpoint.draft_head`).

    Time is counted in steps of the model. Drafts may lose a few steps at first, and one more for each
    hundred tokens of the text; what they gain adds to that allowance, up to a limit. While it is below
    zero, no drafts are made. So a head that is never right slows 256 tokens down by at most 2 %, and one
    that saves time drafts nearly always. Each further token of a draft takes time and is accepted less
    often: the share of recent tokens that were accepted decides how many a draft has. Of a long prompt, and
    of many tokens since its last draft, the head reads only a few (``_READ_FIRST``, ``_READ_LAST``).

    Args:
        prompt: token ids.
        layer: forward of the draft head; emptied here.
        hidden: hidden states of the model, [L, hidden], as
            :attr:`marlinq.runtime.step.forward.Forward.hidden_states`.
        most: tokens of a draft at most.
        cost: steps that take as long as a verification.
        always: whether to draft even where the allowance is used up.
    """

    source = "the model's draft head"
    unused = "the text was too short"

    def __init__(
        self,
        prompt: Sequence[int],
        layer: DraftForward,
        hidden: Tensor,
        most: int,
        cost: float,
        *,
        always: bool = False,
    ) -> None:
        super().__init__()
        self._text = list(prompt)
        self._layer, self._hidden = layer, hidden
        self._most, self._cost, self._always = most, cost + _FIXED_COST, always
        layer.begin()
        # Tokens of the text, besides its first ones, that the head has not read.
        self._skipped = 0
        # Recent tokens that were accepted and refused.
        self._right = self._wrong = 0.0
        # Steps that drafts may lose from now on.
        self._allowance = _FIRST_LOSS
        # Tokens of the draft that has begun; and whether a step came since the last draft.
        self._begun: int | None = None
        self._behind_steps = False

    @property
    def promising(self) -> bool:
        return self._always or self._begun is not None or self._allowance >= 0

    def came(self, token: int) -> None:
        self._text.append(token)
        self._behind_steps = True
        self._save(_LOSS_SHARE)

    def start(self, most: int) -> None:
        self._begun = count = min(most, self._best_length())
        if count < 1:
            return
        known, last = self._skipped + self._layer.known, len(self._text) - 1
        tokens, hidden = self._text[known + 1 :], self._hidden[known:last]
        if last - known > _READ_FIRST + _READ_LAST:
            self._layer.begin()
            first, recent = _READ_FIRST, last - _READ_LAST
            self._skipped = recent - first
            tokens = self._text[1 : first + 1] + self._text[recent + 1 :]
            hidden = torch.cat((self._hidden[:first], self._hidden[recent:last]))
        # The hidden state behind a token goes with the token that follows it.
        self._layer.start(tokens, hidden, count)
        self._save(-self._layer.cost * max(0, len(tokens) - _READ_TOGETHER) / _READ_TOGETHER)
        if self._behind_steps:
            self._save(-_BEHIND_STEPS)
            self._behind_steps = False

    def draft(self, most: int) -> list[int]:
        if self._begun is None:
            self.start(most)
        count, self._begun = self._begun, None
        return self._layer.drafted() if count else []

    def checked(self, draft: Sequence[int], tokens: Sequence[int]) -> None:
        super().checked(draft, tokens)
        self._text += tokens
        accepted = len(tokens) - 1
        self._right = _KEPT_SHARE * self._right + accepted
        self._wrong = _KEPT_SHARE * self._wrong + (accepted < len(draft))
        self._save((1 + _LOSS_SHARE) * len(tokens) - self._time(len(draft)))

    def _save(self, steps: float) -> None:
        self._allowance = min(self._allowance + steps, _MOST_SAVED)

    def _time(self, count: int) -> float:
        """Steps that take as long as a draft of ``count`` tokens and its verification."""
        return self._cost + count * self._layer.cost

    def _best_length(self) -> int:
        """Tokens of the draft that gives most for its time, few where little is known."""
        right, wrong = self._right + _PRIOR[0], self._wrong + _PRIOR[1]
        share = right / (right + wrong)

        def gain(count: int) -> float:
            return sum(share**index for index in range(count + 1)) / self._time(count)

        return max(range(1, min(self._most, _UNTRIED + int(self._right)) + 1), key=gain)
