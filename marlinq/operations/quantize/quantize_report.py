"""The report of a quantise run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from marlinq.core.display import Block, Facts, Shown, counted, size_text
from marlinq.core.rules import Keep
from marlinq.formats.dialects.name_patterns import expert_layer
from marlinq.methods import SolveReport, Statistics
from marlinq.methods.quantity import ErrorQuantity
from marlinq.operations.quantize.allocation.chosen import Allocation
from marlinq.operations.quantize.planned_module import PlannedModule


@dataclass(frozen=True)
class ModuleReport:
    """The result of one quantised linear.

    Attributes:
        scheme: the scheme in words, such as ``int4, groups of 128, symmetric``.
        bits: bits of a code.
        group_size: input channels per scale; -1 for one scale per output channel.
        symmetric: whether zero points are the middle code.
        sparsity: name of the pattern that it was pruned to; None where it is dense.
        reason: source of scheme and options, as text.
        tokens: calibration tokens that the linear saw; 0 for a method without calibration.
        relative_error, quantity, fallback, figures: fields of the method's
            :class:`~marlinq.methods.method.SolveReport`.
    """

    scheme: str
    bits: int
    group_size: int | str
    symmetric: bool
    sparsity: str | None
    reason: str
    tokens: int
    relative_error: float
    quantity: ErrorQuantity
    fallback: str | None
    figures: Mapping[str, float]

    @property
    def is_calibrated(self) -> bool:
        """Whether the module's method reads text; true also of an expert for which the text had no token."""
        return self.tokens > 0 or self.fallback is not None or self.quantity != ErrorQuantity.WEIGHTS


def planned_facts(planned: PlannedModule) -> dict[str, Any]:
    """The fields of a module's report that its plan decides."""
    scheme = planned.spec.scheme
    return {
        "scheme": scheme.describe(),
        "bits": scheme.element.bits,
        "group_size": scheme.granularity.size,
        "symmetric": not scheme.stores_zeros,
        "sparsity": None if scheme.sparsity is None else scheme.sparsity.name,
        "reason": planned.reason,
    }


def module_report(planned: PlannedModule, statistics: Statistics | None, report: SolveReport) -> ModuleReport:
    """The report of a solved module; ``statistics`` is None for a method without calibration."""
    return ModuleReport(
        **planned_facts(planned),
        tokens=0 if statistics is None else statistics.tokens,
        relative_error=report.relative_error,
        quantity=ErrorQuantity(report.quantity),
        fallback=report.fallback,
        figures=dict(report.figures),
    )


