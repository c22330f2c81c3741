"""How much calibration text the model writes itself, and how long it is tuned, where nobody says.

The amount is a function of the model, the kind of device and its number of threads, never of a measurement:
the same command on the same machine gives the same bytes. What is measured, once the model can write, is how
long it will take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from marlinq.core.devices import multiplies_bfloat16
from marlinq.core.settings import AUTO
from marlinq.kernels import device_numbers
from marlinq.models import Blueprint
from marlinq.models.heads import key_channels
from marlinq.operations.quantize.recipe import Recipe

SAMPLES = 128
"""Documents, where nobody says."""
_FEWEST_TOKENS = 4096
_STEP = 1024
_SHORT = 256
"""Tokens that a document may have at least, before more documents are written."""
_FILLED = 0.75
"""Of its longest length what a document has on average: some end before."""
_MOST_ROWS = 128
_MOST_TOKENS = int(SAMPLES * 2048 * _FILLED)

# A CPU: tokens that take about 80 s in all at rates that a core of a current server reaches, operations a
# second of a thread. Writing runs in bfloat16 where the CPU multiplies it (:func:`writing_dtype`).
_CPU_SECONDS = 80.0
_CPU_RATE = 45e9
_CPU_NARROW_RATE = 90e9
# A GPU: steps that take about 20 s. A step reads the weights and every row's cache once, at this share of the
# memory's bandwidth.
_GPU_SECONDS = 20.0
_GPU_SHARE = 0.5
_GPU_MEMORY_SHARE = 0.8

STATES_BYTES = 1 << 31
"""Hidden states that a GPU keeps, whatever its size: those of 128 documents of 2048 tokens, 4096 channels and
16 bits."""
# One with much free memory keeps more, up to the first share of it; none takes more than the second for them.
_STATES_SHARE = 0.125
_STATES_MOST_SHARE = 0.25

# Tuning: steps below which tokens of a step are fewer too, steps and tokens of a step at most, and the
# operations of it all: 200 s of a GPU that does 4e14 a second, an hour of two CPU threads at the rate above.
_TUNE_FEW_STEPS = 120
_TUNE_STEPS = 1400
# The same without text that the model writes: on documents drawn anew more steps gain on held-out ones too,
# on its own text they did not.
_TUNE_STEPS_OF_DOCUMENTS = 2800
_TUNE_TOKENS = 8192
_TUNE_WORK = {"cpu": 3e14, "cuda": 8e16}
# The rate of scales in all steps together, for more steps at a lower rate end nearer; of more than
# _TUNE_STEPS it falls with the root of their number. And the rate of codes, in steps of a code, over it. A
# step's rate at most, of both; twice that of codes led runs astray.
_TUNE_RATES = 0.84
_TUNE_CODES = 10.0
_TUNE_RATE = 0.002
_TUNE_CODE_RATE = 0.01
# Gradients of the loss: tokens that they are taken on, each as often as labels are drawn for it, at most so
# often; and the operations of it all. Of a weight and a token: the original's pass, the same again for its
# backward pass, and that, which is two; and as much for each block's own, without the first.
_GRADIENT_TOKENS = 1 << 16
_GRADIENT_DRAWS = 4
_GRADIENT_WORK = {"cpu": 3e13, "cuda": 4e15}
_GRADIENT_PRODUCTS = 14
# The same for sensitivities, each token once: every output channel of a weight is a sample there.
_FEWEST_MEASURING, _MOST_MEASURING = 512, 1 << 13
# Logits held at once, of which there are some four copies in float32 for a moment.
_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
# Tokens that a model writes to be tuned on at most, and the longest of its documents.
_TUNE_TEXT = 3_600_000
_TUNE_LENGTH = 512
# Multiplications and additions of a weight for a token: the original's pass, the student's, the same again
# for the backward pass, and that, which is two.
_TUNE_PRODUCTS = 10


@dataclass(frozen=True)
class TextBudget:
    """What the model is to write.

    Attributes:
        tokens: number of tokens of all documents.
        documents: how many, or None for as many as ``tokens`` take.
        rows: documents that are written together.
        max_length: tokens that a document has at most.
        reason: why this much, in one clause.
    """

    tokens: int
    documents: int | None
    rows: int
    max_length: int
    reason: str


@dataclass(frozen=True)
class Work:
    """What a token of calibration text costs a model.

    Attributes:
        linear_weights: number of weights of the decoder blocks.
        all_weights: multiplied for a token, the output head among them.
        hessian_products: multiplications of one token's outer products.
        cache_bytes: bytes of keys and values of a token.
        positions: number of positions of the model; None for no bound.
    """

    linear_weights: int
    all_weights: int
    hessian_products: int
    cache_bytes: int
    positions: int | None

    @classmethod
    def of(cls, blueprint: Blueprint) -> Work:
        """The work of the model that ``blueprint`` describes."""
        linears = sum(each.in_features * each.out_features for each in blueprint.projections())
        config = blueprint.config.get_text_config()
        table = None if blueprint.embedding is None else blueprint.parameters.get(blueprint.embedding)
        # Linears of one parent and one K mostly read the same input: q, k and v, or gate and up.
        inputs = {(each.module.rpartition(".")[0], each.in_features) for each in blueprint.projections()}
        positions = getattr(config, "max_position_embeddings", None)
        return cls(
            linear_weights=linears,
            all_weights=linears + (0 if table is None else prod(table)),
            hessian_products=sum(k * k for _, k in inputs),
            cache_bytes=key_channels(config, len(blueprint.blocks)) * 2 * 2,
            positions=positions if isinstance(positions, int) and positions > 0 else None,
        )

    def longest(self, recipe: Recipe) -> int:
        """Tokens that a document may have."""
        return min(recipe.max_length, self.positions or recipe.max_length)


def writing_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """In which dtype the model writes: the stored one on a GPU; on a CPU bfloat16 where it has instructions
    for it, which are twice as fast and leave sampled text what it is, else float32."""
    if device.type == "cuda":
        return stored
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def enough(recipe: Recipe) -> str:
    """The reason for a bound of the method's own, in one clause."""
    return f"enough for {recipe.method}"


