"""Time a decode step of Llama-3-8B's shape and each kernel between its products, and check both.

    python lab/kernels/step_parts.py --batch 1 --batch 16 --context 512

Weights are random 4-bit words of group 128. Each part is a captured graph of one launch per layer over the
layers' own caches, so keys and values come from device memory. Errors are relative, against float32
arithmetic in torch on the same inputs; the whole step's is against the reference forward.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from marlinq.core.granularity import Granularity
from marlinq.core.progress import no_progress
from marlinq.kernels import Operand
from marlinq.kernels import step as kernels
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.step import AttentionShape, AttentionWorkspace, Division, HeadWork, divide
from marlinq.models.anatomy import MLP, Anatomy, Attention, Layer, Norm, Rotary, Slices
from marlinq.operations.bench.hardware import hardware_line
from marlinq.runtime import QuantLinear
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.recorded_step import RecordedStep
from marlinq.runtime.step.reference_forward import ReferenceForward

HIDDEN, HEADS, KV, D, INNER, VOCABULARY = 4096, 32, 8, 128, 14336, 128256
GROUP = 128
DTYPE = torch.float16
# Bytes a second that a kernel which only reads gets from an H200's memory.
BANDWIDTH = 4.58e12


def random_linear(k: int, n: int) -> QuantLinear:
    """Random words with scales that keep activations of their size."""
    words = torch.randint(-(1 << 31), 1 << 31, (k // 16, 2 * n), dtype=torch.int32, device="cuda")
    scales = (torch.rand(k // GROUP, n, device="cuda") + 0.5) * (0.2 / k**0.5)
    return QuantLinear(Operand.whole(INT4, Granularity.group(GROUP), words, scales.to(DTYPE), None))


def random_model(depth: int, inner: int = INNER) -> tuple[nn.Module, Anatomy]:
    """A Llama of Llama-3-8B's shape, or with another inner width; packed linears, a dense head."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        vocab_size=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        max_position_embeddings=8192,
    )
    frequencies = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    model = nn.Module()
    model.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=DTYPE, device="cuda")
    model.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=DTYPE, device="cuda")
    model.rotary = nn.Module()
    model.rotary.register_buffer("frequencies", frequencies.float().cuda())
    model.norm = nn.RMSNorm(HIDDEN, dtype=DTYPE, device="cuda")
    model.layers = nn.ModuleList()
    layers = []
    for index in range(depth):
        block = nn.Module()
        sizes = {
            "q": (HIDDEN, HEADS * D),
            "k": (HIDDEN, KV * D),
            "v": (HIDDEN, KV * D),
            "o": (HEADS * D, HIDDEN),
            "gate": (HIDDEN, inner),
            "up": (HIDDEN, inner),
            "down": (inner, HIDDEN),
        }
        for name, (k, n) in sizes.items():
            setattr(block, name, random_linear(k, n))
        for name in ("first", "second"):
            norm = nn.RMSNorm(HIDDEN, dtype=DTYPE, device="cuda")
            norm.weight.data += 0.1 * torch.randn_like(norm.weight)
            setattr(block, name, norm)
        model.layers.append(block)
        names = {name: f"layers.{index}.{name}" for name in (*sizes, "first", "second")}
        attention = Attention(
            Slices((names["q"], names["k"], names["v"]), (HEADS * D, KV * D, KV * D)),
            names["o"],
            *(HEADS, KV, D),
            scale=D**-0.5,
            rotary=Rotary("rotary", "frequencies", D),
        )
        mlp = MLP(Slices((names["gate"], names["up"]), (inner, inner)), True, names["down"], "silu")
        first, second = (Norm(names[name], "rms", 1e-5, width=HIDDEN) for name in ("first", "second"))
        layers.append(Layer(f"layers.{index}", attention, mlp, first, second))
    final = Norm("norm", "rms", 1e-5, width=HIDDEN)
    return model, Anatomy("embedding", tuple(layers), final, "head")


