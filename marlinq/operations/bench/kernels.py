"""Times products with packed weights on models' layers, beside peers and the hardware's limits."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from marlinq.core.devices import resolve_device
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import UsageError
from marlinq.core.granularity import Granularity
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.core.schemes import SCHEMES as NAMED_SCHEMES
from marlinq.core.sparsity import SPARSITIES
from marlinq.kernels import GEMMS, GROUP_SIZES, Problem, explain, precompile
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8, WeightFormat
from marlinq.operations.bench.contest import Launch, attempted, check_and_time, first_and_last
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.kernel_bench import OURS, Cell, KernelBench
from marlinq.operations.bench.peers import PEERS
from marlinq.operations.bench.peers.contenders import Contender, Run
from marlinq.operations.bench.peers.own import Fp8Activations, Marlinq
from marlinq.operations.bench.peers.sparse import SparseContender
from marlinq.operations.bench.shapes import LinearSize, dividing_group_size, layers_of
from marlinq.operations.bench.timing import cold_read_seconds, copies_for, peak_rate
from marlinq.operations.bench.weights import Weight, pruned, random_weight

SCHEMES: dict[str, tuple[WeightFormat, int | None]] = {
    "int4": (INT4, None),
    "int8": (INT8, None),
    "fp8": (E4M3, -1),
    "mxfp4": (E2M1, 32),
    "nvfp4": (E2M1, 16),
}
"""Name of a scheme -> (weight format, default group size); None is the largest size that divides every
layer."""


def scale_dtype_of(scheme: str) -> torch.dtype | None:
    """Dtype of the scales in files of a scheme of :data:`SCHEMES`; None where it is that of activations."""
    name = NAMED_SCHEMES[scheme].scale_dtype
    return None if name is None else getattr(torch, name)


def scheme_named(name: str, *, asymmetric: bool) -> tuple[WeightFormat, int | None]:
    """The entry of :data:`SCHEMES`, with zero points if ``asymmetric``.

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
# The largest relative rounding to E4M3, three bits behind the first.
_E4M3_ROUNDING = 2.0**-4
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
    scale_dtype: torch.dtype | None = None

    def problem(self, layer: LinearSize, m: int) -> Problem:
        bfloat16 = self.dtype == torch.bfloat16
        return Problem(m, layer.n, layer.k, self.granularity, self.asymmetric, bfloat16, self.weight_format)

    def weight(self, layer: LinearSize) -> Weight:
        made = random_weight(
            layer,
            self.granularity,
            asymmetric=self.asymmetric,
            dtype=self.dtype,
            device=self.device,
            weight_format=self.weight_format,
            scale_dtype=self.scale_dtype,
        )
        return pruned(made) if self.sparse else made

    def cell(
        self, weight: Weight, m: int, floor: float | None, seconds: dict[str, float], errors: dict[str, float]
    ) -> Cell:
        layer = weight.layer
        nbytes = weight.nbytes + 2 * m * (layer.n + layer.k)
        reason = explain(self.device, self.problem(layer, m)).reason if self.explain else None
        return Cell(layer.name, m, layer.n, layer.k, nbytes, floor, seconds, errors, reason)

    def report(
        self,
        contenders: Iterable[str],
        cells: Sequence[Cell],
        notes: Sequence[str],
        cold: dict[str, float],
        peak: float | None,
    ) -> KernelBench:
        return KernelBench(
            hardware=hardware_line(self.device),
            dtype=dtype_name(self.dtype),
            weights=self.weight_format.name,
            group_size=self.granularity.group_size,
            asymmetric=self.asymmetric,
            contenders=tuple(name for name in contenders if any(name in cell.seconds for cell in cells)),
            cold_read_seconds=cold,
            peak_rate=peak,
            cells=tuple(cells),
            notes=tuple(notes),
        )


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
    """Times every layer at every batch size: in replayed graphs, with a cold L2, and with checked results.

    A GPU times marlinq's kernel and peers in turn. A CPU times the reference on each model's smallest layer
    for few rows, with a warning.

    Args:
        models: names of :data:`marlinq.operations.bench.shapes.MODELS`.
        batches: rows of activations.
        device: as in :func:`marlinq.core.devices.resolve_device`.
        against: names of :data:`marlinq.operations.bench.peers.PEERS`; one that can't run becomes a note.
        dtype: float16 or bfloat16.
        scheme: element of the weights, a key of :data:`SCHEMES`.
        group_size: 32, 64, 128 or -1; None is the scheme's own, or the largest of 128, 64 and 32 that divides
            every layer.
        asymmetric: whether weights have zero points.
        sparsity: name in :data:`marlinq.core.sparsity.SPARSITIES`; weights are then pruned at random, and the
            sparse kernel is measured besides the dense one. None for dense weights.
        explain: whether the report has the reason for every choice of a kernel.
        sustained: whether replays follow each other without pauses, so that large products run at the GPU's
            power limit. Floors are measured with pauses in any case.
        shapes: further layers as ``NxK`` or ``NAME=NxK``.
        progress: called with (activity, steps done, steps in all).

    Raises:
        UsageError: an unknown model, peer, dtype or group size, or a shape that does not fit.
        EnvironmentProblem: the machine does not have the device; or CuPy, NVRTC or the driver is missing.
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
        raise UsageError(
            f"sparsity {sparsity}: needs scheme int4 and a GPU, found {weight_format.name} and {chosen.type}"
        )
    setting = _Setting(
        *(chosen, _DTYPES[dtype], weight_format, granularity, asymmetric, explain, sustained),
        sparse=sparsity is not None,
        scale_dtype=scale_dtype_of(scheme),
    )
    ordered = tuple(sorted(set(batches)))
    if chosen.type == "cpu":
        return _on_cpu(setting, layers, ordered, progress)
    with torch.cuda.device(chosen), torch.no_grad():
        return _on_gpu(setting, layers, ordered, tuple(dict.fromkeys(against)), progress)


def _on_gpu(
    setting: _Setting,
    layers: tuple[LinearSize, ...],
    batches: tuple[int, ...],
    against: tuple[str, ...],
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
        # Zero points count as further scales in the cold read.
        scales = weight.scales if weight.zeros is None else torch.cat((weight.scales, weight.zeros))
        cold[layer.name] = cold_read_seconds(weight.words, scales)
        runs = _prepare(contenders, weight, batches, notes)
        dense = weight.dense()
        x = torch.randn(max(batches), layer.k, dtype=setting.dtype, device=setting.device)
        for m in batches:
            cells.append(_cell(setting, weight, runs, x[:m], dense, cold[layer.name], peak, notes))
            progress("kernels", len(cells), total)
    rests = "no rests: at the power limit" if setting.sustained else "as long at rest after each: full clock"
    notes.append(
        "L2 cold (rotating copies of weights), graph replay, contenders in turn, medians; random values; "
        + rests
    )
    return setting.report([one.name for one in contenders], cells, notes, cold, peak)


def _prepare(
    contenders: list[Contender], weight: Weight, batches: Sequence[int], notes: list[str]
) -> dict[str, tuple[Run, int]]:
    runs: dict[str, tuple[Run, int]] = {}
    for contender in contenders:
        copies = copies_for(contender.nbytes(weight), weight.words.device)
        made = partial(contender.prepare, weight, copies, batches)
        run = attempted(contender.name, f"could not prepare {weight.layer.name}", notes, made)
        if run is not None:
            runs[contender.name] = run, copies
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
    rows = first_and_last(m, _CHECKED_ROWS, x.device)

    def ready(run: Run, copies: int) -> Launch:
        return lambda index: run(index % copies, x)

    seconds, errors = check_and_time(
        {name: partial(ready, *prepared) for name, prepared in runs.items()},
        place=f"{layer.name} M={m}",
        expected=x[rows].float() @ dense,
        rows=rows,
        shape=(m, layer.n),
        tolerance=_TOLERANCE[setting.dtype],
        floor=floor,
        notes=notes,
        sustained=setting.sustained,
        roundings={Fp8Activations.name: _E4M3_ROUNDING},
    )
    return setting.cell(weight, m, floor, seconds, errors)


def _on_cpu(
    setting: _Setting,
    layers: tuple[LinearSize, ...],
    batches: tuple[int, ...],
    progress: ReportProgress,
) -> KernelBench:
    smallest: dict[str, LinearSize] = {}
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
            error = float((out.float() - expected).norm() / expected.norm())
            cells.append(setting.cell(weight, m, None, {OURS: statistics.median(seconds)}, {OURS: error}))
            progress("kernels", len(cells), len(smallest) * len(few))
    return setting.report((OURS,), cells, notes, {}, None)
