"""Check and time the persistent decode step on the shape of Llama-3-8B, random weights.

    python lab/kernels/persistent_step.py --batch 1 --context 128 --context 512
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from marlinq.kernels.launch import persistent
from marlinq.kernels.launch.persistent import LayerOperands, Model, Operand, PersistentLayers
from marlinq.kernels.ops.reference import dequantize_operands

_VARIANTS = Path(__file__).parent.resolve() / "persistent_variants"
H, INTERMEDIATE, HEADS, KV_HEADS, D = 4096, 14336, 32, 8, 128


def operand(k: int, n: int, group: int, device: torch.device, size: float = 1.0) -> Operand:
    words = torch.randint(-(2**31), 2**31, (k // 16, 2 * n), dtype=torch.int32, device=device)
    words |= (~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111) << 3
    unit = size / (4.2 * k**0.5)
    scales = (unit * (0.5 + torch.rand(k // group, n, device=device))).half()
    return Operand(words, scales)


def make_layers(count: int, batch: int, capacity: int, group: int, device: torch.device) -> list[LayerOperands]:
    return [
        LayerOperands(
            operand(H, (HEADS + 2 * KV_HEADS) * D, group, device),
            operand(HEADS * D, H, group, device, 0.5),
            operand(H, 2 * INTERMEDIATE, group, device),
            operand(INTERMEDIATE, H, group, device, 0.5),
            0.5 + torch.rand(H, device=device),
            0.5 + torch.rand(H, device=device),
            torch.randn(batch, KV_HEADS, capacity, D, device=device).half(),
            torch.randn(batch, KV_HEADS, capacity, D, device=device).half(),
        )
        for _ in range(count)
    ]


def reference(
    layers: list[LayerOperands], model: Model, cosines: Tensor, sines: Tensor, hidden: Tensor, lengths: Tensor
) -> Tensor:
    """The same in float64, rounded where the kernel rounds; caches are appended to."""
    dtype = hidden.dtype
    rounded = lambda x: x.to(dtype).double()  # noqa: E731
    product = lambda x, w: rounded(x @ dequantize_operands(w.words, w.scales, w.zeros).double())  # noqa: E731

    def norm(x: Tensor, gamma: Tensor) -> Tensor:
        normal = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + model.eps)
        return rounded(rounded(normal) * gamma.double())

    x = hidden.double()
    for layer in layers:
        made = product(norm(x, layer.attention_gamma), layer.qkv).view(x.shape[0], -1, D)
        q, k, v = made.split([model.heads, model.kv_heads, model.kv_heads], 1)
        c, s = (table[lengths.long()].double()[:, None] for table in (cosines, sines))
        turn = lambda y: rounded(  # noqa: E731
            torch.cat([y[..., : D // 2] * c - y[..., D // 2 :] * s, y[..., D // 2 :] * c + y[..., : D // 2] * s], -1)  # noqa: B023
        )
        q, k = turn(q), turn(k)
        out = torch.empty_like(q)
        for row, length in enumerate(lengths.tolist()):
            layer.keys[row, :, length] = k[row].to(dtype)
            layer.values[row, :, length] = v[row].to(dtype)
            keys, values = (
                cache[row, :, : length + 1].double().repeat_interleave(model.heads // model.kv_heads, 0)
                for cache in (layer.keys, layer.values)
            )
            scores = torch.einsum("hd,hld->hl", q[row], keys) * model.scale
            out[row] = torch.einsum("hl,hld->hd", scores.softmax(-1), values)
        x = rounded(x + product(rounded(out.flatten(1)), layer.output))
        made = product(norm(x, layer.mlp_gamma), layer.gate_up).view(x.shape[0], -1, 2, 64)
        gate, up = made[:, :, 0].flatten(1), made[:, :, 1].flatten(1)
        x = rounded(x + product(rounded(rounded(torch.nn.functional.silu(gate)) * up), layer.down))
    return x


def show_trace(trace: Tensor) -> None:
    """Cycles from the start of the layer, median and largest of all blocks."""
    since = (trace - trace[:, :1, :1]).float()
    for kind in range(5):
        line = []
        for mark in range(64):
            seen = trace[:, kind, mark] != 0
            if seen.any():
                found = since[seen, kind, mark]
                line.append(f"{mark}: {found.median():.0f}<{found.max():.0f}")
        print(f"  kind {kind}: " + "  ".join(line))


def time_graph(run: object, repeats: int = 40) -> float:
    """Median microseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    times.sort()
    return times[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, action="append", default=None)
    parser.add_argument("--context", type=int, action="append", default=None)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--teams", type=int, default=2)
    parser.add_argument("--stages", type=int, default=None)
    parser.add_argument("--variant", action="append", default=None)
    parser.add_argument("--check", type=int, default=2, help="layers to check")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = Model(HEADS, KV_HEADS, 1e-5, D**-0.5)
    capacity = 4352
    angles = torch.arange(capacity, device=device)[:, None] * 500000.0 ** (-torch.arange(D // 2, device=device) / (D // 2))
    cosines, sines = angles.cos().float().contiguous(), angles.sin().float().contiguous()
    batches, contexts = arguments.batch or [1], arguments.context or [512]
    layers = make_layers(arguments.layers, max(batches), capacity, arguments.group_size, device)
    for batch in batches:
        mine = [replace(layer, keys=layer.keys[:batch], values=layer.values[:batch]) for layer in layers]
        for context in contexts:
            hidden = torch.randn(batch, H, device=device).half()
            lengths = torch.tensor([max(0, context - 37 * row) for row in range(batch)], dtype=torch.int32, device=device)

            def build(count: int, variant: str | None = None) -> PersistentLayers:
                config = persistent.choose(
                    [one.channels for one in layers[0].operands], batch, model, D, arguments.group_size,
                    zeros=False, bfloat16=False, shared_bytes=232_448, teams=arguments.teams,
                )
                if arguments.stages:
                    config = replace(config, stages=arguments.stages, window=min(config.window, arguments.stages))
                if arguments.window:
                    config = replace(config, window=min(arguments.window, config.stages))
                if variant:
                    config = replace(config, header=str(_VARIANTS / f"{variant}.cuh"))
                return PersistentLayers(mine[:count], model, cosines, sines, hidden, lengths, config=config)

            if arguments.check and arguments.variant is None:
                few = arguments.check
                given = hidden.clone()
                step = build(few)
                if batch == batches[0] and context == contexts[0]:
                    print(step.config, step.grid)
                step.launch()
                torch.cuda.synchronize()
                got = hidden.double()
                hidden.copy_(given)
                keys = [layer.keys.clone() for layer in mine[:few]]
                want = reference(mine[:few], model, cosines, sines, hidden, lengths)
                cache = max(float((a - b.keys).abs().max()) for a, b in zip(keys, mine[:few], strict=True))
                bits = []
                for _ in range(5):
                    hidden.copy_(given)
                    step.launch()
                    bits.append(hidden.clone())
                same = all(torch.equal(bits[0], one) for one in bits)
                print(f"M={batch} context={context} error {float((got - want).norm() / want.norm()):.2e} cache {cache:.1e} same bits {same}", flush=True)
                hidden.copy_(given)
            for variant in arguments.variant or [None]:
                step = build(arguments.layers, variant)
                given = hidden.clone()

                def run(step: PersistentLayers = step, given: Tensor = given) -> None:
                    hidden.copy_(given)
                    step.launch()

                took = time_graph(run)
                if variant and variant.startswith("trace"):
                    show_trace(step.trace.cpu())
                copy = time_graph(lambda given=given: hidden.copy_(given))
                print(f"M={batch} context={context} {variant or 'whole'}: {took:.1f} us, {(took - copy) / arguments.layers:.2f} us a layer (teams {step.config.teams} stages {step.config.stages} window {step.config.window})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
