"""Default amounts: calibration text that the model writes, steps of tuning, tokens of gradients.

Each amount is computed from the model, the kind of device and its number of threads, never from a measured
time, so that the same command on the same machine gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from marlinq.core.devices import multiplies_bfloat16
from marlinq.core.display import counted
from marlinq.core.settings import AUTO
from marlinq.kernels import device_numbers
from marlinq.models import Blueprint
from marlinq.models.head_sizes import key_channels
from marlinq.operations.quantize.recipe import Recipe

SAMPLES = 128
"""documents of calibration text"""
_FEWEST_TOKENS = 4096
"""tokens of calibration text at least"""
_STEP = 1024
"""tokens that amounts of text are rounded down to a multiple of"""
_SHORT = 256
"""tokens per document below which a budget writes fewer documents rather than shorter ones"""
_FILLED = 0.75
"""mean length of a written document over the longest allowed: some end early"""
_MOST_ROWS = 128
"""documents written at once, at most"""
_MOST_TOKENS = int(SAMPLES * 2048 * _FILLED)
"""tokens of calibration text at most, on a CPU"""

_CPU_SECONDS = 80.0
"""seconds for writing and calibrating on a CPU, from which the number of tokens follows"""
_CPU_RATE = 45e9
"""operations a second of one thread in float32, on a current server core"""
_CPU_NARROW_RATE = 90e9
"""operations a second of one thread in bfloat16, where the CPU multiplies it (:func:`writing_dtype`)"""

_GPU_SECONDS = 20.0
"""seconds for writing on a GPU, from which the number of steps follows"""
_GPU_SHARE = 0.5
"""share of the memory bandwidth that a step of writing reaches; it reads all weights and caches once"""
_GPU_MEMORY_SHARE = 0.8
"""share of a GPU's memory for weights and caches while the model writes"""

STATES_BYTES = 1 << 31
"""bytes of hidden states that any GPU keeps: 128 documents of 2048 tokens, 4096 channels, 16 bits"""
_STATES_SHARE = 0.125
"""share of the free memory that hidden states may take where that is more than ``STATES_BYTES``"""
_STATES_MOST_SHARE = 0.25
"""share of the free memory that hidden states never exceed"""

_TUNE_FEW_STEPS = 120
"""steps of tuning; a budget for fewer lowers steps and tokens per step alike"""
_TUNE_STEPS = 1400
"""steps of tuning at most, on text that the model writes: more gained nothing on held-out text"""
_TUNE_STEPS_OF_DOCUMENTS = 2800
"""steps of tuning at most, on documents: here more steps than ``_TUNE_STEPS`` gain on held-out text too"""
_TUNE_TOKENS = 8192
"""tokens of a step of tuning at most"""
_TUNE_WORK = {"cpu": 3e14, "cuda": 8e16}
"""operations of all tuning: 200 s at 4e14 a second on a GPU, about an hour of two CPU threads"""
_TUNE_PRODUCTS = 10
"""operations per weight and token of tuning: 2 each for the forward passes of original and quantised model,
2 to repeat the latter in the backward pass, 4 for the gradients"""

_TUNE_RATES = 0.84
"""sum over all steps of the relative change of a scale; above ``_TUNE_STEPS`` steps the sum grows with the
square root of their number"""
_TUNE_CODES = 10.0
"""learning rate of codes, in steps of a code, over that of scales"""
_TUNE_RATE = 0.002
"""largest relative change of a scale in a step"""
_TUNE_CODE_RATE = 0.01
"""largest change of a code in a step, in steps of a code; twice this diverged"""

_GRADIENT_TOKENS = 1 << 16
"""tokens on which gradients of the loss are taken, at most, counted once per draw of labels"""
_GRADIENT_DRAWS = 4
"""draws of labels per token, at most"""
_GRADIENT_WORK = {"cpu": 3e13, "cuda": 4e15}
"""operations for the gradients of the loss, at most"""
_GRADIENT_PRODUCTS = 14
"""operations per weight and token of the gradients: 8 for the whole original (forward, forward again for the
backward pass, backward), 6 for each block alone"""
_FEWEST_MEASURING, _MOST_MEASURING = 512, 1 << 13
"""tokens, at least and at most, on which sensitivities are measured; each is used once"""