def text_budget(
    recipe: Recipe, work: Work, device: torch.device, dtype: torch.dtype, *, most: int | None = None
) -> TextBudget:
    """What the model is to write for ``recipe``.

    Args:
        recipe: samples, tokens and max_length, any of the first two ``auto``.
        work: amount of work of the model.
        device: where it writes.
        dtype: in which it writes.
        most: tokens that are enough for the method; None for no such bound.
    """
    budget = _unbounded(recipe, work, device, dtype)
    if most is None or budget.tokens <= most:
        return budget
    if budget.documents is not None:
        return replace(budget, tokens=most, reason=enough(recipe))
    return _rows_for(most, work.longest(recipe), enough(recipe))


def _unbounded(recipe: Recipe, work: Work, device: torch.device, dtype: torch.dtype) -> TextBudget:
    longest = work.longest(recipe)
    if isinstance(recipe.samples, int):
        documents = recipe.samples
        tokens = documents * longest
        if isinstance(recipe.tokens, int):
            tokens = min(tokens, recipe.tokens)
        return TextBudget(tokens, documents, min(documents, _MOST_ROWS), longest, "as asked for")
    if recipe.tokens != AUTO:
        return _rows_for(int(recipe.tokens), longest, "as asked for")
    if device.type == "cuda":
        steps, tokens = tuning_budget(recipe, work, device, own_text=True)
        return _for_gpu(work, longest, device, dtype, learnt=steps * tokens if recipe.tune_steps else 0)
    threads = torch.get_num_threads()
    rate = threads * (_CPU_NARROW_RATE if dtype == torch.bfloat16 else _CPU_RATE)
    # Each block runs twice: for its inputs, and for its outputs once it is quantised.
    quantising = 2 * (2 * work.linear_weights + work.hessian_products) / (threads * _CPU_RATE)
    tokens = int(_CPU_SECONDS / (2 * work.all_weights / rate + quantising)) // _STEP * _STEP
    tokens = min(max(tokens, _FEWEST_TOKENS), _MOST_TOKENS)
    return _rows_for(tokens, longest, f"what suits {threads} CPU threads")


def tuning_budget(recipe: Recipe, work: Work, device: torch.device, *, own_text: bool) -> tuple[int, int]:
    """Steps of tuning and tokens of a step.

    Where both are automatic, there are as many steps as the operations of the budget allow. Where these are
    few, steps and tokens shrink alike.

    Args:
        recipe: with its ``tune_steps`` and ``tune_tokens``.
        work: amount of work of the model.
        device: where it is tuned.
        own_text: the model writes text to be tuned on.
    """
    at_most = _TUNE_STEPS if own_text else _TUNE_STEPS_OF_DOCUMENTS
    most = _TUNE_WORK[device.type] / (_TUNE_PRODUCTS * work.all_weights)
    if isinstance(recipe.tune_steps, int):
        tokens = _TUNE_TOKENS if recipe.tune_tokens == AUTO else int(recipe.tune_tokens)
        return recipe.tune_steps, tokens
    if isinstance(recipe.tune_tokens, int):
        return max(1, min(at_most, int(most / recipe.tune_tokens))), recipe.tune_tokens
    share = min(1.0, (most / (_TUNE_FEW_STEPS * _TUNE_TOKENS)) ** 0.5)
    if share < 1:
        return max(1, round(_TUNE_FEW_STEPS * share)), max(1, round(_TUNE_TOKENS * share))
    return min(at_most, int(most / _TUNE_TOKENS)), _TUNE_TOKENS


def tuning_rates(recipe: Recipe, steps: int) -> tuple[float, float]:
    """The highest relative change of a scale in one of ``steps`` steps of tuning, and that of a code in steps
    of a code."""
    if isinstance(recipe.tune_rate, float):
        return recipe.tune_rate, _TUNE_CODES * recipe.tune_rate
    shared = steps if steps <= _TUNE_STEPS else (steps * _TUNE_STEPS) ** 0.5
    rate = min(_TUNE_RATE, _TUNE_RATES / max(1, shared))
    return rate, min(_TUNE_CODE_RATE, _TUNE_CODES * rate)


