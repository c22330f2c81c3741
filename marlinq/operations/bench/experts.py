"""Times layers of experts, beside peers and the hardware's limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from marlinq.core.devices import resolve_device
from marlinq.core.errors import EnvironmentProblem, UsageError
from marlinq.core.granularity import Granularity
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels import GROUP_SIZES
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.experts import ExpertWeights, reference_experts
from marlinq.kernels.experts.configurations import ExpertsShape
from marlinq.kernels.experts.experts_decision import decide_experts
from marlinq.kernels.experts.launch import precompile_experts
from marlinq.kernels.experts.steps import shape_of
from marlinq.operations.bench.contest import Launch, attempted, check_and_time, first_and_last
from marlinq.operations.bench.expert_shapes import ExpertsLayer, layers_named
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.kernel_bench import Cell, KernelBench
from marlinq.operations.bench.kernels import scale_dtype_of, scheme_named
from marlinq.operations.bench.peers import EXPERT_PEERS
from marlinq.operations.bench.peers.contenders import ExpertsContender, Routing
from marlinq.operations.bench.peers.own import MarlinqExperts
from marlinq.operations.bench.synthetic_experts import random_experts
from marlinq.operations.bench.timing import cold_read_seconds, peak_rate

DEFAULT_EXPERT_BATCHES = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""largest relative error by dtype: twice that of a single product (marlinq.operations.bench.kernels)"""
_CHECKED = 2
_DRAWS = 20
_COLD_BYTES = 3 * 60 * 2**20
"""bytes of other experts between two uses of an expert, three times an H200's L2, so that it is not cached"""


