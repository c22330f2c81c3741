"""Servers that will load the output of a quantise run, judged before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.checkpoint.header import TensorInfo
from marlinq.core.errors import MarlinqError
from marlinq.formats import FORMATS
from marlinq.operations.inspect.eligibility import OWN, ServerVerdict
from marlinq.operations.inspect.inspect_checkpoint import planned_verdicts
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.recipe import Recipe


def planned_checkpoint(checkpoint: Checkpoint, plan: OutputPlan) -> QuantizedCheckpoint:
    """The output folder as loaders will see it, made from its planned config and headers."""
    tensors = {
        each.name: TensorInfo(each.name, each.dtype, each.shape, "", 0, each.nbytes) for each in plan.tensors
    }
    planned = QuantizedCheckpoint.of(replace(checkpoint, config=dict(plan.config), tensors=tensors))
    if planned is None:
        raise ValueError("the plan's config names no quantisation")
    return planned


def loader_notes(
    checkpoint: Checkpoint, recipe: Recipe, plan: OutputPlan, plan_of: Callable[[Recipe], OutputPlan]
) -> list[str]:
    """A warning where no server will load the output, with the formats in which some would.

    Args:
        checkpoint: the source.
        recipe: settings of the run.
        plan: plan of its output.
        plan_of: makes the plan of another recipe of the same model.
    """
    verdicts = _servers(checkpoint, plan)
    if any(verdict.loads for verdict in verdicts):
        return []
    others = []
    for name, form in FORMATS.items():
        if name != recipe.format and form.read_only is None:
            try:
                judged = _servers(checkpoint, plan_of(replace(recipe, format=name)))
            except MarlinqError:  # the format can't hold these settings
                continue
            loading = [verdict.server for verdict in judged if verdict.loads]
            others += [f"--format {name} ({', '.join(loading)})"] if loading else []
    first = verdicts[0]
    choice = f"these are loaded: {', '.join(others)}" if others else "nor any other format"
    told = f"no server loads {recipe.format} with these settings, only marlinq does"
    return [f"{told} ({first.server}: {first.reason}); {choice}"]


def _servers(checkpoint: Checkpoint, plan: OutputPlan) -> list[ServerVerdict]:
    """The verdicts of all servers but marlinq itself."""
    judged = planned_verdicts(planned_checkpoint(checkpoint, plan))
    return [verdict for verdict in judged if verdict.server != OWN]
