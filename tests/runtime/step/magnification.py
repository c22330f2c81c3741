"""How much the norms behind Mamba-2 mixers magnify roundings.

A mixer's result is a sum: D x and, of every state channel, C S. Its terms are rounded alike, as values, B and
C are; the norm divides by the size of the sum. Where terms cancel, it magnifies their error by the root of
their mean square over that of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.models.mamba import Mamba, Tokens
from marlinq.runtime.step import mamba


@contextmanager
def magnified_by_norms() -> Iterator[list[Tensor]]:
    """Appends to the list, for every mixer that a reference steps through inside, what its norm magnifies
    each row's errors by: [B], at least 1."""
    factors: list[Tensor] = []
    terms: list[Tensor] = []
    scan, gated = mamba.scan, mamba.gated

    def scanned(tokens: Tokens, rates: Tensor, skip: Tensor, state: Tensor) -> Tensor:
        mixed = scan(tokens, rates, skip, state)
        if mixed.shape[1] == 1:
            each = state.shape[1] // tokens.queries.shape[2]
            queries = tokens.queries[:, 0].repeat_interleave(each, 1)[..., None]
            skipped = skip[:, None] * tokens.values[:, 0]
            terms.append(torch.cat((queries * state, skipped[:, :, None]), 2))
        return mixed

    def normed(mixer: Mamba, mixed: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        if mixed.shape[1] == 1 and mixer.norm is not None:
            # [B, terms, groups of the norm, channels].
            summands = terms.pop().transpose(1, 2).flatten(2).unflatten(-1, (-1, mixer.norm.width))
            if not mixer.norm_first:
                gates = F.silu(gate[:, 0].float() * mixer.scales.gate)
                summands = summands * gates.unflatten(-1, (-1, mixer.norm.width))[:, None]
            sizes, result = summands.square().sum((1, 3)), summands.sum(1).square().sum(2)
            factors.append((sizes / result).sqrt().amax(1).clamp_min(1.0))
        return gated(mixer, mixed, gate, weight)

    with patch.object(mamba, "scan", scanned), patch.object(mamba, "gated", normed):
        yield factors


def magnification(factors: list[Tensor]) -> float:
    """The factor of the error of all rows' logits together, from those of a step's mixers; 1 without any."""
    if not factors:
        return 1.0
    return float(torch.stack(factors).amax(0).square().mean().sqrt())
