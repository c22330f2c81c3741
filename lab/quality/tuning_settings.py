"""Compares settings of end-to-end tuning from one start on one text.

    python lab/quality/tuning_settings.py MODEL START --text FILE --learn FILE --try 'steps=300 rate=2e-3'

START is a folder that ``marlinq quantize`` wrote from MODEL without tuning; its recipe is used again. Every
``--try`` begins there, tunes with the package's own loop, and is measured in float32 on every ``--text``.
Keys of a try: steps, tokens, rate, codes (times the rate), rows (how many rows of text), row (tokens of
one), places (of a micro-batch), whole (rows are documents one after the other, not random pieces), vectors,
seed, rem (how far from its code a latent may begin), graph (0 records no CUDA graphs), fused (0 makes
weights by torch's operations), tilt (a latent's step minds how strong its gradients are, see
:class:`Tilted`), muon (1 moves codes by :class:`Muon`), basis (steps after which :class:`Rotated` moves
them in a basis of its own), beta (Adam's first), freeze (share of the steps after which codes stay), start
(1 measures what the try begins with, too). ``learnt`` is the mean divergence over the last tenth of the
steps, on the text that is learnt.

Figures in docs/lab-notes/quality.md: H100 and H200, CUDA 13.0, torch 2.11.0, transformers 5.17.0.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from marlinq import load
from marlinq.calibration import Document, make_batches
from marlinq.checkpoint import Checkpoint
from marlinq.methods import panel_kernel
from marlinq.methods import tuning as tuning_module
from marlinq.models import BlockReplay, ModelInstance, build_blueprint
from marlinq.operations.evaluate.windows import read_windows
from marlinq.operations.quantize.budget import logits_at_once
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.reproducible import reproducible
from marlinq.operations.quantize.tuning import TuningSettings, tuning_run
from marlinq.operations.quantize.tuning import loop as loop_module
from marlinq.operations.quantize.tuning.loop import Loop
from marlinq.operations.quantize.tuning.student import Student
from marlinq.operations.quantize.tuning.teacher import learn
from marlinq.operations.quantize.tuning.text_rows import hold_out, random_rows


class Bench:
    """The original, the start, and the measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.checkpoint = Checkpoint.open(options.model)
        self.blueprint = build_blueprint(
            self.checkpoint.config, source=str(options.model), tensors=self.checkpoint.tensors
        )
        self.start = load_file(options.start / "model.safetensors")
        manifest = json.loads((options.start / "marlinq.json").read_text(encoding="utf-8"))
        self.plan = plan_output(self.checkpoint, self.blueprint, Recipe.from_dict(manifest["recipe"]))
        self.original = load(options.model, device=str(self.device), dtype="float32")
        self.copy = load(options.model, device=str(self.device), dtype="float32").model
        self.texts: dict[str, Tensor] = {}
        for spelling in options.text:
            name, _, windows = spelling.partition(":")
            found = read_windows(
                name,
                self.original.tokenizer,
                windows=int(windows or 8),
                length=1024,
                vocabulary=self.blueprint.config.get_text_config().vocab_size,
            ).windows
            self.texts[Path(name).name] = torch.tensor(found, device=self.device)

    @torch.no_grad()
    def measure(self) -> dict[str, tuple[float, float]]:
        """Mean KL and top-1 agreement of the copy on every text."""
        found = {}
        for name, windows in self.texts.items():
            kl = agreed = count = 0.0
            for window in windows:
                p = self.original.model(input_ids=window[None]).logits[0, :-1].float()
                q = self.copy(input_ids=window[None]).logits[0, :-1].float()
                log_p, log_q = F.log_softmax(p, -1), F.log_softmax(q, -1)
                kl += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True).double())
                agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
                count += len(p)
            found[name] = (kl / count, 100 * agreed / count)
        return found

    def put(self, student: Student) -> None:
        """Copies the student's values, as they would be stored, into the measured model."""
        with torch.no_grad():
            for name, weight in student.weights.items():
                parameter = self.copy.get_parameter(self.plan.modules[name].projection.parameter)
                parameter.copy_(weight.quantized().dequantize())
            for name, vector in student.vectors.items():
                self.copy.get_parameter(name).copy_(vector.tensor())


