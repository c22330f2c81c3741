"""Output errors of single linears: rounding to nearest beside GPTQ, for each scheme of integers and floats.

    python -m lab.quality.float_layers MODEL --text FILE [--tokens N] [--group-size G]

GPTQ sees the inputs of the text's first tokens; errors are taken with those of as many tokens behind them.
Prints medians over linears of tr(D H D^T) / tr(W H W^T) and of its ratio to rounding's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.schemes import SCHEMES
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.gptq import GPTQOptions, solve_gptq
from marlinq.methods.rtn import round_to_nearest

_SCHEMES = ("int4", "int8", "fp8", "mxfp8", "mxfp4", "nvfp4")
_LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
ROUNDED, SEARCHED, SPANNING, GPTQ = "rounded", "scales searched", "GPTQ, scales span", "GPTQ"


@dataclass(frozen=True)
class Layer:
    """A linear of a model.

    Attributes:
        name: full name of the module.
        weight: float32 [N, K].
        hessians: float32 [K, K] each, sum of x x^T over the inputs of one stretch of text.
    """

    name: str
    weight: Tensor
    hessians: Sequence[Tensor]

    @property
    def shrunk(self) -> Tensor:
        """The first Hessian as the default of GPTQ takes it: without a share of what lies beside its
        diagonal."""
        hessian = self.hessians[0]
        return hessian - GPTQOptions().shrinkage * (hessian - torch.diag(hessian.diagonal()))

    def error(self, quantized: QuantizedWeight) -> float:
        """tr(D H D^T) / tr(W H W^T) with the last Hessian."""
        hessian, difference = self.hessians[-1], self.weight - quantized.dequantize()
        norm = float((self.weight @ hessian * self.weight).sum())
        return float((difference @ hessian * difference).sum()) / norm


def recorded_layers(options: argparse.Namespace, stretches: int) -> list[Layer]:
    """Some linears of a model, with the Hessians of so many stretches of text, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    text = options.text.read_text(encoding="utf-8")[: 8 * stretches * options.tokens]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : stretches * options.tokens]
    blocks = range(0, model.config.num_hidden_layers, options.every)
    names = [f"model.layers.{block}.{linear}" for block in blocks for linear in _LINEARS]
    found: list[dict[str, Tensor]] = []

    def record(name: str) -> None:
        def hook(module: object, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            found[-1][name] = found[-1].get(name, 0) + x.t() @ x

        model.get_submodule(name).register_forward_pre_hook(hook)

    for name in names:
        record(name)
    for stretch in ids.chunk(stretches, dim=1):
        found.append({})
        model(stretch.reshape(-1, min(512, options.tokens)))
    return [Layer(name, model.get_submodule(name).weight, [each[name] for each in found]) for name in names]


def errors_of(layer: Layer, scheme: Scheme) -> dict[str, float]:
    """Errors of the linear in ``scheme``, by method."""
    shrunk = layer.shrunk
    found = {
        ROUNDED: round_to_nearest(layer.weight, scheme),
        SEARCHED: round_to_nearest(layer.weight, scheme, clip_search=True),
        SPANNING: solve_gptq(layer.weight, shrunk, scheme, GPTQOptions(clip_search=False))[0],
        GPTQ: solve_gptq(layer.weight, shrunk, scheme)[0],
    }
    return {label: layer.error(quantized) for label, quantized in found.items()}


@torch.no_grad()
def main() -> None:
    """Record inputs, solve, print."""
    options = _options()
    groups = Granularity.group(options.group_size)
    layers = recorded_layers(options, stretches=2)
    for name in _SCHEMES:
        named = SCHEMES[name]
        scheme = named.example(Scheme(named.element, groups, named.element.zero_point))
        found = [errors_of(layer, scheme) for layer in layers]
        medians = {label: median(each[label] for each in found) for label in found[0]}
        ratios = {label: median(each[label] / each[ROUNDED] for each in found) for label in found[0]}
        for label, error in medians.items():
            print(f"{name:8} {label:20} {error:.3g}  {ratios[label]:.2f}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--every", type=int, default=10, help="take each so-many-th block")
    return parser.parse_args()


if __name__ == "__main__":
    main()
