"""Compares estimators of a quantised module's cost with its measured divergence.

    python -m lab.quality.sensitivity_check MODEL --text TEXT [--windows 6 --length 64 --draws 3 --modules 12]

Every module is rounded to nearest, alone. ``direct`` is the mean KL divergence of the model with it, on the
same windows; the others are over it. ``token``: the gradient at a token times the error of its output,
squared, summed over tokens. ``batch``: the same summed over a window before it is squared, the exact Fisher's
form with one sample a window. ``rows``: what marlinq uses, squared for each output channel
(marlinq/operations/quantize/allocation/sensitivity.py). ``kfac``: inputs and gradients taken for independent.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, INT8, Scheme
from marlinq.methods import METHODS, RTNOptions
from marlinq.runtime import load

SCHEMES = {
    "int4/64": Scheme(INT4, Granularity.group(64), "midpoint"),
    "int8": Scheme(INT8, Granularity.channel(), "midpoint"),
}


class Estimates:
    """Estimated costs of one module's errors.

    Args:
        errors: name of a scheme -> error [N, K].
    """

    def __init__(self, errors: dict[str, Tensor]) -> None:
        self.errors = errors
        self.sums = {name: dict.fromkeys(("token", "batch", "rows"), 0.0) for name in errors}
        self._inputs, self._gradients = torch.zeros(1), torch.zeros(1)

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """Counts a window: inputs [T, K] and gradients of the loss at outputs [T, N]."""
        weight = gradient.t() @ x
        self._inputs = self._inputs + x.t() @ x
        self._gradients = self._gradients + gradient.t() @ gradient
        for name, error in self.errors.items():
            along = (F.linear(x, error) * gradient).sum(1)
            self.sums[name]["token"] += float(along.square().sum()) / 2
            self.sums[name]["batch"] += float(along.sum().square()) / 2
            self.sums[name]["rows"] += float((weight * error).sum(1).square().sum()) / 2

    def of(self, name: str, tokens: int) -> dict[str, float]:
        """Estimator -> nats per token, after ``tokens`` counted tokens."""
        error = self.errors[name]
        together = ((error @ self._inputs) @ error.t() * self._gradients).sum()
        found = {key: value / tokens for key, value in self.sums[name].items()}
        return {**found, "kfac": float(together) / (2 * tokens * tokens)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    for option, default in (("windows", 6), ("length", 64), ("draws", 3), ("modules", 12)):
        parser.add_argument(f"--{option}", type=int, default=default)
    given = parser.parse_args()
    torch.manual_seed(0)
    loaded = load(given.model, device="cpu", dtype="float32", progress=False)
    assert loaded.tokenizer is not None
    model = loaded.model.requires_grad_(False)
    with Path(given.text).open(encoding="utf-8") as file:
        text = file.read(16 * given.windows * given.length)
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[0]
    ids = ids[: given.windows * given.length].view(given.windows, given.length)
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))
    }
    names = random.Random(1).sample(sorted(linears), given.modules)
    estimates = {name: Estimates(_errors(linears[name].weight)) for name in names}
    _count(model, ids, {linears[name]: each for name, each in estimates.items()}, given.draws)
    with torch.no_grad():
        original = [F.log_softmax(model(row[None]).logits[0], -1) for row in ids]
        for name in names:
            weight = linears[name].weight
            before = weight.clone()
            for scheme, error in estimates[name].errors.items():
                weight.copy_(before + error)
                found = sum(
                    float(
                        F.kl_div(
                            F.log_softmax(model(row[None]).logits[0], -1), p, reduction="sum", log_target=True
                        )
                    )
                    for row, p in zip(ids, original, strict=True)
                )
                direct = found / ids.numel()
                guesses = estimates[name].of(scheme, given.draws * ids.numel())
                ratios = "  ".join(f"{key} {value / direct:.2f}" for key, value in guesses.items())
                print(f"{name:40s} {scheme:8s} direct {direct:.3e}  {ratios}", flush=True)
            weight.copy_(before)


def _errors(weight: Tensor) -> dict[str, Tensor]:
    found = {}
    for name, scheme in SCHEMES.items():
        solved = METHODS["rtn"].solve(
            [weight], None, scheme.for_channels(weight.shape[1]), RTNOptions(), names=[name]
        )
        found[name] = solved[0][0].dequantize(torch.float32) - weight
    return found


def _count(model: Any, ids: Tensor, estimates: dict[nn.Module, Estimates], draws: int) -> None:
    def listen(module: nn.Module, given: Any, output: Tensor) -> None:
        x, each = given[0].detach()[0], estimates[module]
        output.register_hook(lambda gradient: each.add(x, gradient[0]))

    handles = [module.register_forward_hook(listen) for module in estimates]
    embed = model.get_input_embeddings()
    for row in ids.repeat(draws, 1):
        logits = model(inputs_embeds=embed(row[None]).requires_grad_(), use_cache=False).logits[0]
        labels = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
        F.cross_entropy(logits, labels, reduction="sum").backward()
    for handle in handles:
        handle.remove()


if __name__ == "__main__":
    main()
