"""Drafts of the next tokens, copied from the text so far, and when checking them pays.

Text repeats itself: names, code, quoted passages of the prompt. What followed the last few tokens where they
stood before is a draft of what follows now (prompt lookup). A forward checks a whole draft in one pass over
the weights, :meth:`marlinq.runtime.decoding.Decoder.verify`; how a draft came about has no influence on the
text. Nothing in here depends on time, so the same call drafts the same tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LONGEST, _SHORTEST = 4, 2
"""Tokens at the end of the text that are looked up; the longest match wins."""
_WEIGHT = 0.25
"""Share of the newest draft in the mean over drafts."""
_MARGIN = 1.15
"""Tokens that a verification has to give for each step that it takes as long as."""


class Lookup:
    """Drafts from earlier places of a text that end in the same tokens.

    Args:
        tokens: the text so far.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # Where the token behind the latest such n-gram stands.
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
                # A repetition shorter than the draft goes round.
                period = len(tokens) - place
                return [tokens[place + index % period] for index in range(most)]
        return []


@dataclass(frozen=True)
class Speculated:
    """What became of drafts.

    Attributes:
        verifications: drafts that were checked.
        drafted: tokens in them.
        accepted: number of these, tokens that the model chose too.
        refusal: why no draft was checked; empty where some were.
    """

    verifications: int
    drafted: int
    accepted: int
    refusal: str = ""

    @property
    def share(self) -> float:
        """Accepted tokens of those drafted; 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def __str__(self) -> str:
        if not self.verifications:
            return f"none: {self.refusal}"
        return (
            f"{self.accepted} of {self.drafted} tokens accepted ({100 * self.share:.0f} %), "
            f"{self.verifications} verifications"
        )


class Speculation:
    """Decides what to draft, and whether to.

    A draft costs nothing until it is checked. So each is first compared with the tokens that come one by one;
    once the mean over recent drafts says that a verification gives more tokens than steps would in its time,
    drafts are checked, until that mean falls again.

    Args:
        prompt: token ids.
        most: tokens of a draft.
        cost: steps that take as long as a verification.
    """

    def __init__(self, prompt: Sequence[int], most: int, cost: float) -> None:
        self._lookup = Lookup(prompt)
        self._most = most
        self._enough = _MARGIN * cost - 1
        self._accepted_mean = 0.0
        # A draft that is compared only, and how many of its tokens have come.
        self._watched: list[int] = []
        self._right = 0
        self._verifications = self._drafted = self._accepted = 0

    @property
    def promising(self) -> bool:
        """Whether drafts are worth being checked."""
        return self._accepted_mean >= self._enough

    def came(self, token: int) -> None:
        """A step has given ``token``."""
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
        """Tokens that may come next, at most ``most``; none where nothing of the text fits."""
        return self._lookup.draft(min(most, self._most))

    def checked(self, draft: Sequence[int], tokens: Sequence[int]) -> None:
        """A verification of ``draft`` has given ``tokens``: those accepted, and one more."""
        accepted = len(tokens) - 1
        self._verifications += 1
        self._drafted += len(draft)
        self._accepted += accepted
        self._count(accepted)
        self._watched = []
        for token in tokens:
            self._lookup.push(token)

    def result(self) -> Speculated:
        """What became of the drafts."""
        refusal = "" if self._verifications else "the text did not repeat itself"
        return Speculated(self._verifications, self._drafted, self._accepted, refusal)

    def _count(self, accepted: int) -> None:
        self._accepted_mean += _WEIGHT * (accepted - self._accepted_mean)
