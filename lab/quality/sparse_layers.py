"""Output errors of single linears: INT4, INT4 with 2:4 sparsity, and INT3, which takes as many bytes.

    python -m lab.quality.sparse_layers MODEL --text FILE [--tokens N] [--group-size G]

Inputs are the original model's on the text. Prints tr(D H D^T) / tr(W H W^T) of each linear and the medians.
What errors of layers do to a model's predictions is measured by ``lab/quality/sparsity.py``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.quality.sparsity import INT3
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, Scheme
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.methods.gptq import GPTQOptions, solve_gptq
from marlinq.methods.rtn import round_to_nearest

_LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@torch.no_grad()
def main() -> None:
    """Record inputs, solve, print."""
    options = _options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    ids = tokenizer(
        options.text.read_text(encoding="utf-8")[: 8 * options.tokens], return_tensors="pt"
    ).input_ids
    ids = ids[:, : options.tokens].reshape(-1, min(512, options.tokens))
    blocks = range(0, model.config.num_hidden_layers, options.every)
    names = [f"model.layers.{block}.{linear}" for block in blocks for linear in _LINEARS]
    hessians: dict[str, torch.Tensor] = {}

    def record(name: str) -> object:
        def hook(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            hessians[name] = hessians.get(name, 0) + x.t() @ x

        return model.get_submodule(name).register_forward_pre_hook(hook)

    for name in names:
        record(name)
    model(ids)
    dense = Scheme(INT4, Granularity.from_group_size(options.group_size), "midpoint")
    schemes = {
        "INT4": dense,
        "INT3": replace(dense, element=INT3),
        "INT4 2:4": replace(dense, sparsity=TWO_OF_FOUR),
    }
    errors: dict[str, list[float]] = {name: [] for name in (*schemes, "INT4 2:4, by magnitude")}
    for name in names:
        weight, hessian = model.get_submodule(name).weight, hessians[name]
        # As the product's default has it: a share of what lies beside the diagonal is left out.
        shrunk = hessian - GPTQOptions().shrinkage * (hessian - torch.diag(hessian.diagonal()))
        found = {label: solve_gptq(weight, shrunk, scheme)[0] for label, scheme in schemes.items()}
        found["INT4 2:4, by magnitude"] = round_to_nearest(weight, schemes["INT4 2:4"])
        norm = float((weight @ hessian * weight).sum())
        for label, q in found.items():
            difference = weight - q.dequantize()
            errors[label].append(float((difference @ hessian * difference).sum()) / norm)
        print(name, {label: round(each[-1], 5) for label, each in errors.items()}, flush=True)
    print(json.dumps({label: median(each) for label, each in errors.items()}))


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