_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
"""logits in memory at once, of which there are about four float32 copies for a moment"""
_TUNE_TEXT = 3_600_000
"""tokens that a model writes for tuning, at most"""
_TUNE_LENGTH = 512
"""tokens of the longest document that a model writes for tuning"""


@dataclass(frozen=True)
class TextBudget:
    """Amount of text that the model writes.

    Attributes:
        tokens: tokens of all documents.
        documents: number of documents; None for as many as ``tokens`` take.
        rows: documents that are written at once.
        max_length: tokens of the longest document.
        reason: why this much, in one clause.
    """

    tokens: int
    documents: int | None
    rows: int
    max_length: int
    reason: str


@dataclass(frozen=True)
class Work:
    """Work and memory per token of calibration text.

    Attributes:
        linear_weights: number of weights in the linears of all decoder blocks.
        all_weights: number of weights multiplied for a token, with the output head.
        hessian_products: multiplications for the outer products (K x K) of one token's inputs.
        cache_bytes: bytes of a token's keys and values.
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
        # Assumes that linears with one parent and one K read the same input: q, k and v, or gate and up.
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
        """Tokens of the longest document that recipe and model allow."""
        return min(recipe.max_length, self.positions or recipe.max_length)


def writing_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """dtype in which the model writes text: the stored one on a GPU; on a CPU bfloat16 where the CPU has
    instructions for it (twice as fast, and accurate enough for sampled text), else float32."""
    if device.type == "cuda":
        return stored
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def enough(recipe: Recipe) -> str:
    """The reason, in one clause, for an amount of text beyond which the method does not improve."""
    return f"enough for {recipe.method}"


def text_budget(
    recipe: Recipe, work: Work, device: torch.device, dtype: torch.dtype, *, most: int | None = None
) -> TextBudget:
    """Amount of text that the model writes for ``recipe``.

    Args:
        recipe: its ``samples`` and ``tokens`` may be ``auto``.
        work: work per token of the model.
        device: device on which it writes.
        dtype: dtype in which it writes.
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
    # Each block runs twice: for the statistics, and for its outputs once it is quantised.
    quantising = 2 * (2 * work.linear_weights + work.hessian_products) / (threads * _CPU_RATE)
    tokens = int(_CPU_SECONDS / (2 * work.all_weights / rate + quantising)) // _STEP * _STEP
    tokens = min(max(tokens, _FEWEST_TOKENS), _MOST_TOKENS)
    return _rows_for(tokens, longest, f"what suits {counted(threads, 'CPU threads')}")


