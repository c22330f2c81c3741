"""The optimisation: Adam on the KL divergence from the original's predictions, checked on held-out text."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from marlinq.core.errors import NumericsError
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.methods.tuning import divergence
from marlinq.models import BlockReplay
from marlinq.operations.quantize.budget import Work, tuning_budget, tuning_rates
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.tuning.cuda_graphs import Direct, Passes, Recorded
from marlinq.operations.quantize.tuning.student import Student
from marlinq.operations.quantize.tuning.teacher import Lesson
from marlinq.operations.quantize.tuning.text_rows import NOISE
from marlinq.operations.quantize.watch import SECONDS_BETWEEN, duration

_WARMUP = 5
"""steps over which the learning rate grows from zero, because Adam's moments are poor at first, and again
after a return to the best values"""
_LOOKS = 24
"""evaluations on held-out text in a run"""
_ASTRAY = 4.0
"""ratio of the held-out divergence to that before tuning at which the run is stopped as diverged"""
_FAR = 1.15
"""ratio of the held-out divergence to that before tuning at which the run returns to its best values, at half
the rates. While the rate is high, the divergence also rises to 1.2 times its least on SmolLM2 and Gemma, and
falls with the rate: of two runs of Gemma one that returned there ended at .67 of its start, the other at .54.
Qwen2.5-Coder reached 1.2 times its start after a fifth of the steps and 2 after a quarter; without changes of
codes, or at a quarter of the rates, it fell."""
_SMALL = 1 << 30
"""number of weights up to which a GPU runs kernels faster than the host launches them"""


@dataclass(frozen=True)
class TuningSettings:
    """Length and rates of tuning.

    Attributes:
        steps: number of steps of the optimiser.
        tokens: tokens of a step, rounded up to whole micro-batches.
        rate: largest relative change of scales and vectors in a step.
        code_rate: largest change of latent codes in a step, in steps of a code; 0 does not tune codes.
        vectors: whether norms and biases are tuned.
        seed: seed of the order of batches.
        noise: probability that a token of repeated text is replaced by a random one.
    """

    steps: int
    tokens: int
    rate: float
    code_rate: float
    vectors: bool
    seed: int
    noise: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe, work: Work, device: torch.device, *, own_text: bool) -> TuningSettings:
        """The settings of a recipe, for a model with this work per token on this device.

        ``own_text`` says whether the model writes any of the text.
        """
        steps, tokens = tuning_budget(recipe, work, device, own_text=own_text)
        rate, code_rate = tuning_rates(recipe, steps)
        return cls(
            steps=steps,
            tokens=tokens,
            rate=rate,
            code_rate=code_rate if recipe.tune_codes else 0.0,
            vectors=recipe.tune_norms,
            seed=recipe.seed,
            noise=0.0 if own_text else NOISE,
        )


@dataclass(frozen=True)
class TuningReport:
    """The result of tuning.

    Attributes:
        steps: number of steps taken; fewer than asked for when the run diverged.
        tokens: number of tokens in all steps, with repetitions.
        documents, held_out: number of documents to learn from, and of held-out documents.
        kl_before, kl_after: mean KL in nats on held-out text, before tuning and with the kept values; None
            without held-out text.
        kept_step: step whose values were kept; 0 if tuning changed nothing.
        astray: mean KL in nats on held-out text at which a diverged run was stopped; None for others.
        halvings: number of times that the run returned to its best values, at half the rates.
        changed_codes: share of codes (0 to 1) that changed.
        vectors: names of the unquantised tensors that changed.
    """

    steps: int
    tokens: int
    documents: int
    held_out: int
    kl_before: float | None
    kl_after: float | None
    kept_step: int
    astray: float | None
    halvings: int
    changed_codes: float
    vectors: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "vectors": list(self.vectors)}


@dataclass
class Progress:
    """The state of a run without its tensors, as JSON values.

    Attributes:
        step: number of steps taken.
        tokens: number of tokens in these steps.
        before: mean KL in nats on held-out text before tuning.
        best: mean KL in nats on held-out text with the kept values.
        best_step: step whose values are kept.
        astray: mean KL in nats on held-out text at which the run was stopped; None while it was not.
        halvings: number of times that the run returned to its best values, at half the rates.
        returned_step: step of the last return; 0 without one.
        finished: whether no step is left.
    """

    step: int = 0
    tokens: int = 0
    before: float | None = None
    best: float | None = None
    best_step: int = 0
    astray: float | None = None
    halvings: int = 0
    returned_step: int = 0
    finished: bool = False


class Loop:
    """Optimises a student. Its state can be saved and restored between any two steps.

    Args:
        student: the quantised model.
        replay: replay of its instance; parameters outside the blocks must be in memory.
        lesson: the text: first the batches to learn from, then the held-out ones.
        learning: number of batches to learn from.
        settings: length and rates.
        original: name -> parameter of the original's head, for the original's logits.
        head: name -> parameter of the student's head, for the student's logits.
        logits: tokens whose logits are in memory at once (:func:`logits_at_once`).
    """

    def __init__(
        self,
        student: Student,
        replay: BlockReplay,
        lesson: Lesson,
        learning: int,
        settings: TuningSettings,
        *,
        original: Mapping[str, Tensor],
        head: Mapping[str, Tensor],
        logits: int,
    ) -> None:
        self._student, self._replay, self._lesson = student, replay, lesson
        self._settings, self._original, self._head = settings, original, head
        self._rows = logits
        self._tokens = [sum(batch.lengths) for batch in lesson.batches]
        self._held_out = range(learning, len(lesson.batches))
        self._order = _order(self._tokens[:learning], settings)
        self.now = Progress()
        slow = {f"{name}.change": weight.change for name, weight in student.weights.items()}
        slow |= {f"{name}.change": vector.change for name, vector in student.vectors.items()}
        codes = {f"{name}.latent": w.latent for name, w in student.weights.items() if w.latent is not None}
        self._leaves: dict[str, Tensor] = {**slow, **codes}
        # The best codes are kept as the stored byte, not as the latent's four.
        self._best = {
            name: _codes(leaf) if name in codes else leaf.detach().clone()
            for name, leaf in self._leaves.items()
        }
        groups = [{"params": list(slow.values()), "lr": settings.rate, "highest": settings.rate}]
        if codes:
            rate = settings.code_rate
            groups.append({"params": list(codes.values()), "lr": rate, "highest": rate})
        # Fused Adam reads and writes each value once; foreach does so about ten times.
        self._fused = lesson.device.type == "cuda"
        self._optimizer = torch.optim.Adam(groups, fused=self._fused, foreach=not self._fused)
        self._passes: Passes = self._recorded(learning) or Direct(student)

    def _recorded(self, learning: int) -> Recorded | None:
        """The passes over micro-batches as CUDA graphs; None where graphs don't help or can't be recorded.

        Models with experts can't be recorded: the host decides which experts run.
        """
        lesson = self._lesson
        weights = sum(weight.count for weight in self._student.weights.values())
        if lesson.device.type != "cuda" or self._replay.routed or not records(weights):
            return None
        first = lesson.batches[0]
        alike = [
            number
            for number in range(learning)
            if lesson.batches[number].ids.shape == first.ids.shape and self._replay.alike(0, number)
        ]
        return Recorded(self._student, alike, lesson.first.load(0), list(self._leaves.values()))

    def run(self, progress: ReportProgress, save: Callable[[], None], message: ReportMessage) -> None:
        """Takes the remaining steps, then restores the best values.

        Args:
            progress: called with (activity, steps done, steps in all).
            save: called after every step.
            message: called with one line after the first evaluation on held-out text, then at most every
                15 s.

        Raises:
            NumericsError: the divergence is not finite.
        """
        settings = self._settings
        interval = max(1, settings.steps // _LOOKS)
        if self.now.step == 0 and self._held_out:
            self.now.before = self.now.best = self._look()
        start, first, told = time.monotonic(), self.now.step, -math.inf
        learnt = tokens = 0.0
        while self.now.step < settings.steps and not self.now.finished:
            before = self.now.tokens
            learnt += self._step()
            tokens += self.now.tokens - before
            progress("tuning", self.now.step, settings.steps)
            if self.now.step % interval == 0 or self.now.step == settings.steps:
                judged = self._judge()
                now, goes_on = time.monotonic(), self.now.astray is None and self.now.step < settings.steps
                if now - told >= SECONDS_BETWEEN and goes_on:
                    seconds = (now - start) / (self.now.step - first) * (settings.steps - self.now.step)
                    message(self._line(learnt / tokens, judged, seconds))
                    told, learnt, tokens = now, 0.0, 0.0
            save()
        self.now.finished = True
        self._restore_best()

    def _line(self, learnt: float, kl: float | None, seconds: float) -> str:
        held_out = "" if kl is None else f", {kl:.4f} on held-out text ({self.now.before:.4f} before)"
        return (
            f"tuning, step {self.now.step} of {self._settings.steps}: mean KL {learnt:.4f} on the text that "
            f"is learnt{held_out}; {duration(seconds)} left"
        )

    def _judge(self) -> float | None:
        """Evaluates the held-out text, and keeps the values if they are the best so far.

        The last step's values are kept if they are better than those before tuning, even if an earlier step
        was better: a few held-out documents tell useful tuning from harmful tuning, but not good values from
        slightly better ones.

        Returns:
            The mean divergence on held-out text; None without held-out text.
        """
        now, kl = self.now, None
        if self._held_out:
            kl = self._look()
            assert now.best is not None
            assert now.before is not None
            last = now.step == self._settings.steps
            if kl >= now.best and not (last and kl < now.before):
                if not last and kl > _ASTRAY * now.before:
                    now.astray, now.finished = kl, True
                elif not last and kl > _FAR * now.before:
                    self._return()
                return kl
            now.best = kl
        now.best_step = now.step
        for name, leaf in self._leaves.items():
            best = self._best[name]
            best.copy_(_codes(leaf) if best.dtype == torch.uint8 else leaf.detach())
        return kl

    def _return(self) -> None:
        """Restores the best values, forgets the optimiser's moments and halves the rates."""
        self._restore_best()
        for state in self._optimizer.state.values():
            for moment in state.values():
                moment.zero_()
        self.now.halvings += 1
        self.now.returned_step = self.now.step

    def _restore_best(self) -> None:
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                leaf.copy_(self._best[name])

    def _step(self) -> float:
        """Takes a step, and returns the sum of the divergence over its tokens before the step."""
        settings, step = self._settings, self.now.step
        warm = min(1.0, (step - self.now.returned_step + 1) / _WARMUP)
        share = 0.5 * (1 + math.cos(math.pi * step / settings.steps)) * warm / 2**self.now.halvings
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest"] * share
        numbers = self._order[step]
        tokens = sum(self._tokens[number] for number in numbers)
        # A step of one micro-batch updates each block as soon as its gradients are there, and then drops
        # them, which saves four bytes per weight.
        at_once = len(numbers) == 1 and not self._passes.keeps_gradients
        learnt = sum(self._learn(number, 1 / tokens, self._take if at_once else None) for number in numbers)
        self._take()
        self.now.step += 1
        self.now.tokens += tokens
        return learnt

    def _take(self) -> None:
        """Updates parameters that have gradients; those updated earlier in this step have none any more."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not self._passes.keeps_gradients)

    def _learn(self, number: int, weight: float, after_block: Callable[[], None] | None) -> float:
        """Adds the gradients of ``weight`` times the divergence over a batch to the parameters.

        Returns:
            The sum of the divergence over its tokens.

        Raises:
            NumericsError: the divergence is not finite.
        """
        inputs, hidden = self._passes.forward(number, self._lesson.first.load(number))
        total, rows = divergence(
            lambda x: self._replay.logits(x, {**self._head, **self._student.outer_parameters()}),
            lambda x: self._replay.logits(x, self._original),
            self._real(number, hidden).float(),
            self._real(number, self._lesson.last.load(number)),
            chunk=self._rows,
            weight=weight,
            parameters=self._student.outer_leaves(),
        )
        if not math.isfinite(total):
            raise NumericsError(
                f"tuning: the divergence is not finite at step {self.now.step + 1}; "
                "lower --tune-rate, or pass --tune-steps 0"
            )
        assert rows is not None
        gradient = torch.zeros_like(hidden)
        self._real(number, gradient).copy_(rows)
        self._passes.backward(number, inputs, gradient, after_block)
        return total

    def _look(self) -> float:
        """The mean divergence, in nats per token, on held-out text."""
        total = 0.0
        for number in self._held_out:
            _, hidden = self._student.forward(number, self._lesson.first.load(number))
            parameters = {**self._head, **self._student.outer_parameters()}
            kl, _ = divergence(
                lambda x: self._replay.logits(x, parameters),  # noqa: B023 - called before the next turn
                lambda x: self._replay.logits(x, self._original),
                self._real(number, hidden).float(),
                self._real(number, self._lesson.last.load(number)),
                chunk=self._rows,
                weight=0.0,
                gradient=False,
            )
            total += kl
        return total / sum(self._tokens[number] for number in self._held_out)

    def _real(self, number: int, hidden: Tensor) -> Tensor:
        """The hidden states [tokens, H] of a batch's real tokens, from [B, T, H]; a view for batches without
        padding, which the batches to learn from are."""
        batch = self._lesson.batches[number]
        return hidden[batch.mask().to(hidden.device)] if batch.padded else hidden.flatten(0, 1)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name."""
        state = dict(self._leaves)
        state |= {f"best {name}": tensor for name, tensor in self._best.items()}
        for name, leaf in self._leaves.items():
            for key, value in self._optimizer.state.get(leaf, {}).items():
                state[f"{key} {name}"] = value
        return state

    def expected(self) -> dict[str, Tensor]:
        """Tensors of the shapes and dtypes that :meth:`tensors` has once a step was taken."""
        state = self.tensors()
        for name, leaf in self._leaves.items():
            state |= {f"exp_avg {name}": leaf, f"exp_avg_sq {name}": leaf, f"step {name}": torch.zeros(())}
        return state

    def _place(self, key: str, leaf: Tensor) -> torch.device:
        """The device on which the optimiser keeps a tensor of its state."""
        return torch.device("cpu") if key == "step" and not self._fused else leaf.device

    def restore(self, tensors: Mapping[str, Tensor], now: Progress) -> None:
        """Restores a state: the result of :meth:`tensors`, and the values of :attr:`now`."""
        self.now = now
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                leaf.copy_(tensors[name])
                self._best[name].copy_(tensors[f"best {name}"])
                moments = {key: tensors.get(f"{key} {name}") for key in ("step", "exp_avg", "exp_avg_sq")}
                if moments["exp_avg"] is not None:
                    self._optimizer.state[leaf] = {
                        key: value if value is None else value.to(self._place(key, leaf))
                        for key, value in moments.items()
                    }


def records(weights: int) -> bool:
    """Whether passes on a GPU are recorded for this number of tuned weights; recorded passes need memory for
    all gradients."""
    return weights <= _SMALL


def _codes(latent: Tensor) -> Tensor:
    """uint8, the rounded latents; not clamped to the largest code where that is below 255."""
    return latent.detach().round().clamp_(0, 255).to(torch.uint8)


def _order(tokens: Sequence[int], settings: TuningSettings) -> list[list[int]]:
    """Numbers of the batches of each step: all batches in random order, repeatedly, until steps are full."""
    generator = random.Random(settings.seed)
    waiting: list[int] = []
    steps = []
    for _ in range(settings.steps):
        step: list[int] = []
        while sum(tokens[number] for number in step) < settings.tokens:
            if not waiting:
                if step and len(step) >= len(tokens):
                    # The text has fewer tokens than a step; the same batch twice in a step teaches nothing.
                    break
                waiting = list(range(len(tokens)))
                generator.shuffle(waiting)
            step.append(waiting.pop())
        steps.append(step)
    return steps
