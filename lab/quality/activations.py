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

from lab.quality.measuring import add_json, conditions, measured, parser_of, row_of, write_record
from marlinq import load
from marlinq.kernels.launch.eight_bit_product import GROUP, quantize_rows
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
            result = measured(quantized, original, text, options)
            for handle in handles:
                handle.remove()
            rows.append(row_of(title, text, result))
            print(json.dumps(rows[-1]), flush=True)
    lines = conditions(
        original,
        f"{options.model.name}, quantised as {options.checkpoint.name}",
        f"evaluated on {options.windows} windows of {options.length} tokens",
    )
    print("\n".join(lines))
    write_record(options.json, lines, rows)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, calibrates=False, windows=16, length=512, device="cpu")
    parser.add_argument("checkpoint", type=Path)
    add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
