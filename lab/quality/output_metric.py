"""GPTQ that minds how errors of a layer's outputs go together: a candidate outside the package.

    python lab/quality/output_metric.py MODEL WORK --documents TOKENS --calibration FILE --text FILE \
        --try 'blocks=8 damp=.03 shrink=.25'

The loss of a layer's error D [N, K] is taken for tr(F D H D^T), F the second moment of the loss's gradients
at the layer's outputs, on labels that the original draws from its own predictions (Tseng et al. 2025, YAQA;
Martens and Grosse 2015). GPTQ solves it for F = I, where outputs don't influence each other. With F, the
outputs are quantised in ``blocks`` parts; behind each part the best answer of the rows still to come is

    W_rest - F_rest^-1 F_rest,done (Q_done - W_done)

whatever H is. Everything else is the default's. Keys of a try: blocks (0: as the package does), damp,
shrink, text (number of a TOKENS file, JSON lists of documents of token ids), draws (labels of a token), keep
(1 leaves WORK/TRY there).
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq import evaluate, load, quantize
from marlinq.core.weight import QuantizedWeight
from marlinq.methods import gptq
from marlinq.methods.base import SolveReport
from marlinq.operations.quantize.recipe import Recipe

PLAIN = gptq.solve_gptq_shared


def main() -> None:
    """Take gradients, quantise, measure."""
    options = _options()
    recipe = Recipe(
        group_size=options.group_size,
        calibration=str(options.calibration),
        samples=options.samples,
        max_length=options.max_length,
        seed=options.seed,
    )
    original = load(options.model, device=options.device, dtype="float32")
    metrics: dict[tuple[int, int], dict[str, Tensor]] = {}
    for number, text in enumerate(options.tries):
        asked = dict(part.split("=") for part in text.split())
        start = time.perf_counter()
        blocks = int(asked.get("blocks", 8))
        gptq.solve_gptq_shared = PLAIN
        if blocks:
            key = int(asked.get("text", 0)), int(asked.get("draws", 1))
            if key not in metrics:
                documents = json.loads(options.documents[key[0]].read_text(encoding="utf-8"))
                metrics[key] = gradients(original.model, documents[: options.most], options.seed, key[1])
                print(f"moments of {key} in {time.perf_counter() - start:.1f} s", flush=True)
                start = time.perf_counter()
            mind(metrics[key], blocks, float(asked.get("damp", 0.03)), float(asked.get("shrink", 0.25)))
        out = options.work / f"try{number}"
        quantize(options.model, out, recipe=recipe, device=options.device)
        lines: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 1)}
        for spelling in options.text:
            name, _, windows = spelling.partition(":")
            found = evaluate(
                out,
                against=original,
                text=name,
                windows=int(windows or 8),
                length=1024,
                device=options.device,
                dtype="float32",
            )
            lines[Path(name).stem] = [found.kl, found.top1_agreement]
        print(text, "|", json.dumps(lines), flush=True)
        if not int(asked.get("keep", 0)):
            shutil.rmtree(out)


def gradients(live: Any, documents: Sequence[Sequence[int]], seed: int, draws: int) -> dict[str, Tensor]:
    """The sum of g g^T over all tokens, [N, N], by linear layer of the blocks."""
    device = next(live.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    found: dict[str, Tensor] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, given: Any, gradient: tuple[Tensor, ...]) -> None:
            rows = gradient[0][0]
            if name not in found:
                found[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
            found[name].addmm_(rows.t(), rows)

        return hook

    for parameter in live.parameters():
        parameter.requires_grad_(False)
    hooks = [
        module.register_full_backward_hook(listen(name))
        for name, module in live.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    ]
    for document in documents:
        for _ in range(draws):
            embedded = live.get_input_embeddings()(torch.tensor([document], device=device)).requires_grad_()
            logits = live(inputs_embeds=embedded, use_cache=False).logits[0]
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            F.cross_entropy(logits, labels, reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    return found


def mind(metrics: Mapping[str, Tensor], blocks: int, damp: float, shrink: float) -> None:
    """Makes GPTQ mind them."""

    def solve(
        weights: Sequence[Tensor], hessian: Tensor, scheme: Any, given: Any = None, *, names: Any = None
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        left = [weight.clone() for weight in weights]
        parts, inverses = [], []
        for weight, name in zip(weights, names, strict=True):
            n, count = len(weight), blocks
            parts.append([torch.arange(start, n, count, device=weight.device) for start in range(count)])
            metric = metrics[name].double()
            diagonal = metric.diagonal().clone()
            metric *= 1 - shrink
            metric.diagonal().copy_(diagonal + damp * diagonal.mean())
            inverses.append(torch.linalg.inv(metric))
        done: list[list[tuple[QuantizedWeight, SolveReport]]] = []
        for part in range(blocks):
            own = [weight[rows[part]] for weight, rows in zip(left, parts, strict=True)]
            done.append(PLAIN(own, hessian, scheme, given, names=names))
            for index, (weight, (quantized, _)) in enumerate(zip(left, done[-1], strict=True)):
                rows = parts[index][part]
                rest = torch.cat([*parts[index][part + 1 :], rows[:0]])
                error = quantized.dequantize() - weight[rows]
                # Of the inverse over rows that are left: the answer is P_rest,done P_done,done^-1 error.
                inverse = inverses[index]
                if len(rest):
                    share = torch.linalg.solve(inverse[rows][:, rows], inverse[rows][:, rest]).t()
                    weight[rest] += (share @ error.double()).float()
                    both = torch.linalg.solve(inverse[rows][:, rows], inverse[rows])
                    inverses[index] = inverse - inverse[:, rows] @ both
        results = []
        for index in range(len(weights)):
            order = torch.cat(parts[index]).argsort()
            pieces = [each[index] for each in done]
            codes, scales, zeros = (
                torch.cat([getattr(piece[0], field) for piece in pieces], dim=1)[:, order]
                for field in ("codes", "scales", "zeros")
            )
            whole = replace(pieces[0][0], codes=codes, scales=scales, zeros=zeros)
            results.append((whole, SolveReport.of_slices([piece[1] for piece in pieces])))
        return results

    gptq.solve_gptq_shared = solve


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--documents", type=Path, action="append", required=True)
    parser.add_argument("--most", type=int, default=400, help="documents that gradients are taken on")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True, help="FILE or FILE:WINDOWS")
    parser.add_argument("--try", dest="tries", action="append", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
