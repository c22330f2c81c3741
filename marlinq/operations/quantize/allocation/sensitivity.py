"""Estimates, by gradients, the mean KL divergence that each option of each unit causes.

To second order, the mean KL divergence from an error D = Q - W of one weight is

    KL(D) = 1/2 E[ <G, D>^2 ] / tokens,   G = the gradient of the log-likelihood at W

with labels drawn from the original's own predictions: E[G G^T] is the Fisher information, the curvature of
the divergence (Martens 2014). G is exact: it goes through attention and every later block, over all tokens of
a batch, for one block's weights at a time. Rounding errors of different output channels are independent, so
instead of the square of one sum over the weight,

    KL(D) ~ 1/2 sum_n ( sum_k G[n, k] D[n, k] )^2 / tokens

is used. Its expectation over roundings is the same, but it has one sample for each output channel and batch
instead of one for each batch. Errors inside a channel are correlated (GPTQ relies on that), and all those
terms are in the inner sum.

D comes from the recipe's own method, solved on the original's inputs. Methods are solved on every other
document and their errors weighed on the remaining ones, because a method fits the text that it sees. The
estimate leaves out tuning, and the errors of earlier blocks with their correction (``drift_correction``). A
sum over units takes units for independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.core.errors import NumericsError
from marlinq.core.progress import ReportProgress
from marlinq.models import BlockReplay, ModelInstance
from marlinq.operations.quantize.allocation.units import Unit
from marlinq.operations.quantize.budget import logits_at_once
from marlinq.operations.quantize.expert_statistics import ExpertCalibration
from marlinq.operations.quantize.gathering import Gathering
from marlinq.operations.quantize.gradients import LossGradients
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.ranks import ALONE
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.states import first_states

STAGE = "measuring sensitivities"


@dataclass(frozen=True)
class MeasuringText:
    """The text of a measurement.

    Attributes:
        solved: batches that options are solved on.
        weighed: other batches, on which the errors of options are weighed.
    """

    solved: Sequence[Batch]
    weighed: Sequence[Batch]

    @property
    def tokens(self) -> int:
        """Number of tokens on which gradients are taken."""
        return sum(sum(batch.lengths) for batch in self.weighed)


def measure(
    instance: ModelInstance,
    units: Sequence[Unit],
    recipe: Recipe,
    text: MeasuringText,
    *,
    products: torch.dtype | None,
    folder: Path,
    progress: ReportProgress,
) -> list[list[float]]:
    """Estimated mean KL divergence, in nats per token, for every unit and each of its options, with the rest
    of the model unquantised.

    Memory holds one block, the errors of all its options in the instance's dtype, the statistics of its
    inputs, and hidden states of the text for every block (:class:`LossGradients`).

    Args:
        instance: the loaded original, without any weights in memory.
        units: groups of modules that get one scheme.
        recipe: recipe with the method and the seed.
        text: the text.
        products: dtype that linear layers multiply in while blocks run in float32; None for float32.
        folder: folder for hidden states that don't fit memory.
        progress: called after every block.

    Raises:
        NumericsError: weights, activations or gradients are NaN or infinite.
        UnsupportedError: the model has no output head, or can't be run block by block.
    """
    return _Measurement(instance, units, recipe, text, products, folder, progress).run()


class _Measurement:
    """State of :func:`measure`, whose arguments it takes."""

    def __init__(
        self,
        instance: ModelInstance,
        units: Sequence[Unit],
        recipe: Recipe,
        text: MeasuringText,
        products: torch.dtype | None,
        folder: Path,
        progress: ReportProgress,
    ) -> None:
        self._instance, self._units, self._progress = instance, units, progress
        self._batches = [*text.solved, *text.weighed]
        self._jobs = range(len(text.solved), len(self._batches))
        self._tokens = text.tokens
        self._replay = BlockReplay(instance, products)
        self._gathering = Gathering(instance, self._replay, text.solved, ALONE)
        self._experts = ExpertCalibration(
            instance, self._replay, recipe, len(text.solved), self._gathering.empty, ALONE
        )
        self._states = first_states(instance, self._replay, self._batches, folder)
        self._gradients = LossGradients(
            instance,
            self._replay,
            self._batches,
            list(self._jobs),
            self._states,
            logits=logits_at_once(instance.blueprint.config, instance.device),
            seed=recipe.seed,
            folder=folder,
            device_bytes=torch.cuda.mem_get_info(instance.device)[0] // 4
            if instance.device.type == "cuda"
            else 0,
            progress=progress,
        )
        self._place = {
            projection.name: (number, member)
            for number, unit in enumerate(units)
            for member, projection in enumerate(unit.projections)
        }
        self._costs = [[0.0] * len(unit.options) for unit in units]

    def run(self) -> list[list[float]]:
        """The estimates, one list for each unit."""
        blocks = self._instance.blueprint.blocks
        with self._instance.reading_ahead(range(len(blocks))):
            for index in range(len(blocks)):
                self._instance.block(index)
                errors = self._errors(index)
                if errors:
                    self._weigh(index, errors)
                if index + 1 < len(blocks):
                    self._advance(index, self._states)
                self._instance.release_block(index)
                self._progress(STAGE, index + 1, len(blocks))
        self._check()
        return self._costs

    def _advance(self, index: int, states: HiddenStates) -> None:
        for number in range(len(self._batches)):
            states.store(number, self._replay.run(index, number, states.load(number)))

    def _check(self) -> None:
        for unit, costs in zip(self._units, self._costs, strict=True):
            if not all(cost < float("inf") for cost in costs):
                raise NumericsError(
                    f"{unit.name}: its sensitivity is NaN or infinite; check the source checkpoint, or "
                    "choose its scheme with --override"
                )

    def _errors(self, index: int) -> dict[str, dict[int, Tensor]]:
        """Name of a projection of the block -> index of a quantised option -> its error [N, K]."""
        block = self._instance.blueprint.blocks[index]
        known = [each for each in block.projections if each.name in self._place]
        members = [member for each in known if (member := self._any_option(each.name)) is not None]
        by_name = {member.projection.name: member for member in members}
        of_experts = {name for each in block.experts for name in each.parameters}
        plain = [member for member in members if member.projection.parameter not in of_experts]
        errors: dict[str, dict[int, Tensor]] = {name: {} for name in by_name}
        calibrated = [member for member in plain if member.method.calibrated]
        if calibrated:
            gathered = self._gathering.gather(index, calibrated, self._states)
            for group in gathered.groups:
                self._solve(group, gathered.statistics.pop(group[0]), errors)
        for member in plain:
            if not member.method.calibrated:
                self._solve([member.projection.name], None, errors)
        for experts in block.experts:
            if experts.projections[0].name not in by_name:
                continue
            for groups in self._experts.groups(index, experts, by_name, self._states):
                for part in groups:
                    self._solve([each.projection.name for each in part.members], part.statistics, errors)
        return errors

    def _any_option(self, name: str) -> PlannedModule | None:
        """The first quantised option of a projection; all options need the same statistics."""
        unit, member = self._place[name]
        return next((each.planned[member] for each in self._units[unit].options if each.planned), None)

    def _solve(self, names: Sequence[str], statistics: Any, errors: dict[str, dict[int, Tensor]]) -> None:
        """Solves all options of projections that share an input, and adds their errors to ``errors``."""
        for unit, together in groupby(names, key=lambda name: self._place[name][0]):
            mine = list(together)
            weights = [
                self._instance.weight(self._instance.blueprint.by_name[name]).to(torch.float32)
                for name in mine
            ]
            for number, option in enumerate(self._units[unit].options):
                if not option.planned:
                    continue
                planned = [option.planned[self._place[name][1]] for name in mine]
                first = planned[0]
                solved = first.method.solve(
                    weights,
                    statistics if first.method.calibrated else None,
                    first.spec.scheme,
                    first.options,
                    names=mine,
                )
                for name, weight, (quantized, _) in zip(mine, weights, solved, strict=True):
                    errors[name][number] = (quantized.dequantize(torch.float32) - weight).to(
                        self._instance.dtype
                    )

    def _weigh(self, index: int, errors: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Adds the estimated KL divergence of a block's errors to the costs."""
        by_name = self._instance.blueprint.by_name
        parameters = list(dict.fromkeys(by_name[name].parameter for name in errors))
        for gradients in self._gradients.weight_gradients(index, parameters, self._states):
            for name, options in errors.items():
                projection = by_name[name]
                gradient = projection.view(gradients[projection.parameter]).to(torch.float32)
                unit, _ = self._place[name]
                for number, error in options.items():
                    along = (gradient * error).sum(dim=1).to(torch.float64)
                    self._costs[unit][number] += float(along.square().sum()) / (2 * self._tokens)
