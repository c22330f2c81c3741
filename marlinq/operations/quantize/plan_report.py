"""The report of ``quantize --plan``: scheme of every module, sizes, time, memory, kernels and servers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from marlinq.checkpoint import check_place
from marlinq.core.devices import resolve_device
from marlinq.core.display import Block, Facts, Shown, Table, counted, lines, size_text
from marlinq.core.granularity import Granularity
from marlinq.core.progress import Progress, ReportMessage, messages_beside, shows_progress
from marlinq.kernels import Device, Problem, decide, device_numbers
from marlinq.kernels.contract.device import H200
from marlinq.operations.inspect.eligibility import ServerVerdict
from marlinq.operations.inspect.inspect_checkpoint import planned_verdicts
from marlinq.operations.little_memory import tells_of_little_memory
from marlinq.operations.quantize.allocation.chosen import Allocation
from marlinq.operations.quantize.budget import tuning_budget, tuning_work, writing_dtype
from marlinq.operations.quantize.counting import local_tokens
from marlinq.operations.quantize.estimate import RunEstimate, estimate
from marlinq.operations.quantize.loaders import planned_checkpoint
from marlinq.operations.quantize.numerics import described_dtype
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.planned_text import (
    PlannedText,
    planned_text,
    planned_tuning_text,
    stored_dtype,
)
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.prepare import Decisions, open_source, plan_run
from marlinq.operations.quantize.recipe import Recipe, as_recipe
from marlinq.operations.quantize.recipe_settings import NO_TEMPLATE
from marlinq.operations.quantize.solve import TOKEN_BUDGET
from marlinq.operations.quantize.tuning import tuning_bytes
from marlinq.operations.quantize.watch import duration
from marlinq.runtime.kernel_operand import format_of, kernel_granularity, scheme_refusal

TENSOR_PARALLEL = (1, 2, 4, 8)
"""numbers of GPUs that share each layer, for which servers are judged"""
KERNEL_ROWS = (1, 16, 256)
"""rows of activations for which the report names marlinq's kernels"""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_PAD = 64


@dataclass(frozen=True)
class Fate:
    """The planned scheme of one module with a weight matrix.

    Attributes:
        name: name in the output.
        in_features, out_features: K and N; None for a kept module.
        becomes: the scheme in words, or ``kept``.
        reason: source of the scheme, or why the module is kept, as text.
        nbytes: bytes of its tensors in the output; None for a kept module.
    """

    name: str
    in_features: int | None
    out_features: int | None
    becomes: str
    reason: str
    nbytes: int | None


@dataclass(frozen=True)
class ShapeKernels:
    """marlinq's kernels for one shape.

    Attributes:
        in_features, out_features: K and N.
        group_size: input channels that share a scale, as in reports.
        modules: number of modules with this shape and group size.
        kernels: rows of activations -> name of the kernel; or 0 -> why there is none.
    """

    in_features: int
    out_features: int
    group_size: int | str
    modules: int
    kernels: Mapping[int, str]