def main() -> None:
    """Tune and measure every try."""
    options = _options()
    bench = Bench(options)
    documents = [
        Document(tuple(d)) for path in options.learn for d in json.loads(path.read_text(encoding="utf-8"))
    ]
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens", flush=True)
    lessons: dict[str, Any] = {}
    instance = ModelInstance(bench.blueprint, bench.checkpoint, device=bench.device, dtype=torch.float32)
    for text in options.tries:
        start = time.perf_counter()
        asked = dict(part.split("=") for part in text.split())
        settings = TuningSettings(
            steps=int(asked.get("steps", 120)),
            tokens=int(asked.get("tokens", 8192)),
            rate=float(asked.get("rate", 2e-3)),
            code_rate=float(asked.get("codes", 2.5)) * float(asked.get("rate", 2e-3)),
            vectors=bool(int(asked.get("vectors", 1))),
            seed=int(asked.get("seed", 0)),
        )
        loop_module._SMALL = int(asked.get("graph", 1)) << 30
        patched: Any = tuning_module
        patched.has_panel_kernel = panel_kernel.has_panel_kernel if int(asked.get("fused", 1)) else _never
        tuning_module._LARGEST_REMAINDER = float(asked.get("rem", 0.45))
        with reproducible(bench.device):
            lines = _try(bench, instance, documents, settings, asked, lessons)
        lines["seconds"] = time.perf_counter() - start
        print(text, "|", json.dumps(lines), flush=True)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"try": text, **lines}) + "\n")


class Tilted:
    """Adam for the first group; for the second, Adam's steps times a power of their gradients' RMS.

    A code with small gradients matters less: Adam moves it as far as others, Newton's method farther. A step
    is multiplied by (g / r)^tilt, clamped to 1/4..4, where r is the RMS of a code's gradients and g the
    geometric mean of r over its tensor. A tilt of -1 gives steps along the gradient itself.
    """

    def __init__(self, adam: torch.optim.Optimizer, tilt: float) -> None:
        slow, codes = adam.param_groups
        fused = bool(slow["fused"])
        self._adam = torch.optim.Adam([slow], fused=fused, foreach=not fused)
        self._tilt = tilt
        self.param_groups = [self._adam.param_groups[0], codes]
        self._leaves = codes["params"]
        self._means = [torch.zeros_like(leaf) for leaf in self._leaves]
        self._squares = [torch.zeros_like(leaf) for leaf in self._leaves]
        self._steps = [0 for _ in self._leaves]

    def zero_grad(self, set_to_none: bool) -> None:
        """As of any optimiser."""
        self._adam.zero_grad(set_to_none)
        for leaf in self._leaves:
            if set_to_none or leaf.grad is None:
                leaf.grad = None
            else:
                leaf.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """As of any optimiser."""
        self._adam.step()
        first, second = 0.9, 0.999
        for index, leaf in enumerate(self._leaves):
            if leaf.grad is None:
                # A code of another block, which is updated when that block's gradients are there.
                continue
            self._steps[index] += 1
            steps, mean, square = self._steps[index], self._means[index], self._squares[index]
            rate = self.param_groups[1]["lr"] / (1 - first**steps)
            mean.lerp_(leaf.grad, 1 - first)
            square.lerp_(leaf.grad.square(), 1 - second)
            root = (square / (1 - second**steps)).sqrt_()
            # A floor for inputs that are always zero, whose gradients of 0 would dominate the mean logarithm.
            log = root.clamp_(min=max(1e-20, 1e-3 * float(root.mean()))).log()
            factor = (log.mean() - log).mul_(self._tilt).exp_().clamp_(0.25, 4.0)
            leaf.addcmul_(mean, factor.div_(root), value=-rate)


