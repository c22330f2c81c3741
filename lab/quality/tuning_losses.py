"""Tuning towards more than the original's predictions: candidates outside the package.

    python lab/quality/tuning_losses.py MODEL OUT --calibration FILE --temperature 2
    python lab/quality/tuning_losses.py MODEL OUT --calibration FILE --hidden 4

``--quality best --no-tune-own-text`` with another loss. ``--temperature T`` adds the divergence of both
predictions softened by T, times T squared, which minds unlikely tokens more (Hinton et al. 2015).
``--hidden W`` adds W times the mean square difference of the last hidden states, each over its root mean
square. The report's divergence stays the plain one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq import quantize
from marlinq.methods.tuning import divergence
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.tuning import loop

Logits = Callable[[Tensor], Tensor]


def changed_divergence(temperature: float, hidden: float) -> Callable[..., tuple[float, Tensor | None]]:
    """:func:`marlinq.methods.tuning.divergence` whose gradient is that of more."""

    def found(
        student: Logits, teacher: Logits, rows: Tensor, expected: Tensor, **settings: Any
    ) -> tuple[float, Tensor | None]:
        total, result = divergence(student, teacher, rows, expected, **settings)
        if result is None:
            return total, None
        parameters = settings.get("parameters", ()) if temperature else ()
        for start in range(0, len(rows), settings["chunk"]):
            part = slice(start, start + settings["chunk"])
            leaf = rows[part].detach().requires_grad_()
            loss = torch.zeros((), device=rows.device)
            with torch.enable_grad():
                if temperature:
                    with torch.no_grad():
                        soft = F.log_softmax(teacher(expected[part]).float() / temperature, dim=-1)
                    own = F.log_softmax(student(leaf).float() / temperature, dim=-1)
                    loss = loss + temperature**2 * F.kl_div(own, soft, reduction="sum", log_target=True)
                if hidden:
                    misses = (_over_its_size(leaf) - _over_its_size(expected[part].float())).square()
                    loss = loss + hidden * misses.mean(-1).sum()
            torch.autograd.backward(settings["weight"] * loss, inputs=[leaf, *parameters])
            assert leaf.grad is not None
            result[part] += leaf.grad
        return total, result

    return found


def _over_its_size(x: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).rsqrt()


def main() -> None:
    """Quantise with the changed loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--hidden", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if not (options.temperature or options.hidden):
        parser.error("nothing to add: --temperature or --hidden")
    recipe = Recipe(
        group_size=options.group_size,
        calibration=str(options.calibration),
        samples=options.samples,
        max_length=options.max_length,
    ).replace(quality="best", tune_own_text=False, tune_steps=options.steps)
    loop.divergence = changed_divergence(options.temperature, options.hidden)  # type: ignore[attr-defined]
    print(quantize(options.model, options.out, recipe=recipe, device=options.device).render())


if __name__ == "__main__":
    main()