@dataclass(frozen=True)
class QuantizeReport(Shown):
    """The result of ``marlinq quantize``.

    Attributes:
        out: path of the new folder.
        format: name of its format.
        method: name of the method.
        modules: quantised linears by stored name.
        kept: modules with a weight matrix that stay unquantised, with reasons.
        head: stored name of the output head; None where it is not quantised.
        calibration: source, documents, tokens and a hash of the calibration text's token ids; None for a
            method without calibration.
        quality: name and version of the recipe's quality, and its settings that the recipe changed.
        tuning: fields of :class:`~marlinq.operations.quantize.tuning.TuningReport`; None without tuning.
        device, dtype: device and dtype that blocks ran in.
        blocks: number of decoder blocks with quantised linears.
        resumed_blocks: number of these blocks taken over from an interrupted run.
        source_bytes, output_bytes: bytes of all tensors before and after.
        seconds: wall-clock seconds of this run.
        peak_host_bytes: highest resident bytes of the process.
        peak_device_bytes: highest bytes allocated on the GPU; None on a CPU.
        allocation: schemes chosen for a size or quality target, with reasons
            (:class:`~marlinq.operations.quantize.allocation.chosen.Allocation`); None without a target.
    """

    out: Path
    format: str
    method: str
    modules: Mapping[str, ModuleReport]
    kept: Mapping[str, Keep]
    head: str | None
    calibration: Mapping[str, Any] | None
    quality: Mapping[str, Any]
    tuning: Mapping[str, Any] | None
    device: str
    dtype: str
    blocks: int
    resumed_blocks: int
    source_bytes: int
    output_bytes: int
    seconds: float
    peak_host_bytes: int
    peak_device_bytes: int | None
    allocation: Allocation | None = None

    @property
    def fallbacks(self) -> dict[str, str]:
        """Modules for which the method used a fallback, with the reason."""
        return {name: report.fallback for name, report in self.modules.items() if report.fallback}

    @property
    def schemes(self) -> dict[str, int]:
        """Scheme in words -> number of modules that have it."""
        return Counter(report.scheme for report in self.modules.values())

    def _reasons(self) -> list[tuple[str, int]]:
        """(source of the settings, number of modules), unless all settings come from the recipe."""
        reasons = Counter(report.reason for report in self.modules.values())
        return [] if set(reasons) == {"recipe"} else list(reasons.items())

    def _seen(self) -> list[tuple[str, str]]:
        """Rows on the text's sources and duplicates, and on the tokens per module where they differ."""
        text = self.calibration
        if text is None:
            return []
        rows = [
            (
                "",
                f"{counted(each['documents'], 'documents')}, {each['tokens']} tokens from {each['source']}",
            )
            for each in text.get("sources", ())
        ]
        if tuned := text.get("tuned"):
            own = f"{counted(tuned['documents'], 'documents')}, {tuned['tokens']} tokens it wrote itself"
            rows.append(("tuned on", f"these, and {own}"))
        if text.get("own_left_out"):
            rows.append(("tuned on", "these; text of its own was left out, of which the model is much surer"))
        if text.get("duplicates"):
            rows.append(("", f"{text['duplicates']} duplicate documents were left out"))
        tokens = {name: report.tokens for name, report in self.modules.items() if report.is_calibrated}
        if not tokens:
            return rows
        least = min(tokens, key=lambda name: tokens[name])
        most = max(tokens.values())
        if tokens[least] < most:
            middle = median(tokens.values())
            seen = f"{middle:.0f} tokens (median), {most} at most, {tokens[least]} at least in {least}"
            rows.append(("modules saw", seen))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        kept = {name: keep.reason for name, keep in self.kept.items()}
        return {**asdict(self), "out": str(self.out), "kept": kept}

    def display(self) -> list[Block]:
        """Output, schemes, calibration text, errors, unquantised modules and resources."""
        sizes = f"{size_text(self.source_bytes)} -> {size_text(self.output_bytes)}"
        text = self.calibration
        used = "none: the method needs no text"
        if text is not None:
            used = f"{counted(text['documents'], 'documents')}, {text['tokens']} tokens from {text['source']}"
        inside = len(self.modules) - (self.head is not None)
        head = f" and the output head {self.head}" if self.head is not None else ""
        linears = f"{counted(inside, 'linears')} in {counted(self.blocks, 'blocks')}{head} with {self.method}"
        rows = [
            ("made", f"{self.out}, {self.format}, {sizes}"),
            *_quality(self.quality),
            ("quantised", linears),
            *(("", f"{count} as {scheme}") for scheme, count in self.schemes.items()),
            *(("", f"{count} by {reason}") for reason, count in self._reasons()),
            *([] if self.allocation is None else self.allocation.rows()),
            ("calibration", used),
            *self._seen(),
            *self._errors(),
            *self._pruned(),
        ]
        if self.tuning is not None:
            rows += _tuning_rows(self.tuning)
        reasons: dict[str, list[str]] = {}
        for name, keep in self.kept.items():
            reasons.setdefault(keep.reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            rows.append(("unquantised", f"{names[0]}{more} ({reason})"))
        rows += self._about_experts()
        rows += [
            ("fallback", f"{name}: {reason}")
            for name, reason in self.fallbacks.items()
            if expert_of(name) is None
        ]
        if self.resumed_blocks:
            resumed = f"{self.resumed_blocks} of {counted(self.blocks, 'blocks')} were there already"
            rows.append(("resumed", resumed))
        ran = f"{self.seconds:.0f} s on {self.device} in {self.dtype}"
        if self.peak_host_bytes:  # a resumed run that was finished already measures nothing
            ran += f", peak memory {size_text(self.peak_host_bytes)}"
        if self.peak_device_bytes is not None:
            ran += f", GPU {size_text(self.peak_device_bytes)}"
        rows.append(("ran", ran))
        return [Facts(tuple(rows))]

    def _errors(self) -> list[tuple[str, str]]:
        """A row for each quantity (outputs or weights) that modules' errors are measured in."""
        rows = []
        for quantity in ErrorQuantity:
            errors = {
                name: report.relative_error
                for name, report in self.modules.items()
                if report.quantity == quantity
            }
            if errors:
                worst = max(errors, key=lambda name: errors[name])
                some = f", of {counted(len(errors), 'modules')}" if len(errors) < len(self.modules) else ""
                figures = f"median {median(errors.values()):.2e}, largest {errors[worst]:.2e} in {worst}"
                rows.append((quantity.label, f"relative, squared{some}: {figures}"))
        return rows

    def _pruned(self) -> list[tuple[str, str]]:
        """Number and median error of the pruned modules, beside the median error of the dense ones."""
        errors: dict[str | None, list[float]] = {}
        for report in self.modules.values():
            errors.setdefault(report.sparsity, []).append(report.relative_error)
        dense = errors.pop(None, [])
        beside = f"; median of the {len(dense)} dense ones {median(dense):.2e}" if dense else ""
        return [
            (
                "pruned",
                f"{counted(len(listed), 'linears')} to {name}: median error {median(listed):.2e}{beside}",
            )
            for name, listed in errors.items()
            if name is not None
        ]

    def _about_experts(self) -> list[tuple[str, str]]:
        """Tokens per expert and counts of fallbacks, summed up because there can be thousands of experts."""
        tokens: dict[str, int] = {}
        reasons: dict[str, set[str]] = {}
        for name, report in self.modules.items():
            expert = expert_of(name)
            if expert is None:
                continue
            tokens[expert] = report.tokens
            if report.fallback:
                reason = report.fallback.removeprefix(f"{counted(report.tokens, 'tokens')}, ")
                reasons.setdefault(reason, set()).add(expert)
        if not tokens:
            return []
        counts = sorted(tokens.values())
        layers = len({expert.rpartition(".")[0] for expert in tokens})
        seen = f"{counts[0]} to {counted(counts[-1], 'tokens')} each, median {median(counts):.0f}"
        if self.calibration is None:
            seen = "calibrated on no text"
        rows = [("experts", f"{len(tokens)} in {counted(layers, 'layers')}, {seen}")]
        for reason, listed in reasons.items():
            rows.append(("fallback", f"{len(listed)} of {counted(len(tokens), 'experts')}: {reason}"))
        return rows


def expert_of(module: str) -> str | None:
    """The expert that a linear belongs to, such as ``model.layers.3.mlp.experts.7``; None for others."""
    layer = expert_layer(module)
    return None if layer is None else module.rpartition(".")[0]


def _quality(quality: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A row on the recipe's quality; no row where the recipe changes the quality's method."""
    if "method" in quality["changed"]:
        return []
    changed = f", with other {', '.join(quality['changed'])}" if quality["changed"] else ""
    return [("quality", f"{quality['name']} (version {quality['version']}){changed}")]


def _tuning_rows(tuning: Mapping[str, Any]) -> list[tuple[str, str]]:
    documents = counted(tuning["documents"], "documents")
    text = f"{counted(tuning['steps'], 'steps')}, {tuning['tokens']} tokens of {documents}"
    if tuning["astray"] is not None:
        text += f", stopped at a mean KL of {tuning['astray']:.4f}; a lower --tune-rate may help"
    if tuning["halvings"]:
        text += f", the rates halved {counted(tuning['halvings'], 'times')}, since held-out text got worse"
    if tuning["changed_codes"]:
        text += f"; {100 * tuning['changed_codes']:.2f} % of the codes changed"
    if tuning["kl_before"] is None:
        return [
            ("tuned", text),
            ("", "too few documents to hold any out, so nothing watched for overfitting"),
        ]
    watched = f"mean KL on {tuning['held_out']} held-out documents"
    if tuning["kept_step"] == 0:
        return [
            ("tuned", text),
            ("", f"{watched} got no better than {tuning['kl_before']:.4f}, so tuning is undone"),
        ]
    found = f"{tuning['kl_before']:.4f} -> {tuning['kl_after']:.4f} nats, after step {tuning['kept_step']}"
    return [("tuned", text), ("", f"{watched}: {found}")]
