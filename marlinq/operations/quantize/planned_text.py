"""How many documents and tokens each calibration source gives, planned before any text is read."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from marlinq.calibration import MixturePart, read_part, shares
from marlinq.checkpoint import Checkpoint
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import UsageError
from marlinq.core.settings import AUTO
from marlinq.methods import METHODS
from marlinq.models import Blueprint, TensorNames
from marlinq.operations.quantize.budget import SAMPLES, TextBudget, Work, text_budget, writing_dtype
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.spelling import spelled

SELF = "self"
"""Value of ``calibration`` for text that the model writes itself."""
DRAWN_ANEW = "documents drawn anew"
"""Name in reports for documents in which the model has replaced some tokens by its own draws."""


def parts_of(recipe: Recipe) -> tuple[MixturePart, ...]:
    """The recipe's sources with their weights.

    Raises:
        UsageError: a weight is 0, or a source is named twice.
    """
    spellings = recipe.calibration if isinstance(recipe.calibration, tuple) else (recipe.calibration,)
    parts = tuple(map(read_part, spellings))
    names = [part.source for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{spelled('calibration')}: {twice[0]!r} is named twice; give it one weight")
    return parts


@dataclass(frozen=True)
class SourcePart:
    """One source of calibration text and its share of the amount.

    Attributes:
        source: source as the recipe spells it.
        recipe: recipe with ``samples`` and ``tokens`` of this source's share.
        most: tokens that are enough for the method where the recipe's ``tokens`` is ``auto``; None for no
            limit.
    """

    source: str
    recipe: Recipe
    most: int | None

    @property
    def samples(self) -> int | None:
        """Number of documents from a file or dataset; None for as many as the tokens take."""
        if isinstance(self.recipe.samples, int):
            return self.recipe.samples
        return SAMPLES if self.recipe.tokens == AUTO else None

    @property
    def tokens(self) -> int | None:
        """Largest number of tokens from a file or dataset; None for no limit."""
        return self.recipe.tokens if isinstance(self.recipe.tokens, int) else self.most


def tokens_looked_at(recipe: Recipe) -> int | None:
    """Number of tokens that are enough for the method, where ``recipe`` gives no number; None for no limit.

    There is no limit with tuning, which learns from every token.
    """
    if recipe.tokens != AUTO or recipe.tune_steps:
        return None
    return METHODS[recipe.method].enough_tokens


def recipes_of_parts(recipe: Recipe) -> list[SourcePart]:
    """The recipe's sources, each with a share of samples and tokens in proportion to its weight.

    Raises:
        UsageError: a share is too small for a document.
    """
    parts = parts_of(recipe)
    most = tokens_looked_at(recipe)
    if len(parts) == 1:
        return [SourcePart(parts[0].source, recipe, most)]
    weights = [part.weight for part in parts]
    bounds = [None] * len(parts) if most is None else shares(most, weights)
    changes: list[dict[str, Any]] = [{} for _ in parts]
    if isinstance(recipe.tokens, int):
        for change, share in zip(changes, shares(recipe.tokens, weights), strict=True):
            change["tokens"] = share
    if isinstance(recipe.samples, int) or recipe.tokens == AUTO:
        samples = recipe.samples if isinstance(recipe.samples, int) else SAMPLES
        for change, share in zip(changes, shares(samples, weights), strict=True):
            change["samples"] = share
    for part, change in zip(parts, changes, strict=True):
        if change.get("samples") == 0 or change.get("tokens", _SMALLEST_SHARE) < _SMALLEST_SHARE:
            raise UsageError(
                f"{spelled('calibration')} {part.source!r}: its weight leaves it no document; raise it, "
                f"{spelled('samples')} or {spelled('tokens')}"
            )
    return [
        SourcePart(part.source, recipe.replace(**change), bound)
        for part, change, bound in zip(parts, changes, bounds, strict=True)
    ]


_SMALLEST_SHARE = 16
"""tokens of a source at least"""
_CALIBRATED = 3 << 17
"""tokens to calibrate on, at most, of the text that the model writes for tuning; more hardly change a
Hessian"""
_CALIBRATED_WITH = 80_000
"""tokens to calibrate on, at most, of a file or dataset together with text that the model writes or draws
anew for tuning; on SmolLM2 three times as many were worse"""


@dataclass(frozen=True)
class PlannedText:
    """Text to take from one source.

    Attributes:
        source: source as the recipe spells it.
        tokens: tokens to calibrate on, at most.
        budget: amount that the model writes, with text for tuning; None for files and datasets.
        counted: whether ``tokens`` is the exact number and not a limit.
    """

    source: str
    tokens: int
    budget: TextBudget | None = None
    counted: bool = False


def tuning_part(recipe: Recipe) -> SourcePart | None:
    """Text that the model writes for tuning where the calibration text is a file or dataset; None for
    none."""
    if not (recipe.tune_steps and recipe.tune_own_text):
        return None
    if any(part.source == SELF for part in parts_of(recipe)):
        return None
    return SourcePart(SELF, recipe.replace(calibration=SELF, samples=AUTO, tokens=AUTO), None)


def writes_text(recipe: Recipe) -> bool:
    """Whether the model writes any of the text itself."""
    return tuning_part(recipe) is not None or any(part.source == SELF for part in parts_of(recipe))


def tokens_drawn_anew(recipe: Recipe, tokens: int) -> int:
    """Tokens that the model draws anew to calibrate on, beside ``tokens`` from files and datasets.

    0 unless the model is tuned and writes no text itself.
    """
    if not recipe.tune_steps or writes_text(recipe) or not METHODS[recipe.method].calibrated:
        return 0
    return calibrated_beside(tokens)


def planned_tuning_text(
    recipe: Recipe, checkpoint: Checkpoint, blueprint: Blueprint, device: torch.device
) -> PlannedText | None:
    """Amount of text that the model writes for tuning, where :func:`tuning_part` has any."""
    part = tuning_part(recipe)
    if part is None:
        return None
    dtype = writing_dtype(device, stored_dtype(checkpoint, blueprint))
    budget = text_budget(part.recipe, Work.of(blueprint), device, dtype)
    return PlannedText(part.source, budget.tokens, budget)


def planned_text(
    recipe: Recipe,
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    device: torch.device,
    counted: Mapping[str, int] | None = None,
) -> list[PlannedText]:
    """Text to calibrate on from each source of ``recipe``.

    Args:
        recipe: settings of the run.
        checkpoint, blueprint: the model.
        device: device that the model writes text on.
        counted: source -> its number of tokens, for sources that have been counted.
    """
    work = Work.of(blueprint)
    planned = []
    longest = work.longest(recipe)
    for part in recipes_of_parts(recipe):
        if part.source == SELF:
            dtype = writing_dtype(device, stored_dtype(checkpoint, blueprint))
            budget = text_budget(part.recipe, work, device, dtype, most=part.most)
            planned.append(PlannedText(part.source, min(budget.tokens, calibrated_of_own(recipe)), budget))
            continue
        if counted is not None and part.source in counted:
            planned.append(PlannedText(part.source, counted[part.source], counted=True))
            continue
        bounds = [part.tokens, None if part.samples is None else part.samples * longest]
        tokens = min(bound for bound in bounds if bound is not None)
        planned.append(PlannedText(part.source, tokens))
    own = planned_tuning_text(recipe, checkpoint, blueprint, device)
    beside = calibrated_beside(sum(text.tokens for text in planned))
    if own is not None and beside:
        planned.append(replace(own, tokens=min(own.tokens, beside)))
    if anew := tokens_drawn_anew(recipe, sum(text.tokens for text in planned)):
        planned.append(PlannedText(DRAWN_ANEW, anew))
    return planned


def longest(config: Any, recipe: Recipe) -> int:
    """Tokens that a document is cut to: the recipe's ``max_length``, at most the model's positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or not 0 < positions < recipe.max_length:
        return recipe.max_length
    warnings.warn(
        f"calibration: {spelled('max_length')} {recipe.max_length} is cut to the model's "
        f"{positions} positions",
        stacklevel=3,
    )
    return int(positions)


def calibrated_of_own(recipe: Recipe) -> int:
    """Tokens to calibrate on, at most, of the text that the model writes."""
    asked = recipe.samples != AUTO or recipe.tokens != AUTO
    return sys.maxsize if asked or not recipe.tune_steps else _CALIBRATED


def calibrated_beside(tokens: int) -> int:
    """Tokens to calibrate on, at most, of text that the model writes or draws anew for tuning, beside
    ``tokens`` from files and datasets. They are added because codes overfit a few documents."""
    return max(0, _CALIBRATED_WITH - tokens)


def stored_dtype(checkpoint: Checkpoint, blueprint: Blueprint) -> torch.dtype:
    """dtype of the first linear's stored weight."""
    names = TensorNames(blueprint, checkpoint.tensors, source=str(checkpoint.path))
    first = next(blueprint.projections())
    stored, _ = names.places(first.parameter, blueprint.parameters.get(first.parameter, ()))[0]
    return torch_dtype(checkpoint.tensors[stored].dtype)
