"""Times of products with packed weights on models' layers against its peers and the hardware's limits."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.devices import resolve_device
from marlinq.core.errors import UsageError
from marlinq.core.granularity import Granularity
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.core.sparsity import SPARSITIES
from marlinq.kernels import GEMMS, GROUP_SIZES, Problem, explain, precompile
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8, WeightFormat
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.peers import PEERS, Contender, Marlinq, Run, Weight, random_weight
from marlinq.operations.bench.report import OURS, Cell, KernelBench
from marlinq.operations.bench.shapes import Layer, dividing_group_size, layers_of
from marlinq.operations.bench.sparse import SparseContender, pruned
from marlinq.operations.bench.timing import (
    capture,
    cold_read_seconds,
    copies_for,
    launches_for,
    peak_rate,
    time_in_turn,
)

SCHEMES: dict[str, tuple[WeightFormat, int | None]] = {
    "int4": (INT4, None),
    "int8": (INT8, None),
    "fp8": (E4M3, -1),
    "mxfp4": (E2M1, 32),
    "nvfp4": (E2M1, 16),
}
"""What weights may be made of, and the group size where nothing else is asked for; None for the largest that
divides every layer."""


def scheme_named(name: str, *, asymmetric: bool) -> tuple[WeightFormat, int | None]:
    """Of :data:`SCHEMES`.

    Raises:
        UsageError: an unknown name, or zero points for an element that has none.
    """
    if name not in SCHEMES:
        raise UsageError(f"scheme {name!r}: expected one of {', '.join(SCHEMES)}")
    if asymmetric and not SCHEMES[name][0].stores_zeros:
        raise UsageError(f"scheme {name}: its weights have no zero points; leave out --asymmetric")
    return SCHEMES[name]


DEFAULT_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
# Peers round in other places; only a wrong product is off by this much.
_PEER_SLACK = 4.0
_CHECKED_ROWS = 8
_CPU_BATCH, _CPU_REPEATS = 16, 3


@dataclass(frozen=True)
class _Setting:
    device: torch.device
    dtype: torch.dtype
    weight_format: WeightFormat
    granularity: Granularity
    asymmetric: bool
    explain: bool
    sustained: bool = False
    sparse: bool = False

    def problem(self, layer: Layer, m: int) -> Problem:
        bfloat16 = self.dtype == torch.bfloat16
        return Problem(m, layer.n, layer.k, self.granularity, self.asymmetric, bfloat16, self.weight_format)

    def weight(self, layer: Layer) -> Weight:
        made = random_weight(
            layer,
            self.granularity,
            asymmetric=self.asymmetric,
            dtype=self.dtype,
            device=self.device,
            weight_format=self.weight_format,
        )
        return pruned(made) if self.sparse else made

    def reason(self, layer: Layer, m: int) -> str | None:
        if not self.explain:
            return None
        return explain(self.device, self.problem(layer, m)).reason


def bench_kernels(
    models: Sequence[str] = ("llama-3-8b",),
    *,
    batches: Sequence[int] = DEFAULT_BATCHES,
    device: str | torch.device = "auto",
    against: Sequence[str] = ("cublas", "humming"),
    dtype: str = "float16",
    scheme: str = "int4",
    group_size: int | None = None,
    asymmetric: bool = False,
    sparsity: str | None = None,
    explain: bool = False,
    sustained: bool = False,
    shapes: Sequence[str] = (),
    progress: ReportProgress = no_progress,
) -> KernelBench:
    """Times every layer at every batch size: L2 cold, graph replay, contenders in turn, checked before timed.

    A GPU measures our kernel and its peers. A CPU measures the reference on each model's smallest layer,
    for few rows, and says so.

    Args:
        models: names of :data:`marlinq.operations.bench.shapes.MODELS`.
        batches: rows of activations.
        device: as in :func:`marlinq.core.devices.resolve_device`.
        against: names of :data:`marlinq.operations.bench.peers.PEERS`; one that can't run is noted.
        dtype: float16 or bfloat16.
        scheme: element of the weights, a key of :data:`SCHEMES`.
        group_size: 32, 64, 128 or -1; None is the largest of 128, 64 and 32 that divides every layer, or
            what the scheme has.
        asymmetric: measure weights with zero points.
        sparsity: a name in :data:`marlinq.core.sparsity.SPARSITIES`: weights are pruned at random, and the
            sparse kernel is measured beside the dense one; None for dense weights.
        explain: keep the reason of every decision.
        sustained: replay without rests, so that large products run at the GPU's power limit. The limits that
            they are held to are those with rests all the same.
        shapes: more layers as ``NxK`` or ``NAME=NxK``.
        progress: called with (what is being done, steps done, steps in all).

    Raises:
        UsageError: an unknown model, peer, dtype or group size, or a shape that does not fit.
        EnvironmentProblem: the device is not there; or CuPy, NVRTC or the driver is missing on a GPU.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r}: expected float16 or bfloat16")
    weight_format, usual = scheme_named(scheme, asymmetric=asymmetric)
    if group_size is None:
        group_size = usual
    if group_size is None:
        group_size = dividing_group_size(models, shapes)
    if group_size not in (*GROUP_SIZES, usual):
        raise UsageError(f"group size {group_size}: expected one of 32, 64, 128, -1")
    unknown = [name for name in against if name not in PEERS]
    if unknown:
        raise UsageError(f"peer {unknown[0]!r} is not known; expected one of {', '.join(PEERS)}")
    if not batches or min(batches) < 1:
        raise UsageError(f"batches {list(batches)}: expected one or more numbers of at least 1")
    layers = layers_of(models, shapes, group_size)
    chosen = resolve_device(device)
    granularity = Granularity.from_group_size(group_size)
    if sparsity not in (None, *SPARSITIES):
        raise UsageError(f"sparsity {sparsity!r}: expected {', '.join(SPARSITIES)}")
    if sparsity is not None and (chosen.type == "cpu" or weight_format != INT4):
        raise UsageError(f"sparsity {sparsity}: the sparse kernel multiplies int4 weights on a GPU")
    setting = _Setting(
        *(chosen, _DTYPES[dtype], weight_format, granularity, asymmetric, explain, sustained),
        sparse=sparsity is not None,
    )
    ordered = tuple(sorted(set(batches)))
    if chosen.type == "cpu":
        return _on_cpu(setting, layers, ordered, dtype, progress)
    with torch.cuda.device(chosen), torch.no_grad():
        return _on_gpu(setting, layers, ordered, tuple(dict.fromkeys(against)), dtype, progress)


