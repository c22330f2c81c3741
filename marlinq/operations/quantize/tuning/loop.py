"""The optimisation: Adam on the divergence from the original's predictions, watched on held-out text."""

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
from marlinq.operations.quantize.tuning.recording import Direct, Passes, Recorded
from marlinq.operations.quantize.tuning.rows import NOISE
from marlinq.operations.quantize.tuning.student import Student
from marlinq.operations.quantize.tuning.teacher import Lesson
from marlinq.operations.quantize.watch import SECONDS_BETWEEN, duration

# Steps over which the rate grows from zero: Adam's first steps are as large as later ones, but know less.
_WARMUP = 5
# Looks at the held-out text in a run.
_LOOKS = 12
# Times the divergence before tuning at which a run has gone astray. Below it nothing stops it: at full rate
# the held-out text is often worse than a few steps into the run, and best when the rate has come down. At one
# step four of five runs of one recipe were at 0.92 to 1.04 times it, and one at more than 1.5.
_ASTRAY = 4.0
# Weights up to which kernels are so small that the host launches them more slowly than a GPU runs them.
_SMALL = 1 << 30


@dataclass(frozen=True)
class TuningSettings:
    """How long and how fast.

    Attributes:
        steps: number of steps of the optimiser.
        tokens: a step's, at least; whole micro-batches are taken.
        rate: rate of the relative change of scales and vectors a step, at its highest.
        code_rate: rate of latent codes, in steps of a code; 0 leaves codes alone.
        vectors: norms and biases follow too.
        seed: seed of the order of batches.
        noise: the chance of a token to become any token, in text that comes again.
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
        """What a recipe asks for, for a model of this much work on this device; ``own_text`` says whether
        the model writes any of the text."""
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
    """What tuning did.

    Attributes:
        steps: number of steps taken; fewer than asked for when the run went astray.
        astray: mean KL on the held-out text where it was stopped for that; None where it was not.
        tokens: seen in all of them, repetitions included.
        documents, held_out: to learn from, and to watch.
        kl_before, kl_after: mean KL on the held-out text in nats, before and with the kept values; None
            without such text.
        kept_step: the step whose values were kept, the last where that helped; 0 leaves everything as it was.
        changed_codes: share of the codes that are others than before.
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
    changed_codes: float
    vectors: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "vectors": list(self.vectors)}


@dataclass
class Progress:
    """Where a run stands besides its tensors; JSON values."""

    step: int = 0
    tokens: int = 0
    before: float | None = None
    best: float | None = None
    best_step: int = 0
    astray: float | None = None
    finished: bool = False