class Stacked:
    """Adam for the first group; for the second, steps of whole matrices, all of one shape at a time.

    It needs the gradients of all codes at once, hence recorded passes (``graph=1``).
    """

    def __init__(self, adam: torch.optim.Optimizer) -> None:
        slow, codes = adam.param_groups
        fused = bool(slow["fused"])
        self._adam = torch.optim.Adam([slow], fused=fused, foreach=not fused)
        self.param_groups = [self._adam.param_groups[0], codes]
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for leaf in codes["params"]:
            shapes.setdefault(tuple(leaf.shape), []).append(leaf)
        self._leaves = list(shapes.values())
        self._first = [torch.zeros_like(torch.stack([leaf.detach() for leaf in x])) for x in self._leaves]
        self._taken = 0

    def zero_grad(self, set_to_none: bool) -> None:
        """As of any optimiser."""
        self._adam.zero_grad(set_to_none)
        for leaf in (leaf for leaves in self._leaves for leaf in leaves):
            assert leaf.grad is not None
            leaf.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """As of any optimiser."""
        self._adam.step()
        self._taken += 1
        rate = self.param_groups[1]["lr"]
        for index, leaves in enumerate(self._leaves):
            gradient = torch.stack([leaf.grad for leaf in leaves])  # type: ignore[misc]
            for leaf, change in zip(leaves, self._change(index, gradient), strict=True):
                leaf.sub_(change, alpha=rate)

    def _change(self, index: int, gradient: Tensor) -> Tensor:
        """[B, K, N]: the change that is subtracted from the codes at a learning rate of 1."""
        raise TypeError


class Muon(Stacked):
    """Steps are the momentum with all singular values made equal (Jordan et al. 2024)."""

    def _change(self, index: int, gradient: Tensor) -> Tensor:
        mean = self._first[index].mul_(0.95).add_(gradient, alpha=0.05)
        wanted = gradient.mul_(0.05).add_(mean, alpha=0.95)
        x = wanted.to(torch.bfloat16)
        if x.shape[-2] > x.shape[-1]:
            x = x.mT
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-20)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        if wanted.shape[-2] > wanted.shape[-1]:
            x = x.mT
        # Scaled to the size of Adam's steps where gradients are mostly noise.
        return x.float() * (0.23 * max(x.shape[-2:]) ** 0.5)


class Rotated(Stacked):
    """Adam in the basis in which a matrix' gradients of different input channels are uncorrelated.

    A simpler SOAP (Vyas et al. 2024): the eigenbasis is that of the inputs only, and is computed once from
    the gradients of the first ``learning`` steps, which are Adam's.
    """

    def __init__(self, adam: torch.optim.Optimizer, learning: int) -> None:
        super().__init__(adam)
        self._learning = learning
        self._second = [torch.zeros_like(first) for first in self._first]
        self._together = [first.new_zeros(*first.shape[:2], first.shape[1]) for first in self._first]
        self._basis: list[Tensor] = []

    def _change(self, index: int, gradient: Tensor) -> Tensor:
        steps = self._taken
        if steps <= self._learning:
            self._together[index].baddbmm_(gradient, gradient.mT)
        if steps == self._learning + 1:
            self._basis.append(torch.linalg.eigh(self._together[index].double())[1].float())
            self._first[index].zero_()
            self._second[index].zero_()
        if steps > self._learning:
            steps -= self._learning
            gradient = self._basis[index].mT @ gradient
        mean = self._first[index].lerp_(gradient, 0.1)
        square = self._second[index].lerp_(gradient.square(), 0.001)
        change = (mean / (1 - 0.9**steps)) / ((square / (1 - 0.999**steps)).sqrt_() + 1e-12)
        return change if self._taken <= self._learning else self._basis[index] @ change


def freeze_codes(loop: Loop, share: float) -> None:
    """Makes the learning rate of codes fall to zero within this share of the steps; others don't change."""
    optimizer, steps = loop._optimizer, loop._settings.steps * share
    take_step = optimizer.step

    def step() -> None:
        codes = optimizer.param_groups[1]
        now = loop.now.step
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, now / steps)))
        codes["lr"] = codes["highest"] * cosine * min(1.0, (now + 1) / loop_module._WARMUP)
        take_step()

    optimizer.step = step  # type: ignore[method-assign, assignment]


@contextmanager
def kept_divergences(found: list[float]) -> Iterator[None]:
    """Inside, appends every training micro-batch's part of its step's mean divergence to ``found``."""
    patched: Any = loop_module
    divergence = patched.divergence

    def kept(*args: Any, **kwargs: Any) -> tuple[float, Tensor | None]:
        total, rows = divergence(*args, **kwargs)
        if rows is not None:
            found.append(total * kwargs["weight"])
        return total, rows

    patched.divergence = kept
    try:
        yield
    finally:
        patched.divergence = divergence


def last_tenth(found: Sequence[float], steps: int) -> float:
    """The mean over the last tenth of the steps, all of which have the same number of values."""
    each, tenth = len(found) // steps, max(1, steps // 10)
    return sum(found[-each * tenth :]) / tenth