def _on_gpu(
    setting: _Setting,
    layers: tuple[Layer, ...],
    batches: tuple[int, ...],
    against: tuple[str, ...],
    dtype: str,
    progress: ReportProgress,
) -> KernelBench:
    notes: list[str] = []
    contenders: list[Contender] = [Marlinq()]
    others: list[Contender] = [PEERS[name] for name in against]
    for peer in [SparseContender(), *others] if setting.sparse else others:
        reason: str | None
        if setting.weight_format != INT4 and not peer.any_format:
            reason = f"it is measured with {INT4.name} weights alone"
        else:
            reason = peer.unavailable(setting.dtype, setting.granularity.group_size, setting.asymmetric)
        if reason is None:
            contenders.append(peer)
        else:
            notes.append(f"{peer.name} was left out: {reason}")
    start = time.perf_counter()
    problems = [setting.problem(layer, m) for layer in layers for m in batches]
    compiled = precompile(problems, setting.device.index)
    notes.append(f"{compiled} kernels compiled in {time.perf_counter() - start:.1f} s before timing")

    peak = peak_rate(setting.device, setting.dtype)
    cold: dict[str, float] = {}
    cells: list[Cell] = []
    total = len(layers) * len(batches)
    for layer in layers:
        weight = setting.weight(layer)
        # Zero points are read like more scales.
        scales = weight.scales if weight.zeros is None else torch.cat((weight.scales, weight.zeros))
        cold[layer.name] = cold_read_seconds(weight.words, scales)
        runs = _prepare(contenders, weight, batches, notes)
        dense = weight.dense()
        x = torch.randn(max(batches), layer.k, dtype=setting.dtype, device=setting.device)
        for m in batches:
            cells.append(_cell(setting, weight, runs, x[:m], dense, cold[layer.name], peak, notes))
            progress("kernels", len(cells), total)
    timed = tuple(c.name for c in contenders if any(c.name in cell.seconds for cell in cells))
    rests = "no rests: at the power limit" if setting.sustained else "as long at rest after each: full clock"
    notes.append(
        "L2 cold (rotating copies of weights), graph replay, contenders in turn, medians; random values; "
        + rests
    )
    return KernelBench(
        hardware=hardware_line(setting.device),
        dtype=dtype,
        weights=setting.weight_format.name,
        group_size=setting.granularity.group_size,
        asymmetric=setting.asymmetric,
        contenders=timed,
        cold_read_seconds=cold,
        peak_rate=peak,
        cells=tuple(cells),
        notes=tuple(notes),
    )


def _prepare(
    contenders: list[Contender], weight: Weight, batches: Sequence[int], notes: list[str]
) -> dict[str, tuple[Run, int]]:
    runs: dict[str, tuple[Run, int]] = {}
    for contender in contenders:
        copies = copies_for(contender.nbytes(weight), weight.words.device)
        try:
            runs[contender.name] = contender.prepare(weight, copies, batches), copies
        except Exception as error:
            # A peer may fail in any way of its own; the report says how.
            if contender.name == OURS:
                raise
            notes.append(f"{contender.name} could not prepare {weight.layer.name}: {_one_line(error)}")
    return runs