class Loop:
    """Optimises a student; its state can be taken out and put back at the end of any step.

    Args:
        student: the quantised model.
        replay: replay of its instance; the parts outside the blocks are materialised.
        lesson: the text, first the batches to learn from, then those that are held out.
        learning: how many batches are to learn from.
        settings: how long and how fast.
        original: parameters that the original's logits are computed with, by full name; the head's, if tied.
        head: head of the student.
        logits: tokens whose logits are held at once (:func:`logits_at_once`).
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
        # Of a code that follows, what would be stored is kept: a byte instead of four.
        self._best = {
            name: _codes(leaf) if name in codes else leaf.detach().clone()
            for name, leaf in self._leaves.items()
        }
        groups = [{"params": list(slow.values()), "lr": settings.rate, "highest": settings.rate}]
        if codes:
            rate = settings.code_rate
            groups.append({"params": list(codes.values()), "lr": rate, "highest": rate})
        # Fused: one kernel reads and writes each value once, where loops over lists do so some ten times.
        self._fused = lesson.device.type == "cuda"
        self._optimizer = torch.optim.Adam(groups, fused=self._fused, foreach=not self._fused)
        self._passes: Passes = self._recorded(learning) or Direct(student)

    def _recorded(self, learning: int) -> Recorded | None:
        """The passes over the micro-batches to learn from as CUDA graphs, where those are of use.

        A layer's router decides on the host which experts run, and nothing that the host decides can be
        recorded.
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
        """Takes all steps that are left and goes back to the values that are kept.

        Args:
            progress: told about every step.
            save: called after every step.
            message: given a line at the first look at the held-out text, then at most every 15 s.

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
                found = self._judge()
                now, goes_on = time.monotonic(), self.now.astray is None and self.now.step < settings.steps
                if now - told >= SECONDS_BETWEEN and goes_on:
                    seconds = (now - start) / (self.now.step - first) * (settings.steps - self.now.step)
                    message(self._line(learnt / tokens, found, seconds))
                    told, learnt, tokens = now, 0.0, 0.0
            save()
        self.now.finished = True
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                leaf.copy_(self._best[name])

    def _line(self, learnt: float, found: float | None, seconds: float) -> str:
        held_out = "" if found is None else f", {found:.4f} on held-out text ({self.now.before:.4f} before)"
        return (
            f"tuning, step {self.now.step} of {self._settings.steps}: mean KL {learnt:.4f} on the text that "
            f"is learnt{held_out}; {duration(seconds)} left"
        )

    def _judge(self) -> float | None:
        """Looks at the held-out text, and keeps the values if they are the best so far or the last.

        A few held-out documents tell a run that helps from one that does harm, but not good values from
        better ones: where they are the judge of that, a run may end up with its first steps. So the last
        values need only be better than none.

        Returns:
            The mean divergence there; None where nothing is held out.
        """
        now, found = self.now, None
        if self._held_out:
            found = self._look()
            assert now.best is not None
            assert now.before is not None
            last = now.step == self._settings.steps
            if found >= now.best and not (last and found < now.before):
                if found > _ASTRAY * now.before and not last:
                    now.astray, now.finished = found, True
                return found
            now.best = found
        now.best_step = now.step
        for name, leaf in self._leaves.items():
            best = self._best[name]
            best.copy_(_codes(leaf) if best.dtype == torch.uint8 else leaf.detach())
        return found

    def _step(self) -> float:
        """Takes a step; the sum of the divergence over its tokens, before it."""
        settings, step = self._settings, self.now.step
        share = 0.5 * (1 + math.cos(math.pi * step / settings.steps)) * min(1.0, (step + 1) / _WARMUP)
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest"] * share
        numbers = self._order[step]
        tokens = sum(self._tokens[number] for number in numbers)
        # Where one micro-batch is the step, a block takes it as soon as it has its gradients, which are
        # forgotten then: four bytes a weight that no memory is needed for.
        at_once = len(numbers) == 1 and not self._passes.keeps_gradients
        learnt = sum(self._learn(number, 1 / tokens, self._take if at_once else None) for number in numbers)
        self._take()
        self.now.step += 1
        self.now.tokens += tokens
        return learnt

    def _take(self) -> None:
        """Changes what has gradients; what has none, or has taken the step already, stays."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not self._passes.keeps_gradients)

    def _learn(self, number: int, weight: float, after_block: Callable[[], None] | None) -> float:
        """Adds the gradient of ``weight`` times the divergence over a batch.

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
        """The mean divergence over the held-out text."""
        total = 0.0
        for number in self._held_out:
            _, hidden = self._student.forward(number, self._lesson.first.load(number))
            parameters = {**self._head, **self._student.outer_parameters()}
            found, _ = divergence(
                lambda x: self._replay.logits(x, parameters),  # noqa: B023 - called before the next turn
                lambda x: self._replay.logits(x, self._original),
                self._real(number, hidden).float(),
                self._real(number, self._lesson.last.load(number)),
                chunk=self._rows,
                weight=0.0,
                gradient=False,
            )
            total += found
        return total / sum(self._tokens[number] for number in self._held_out)

    def _real(self, number: int, hidden: Tensor) -> Tensor:
        """The rows [tokens, H] of a batch's hidden states [B, T, H] that belong to real tokens; of a batch
        without padding, as the batches to learn from are, a view."""
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
        """Where the optimiser has a tensor of its state."""
        return torch.device("cpu") if key == "step" and not self._fused else leaf.device

    def restore(self, tensors: Mapping[str, Tensor], now: Progress) -> None:
        """Goes on where a state was taken out."""
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
    """Whether a GPU's passes of a model of so many tuned weights are recorded, which keeps all gradients."""
    return weights <= _SMALL


def _codes(latent: Tensor) -> Tensor:
    """uint8, what a latent would be stored as, or beyond that where its element ends before 255."""
    return latent.detach().round().clamp_(0, 255).to(torch.uint8)


def _order(tokens: Sequence[int], settings: TuningSettings) -> list[list[int]]:
    """The batches of each step: every batch once in random order, and again, until the steps are full."""
    generator = random.Random(settings.seed)
    waiting: list[int] = []
    steps = []
    for _ in range(settings.steps):
        step: list[int] = []
        while sum(tokens[number] for number in step) < settings.tokens:
            if not waiting:
                if step and len(step) >= len(tokens):
                    # The text is smaller than a step; seeing it twice in one teaches nothing.
                    break
                waiting = list(range(len(tokens)))
                generator.shuffle(waiting)
            step.append(waiting.pop())
        steps.append(step)
    return steps