def microseconds(launch: Callable[[], object], repeats: int = 21) -> float:
    """Median time of a replay of ``launch``, captured once."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(3):
        graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def rotations(capacity: int) -> Tensor:
    """Cosines and sines of Llama 3's frequencies [capacity, D / 2, 2]."""
    angles = torch.arange(capacity)[:, None] * 500000.0 ** (-torch.arange(0, D, 2) / D)
    return torch.stack((angles.cos(), angles.sin()), -1).float()


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Heads [..., D] turned by [D / 2, 2]."""
    first, second = x.chunk(2, -1)
    cosine, sine = turns.unbind(-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def parts(batch: int, context: int, depth: int, *, dependent: bool) -> None:
    """One line a kernel: us a layer of a chain of ``depth`` launches, and its error."""
    device = torch.device("cuda")
    capacity = -(-(context + 64) // 64) * 64
    x = torch.randn(batch, HIDDEN, dtype=DTYPE, device=device)
    delta = torch.randn_like(x)
    stored, out = torch.empty_like(x), torch.empty_like(x)
    weight = torch.randn(HIDDEN, dtype=DTYPE, device=device)
    norm = kernels.RowNorm("RMS", weight, None, 1e-5)
    joined = torch.randn(batch, (HEADS + 2 * KV) * D, dtype=DTYPE, device=device)
    caches = [torch.randn(2, batch, KV, capacity, D, dtype=DTYPE, device=device) for _ in range(depth)]
    lengths = torch.full((batch,), context - 1, dtype=torch.int32, device=device)
    work = HeadWork(table=rotations(capacity).to(device))
    shape = AttentionShape(batch, HEADS, KV, D, capacity)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    clusters = torch.cuda.get_device_capability() >= (9, 0)
    chosen = divide(shape, processors, clusters=clusters)
    workspace = AttentionWorkspace.of([(shape, Division(64))], device)
    attended = torch.empty(batch, HEADS, D, dtype=DTYPE, device=device)
    mixed = torch.randn(batch, 2 * INNER, dtype=DTYPE, device=device)
    active = torch.empty(batch, INNER, dtype=DTYPE, device=device)

    def chain(prepared: list[kernels.Prepared]) -> float:
        launches = [kernels.bind(one, 0, dependent=dependent) for one in prepared]

        def replay() -> None:
            for launch in launches:
                launch.start()

        return microseconds(replay) / len(launches)

    found = {
        "residual + norm": chain(
            [kernels.residual(x, stored=stored, out=out, norm=norm, first=delta)] * depth
        )
    }
    total = (x.float() + delta.float()).to(DTYPE)
    errors = {"residual + norm": error(out, F.rms_norm(total.float(), (HIDDEN,), weight.float(), 1e-5))}
    found["activation"] = chain([kernels.activate(mixed, active, "silu", "tiles")] * depth)
    gate, up = mixed.float().view(batch, -1, 2, 64).unbind(2)
    errors["activation"] = error(active, (F.silu(gate) * up).flatten(1))

    def attention(division: Division) -> float:
        return chain(
            [
                kernels.attend(
                    *(joined, *cache, attended, lengths, work, workspace),
                    scale=D**-0.5,
                    division=division,
                )
                for cache in caches
            ]
        )

    def named(division: Division) -> str:
        return f"attention, {division.splits} splits, {division.warps} warps"

    found[named(chosen)] = attention(chosen)
    assert work.table is not None
    heads = joined.float().view(batch, -1, D)
    q = rotated(heads[:, :HEADS], work.table[context - 1])
    k, v = (side[:, :, :context].float() for side in caches[-1])
    expected = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    errors[named(chosen)] = error(attended, expected)
    for warps in (4, 8):
        for count in sorted({max(1, chosen.splits // 2), chosen.splits, min(64, 2 * chosen.splits)}):
            other = Division(count, warps)
            if other != chosen:
                found[named(other)] = attention(other)
    q = q.to(DTYPE)
    flash = [
        lambda cache=cache: F.scaled_dot_product_attention(
            q[:, :, None], cache[0, :, :, :context], cache[1, :, :, :context], enable_gqa=True
        )
        for cache in caches
    ]
    found["torch SDPA, nothing appended"] = microseconds(lambda: [one() for one in flash]) / depth
    floor = 2e6 * batch * KV * context * D * 2 / BANDWIDTH
    for name, time in found.items():
        wrong = f"  error {errors[name]:.1e}" if name in errors else ""
        read = f"  ({floor:.2f} us to read the cache)" if "attention" in name else ""
        print(f"  {name:<32s} {time:7.2f} us{wrong}{read}")


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        print("error: the step needs a GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(hardware_line(torch.device("cuda", 0)))
    for batch in arguments.batch if arguments.parts else ():
        for context in arguments.context:
            print(f"batch {batch}, context {context}: a layer's kernels")
            parts(batch, context, 32, dependent=True)
    if not arguments.layers:
        return 0
    model, anatomy = random_model(arguments.layers)
    torch.cuda.synchronize()
    for batch in arguments.batch:
        for context in arguments.context:
            whole(model, anatomy, batch, context, shares=arguments.shares)
    if arguments.prefill:
        prefill(model, anatomy, arguments.prefill)
    return 0


def whole(model: nn.Module, anatomy: Anatomy, batch: int, context: int, *, shares: bool) -> None:
    """The captured step, its error against the reference, and what each kind of kernel adds to its time."""
    capacity = -(-(context + 64) // 64) * 64
    own = ChainForward(model, anatomy, batch=batch, capacity=capacity)
    ids = torch.randint(0, VOCABULARY, (batch, min(context - 1, 128)), device="cuda")
    lengths = torch.full((batch,), ids.shape[1], dtype=torch.int32)
    tokens = torch.randint(0, VOCABULARY, (batch,), device="cuda")
    first = own.prefill(ids, lengths).clone()
    second = own.step(tokens).clone()
    reference = ReferenceForward(model, anatomy, batch=batch, capacity=capacity)
    wrong = error(first, reference.prefill(ids, lengths)), error(second, reference.step(tokens))
    del reference

    # Values of the cache don't matter to the time.
    def milliseconds(starts: list[Callable[[], object]]) -> float:
        return step_milliseconds(own, context, starts)

    starts = own.recorded.starts
    print(
        f"batch {batch:3d}, context {context:5d}: {milliseconds(starts):7.3f} ms for "
        f"{len(anatomy.layers)} layers, errors of prompt {wrong[0]:.1e} and step {wrong[1]:.1e}; {own.reason}"
    )
    if not shares:
        return
    layers = len(anatomy.layers)
    kinds, bytes_read = kinds_of(len(starts), layers), bytes_of(batch, context)
    for kind in dict.fromkeys(kinds):
        rest = [start for start, other in zip(starts, kinds, strict=True) if other != kind]
        alone = [start for start, other in zip(starts, kinds, strict=True) if other == kind]
        each = 1e3 / (1 if kind == "head" else layers)
        less = each * (milliseconds(starts) - milliseconds(rest))
        print(
            f"    {kind:<10s} {len(alone):4d} launches, {less:6.2f} us less without, "
            f"{each * milliseconds(alone):6.2f} alone ({1e6 * bytes_read[kind] / BANDWIDTH:5.2f} to read its "
            f"bytes){'' if kind == 'head' else ' a layer'}"
        )
    # Outside of the context that the forward prepares its step in.
    print(f"    products launched ordinarily: {milliseconds(RecordedStep(own, no_progress).starts):7.3f} ms")


def kinds_of(launches: int, layers: int) -> list[str]:
    """Kind of each launch of a step, by their number: norms have kernels of their own, or only at the ends.

    Raises:
        ValueError: neither is so.
    """
    if launches == 7 * layers + 2:
        each = ["qkv", "attention", "o", "norm", "gate_up", "down", "norm"]
        return ["norm", *each * layers, "head"]
    if launches == 5 * layers + 3:
        return ["norm", *["qkv", "attention", "o", "gate_up", "down"] * layers, "norm", "head"]
    raise ValueError(f"{launches} launches of {layers} layers are no known walk")


def bytes_of(batch: int, context: int) -> dict[str, float]:
    """Bytes that each kind of kernel reads from memory, of a layer or of the head."""
    word = 0.5 + 2 / GROUP
    return {
        "qkv": word * HIDDEN * (HEADS + 2 * KV) * D,
        "attention": 4.0 * batch * KV * D * context,
        "o": word * HEADS * D * HIDDEN,
        "gate_up": word * HIDDEN * 2 * INNER,
        "down": word * INNER * HIDDEN,
        "norm": 0.0,
        "head": 2.0 * HIDDEN * VOCABULARY,
    }


def step_milliseconds(own: ChainForward, context: int, starts: list[Callable[[], object]]) -> float:
    """Median time of a captured step that consists of ``starts``."""
    for start in starts:
        start()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for start in starts:
            start()
    times = []
    for _ in range(21):
        own.lengths.fill_(context - 1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def prefill(model: nn.Module, anatomy: Anatomy, length: int) -> None:
    """A prompt's time, by the clock of the host that waits for it."""
    own = ChainForward(model, anatomy, batch=1, capacity=length + 64)
    ids = torch.randint(0, VOCABULARY, (1, length), device="cuda")
    lengths = torch.tensor([length], dtype=torch.int32)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        own.prefill(ids, lengths)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    print(f"prompt of {length}: {statistics.median(times[1:]):.2f} ms, first {times[0]:.0f} ms")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batch", type=int, action="append", default=None)
    parser.add_argument("--context", type=int, action="append", default=None)
    parser.add_argument("--layers", type=int, default=32, help="of the whole step; 0 for the parts alone")
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--shares", action="store_true", help="the step without each kind of kernel")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of a prompt; 0 for none")
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or [1, 4, 16, 64]
    arguments.context = arguments.context or [128, 512, 2048, 4096]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