def _cell(
    setting: _Setting,
    weight: Weight,
    runs: dict[str, tuple[Run, int]],
    x: Tensor,
    dense: Tensor,
    cold: float,
    peak: float,
    notes: list[str],
) -> Cell:
    layer, m = weight.layer, x.shape[0]
    floor = max(cold, 2.0 * m * layer.n * layer.k / peak)
    # The first and the last rows stand for all: a wrong tile shows at either end.
    rows = torch.tensor(
        sorted({*range(min(m, _CHECKED_ROWS)), *range(max(0, m - _CHECKED_ROWS), m)}), device=x.device
    )
    expected = x[rows].float() @ dense
    errors: dict[str, float] = {}
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    launches = launches_for(1.5 * floor)
    for name, (run, copies) in runs.items():

        def launch(index: int, run: Run = run, copies: int = copies) -> Tensor:
            return run(index % copies, x)

        try:
            error = _error(launch, rows, expected, (m, layer.n))
            limit = _TOLERANCE[setting.dtype] * (1.0 if name == OURS else _PEER_SLACK)
            if not error < limit:
                notes.append(
                    f"{name} is wrong on {layer.name} M={m}: relative error {error:.2g}, at most {limit:.0e} "
                    "expected; not timed"
                )
                continue
            graphs[name] = capture(launch, launches), launches
        except Exception as failure:
            # As above: a peer's failure is part of the result, ours is not.
            if name == OURS:
                raise
            notes.append(f"{name} failed on {layer.name} M={m}: {_one_line(failure)}")
            continue
        errors[name] = error
    return Cell(
        layer=layer.name,
        m=m,
        n=layer.n,
        k=layer.k,
        nbytes=weight.nbytes + 2 * m * (layer.n + layer.k),
        floor_seconds=floor,
        seconds=time_in_turn(graphs, 1.5 * floor, sustained=setting.sustained),
        errors=errors,
        reason=setting.reason(layer, m),
    )


def _error(launch: Callable[[int], Tensor], rows: Tensor, expected: Tensor, shape: tuple[int, int]) -> float:
    # The allocator hands the freed block out again, so that elements nobody writes are found to be NaN.
    poison = torch.full(shape, torch.nan, dtype=torch.float16, device=expected.device)
    del poison
    out = launch(0)
    if tuple(out.shape) != shape:
        return float("inf")
    return float((out[rows].float() - expected).norm() / expected.norm())


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _on_cpu(
    setting: _Setting,
    layers: tuple[Layer, ...],
    batches: tuple[int, ...],
    dtype: str,
    progress: ReportProgress,
) -> KernelBench:
    smallest: dict[str, Layer] = {}
    for layer in layers:
        model = layer.name.rpartition(" ")[0] or layer.name
        kept = smallest.get(model)
        if kept is None or layer.n * layer.k < kept.n * kept.k:
            smallest[model] = layer
    few = tuple(m for m in batches if m <= _CPU_BATCH) or batches[:1]
    notes = [
        "no GPU was used: these are the figures of the CPU reference (dequantise, then multiply), no kernel's"
    ]
    skipped = len(layers) * len(batches) - len(smallest) * len(few)
    if skipped:
        text = f"{skipped} cells were skipped: each model's smallest layer only, at most {_CPU_BATCH} rows"
        warnings.warn(text, stacklevel=3)
        notes.append(text)
    cells: list[Cell] = []
    for layer in smallest.values():
        weight = setting.weight(layer)
        dense = weight.dense()
        for m in few:
            x = torch.randn(m, layer.k, dtype=setting.dtype)
            gemm = GEMMS[setting.weight_format.name]
            operands = (
                weight.words,
                weight.scales,
                weight.zeros,
                None,
                setting.granularity.group_size,
                layer.n,
            )
            seconds = []
            out = gemm(x, *operands)
            for _ in range(_CPU_REPEATS):
                start = time.perf_counter()
                out = gemm(x, *operands)
                seconds.append(time.perf_counter() - start)
            expected = x.float() @ dense
            cells.append(
                Cell(
                    layer=layer.name,
                    m=m,
                    n=layer.n,
                    k=layer.k,
                    nbytes=weight.nbytes + 2 * m * (layer.n + layer.k),
                    floor_seconds=None,
                    seconds={OURS: statistics.median(seconds)},
                    errors={OURS: float((out.float() - expected).norm() / expected.norm())},
                    reason=setting.reason(layer, m),
                )
            )
            progress("kernels", len(cells), len(smallest) * len(few))
    return KernelBench(
        hardware=hardware_line(setting.device),
        dtype=dtype,
        weights=setting.weight_format.name,
        group_size=setting.granularity.group_size,
        asymmetric=setting.asymmetric,
        contenders=(OURS,),
        cold_read_seconds={},
        peak_rate=None,
        cells=tuple(cells),
        notes=tuple(notes),
    )
