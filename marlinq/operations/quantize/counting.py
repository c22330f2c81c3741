"""Counts the tokens of local calibration text for a plan."""

from __future__ import annotations

from marlinq.calibration.documents import Duplicates
from marlinq.calibration.sources import Source
from marlinq.checkpoint import Checkpoint
from marlinq.models import Blueprint
from marlinq.operations.quantize.calibration_text import text_from_outside
from marlinq.operations.quantize.planned_text import SELF, longest, recipes_of_parts
from marlinq.operations.quantize.recipe import Recipe


def local_tokens(
    recipe: Recipe, checkpoint: Checkpoint, blueprint: Blueprint, *, trust_remote_code: bool
) -> dict[str, int]:
    """Number of tokens that the run takes from each local file or folder of ``recipe``.

    Datasets on the Hub are left out: nothing is downloaded.

    Raises:
        MarlinqError: a file can't be read or tokenised; the errors are those of the run itself.
    """
    counts: dict[str, int] = {}
    duplicates = Duplicates()
    for part in recipes_of_parts(recipe):
        if part.source == SELF or Source.parse(part.source, split="train").dataset:
            continue
        documents = text_from_outside(
            part,
            checkpoint.path,
            blueprint.config,
            max_length=longest(blueprint.config, recipe),
            duplicates=duplicates,
            trust_remote_code=trust_remote_code,
        )
        counts[part.source] = sum(map(len, documents))
    return counts