@dataclass(frozen=True)
class PlanReport(Shown):
    """The outcome of :func:`plan_quantize`.

    Attributes:
        model, out: paths of the source and output folders.
        architecture: class name of the model.
        format: name of the output's format.
        method: name of the method.
        fates: planned scheme of every module with a weight matrix, in order.
        group_size: automatic group size and its reason; None where the recipe names all sizes.
        source_bytes, output_bytes: bytes of all tensors before and after.
        calibration: source of the calibration text, in words; None for a method without calibration.
        tokens: tokens of calibration text, at most.
        tuning_text: text that the model is tuned on, in words; None for a run without tuning.
        estimate: estimated seconds and bytes.
        device, dtype: device and dtype that blocks run in.
        gpu: GPU that the kernels are named for: the run's, or an H200 where the run uses the CPU.
        kernels: marlinq's kernels for every shape.
        servers: number of GPUs that share each layer -> verdicts of the servers.
        allocation: schemes chosen for a size or quality target, with reasons; None without a target.
    """

    model: str
    out: str
    architecture: str
    format: str
    method: str
    fates: tuple[Fate, ...]
    group_size: str | None
    source_bytes: int
    output_bytes: int
    calibration: str | None
    tokens: int
    tuning_text: str | None
    estimate: RunEstimate
    device: str
    dtype: str
    gpu: str
    kernels: tuple[ShapeKernels, ...]
    servers: Mapping[int, tuple[ServerVerdict, ...]]
    allocation: Allocation | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        values["estimate"]["seconds"] = self.estimate.seconds
        return values

    def display(self) -> list[Block]:
        """Source and output, time and memory, then tables of modules, kernels and servers."""
        quantised = [fate for fate in self.fates if fate.nbytes is not None]
        guess = self.estimate
        parts = [
            ("writing text", guess.writing_seconds),
            ("forward passes and statistics", guess.block_seconds),
            (f"solving with {self.method}", guess.solve_seconds),
            ("tuning", guess.tuning_seconds),
            ("copying", guess.copy_seconds),
        ]
        split = ", ".join(f"{what} {duration(seconds)}" for what, seconds in parts if seconds >= 0.5)
        device = max(guess.text_bytes, guess.block_bytes, guess.tuning_bytes)
        on_device = "" if self.device == "cpu" else f"{size_text(device)} on {self.device}, "
        loaded = "nothing was loaded" if self.allocation is None else "the model was run to choose schemes"
        rows = [
            ("plan", f"{self.model} -> {self.out}, {self.format}; {loaded}, nothing is written"),
            ("quantised", f"{counted(len(quantised), 'linears')} of {self.architecture} with {self.method}"),
            *([] if self.group_size is None else [("group size", self.group_size)]),
            *([] if self.allocation is None else self.allocation.rows()),
            ("size", f"{size_text(self.source_bytes)} -> {size_text(self.output_bytes)}"),
            ("calibration", self.calibration or "none: the method needs no text"),
            *([] if self.tuning_text is None else [("tuned on", self.tuning_text)]),
            (
                "time",
                f"about {duration(guess.seconds)} on {self.device} in {self.dtype}{split and f': {split}'}",
            ),
            ("memory", f"about {on_device}{size_text(guess.host_bytes)} of the host"),
        ]
        return [
            Facts(tuple(rows)),
            _fate_table(self.fates),
            _kernel_table(self.kernels, self.gpu, example=self.device == "cpu"),
            _server_table(self.servers),
            lines(*_server_reasons(self.servers)),
        ]