def tuning_work(work: Work, steps: int, tokens: int) -> float:
    """Operations of ``steps`` of tuning on ``tokens`` tokens each."""
    return float(steps * tokens) * _TUNE_PRODUCTS * work.all_weights


def gradient_jobs(tokens: Sequence[int], work: Work, device: torch.device) -> list[int]:
    """On which batches the loss's gradients are taken: evenly spaced ones of a long text, all of a short one,
    and several times, each with labels of its own.

    Args:
        tokens: number of tokens of each batch.
        work: amount of work of the model.
        device: where.
    """
    most = gradient_tokens(sum(tokens), work, device)
    whole = sum(tokens)
    if most < whole:
        return list(range(0, len(tokens), -(-whole // most)))
    return list(range(len(tokens))) * (most // whole)


def gradient_tokens(tokens: int, work: Work, device: torch.device) -> int:
    """On how many tokens the loss's gradients are taken at most, of a text of ``tokens``."""
    most = int(_GRADIENT_WORK[device.type] / (_GRADIENT_PRODUCTS * work.all_weights))
    return max(1, min(most, _GRADIENT_TOKENS, _GRADIENT_DRAWS * tokens))


def measuring_tokens(work: Work, device: torch.device) -> int:
    """Tokens whose gradients measure how sensitive modules are (:mod:`..allocation.sensitivity`)."""
    most = int(_GRADIENT_WORK[device.type] / (_GRADIENT_PRODUCTS * work.all_weights))
    return max(_FEWEST_MEASURING, min(_MOST_MEASURING, most // _STEP * _STEP))


def gradient_work(tokens: int, work: Work, device: torch.device) -> float:
    """Operations of the loss's gradients on a text of ``tokens``."""
    return float(gradient_tokens(tokens, work, device)) * _GRADIENT_PRODUCTS * work.all_weights


def states_on_device(device: torch.device) -> int:
    """Bytes of hidden states that may stay on a GPU, where they need no way to the host and back, and no
    pinned memory of the host; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(free * _STATES_MOST_SHARE, max(STATES_BYTES, free * _STATES_SHARE)))


def logits_at_once(config: Any, device: torch.device) -> int:
    """Tokens whose logits are held at once; they go through the model's end as one sequence, so no more than
    it has positions."""
    text = config.get_text_config()
    rows = max(1, _LOGITS[device.type] // int(text.vocab_size))
    positions: int | None = getattr(text, "max_position_embeddings", None)
    return min(rows, positions or rows)


def _for_gpu(
    work: Work, longest: int, device: torch.device, dtype: torch.dtype, *, learnt: int
) -> TextBudget:
    """What a GPU writes in about 20 s; to be tuned on, no more than the tokens that tuning learns from, which
    takes a small model up to a minute: its launches take longer than its bytes."""
    bandwidth = device_numbers(device.index or 0).bandwidth * _GPU_SHARE
    weights = work.all_weights * dtype.itemsize
    memory = torch.cuda.get_device_properties(device).total_memory * _GPU_MEMORY_SHARE - weights
    rows = min(_MOST_ROWS, max(1, int(memory / (work.cache_bytes * _SHORT))))
    length = min(longest, max(_SHORT, int(memory / (work.cache_bytes * rows))))
    if learnt:
        # Tuning takes text in short rows, and more of it is worth more; rounds of short documents write more.
        length = min(length, _TUNE_LENGTH)
        steps = int(_GPU_SECONDS * bandwidth / (weights + rows * work.cache_bytes * length / 2))
        tokens = min(_TUNE_TEXT, learnt, int(rows * steps * _FILLED)) // _STEP * _STEP
        return TextBudget(
            max(tokens, _FEWEST_TOKENS),
            None,
            rows,
            length,
            "what tuning has a use for, in about a minute at most",
        )
    # Of a row's cache half is there on average: seconds = length * (weights + rows * cache * length / 2) / b.
    a, b = rows * work.cache_bytes / 2, weights
    steps = int(((b * b + 4 * a * _GPU_SECONDS * bandwidth) ** 0.5 - b) / (2 * a))
    length = min(length, max(_SHORT, steps // 64 * 64))
    tokens = max(int(rows * length * _FILLED) // _STEP * _STEP, _FEWEST_TOKENS)
    return TextBudget(tokens, None, rows, length, "what this GPU writes in about 20 s")


def _rows_for(tokens: int, longest: int, reason: str) -> TextBudget:
    """Documents of up to 256 tokens, and longer ones where 128 of these are not enough."""
    length = min(longest, max(_SHORT, -(-tokens // int(_MOST_ROWS * _FILLED))))
    rows = min(_MOST_ROWS, -(-tokens // max(int(length * _FILLED), 1)))
    return TextBudget(tokens, None, rows, length, reason)
