"""The forward through transformers' own modules, for any model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import StaticLayer

from marlinq.core.errors import UnsupportedError
from marlinq.runtime.step.forward import Forward


class TransformersForward(Forward):
    """transformers' forward pass over one of its caches.

    Rows of different length are padded on the left, since transformers' caches append at the same position
    for all rows. Padding is masked, and positions are counted without it. Attention then also reads the
    padding and a mask.

    Args:
        model: a causal language model in evaluation mode.
        batch: B.
        capacity: tokens that a row can hold, padding included.
        reason: why this forward was chosen.
        fixed: whether keys and values are in memory of fixed size, which a graph needs and which every step
            reads whole; else in the model's own growing cache, where all rows must have the same length.
    """

    def __init__(
        self, model: PreTrainedModel, *, batch: int, capacity: int, reason: str, fixed: bool = True
    ) -> None:
        self.batch = batch
        self.capacity = capacity
        self.reason = reason
        self.capturable = fixed and model.device.type == "cuda"
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=model.device)
        self._model = model
        self._fixed = fixed
        parameters = inspect.signature(model.forward).parameters
        # Only the last position's logits are needed; most models can compute those alone.
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters
        # A model that takes no positions derives them from the mask, whose length then has to be the cache's.
        self._masks = fixed and (batch > 1 or not self._takes_positions)
        self._attended = torch.ones((batch, capacity), dtype=torch.bool, device=model.device)
        self._cache: Cache | None = None

    def _emptied_cache(self) -> Cache | None:
        """An empty cache; None where the model makes one of its own kind."""
        own = DynamicCache(config=self._model.config)
        if not self._fixed:
            return own if self._model._supports_default_dynamic_cache() else None
        if self._cache is None:
            # Full-length layers also for sliding windows, whose masks hide older positions: transformers'
            # sliding layer counts in a Python integer, which a graph would freeze.
            return Cache(layers=[StaticLayer(max_cache_len=self.capacity) for _ in own.layers])
        self._cache.reset()
        return self._cache

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """As :meth:`Forward.prefill`.

        Raises:
            UnsupportedError: prompts of different length, and the model has layers that padding would change.
        """
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < longest and not self._fixed:
            raise UnsupportedError(
                f"{type(self._model).__name__}: prompts of {shortest} to {longest} tokens together, but here "
                f"they have to be of one length ({self.reason}); give one at a time"
            )
        self._cache = self._emptied_cache()
        # Each row's tokens move right by its padding.
        padding = longest - lengths.to(torch.int64)[:, None]
        columns = torch.arange(longest)[None]
        positions = (columns - padding).clamp(min=0).to(ids.device)
        self._attended.fill_(True)
        self._attended[:, :longest] = (columns >= padding).to(ids.device)
        # Without padding transformers needs no mask in memory, and uses its fastest attention.
        masked = self._masks and (shortest < longest or not self._takes_positions)
        logits = self._forward(ids[:, :longest].gather(1, positions), positions, masked=masked)
        self.lengths.copy_(lengths)
        return logits

    def assume(self, length: int) -> None:
        """Does nothing: transformers' caches count by themselves, and every step reads one of fixed size
        whole."""

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """As :meth:`Forward.step`."""
        positions = self.lengths[:, None].to(torch.int64)
        logits = self._forward(tokens[:, None], positions, masked=self._masks)
        self.lengths.add_(1)
        return logits

    def _forward(self, ids: Tensor, positions: Tensor, *, masked: bool) -> Tensor:
        """Append ``ids`` [B, T] at ``positions`` [B, T]; returns the logits of the last one."""
        arguments = dict(self._last_only)
        if masked:
            arguments["attention_mask"] = self._attended
            if self._takes_positions:
                arguments["position_ids"] = positions
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **arguments)
        if self._cache is None:
            self._cache = getattr(output, "past_key_values", None)
            if self._cache is None:
                raise UnsupportedError(
                    f"{type(self._model).__name__}: expected a cache of past tokens from its forward pass, "
                    "found none; marlinq can't generate text with this model"
                )
        logits: Tensor = output.logits[:, -1]
        return logits


def holds_keys_and_values(model: PreTrainedModel) -> bool:
    """Whether the model's own cache holds keys and values in every layer, and nothing else."""
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    return bool(kinds) and kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}
