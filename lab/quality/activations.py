"""Measures what FP8 activations cost beside 4-bit weights alone: KL divergence from the original per text.

    python -m lab.quality.activations MODEL CKPT --text FILE [--text FILE] [--json OUT]

CKPT is MODEL quantised to INT4. Activations are rounded in front of every quantised linear as the kernels do:
to E4M3, with a scale of each token and 128 channels, or of each token alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq import evaluate, load
from marlinq.kernels.launch.eight_bit_product import GROUP, quantize_rows
from marlinq.operations.bench.hardware import hardware_line
from marlinq.runtime import LoadedModel

ROWS = {"16-bit activations": None, "FP8, scale of token and 128 channels": GROUP, "FP8, scale of token": 0}
"""Title of a row -> channels that share a scale: 0 for all of a token's, None where nothing is rounded."""


def rounded(x: Tensor, group: int) -> Tensor:
    """Activations [..., K] rounded to E4M3; a last group may have fewer than ``group`` channels."""
    k = x.shape[-1]
    flat = x.reshape(-1, k).float()
    if group:
        flat = F.pad(flat, (0, -k % group))
    codes, scales = quantize_rows(flat, group)
    values = codes.float().view(len(flat), scales.shape[1], -1) * scales[..., None]
    return values.view(len(flat), -1)[:, :k].reshape(x.shape).to(x.dtype)


def round_inputs(loaded: LoadedModel, group: int) -> list[torch.utils.hooks.RemovableHandle]:
    """Round the inputs of every quantised linear until the handles are removed."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return rounded(inputs[0], group), *inputs[1:]

    linears = [loaded.model.get_submodule(name) for name in loaded.decisions]
    return [linear.register_forward_pre_hook(hook) for linear in linears]


def main() -> None:
    """Evaluate each row on each text."""
    options = _options()
    original, quantized = (
        load(path, device=options.device, dtype="float32") for path in (options.model, options.checkpoint)
    )
    rows = []
    for text in options.text:
        for title, group in ROWS.items():
            handles = [] if group is None else round_inputs(quantized, group)
            measured = evaluate(
                quantized,
                against=original,
                text=str(text),
                windows=options.windows,
                length=options.length,
                device=options.device,
                dtype="float32",
                progress=False,
            )
            for handle in handles:
                handle.remove()
            rows.append(
                {
                    "name": title,
                    "text": text.name,
                    "perplexity": measured.perplexity,
                    "original_perplexity": measured.against_perplexity,
                    "kl": measured.kl,
                    "top1_agreement": measured.top1_agreement,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    conditions = [
        hardware_line(original.device),
        f"{options.model.name}, quantised as {options.checkpoint.name}",
        f"evaluated on {options.windows} windows of {options.length} tokens",
    ]
    print("\n".join(conditions))
    if options.json is not None:
        record = {"conditions": conditions, "rows": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