def _never(device: torch.device) -> bool:
    return False


def _try(bench: Bench, instance: Any, documents: Any, settings: Any, asked: Any, lessons: Any) -> Any:
    learning, held_out = hold_out(documents)
    length, count = int(asked.get("row", 512)), int(asked.get("rows", 512))
    places = int(asked.get("places", tuning_run._PLACES[bench.device.type]))
    key = f"{length} {count} {places} {asked.get('whole')} {settings.seed}"
    if key not in lessons:
        for old in list(lessons):
            del lessons[old]
        if int(asked.get("whole", 0)):
            flat = [token for document in learning for token in document.tokens]
            rows = [Document(tuple(flat[at : at + length])) for at in range(0, len(flat) - length, length)][
                :count
            ]
        else:
            rows = random_rows(learning, length, places, length * count, settings.seed)
        # As in the package: all micro-batches have the same number of rows.
        full = max(1, places // length)
        rows = rows[: len(rows) - len(rows) % full] if len(rows) > full else rows
        own = make_batches(rows, token_budget=places)
        watched = make_batches(held_out[:16], token_budget=places, pad=True)
        replay = BlockReplay(instance)
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            lesson = learn(instance, replay, own + watched, folder=Path(folder), progress=lambda *_: None)
        lessons[key] = (replay, lesson, len(own), time.perf_counter() - begun)
        print(f"{len(rows)} rows of {length}, lesson in {lessons[key][3]:.1f} s", flush=True)
    replay, lesson, own_count, _ = lessons[key]
    before = {}
    for planned in bench.plan.modules.values():
        names = bench.plan.tensor_names(planned)
        tensors = {suffix: bench.start[name] for suffix, name in names.items()}
        before[planned.projection.name] = planned.layout.unpack(tensors, planned.spec)
    student = Student(
        instance, replay, bench.plan, before, codes=settings.code_rate > 0, vectors=settings.vectors
    )
    bench.put(student)
    at_start = bench.measure() if int(asked.get("start", 0)) else {}
    with instance.outer(whole=True):
        head = instance.head_parameters()
        loop = Loop(
            student,
            replay,
            lesson,
            own_count,
            settings,
            original=head,
            head=head,
            logits=logits_at_once(bench.blueprint.config, bench.device),
        )
        if "tilt" in asked:
            loop._optimizer = Tilted(loop._optimizer, float(asked["tilt"]))  # type: ignore[assignment]
        if "muon" in asked:
            loop._optimizer = Muon(loop._optimizer)  # type: ignore[assignment]
        if "basis" in asked:
            loop._optimizer = Rotated(loop._optimizer, int(asked["basis"]))  # type: ignore[assignment]
        if "beta" in asked:
            for group in loop._optimizer.param_groups:
                group["betas"] = (float(asked["beta"]), 0.999)
        if "freeze" in asked:
            freeze_codes(loop, float(asked["freeze"]))
        learnt: list[float] = []
        begun = time.perf_counter()
        with kept_divergences(learnt):
            loop.run(lambda *_: None, lambda: None, print)
        torch.cuda.synchronize() if bench.device.type == "cuda" else None
        took = time.perf_counter() - begun
    bench.put(student)
    changed = sum(
        int((w.quantized().codes != before[n].codes.to(bench.device)).sum())
        for n, w in student.weights.items()
    )
    total = sum(w.codes.numel() for w in before.values())
    for block in range(len(bench.blueprint.blocks)):
        instance.release_block(block)
    return {
        "start": at_start,
        "measured": bench.measure(),
        "tuning": round(took, 1),
        "step": round(took / max(1, loop.now.step), 4),
        "before": loop.now.before,
        "learnt": last_tenth(learnt, loop.now.step),
        "best": loop.now.best,
        "best_step": loop.now.best_step,
        "steps": loop.now.step,
        "changed": round(changed / total, 5),
        "peak": torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 0,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("start", type=Path)
    parser.add_argument("--text", action="append", required=True, help="FILE or FILE:WINDOWS")
    parser.add_argument(
        "--learn", type=Path, required=True, action="append", help="a JSON list of documents of token ids"
    )
    parser.add_argument("--try", dest="tries", action="append", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
