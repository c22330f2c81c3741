"""What tuning does to text that begins with the model's beginning token, and to the same text without it.

    python lab/quality/beginnings.py MODEL START --learn FILE --steps 200 [--of 1400] [--cut]

START is a folder that ``marlinq quantize`` wrote from MODEL without tuning, FILE what own_text.py wrote,
whose documents begin alike. Eight are held out, with and without their first token. Every 40 steps the mean
divergence on them is printed, from the third token on, and what the first two add to the mean of all.
``--of`` is the number of steps that the rates are for, ``--cut`` begins rows wherever pieces begin.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from marlinq.calibration import Document, make_batches
from marlinq.checkpoint import Checkpoint
from marlinq.models import BlockReplay, ModelInstance, build_blueprint
from marlinq.operations.quantize.budget import logits_at_once
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.reproducible import reproducible
from marlinq.operations.quantize.tuning import TuningSettings, loop, rows
from marlinq.operations.quantize.tuning.loop import Loop
from marlinq.operations.quantize.tuning.student import Student
from marlinq.operations.quantize.tuning.teacher import learn

ROW, WATCHED, FIRST = 512, 8, 2
EVERY = 40


class Watched(Loop):
    """A loop that looks at documents with and without their first token, :attr:`beginning`."""

    beginning = 0

    def _look(self) -> float:
        sums: dict[str, list[float]] = {"with it": [0.0, 0], "without it": [0.0, 0], "all": [0.0, 0]}
        parameters = {**self._head, **self._student.outer_parameters()}
        for number in self._held_out:
            _, hidden = self._student.forward(number, self._lesson.first.load(number))
            last, batch = self._lesson.last.load(number), self._lesson.batches[number]
            for row, length in enumerate(batch.lengths):
                with torch.no_grad():
                    p = F.log_softmax(self._replay.logits(last[row, :length], self._original).float(), -1)
                    q = F.log_softmax(
                        self._replay.logits(hidden[row, :length].float(), parameters).float(), -1
                    )
                each = (p.exp() * (p - q)).sum(-1)
                kind = "with it" if int(batch.ids[row, 0]) == self.beginning else "without it"
                for key, part in ((kind, each[FIRST:]), ("all", each)):
                    sums[key][0] += float(part.sum())
                    sums[key][1] += len(part)
        means = {key: total / count for key, (total, count) in sums.items()}
        first_two = means["all"] - (means["with it"] + means["without it"]) / 2
        shown = ", ".join(f"{key} {mean:.4f}" for key, mean in means.items())
        print(f"step {self.now.step}: {shown}; the first two add {first_two:.4f}", flush=True)
        return means["all"]


def main() -> None:
    """Tune, and look now and then."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("start", type=Path)
    parser.add_argument("--learn", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--of", type=int, default=1400)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    documents = [Document(tuple(each)) for each in json.loads(options.learn.read_text(encoding="utf-8"))]
    watched = [each for each in documents[7::16] if len(each) > 150][:WATCHED]
    learning = [each for each in documents if each not in watched]
    watched += [Document(each.tokens[1:]) for each in watched]
    if options.cut:
        rows._beginning = lambda documents: ((), 1)
    total = sum(map(len, learning))
    taught = make_batches(
        rows.random_rows(learning, ROW, options.tokens, total, 0), token_budget=options.tokens
    )
    looked_at = make_batches(watched, token_budget=options.tokens, pad=True)

    checkpoint = Checkpoint.open(options.model)
    blueprint = build_blueprint(checkpoint.config, source=str(options.model), tensors=checkpoint.tensors)
    manifest = json.loads((options.start / "marlinq.json").read_text(encoding="utf-8"))
    plan = plan_output(checkpoint, blueprint, Recipe.from_dict(manifest["recipe"]))
    stored = load_file(options.start / "model.safetensors", device=options.device)
    instance = ModelInstance(blueprint, checkpoint, device=device, dtype=torch.float32)
    replay = BlockReplay(instance)
    settings = TuningSettings(options.of, options.tokens, 6e-4, 6e-3, vectors=True, seed=0)
    loop._LOOKS = options.of // EVERY
    with reproducible(device), tempfile.TemporaryDirectory() as folder:
        lesson = learn(instance, replay, taught + looked_at, folder=Path(folder), progress=lambda *_: None)
        before = {}
        for planned in plan.modules.values():
            names = plan.tensor_names(planned)
            tensors = {suffix: stored[name] for suffix, name in names.items()}
            before[planned.projection.name] = plan.layout.unpack(tensors, planned.spec)
        student = Student(instance, replay, plan, before, codes=True, vectors=True)
        with instance.outer(whole=True):
            head = instance.head_parameters()
            tuned = Watched(
                student,
                replay,
                lesson,
                len(taught),
                settings,
                original=head,
                head=head,
                logits=logits_at_once(blueprint.config, device),
            )
            tuned.beginning = watched[0].tokens[0]

            def stop(stage: str, done: int, total: int) -> None:
                if done > options.steps:
                    sys.exit()

            tuned.run(stop, lambda: None, lambda line: None)


if __name__ == "__main__":
    main()
