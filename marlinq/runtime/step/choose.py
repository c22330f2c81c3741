"""Which forward decodes a model, decided in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.transformers_forward import TransformersForward, holds_keys_and_values

if TYPE_CHECKING:
    from marlinq.runtime.loading import LoadedModel

# Another order of sums in 16 bits stays far below it; a row that sees padding, or a step that misses its
# cache, changes logits by tens of percent.
_TOLERANCE = 0.03
_PROBE = (5, 3)
"""Tokens of the probe's two prompts."""
_PROBE_STEPS = 2

_fixed_cache_refusals: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def choose_forward(loaded: LoadedModel, batch: int, capacity: int) -> Forward:
    """The forward that decodes ``batch`` rows of up to ``capacity`` tokens; its ``reason`` says why."""
    model = loaded.model
    refusal = fixed_cache_refusal(model)
    reason = f"transformers' modules with a growing cache: {refusal}" if refusal else "transformers' modules"
    return TransformersForward(model, batch=batch, capacity=capacity, reason=reason, fixed=not refusal)


def fixed_cache_refusal(model: PreTrainedModel) -> str:
    """Why the library's cache of fixed size does not serve this model; empty where it does.

    Found out once for each model: two prompts of different length, and some steps, have to give the logits
    that each prompt has alone with the model's own growing cache.
    """
    if model not in _fixed_cache_refusals:
        _fixed_cache_refusals[model] = _try_fixed_cache(model)
    return _fixed_cache_refusals[model]


def _try_fixed_cache(model: PreTrainedModel) -> str:
    if not holds_keys_and_values(model):
        return "the model has layers without an ordinary key-value cache"
    vocabulary = model.config.get_text_config().vocab_size
    rows = torch.arange(2 * (max(_PROBE) + _PROBE_STEPS)).view(2, -1) % vocabulary

    def made(batch: int, *, fixed: bool) -> Forward:
        return TransformersForward(model, batch=batch, capacity=64, reason="a probe", fixed=fixed)

    alone = [_probe(made(1, fixed=False), rows[i : i + 1], _PROBE[i : i + 1]) for i in range(2)]
    try:
        found = (
            (_probe(made(2, fixed=True), rows, _PROBE), torch.cat(alone, dim=1)),
            (_probe(made(1, fixed=True), rows[:1], _PROBE[:1]), alone[0]),
        )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return f"one of fixed size fails ({' '.join(str(error).split())[:120]})"
    for mine, theirs in found:
        difference = float((mine - theirs).norm() / theirs.norm())
        if not difference <= _TOLERANCE:
            return f"one of fixed size gives other logits (relative error {difference:.2g})"
    return ""


def _probe(forward: Forward, rows: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Logits, float32 [1 + steps, B, vocabulary], behind the prompts and after each step."""
    rows = rows.to(forward.device())
    logits = [
        forward.prefill(rows[:, : max(lengths)], torch.tensor(lengths, dtype=torch.int32)).float().clone()
    ]
    steps = rows[:, max(_PROBE) :].T.contiguous()
    logits += [forward.step(tokens).float().clone() for tokens in steps]
    return torch.stack(logits)
