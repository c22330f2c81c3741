"""Recognises the groups of experts that a router chooses first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from marlinq.models.anatomy import Groups
from marlinq.models.recording import Call, ExpertsCall, Recording

_MOST_GROUPS = 64


def chosen_by(decisive: Tensor, index: Tensor) -> bool:
    """Whether the experts ``index`` [T, top] have the highest values of ``decisive`` [T, experts]."""
    chosen = decisive.gather(1, index).sort(-1, descending=True).values
    return torch.equal(chosen, decisive.topk(index.shape[-1], -1).values)


def find_groups(recordings: Sequence[Recording], corrections: Mapping[str, str | None]) -> Groups | None:
    """The groups that explain all choices in all recordings; None if none are needed or none explain them.

    Args:
        recordings: recordings of one model.
        corrections: full name of a module of experts -> full name of the buffer that corrects their choice,
            or None without one.
    """
    choices = [each for recording in recordings for each in _choices(recording, corrections)]
    sizes = {(scores[0].shape[-1], index.shape[-1]) for scores, index in choices}
    if len(sizes) != 1:
        return None
    corrected = all(each is not None for each in corrections.values())
    for groups in (None, *_possible(*sizes.pop(), corrected=corrected)):
        if all(_explains(groups, *each) for each in choices):
            return groups
    return None


def _choices(
    recording: Recording, corrections: Mapping[str, str | None]
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """For every call of experts, the values [T, experts] that may have decided, and the choice."""
    for call in recording.calls:
        if not isinstance(call, ExpertsCall) or call.name not in corrections:
            continue
        name, count = corrections[call.name], call.count
        correction = torch.zeros(count) if name is None else recording.corrections[name]
        logits = [
            each.output.reshape(-1, count).float()
            for each in recording.calls
            if _may_route(each, call, count)
        ]
        scores = (function(each) for each in logits for function in (_softmax, torch.sigmoid))
        yield tuple(each + correction for each in scores), call.index


def _may_route(call: Call, experts: ExpertsCall, count: int) -> bool:
    output = call.output
    return (
        (call.kind, call.block) == ("linear", experts.block)
        and output.shape[-1] == count
        and output.numel() == len(experts.index) * count
    )


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _possible(experts: int, top: int, *, corrected: bool) -> Iterator[Groups]:
    for count in range(2, min(experts // 2, _MOST_GROUPS) + 1):
        if experts % count:
            continue
        for kept in range(-(-top * count // experts), count):
            if corrected:
                yield from (Groups(count, kept, zeroed) for zeroed in (False, True))
            else:
                # All scores are positive, so 0 is as good as excluded.
                yield Groups(count, kept, summed=1)


def _explains(groups: Groups | None, decisive: tuple[Tensor, ...], index: Tensor) -> bool:
    return any(chosen_by(each if groups is None else groups.limited(each), index) for each in decisive)