def tuning_budget(recipe: Recipe, work: Work, device: torch.device, *, own_text: bool) -> tuple[int, int]:
    """(steps of tuning, tokens of a step).

    Where both are ``auto``, there are as many steps as the budget of operations allows. Where it allows fewer
    than 120, steps and tokens per step shrink alike.

    Args:
        recipe: recipe with ``tune_steps`` and ``tune_tokens``.
        work: work per token of the model.
        device: device on which it is tuned.
        own_text: whether the model writes the text that it is tuned on.
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
    """Largest change in one of ``steps`` steps of tuning: (relative change of a scale, change of a code in
    steps of a code)."""
    if isinstance(recipe.tune_rate, float):
        return recipe.tune_rate, _TUNE_CODES * recipe.tune_rate
    shared = steps if steps <= _TUNE_STEPS else (steps * _TUNE_STEPS) ** 0.5
    rate = min(_TUNE_RATE, _TUNE_RATES / max(1, shared))
    return rate, min(_TUNE_CODE_RATE, _TUNE_CODES * rate)


def tuning_work(work: Work, steps: int, tokens: int) -> float:
    """Operations of ``steps`` of tuning on ``tokens`` tokens each."""
    return float(steps * tokens) * _TUNE_PRODUCTS * work.all_weights


def gradient_jobs(tokens: Sequence[int], work: Work, device: torch.device) -> list[int]:
    """Indices of the batches on which gradients of the loss are taken.

    Of a long text evenly spaced batches; of a short one all batches, several times with newly drawn labels.

    Args:
        tokens: number of tokens of each batch.
        work: work per token of the model.
        device: device on which they are taken.
    """
    most = gradient_tokens(sum(tokens), work, device)
    whole = sum(tokens)
    if most < whole:
        return list(range(0, len(tokens), -(-whole // most)))
    return list(range(len(tokens))) * (most // whole)


def gradient_tokens(tokens: int, work: Work, device: torch.device) -> int:
    """Number of tokens, counted once per draw of labels, for gradients on a text of ``tokens`` tokens."""
    most = int(_GRADIENT_WORK[device.type] / (_GRADIENT_PRODUCTS * work.all_weights))
    return max(1, min(most, _GRADIENT_TOKENS, _GRADIENT_DRAWS * tokens))


def measuring_tokens(work: Work, device: torch.device) -> int:
    """Number of tokens on which sensitivities are measured (:mod:`..allocation.sensitivity`)."""
    most = int(_GRADIENT_WORK[device.type] / (_GRADIENT_PRODUCTS * work.all_weights))
    return max(_FEWEST_MEASURING, min(_MOST_MEASURING, most // _STEP * _STEP))


def gradient_work(tokens: int, work: Work, device: torch.device) -> float:
    """Operations for gradients of the loss on a text of ``tokens`` tokens."""
    return float(gradient_tokens(tokens, work, device)) * _GRADIENT_PRODUCTS * work.all_weights


def states_on_device(device: torch.device) -> int:
    """Bytes of hidden states that may stay on a GPU instead of in pinned host memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(free * _STATES_MOST_SHARE, max(STATES_BYTES, free * _STATES_SHARE)))


def logits_at_once(config: Any, device: torch.device) -> int:
    """Tokens whose logits are in memory at once. The model's last layers see them as one sequence, hence no
    more than the model has positions."""
    text = config.get_text_config()
    rows = max(1, _LOGITS[device.type] // int(text.vocab_size))
    positions: int | None = getattr(text, "max_position_embeddings", None)
    return min(rows, positions or rows)


def _for_gpu(
    work: Work, longest: int, device: torch.device, dtype: torch.dtype, *, learnt: int
) -> TextBudget:
    """The text that a GPU writes in about 20 s.

    ``learnt`` is the number of tokens that tuning learns from, 0 without tuning; no more are written. A small
    model then takes up to a minute, because launches take longer than reading its weights.
    """
    bandwidth = device_numbers(device.index or 0).bandwidth * _GPU_SHARE
    weights = work.all_weights * dtype.itemsize
    memory = torch.cuda.get_device_properties(device).total_memory * _GPU_MEMORY_SHARE - weights
    rows = min(_MOST_ROWS, max(1, int(memory / (work.cache_bytes * _SHORT))))
    length = min(longest, max(_SHORT, int(memory / (work.cache_bytes * rows))))
    if learnt:
        # Tuning gains from more tokens, and short documents give more of them in the same time.
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
    # On average half of a row's cache is filled:
    # seconds * bandwidth = length * (weights + rows * cache_bytes * length / 2), solved for length.
    a, b = rows * work.cache_bytes / 2, weights
    steps = int(((b * b + 4 * a * _GPU_SECONDS * bandwidth) ** 0.5 - b) / (2 * a))
    length = min(length, max(_SHORT, steps // 64 * 64))
    tokens = max(int(rows * length * _FILLED) // _STEP * _STEP, _FEWEST_TOKENS)
    return TextBudget(tokens, None, rows, length, "what this GPU writes in about 20 s")


def _rows_for(tokens: int, longest: int, reason: str) -> TextBudget:
    """``tokens`` as documents of up to 256 tokens, or longer ones where 128 such documents are not enough."""
    length = min(longest, max(_SHORT, -(-tokens // int(_MOST_ROWS * _FILLED))))
    rows = min(_MOST_ROWS, -(-tokens // max(int(length * _FILLED), 1)))
    return TextBudget(tokens, None, rows, length, reason)
