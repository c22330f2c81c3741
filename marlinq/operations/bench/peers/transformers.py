"""Decoding by transformers with the same model in 16 bits, which decoding by marlinq is timed against."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache

from marlinq.models import Blueprint
from marlinq.operations.bench.synthetic import fill_random
from marlinq.runtime import LoadedModel

PEERS = ("transformers",)
"""Names that ``--against`` knows."""


def dense_twin(blueprint: Blueprint, loaded: LoadedModel) -> PreTrainedModel:
    """The unquantised model of the same shapes with random weights, on the same device in the same dtype.

    Only shapes matter to its speed, and where a checkpoint is measured the original need not be at hand.
    """
    model = blueprint.build()
    with torch.no_grad():
        fill_random(model, loaded.device, loaded.dtype)
    return model


class CompiledTransformers:
    """transformers with a static cache, compiled by torch: a prefill and greedy steps.

    Args:
        model: unquantised.
        batch: sequences decoded together.
        capacity: tokens that a sequence will hold at most.
        compiled: False runs eagerly, on a device where compiling is of no use.
    """

    def __init__(self, model: PreTrainedModel, *, batch: int, capacity: int, compiled: bool = True) -> None:
        self._model = model
        self._capacity = capacity
        self._tokens = torch.zeros((batch, 1), dtype=torch.int64, device=model.device)
        self._cache: Cache | None = None
        self._prefill: Any = model
        self._step: Any = model
        if compiled:
            # The recommended way: graphs for single tokens, plain compilation for the prompt.
            self._step = torch.compile(copy.copy(model).forward, mode="reduce-overhead", fullgraph=True)
            self._prefill = torch.compile(copy.copy(model).forward, dynamic=False)

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> None:
        """Start over with ``ids``, int64 [batch, length]."""
        if self._cache is None:
            self._cache = self._made_cache(ids)
        self._cache.reset()
        logits = self._prefill(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        ).logits
        self._tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def _made_cache(self, ids: Tensor) -> StaticCache:
        cache = StaticCache(config=self._model.config.get_text_config(), max_cache_len=self._capacity)
        # A run makes its tensors, in each layer's own sizes. It is not compiled: only then are they marked as
        # ones that stay, and graphs are used.
        self._model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    @torch.no_grad()
    def steps(self, count: int) -> None:
        """``count`` more tokens for every sequence."""
        for _ in range(count):
            if self._tokens.is_cuda:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            output = self._step(input_ids=self._tokens, past_key_values=self._cache, use_cache=True)
            self._tokens.copy_(output.logits[:, -1].argmax(-1, keepdim=True))