@shows_progress
@tells_of_little_memory("choose another device, fewer calibration tokens or shorter documents")
def plan_quantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: Recipe | Mapping[str, Any] | None = None,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = False,
    message: ReportMessage | None = None,
) -> PlanReport:
    """Report what :func:`~marlinq.operations.quantize.quantize` would do with the same arguments.

    Reads config, headers and local calibration text, and times two products and a small solve on the device.
    Nothing is written. Weights are loaded only to choose schemes for a size or quality target.

    Raises:
        MarlinqError: the run would be refused; the errors are those of
            :func:`~marlinq.operations.quantize.quantize`.
    """
    recipe = as_recipe(recipe)
    chosen = resolve_device(device)
    checkpoint = open_source(model, revision=revision)
    check_place(Path(out), resume=True, source=checkpoint.path)
    assert not isinstance(progress, bool)  # the decorator made it a function
    decisions = plan_run(
        checkpoint,
        recipe,
        chosen,
        trust_remote_code=trust_remote_code,
        progress=progress,
        message=message or messages_beside(progress),
    )
    recipe = decisions.recipe
    blueprint, plan = decisions.blueprint, decisions.plan
    texts: list[PlannedText] = []
    if plan.method.calibrated or decisions.tuning is not None:
        counted = local_tokens(recipe, checkpoint, blueprint, trust_remote_code=trust_remote_code)
        texts = planned_text(recipe, checkpoint, blueprint, chosen, counted)
    if plan.method.calibrated:
        decisions = replace(decisions, texts=tuple(texts))
    work, tuning, dtype, products = decisions.work, decisions.tuning, decisions.dtype, decisions.products
    own = planned_tuning_text(recipe, checkpoint, blueprint, chosen)
    written = [text for text in (*texts, own) if text is not None and text.budget is not None]
    stored = stored_dtype(checkpoint, blueprint)
    guess = estimate(
        plan,
        work,
        [plan.members(block) for block in blueprint.blocks],
        tokens=decisions.tokens,
        writing=next((text.budget for text in written), None),
        parameters=sum(torch.Size(shape).numel() for shape in blueprint.parameters.values()),
        hidden_size=blueprint.config.get_text_config().hidden_size,
        batch_tokens=TOKEN_BUDGET[chosen.type],
        source_bytes=checkpoint.nbytes,
        device=chosen,
        dtype=dtype,
        products=products or dtype,
        writing_dtype=writing_dtype(chosen, stored),
        ends=getattr(blueprint.config.get_text_config(), "eos_token_id", None) is not None,
        tuning=(0.0, 0.0)
        if tuning is None
        else (
            tuning_work(work, tuning.steps, tuning.tokens),
            tuning_bytes(plan, tuning, chosen, work.longest(recipe)),
        ),
    )
    quantized = planned_checkpoint(checkpoint, plan)
    gpu = device_numbers(chosen.index or 0) if chosen.type == "cuda" else H200
    return PlanReport(
        model=str(checkpoint.path),
        out=str(out),
        architecture=blueprint.architecture,
        format=plan.format.name,
        method=plan.method.name,
        fates=_fates(plan),
        group_size=None if plan.automatic is None else plan.automatic.describe(),
        source_bytes=checkpoint.nbytes,
        output_bytes=sum(tensor.nbytes for tensor in plan.tensors),
        calibration=", ".join(map(_described, decisions.texts)) or None,
        tuning_text=_tuning_text(decisions, texts, own),
        tokens=decisions.tokens,
        estimate=guess,
        device=str(chosen),
        dtype=described_dtype(dtype, products),
        gpu=gpu.name or gpu.architecture,
        kernels=_kernels(plan.modules.values(), gpu, bfloat16=stored == torch.bfloat16),
        allocation=decisions.allocation,
        servers={parts: planned_verdicts(quantized, tensor_parallel=parts) for parts in TENSOR_PARALLEL},
    )


def _described(text: PlannedText, *, whole: bool = False) -> str:
    if text.budget is None:
        return f"{'' if text.counted else 'at most '}{text.tokens} tokens of {text.source}"
    part = not whole and text.tokens < text.budget.tokens
    first = f", the first {text.tokens} to calibrate on" if part else ""
    return f"{text.budget.tokens} tokens that the model writes itself ({text.budget.reason}){first}"


def _tuning_text(decisions: Decisions, texts: Sequence[PlannedText], own: PlannedText | None) -> str | None:
    recipe, tuning = decisions.recipe, decisions.tuning
    if tuning is None:
        return None
    if decisions.texts:
        same = "the same"
    else:
        # Own text beside a file is in ``own``; none of it is calibrated on.
        read = (text for text in texts if own is None or text.budget is None)
        same = ", ".join(_described(text, whole=True) for text in read)
    if own is None:
        return same
    if recipe.chat_template != NO_TEMPLATE:
        return f"{same} and {_described(own)}"
    steps, _ = tuning_budget(recipe, decisions.work, decisions.device, own_text=False)
    longer = "" if steps == tuning.steps else f"; tuning then takes {steps} steps instead of {tuning.steps}"
    return (
        f"{same} and {_described(own)}; left out if the model is much surer of it than of the calibration "
        f"text{longer}"
    )


def _fates(plan: OutputPlan) -> tuple[Fate, ...]:
    sizes = {tensor.name: tensor.nbytes for tensor in plan.tensors}
    quantised = [
        Fate(
            name=each.stored,
            in_features=each.spec.in_features,
            out_features=each.spec.out_features,
            becomes=each.spec.scheme.describe(),
            reason=each.reason,
            nbytes=sum(sizes[name] for name in plan.tensor_names(each).values()),
        )
        for each in plan.modules.values()
    ]
    kept = [Fate(name, None, None, "kept", keep.reason, None) for name, keep in plan.kept.items()]
    return (*quantised, *kept)


