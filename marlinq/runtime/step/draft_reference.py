"""The forward of a draft head in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marlinq.runtime.draft_layer import DraftLayer
from marlinq.runtime.step.forward import DraftForward
from marlinq.runtime.step.functions import linear_of, norm_of
from marlinq.runtime.step.reference_forward import ReferenceForward


class ReferenceDraft(ReferenceForward, DraftForward):
    """Computes a draft head in torch.

    Args:
        layer: the draft head.
        capacity: L, tokens that the cache can hold.
    """

    def __init__(self, layer: DraftLayer, *, capacity: int) -> None:
        super().__init__(layer.model, layer.anatomy, batch=1, capacity=capacity)
        self._project = linear_of(layer.model, layer.projection)
        self._token_norm = norm_of(layer.model, layer.token_norm, self._dtype)
        self._hidden_norm = norm_of(layer.model, layer.hidden_norm, self._dtype)
        self.known = 0
        self.cost = layer.nbytes / layer.model_nbytes

    def begin(self) -> None:
        self.known = 0

    @torch.inference_mode()
    def start(self, tokens: Sequence[int], hidden: Tensor, most: int) -> None:
        self.keep(self.known)
        behind = self._append(torch.tensor(tokens, device=hidden.device), hidden)
        self.known += len(tokens)
        self._drafted: list[int] = []
        while True:
            token = self._logits(behind[-1:]).argmax(-1)
            self._drafted.append(int(token))
            if len(self._drafted) == most:
                return
            behind = self._append(token, behind[-1:])

    def drafted(self) -> list[int]:
        return self._drafted

    def _append(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Append pairs of tokens [T] and the hidden states [T, hidden] before them; returns the head's own
        hidden states behind them."""
        self._given = hidden
        behind = self._run(tokens)
        self.keep(self._longest + len(tokens))
        return behind

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        assert self._token_norm is not None
        assert self._hidden_norm is not None
        tokens = self._token_norm(super()._embed(ids, positions))
        return self._project(torch.cat((tokens, self._hidden_norm(self._given)[None]), -1))
