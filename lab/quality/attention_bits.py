"""Whether attention's backward pass on a GPU has the same bits each time, by kernel.

    python lab/quality/attention_bits.py [--rows 16 --tokens 512 --heads 9 --shared 3 --channels 64 --beside]

Causal attention in bfloat16 with torch's deterministic algorithms; how many of the repeated backward passes
have other bits than the first, of the gradients of queries, keys and values. With --beside another stream
multiplies matrices meanwhile.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "memory-efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "plain": [SDPBackend.MATH],
    "cuDNN, memory-efficient, plain": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
}
REPEATS = 299


def differing(
    kernels: list[SDPBackend], operands: list[Tensor], slope: Tensor, *, shared: bool, beside: bool
) -> str:
    """How many repeats differ, by operand; or why there is none."""
    query, key, value = operands
    other, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    counts, first = [0] * len(operands), None
    for _ in range(REPEATS + 1):
        if beside:
            with torch.cuda.stream(other):
                square = square @ square / square.norm()
        try:
            with sdpa_kernel(kernels):
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        found = torch.autograd.grad(out, operands, slope)
        first = first or found
        counts = [
            count + (not torch.equal(mine, its))
            for count, mine, its in zip(counts, found, first, strict=True)
        ]
    return ", ".join(f"{count} of {REPEATS}" for count in counts)


def main() -> None:
    """Repeat and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--shared", type=int, default=3)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--beside", action="store_true", help="other work on the GPU meanwhile")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for own in (options.heads, options.shared):
        query, key, value = (
            torch.randn(
                options.rows, heads, options.tokens, options.channels, device="cuda", dtype=torch.bfloat16
            ).requires_grad_()
            for heads in (options.heads, own, own)
        )
        slope = torch.randn_like(query)
        for name, kernels in KERNELS.items():
            found = differing(
                kernels,
                [query, key, value],
                slope,
                shared=own != options.heads,
                beside=options.beside,
            )
            print(f"{options.heads} heads, {own} of keys; {name}: {found}", flush=True)


if __name__ == "__main__":
    main()