def _kernels(modules: Iterable[PlannedModule], gpu: Device, *, bfloat16: bool) -> tuple[ShapeKernels, ...]:
    counts: dict[tuple[int, int, Granularity], list[PlannedModule]] = {}
    for each in modules:
        key = each.spec.in_features, each.spec.out_features, each.spec.granularity
        counts.setdefault(key, []).append(each)
    return tuple(
        ShapeKernels(k, n, shared.size, len(members), _kernels_of(members[0], gpu, bfloat16=bfloat16))
        for (k, n, shared), members in counts.items()
    )


def _kernels_of(planned: PlannedModule, gpu: Device, *, bfloat16: bool) -> dict[int, str]:
    scheme, k, n = planned.spec.scheme, planned.spec.in_features, planned.spec.out_features
    reason = scheme_refusal(scheme)
    if reason is not None:
        return {0: f"dense product: {reason}"}
    granularity = kernel_granularity(scheme) or Granularity.channel()
    unit = max(_PAD, granularity.channels)
    padded = -(-k // unit) * unit, -(-n // _PAD) * _PAD
    kernels = {}
    for rows in KERNEL_ROWS:
        problem = Problem(
            rows, padded[1], padded[0], granularity, scheme.stores_zeros, bfloat16, format_of(scheme)
        )
        kernels[rows] = decide(problem, gpu).kernel
    return kernels


def _fate_table(fates: Sequence[Fate]) -> Table:
    """A table of modules; those whose names differ only in numbers share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for fate in fates:
        k, n = ("-" if size is None else str(size) for size in (fate.in_features, fate.out_features))
        key = (_NUMBER.sub("*", fate.name), k, n, fate.becomes, fate.reason)
        groups.setdefault(key, []).append(fate.name)
    rows = []
    for (pattern, *cells), names in groups.items():
        # The first number is the block's; an expert's number, the second, is not shown.
        blocks = [int(_NUMBER.findall(name)[0]) for name in names] if "*" in pattern else []
        rows.append((pattern, _ranges(blocks), *cells))
    return Table(("module", "block", "K", "N", "becomes", "why"), tuple(rows), numbers=(2, 3))


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 5`` of 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in runs)


def _kernel_table(kernels: Sequence[ShapeKernels], gpu: str, *, example: bool) -> Table:
    """The kernels for each shape; as an ``example`` where the run itself uses no GPU."""
    rows = []
    for each in kernels:
        chosen = [each.kernels.get(count, each.kernels.get(0, "-")) for count in KERNEL_ROWS]
        sizes = (str(each.in_features), str(each.out_features), str(each.group_size), str(each.modules))
        rows.append((*sizes, *chosen))
    title = f"marlinq's kernels on {gpu}"
    if example:
        title += ", as an example: this plan is for the CPU"
    header = ("K", "N", "group", "linears", *(f"{count} row{'s'[: count > 1]}" for count in KERNEL_ROWS))
    return Table(header, tuple(rows), numbers=(0, 1, 2, 3), title=title)


def _server_table(servers: Mapping[int, Sequence[ServerVerdict]]) -> Table:
    by_name: dict[str, dict[int, ServerVerdict]] = {}
    for parts, verdicts in servers.items():
        for verdict in verdicts:
            by_name.setdefault(f"{verdict.server} {verdict.version}", {})[parts] = verdict
    rows = tuple(
        (name, *(_verdict(judged.get(parts)) for parts in servers)) for name, judged in by_name.items()
    )
    header = ("server", *(f"{parts} GPU{'s'[: parts > 1]}" for parts in servers))
    return Table(
        header,
        rows,
        title="who loads it, and the kernel each takes first on Hopper, by GPUs that share each layer",
    )


def _verdict(verdict: ServerVerdict | None) -> str:
    if verdict is None:
        return "-"
    if not verdict.loads:
        return "no"
    return ", ".join(f"{kernel} ({count})" for kernel, count in verdict.first) or "yes"


def _server_reasons(servers: Mapping[int, Sequence[ServerVerdict]]) -> list[str]:
    """Why servers don't load the output, one line per server and reason."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for parts, verdicts in servers.items():
        for verdict in verdicts:
            if not verdict.loads:
                reasons.setdefault((verdict.server, verdict.reason), []).append(parts)
    return [
        f"{server} on {', '.join(map(str, parts))}: {reason}" for (server, reason), parts in reasons.items()
    ]