def bench_experts(
    models: Sequence[str] = ("qwen3-30b-a3b",),
    *,
    batches: Sequence[int] = DEFAULT_EXPERT_BATCHES,
    device: str | torch.device = "auto",
    against: Sequence[str] = ("humming",),
    dtype: str = "float16",
    scheme: str = "int4",
    group_size: int | None = None,
    asymmetric: bool = False,
    explain: bool = False,
    progress: ReportProgress = no_progress,
) -> KernelBench:
    """Times a layer's experts: sorting tokens, both products, activation, weighting and sum.

    Routings are random and even. Launches of a graph use different experts in turn, so that weights come from
    device memory. A cell's floor is the longer of two times: reading the touched experts at the bandwidth of
    a cold read, and the operations at the measured peak.

    Args:
        models: names of :data:`marlinq.operations.bench.expert_shapes.EXPERT_LAYERS`.
        batches: rows of activations.
        device: a GPU, as in :func:`marlinq.core.devices.resolve_device`.
        against: names of :data:`marlinq.operations.bench.peers.EXPERT_PEERS`.
        dtype: float16 or bfloat16.
        scheme: element of the weights, a key of :data:`marlinq.operations.bench.kernels.SCHEMES`.
        group_size: 32, 64, 128 or -1; None is the scheme's own, else 128.
        asymmetric: whether weights have zero points.
        explain: whether the report has the reason for every choice of a kernel.
        progress: called with (activity, steps done, steps in all).

    Returns:
        The report; a cell's N is the number of columns in all matrices of a row's experts, K is H.

    Raises:
        UsageError: an unknown model, peer, dtype, scheme or group size.
        EnvironmentProblem: there is no GPU; or CuPy, NVRTC or the driver is missing.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r}: expected float16 or bfloat16")
    weight_format, usual = scheme_named(scheme, asymmetric=asymmetric)
    if group_size is None:
        group_size = usual or 128
    if group_size not in (*GROUP_SIZES, usual):
        raise UsageError(f"group size {group_size}: expected one of 32, 64, 128, -1")
    for name in against:
        if name not in EXPERT_PEERS:
            raise UsageError(f"peer {name!r}: expected one of {', '.join(EXPERT_PEERS)}")
    layers = layers_named(models)
    gpu = resolve_device(device)
    if gpu.type != "cuda":
        raise EnvironmentProblem("bench experts: needs an NVIDIA GPU, found none; run marlinq doctor")
    # A plain "cuda" has no index, whatever the annotation says.
    index = torch.cuda.current_device() if gpu.index is None else gpu.index  # type: ignore[redundant-expr]
    gpu = torch.device("cuda", index)
    granularity = Granularity.from_group_size(group_size)
    notes: list[str] = []
    contenders: list[ExpertsContender] = [MarlinqExperts()]
    for name in against:
        peer = EXPERT_PEERS[name]()
        reason = peer.unavailable()
        if reason is None:
            contenders.append(peer)
        else:
            notes.append(f"{name} was left out: {reason}")
    peak = peak_rate(gpu, _DTYPES[dtype])
    cold: dict[str, float] = {}
    cells: list[Cell] = []
    with torch.cuda.device(gpu):
        begun = time.perf_counter()
        shapes = [
            ExpertsShape(
                *(m, layer.top, layer.experts, layer.hidden, layer.inner, granularity, asymmetric),
                dtype == "bfloat16",
                weight_format,
            )
            for layer in layers
            for m in batches
        ]
        compiled = precompile_experts(shapes, "silu", gpu.index)
        notes.append(f"{compiled} kernels compiled in {time.perf_counter() - begun:.1f} s before timing")
        for layer in layers:
            begun = time.perf_counter()
            weights = random_experts(
                layer,
                granularity,
                asymmetric=asymmetric,
                dtype=_DTYPES[dtype],
                device=gpu,
                weight_format=weight_format,
                scale_dtype=scale_dtype_of(scheme),
            )
            cold[layer.name] = cold_read_seconds(weights.gate_up.words, weights.gate_up.scales)
            ready = _load(contenders, layer, weights, scale_dtype_of(scheme), notes)
            notes.append(f"{layer.name} took {time.perf_counter() - begun:.0f} s to make and pack")
            bandwidth = (weights.gate_up.words.nbytes + weights.gate_up.scales.nbytes) / cold[layer.name]
            for m in batches:
                cells.append(_cell(ready, layer, weights, m, bandwidth, peak, explain, notes))
                progress("experts", len(cells), len(layers) * len(batches))
    timed = tuple(c.name for c in contenders if any(c.name in cell.seconds for cell in cells))
    notes.append(
        "whole routed layers, L2 cold (other experts every launch), graph replay, contenders in turn, "
        "medians; peers without sorting, humming with marlinq's sum, the others with dense weights of 16 bits"
    )
    return KernelBench(
        hardware=hardware_line(gpu),
        dtype=dtype,
        weights=weight_format.name,
        group_size=group_size,
        asymmetric=asymmetric,
        contenders=timed,
        cold_read_seconds=cold,
        peak_rate=peak,
        cells=tuple(cells),
        notes=tuple(notes),
    )


def _load(
    contenders: Sequence[ExpertsContender],
    layer: ExpertsLayer,
    weights: ExpertWeights,
    scale_dtype: torch.dtype | None,
    notes: list[str],
) -> list[ExpertsContender]:
    def loaded(contender: ExpertsContender) -> ExpertsContender:
        contender.load(layer, weights, scale_dtype)
        return contender

    made = [
        attempted(one.name, f"could not pack {layer.name}", notes, partial(loaded, one)) for one in contenders
    ]
    return [contender for contender in made if contender is not None]


def even_routings(layer: ExpertsLayer, m: int, device: torch.device, expert_bytes: int) -> list[Routing]:
    """Random routings that use different experts in turn, as far as there are enough experts.

    Of several draws with a fixed seed, the one is taken whose number of touched experts is nearest to the
    expected number, because single draws vary by a factor of two for few experts.
    """
    expected = layer.experts * (1 - (1 - layer.top / layer.experts) ** m)
    generator = torch.Generator().manual_seed(0)
    drawn: list[tuple[float, Tensor]] = []
    while len(drawn) < _DRAWS and (not drawn or drawn[-1][0] > 0.5):
        scores = torch.randn(m, layer.experts, generator=generator)
        touched = len(set(scores.topk(layer.top, 1).indices.flatten().tolist()))
        drawn.append((abs(touched - expected), scores))
    scores = min(drawn, key=lambda draw: draw[0])[1].to(device)
    values, ids = torch.softmax(scores, 1).topk(layer.top, 1)
    weights = (values / values.sum(1, keepdim=True)).contiguous()
    chosen = torch.tensor(sorted(set(ids.flatten().tolist())), device=device)
    # Renumbers experts so that successive routings touch successive ranges of experts.
    names = torch.zeros(layer.experts, dtype=torch.int64, device=device)
    names[chosen] = torch.arange(len(chosen), device=device)
    count = 1
    if len(chosen) * expert_bytes < _COLD_BYTES:
        count = max(1, layer.experts // len(chosen))
    return [
        Routing(((names[ids] + turn * len(chosen)) % layer.experts).to(torch.int32).contiguous(), weights)
        for turn in range(count)
    ]


def _cell(
    contenders: Sequence[ExpertsContender],
    layer: ExpertsLayer,
    weights: ExpertWeights,
    m: int,
    bandwidth: float,
    peak: float,
    explain: bool,
    notes: list[str],
) -> Cell:
    device, dtype = weights.down.words.device, weights.down.scales.dtype
    expert_bytes = (weights.gate_up.nbytes + weights.down.nbytes) // layer.experts
    routings = even_routings(layer, m, device, expert_bytes)
    touched = len(set(routings[0].ids.flatten().tolist())) * expert_bytes
    columns = 3 * layer.inner * layer.top
    nbytes = touched + 2 * m * 2 * layer.hidden
    floor = max(touched / bandwidth, 2.0 * m * columns * layer.hidden / peak)
    x = torch.randn(m, layer.hidden, dtype=dtype, device=device)
    rows = first_and_last(m, _CHECKED, device)
    first = routings[0]
    expected = reference_experts(x[rows].float(), first.ids[rows], first.weights[rows], weights, "silu")

    def ready(contender: ExpertsContender) -> Launch:
        run = contender.prepare(m, routings)
        return lambda index: run(index % len(routings), x)

    seconds, errors = check_and_time(
        {contender.name: partial(ready, contender) for contender in contenders},
        place=f"{layer.name} M={m}",
        expected=expected,
        rows=rows,
        shape=(m, layer.hidden),
        tolerance=_TOLERANCE[dtype],
        floor=floor,
        notes=notes,
    )
    reason = None
    if explain:
        shape = shape_of(x, first.ids, weights)
        reason = decide_experts(shape, device_numbers(device.index)).reason
    return Cell(
        layer=layer.name,
        m=m,
        n=columns,
        k=layer.hidden,
        nbytes=nbytes,
        floor_seconds=floor,
        seconds=seconds,
        errors=errors,
        reason=reason,
    )
