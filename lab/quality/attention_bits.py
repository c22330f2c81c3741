"""Whether attention's backward pass on a GPU has the same bits each time, by kernel, and how long it takes.

    python lab/quality/attention_bits.py [--rows 16 --tokens 512 --heads 9 --shared 3 --channels 64 --beside]
        [--dtype float32]

Causal attention with torch's deterministic algorithms: as a wish (``warn_only``), and as an order for the
backward pass alone. How many of the repeated backward passes have other bits than the first, of the gradients
of queries, keys and values; and milliseconds of a forward and a backward pass, the median. With --beside
another stream multiplies matrices meanwhile, which the times then include.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "memory-efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "plain": [SDPBackend.MATH],
}
REPEATS = 299


def order(*_: Any) -> None:
    """Operations without a fixed order raise from here on."""
    torch.use_deterministic_algorithms(True, warn_only=False)


def wish(*_: Any) -> None:
    """They warn from here on."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def differing(
    kernels: list[SDPBackend], operands: list[Tensor], slope: Tensor, *, ordered: bool, beside: bool
) -> str:
    """How many repeats differ, by operand, and the time; or why there is none."""
    query, key, value = operands
    other, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    counts, first, spans = [0] * len(operands), None, []
    for _ in range(REPEATS + 1):
        if beside:
            with torch.cuda.stream(other):
                square = square @ square / square.norm()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            with sdpa_kernel(kernels):
                out = F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
                )
            if ordered:
                assert out.grad_fn is not None
                out.grad_fn.register_prehook(order)
                out.grad_fn.register_hook(wish)
            found = torch.autograd.grad(out, operands, slope)
        except RuntimeError as error:
            wish()
            return str(error).partition("\n")[0]
        end.record()
        spans.append((start, end))
        first = first or found
        counts = [
            count + (not torch.equal(mine, its))
            for count, mine, its in zip(counts, found, first, strict=True)
        ]
    took = statistics.median(start.elapsed_time(end) for start, end in spans)
    return ", ".join(f"{count} of {REPEATS}" for count in counts) + f"; {took:.3f} ms"


def main() -> None:
    """Repeat and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--shared", type=int, default=3)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--beside", action="store_true", help="other work on the GPU meanwhile")
    options = parser.parse_args()
    torch.manual_seed(0)
    wish()
    for own in (options.heads, options.shared):
        query, key, value = (
            torch.randn(
                *(options.rows, heads, options.tokens, options.channels),
                device="cuda",
                dtype=getattr(torch, options.dtype),
            ).requires_grad_()
            for heads in (options.heads, own, own)
        )
        slope = torch.randn_like(query)
        for name, kernels in KERNELS.items():
            for ordered in (False, True):
                found = differing(kernels, [query, key, value], slope, ordered=ordered, beside=options.beside)
                how = "order" if ordered else "wish"
                print(f"{options.heads} heads, {own} of keys; {name}, {how}: {found}", flush=True)


if __name__ == "__main__":
    main()
