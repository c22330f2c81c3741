"""Compares a checkpoint with the model it was made from, or with another conversion of the same checkpoint.

Against an unquantised model every quantised weight is compared three ways:

* the module as a whole: its error ||W - dq|| / ||W||, beside that of round-to-nearest with the same groups.
  GPTQ accepts a larger weight error for a smaller output error: 0.9 to 1.5 times round-to-nearest's on the
  layers of a small language model, up to 2.8 with the most uneven inputs that tests make. Codes unrelated to
  the weights give 10 and more;
* every word, group and channel on its own, by :mod:`marlinq.operations.verify.statistics.evidence`;
* unquantised tensors bit for bit. Tensors that a conversion dequantised are compared as a quantised module
  is, and no group may hold more different values than there are codes.

A checkpoint whose quantiser first moved factors between layers (AWQ's scaling, rotations) does not hold the
original's weights, and fails here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, dequantized
from marlinq.core.display import counted
from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Element, Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import ModuleSpec
from marlinq.formats.dialects import QuantizationConfig
from marlinq.methods.rtn import round_to_nearest
from marlinq.models import Blueprint, Projection, TensorNames, converted, find_conversions
from marlinq.operations.verify.background import BackgroundThreads
from marlinq.operations.verify.conversions import (
    coarsest_scheme,
    dequantized_modules,
    off_grid,
    sources_of,
)
from marlinq.operations.verify.masks import misplaced_channels
from marlinq.operations.verify.statistics.evidence import Evidence, find_faults
from marlinq.operations.verify.statistics.finding import RunSize, SuspectPlace
from marlinq.operations.verify.statistics.float_weights import find_float_faults, whole_module_faults
from marlinq.operations.verify.tuned import too_far, tuned_vectors
from marlinq.operations.verify.verification_report import Check, Findings

FAR_ABOVE_RTN = 5.0
ABOVE_RTN = 3.0
_WORTH_A_LOOK = 1.2
"""ratio of a float module's error to round-to-nearest's above which all its scales may be wrong"""

_SHOWN_FAULTS = 5

_ELEMENTS_AT_ONCE = 1 << 25
"""weights that are judged at a time; each takes up to 90 bytes"""


class Comparison:
    """Collects the checks against ``original``, a module at a time.

    Args:
        view: the quantised checkpoint.
        original: checkpoint to compare with.
        blueprint: structure of the model that both hold, or why it can't be built.
        device: device that weights are compared on.
    """

    def __init__(
        self,
        view: QuantizedCheckpoint,
        original: Checkpoint,
        blueprint: Blueprint | str,
        device: torch.device,
    ) -> None:
        self._view = view
        self._original = original
        self._other = QuantizedCheckpoint.of(original)
        if self._other is not None and _elements(self._other) != _elements(view):
            # The original is quantised in another way: its dequantised weights are what was quantised anew.
            self._original, self._other = dequantized(original), None
        elif self._other is not None:
            self._original = self._other.checkpoint
        self._stored = self._original
        self._device = device
        self._names: TensorNames | None = None
        self._projections: dict[str, Projection] = {}
        self._routing: set[str] = set()
        self._blueprint = None if isinstance(blueprint, str) else blueprint
        if not isinstance(blueprint, str):
            if self._other is None:
                self._original = converted(
                    self._stored, find_conversions(blueprint, self._stored.tensors, source=str(original.path))
                )
            self._names = TensorNames(blueprint, self._original.tensors.keys(), source=str(original.path))
            self._projections = _by_stored_name(blueprint, view)
            self._routing = _routing(blueprint, view)
        self._run = RunSize.of(view.modules.values())
        self._unquantized = Findings("unquantised tensors")
        self._weights = Findings("weights")
        self._places = Findings("words and groups")
        self._cast = ""
        self._may_be_tuned = tuned_vectors(view.checkpoint.path)
        self._tuned = 0
        self._dequantized: dict[str, Scheme] = {}
        self._sources: tuple[QuantizationConfig, ...] = ()
        try:
            self._dequantized = dequantized_modules(view.checkpoint.path)
            self._sources = sources_of(view.checkpoint.path)
        except CheckpointError as error:
            self._unquantized.failures.append(str(error))
        self._judged: list[Evidence] = []
        sizes = [spec.in_features * spec.out_features for spec in view.modules.values()]
        at_once = min(torch.get_num_threads(), _ELEMENTS_AT_ONCE // max(sizes, default=1))
        self.background = BackgroundThreads(at_once if device.type == "cpu" else 1)
        """Threads that judge modules; on a CPU several modules at a time."""
        self.errors: dict[str, tuple[float, float | None]] = {}
        """Module -> (relative error, round-to-nearest's relative error or None)."""

    @property
    def same_tuple(self) -> bool:
        """Whether both are conversions of one checkpoint, which must hold the same codes, scales and
        zeros."""
        return self._other is not None

    @property
    def schemes(self) -> dict[Projection, Scheme] | None:
        """Scheme that each quantised linear of the model is judged by; None where :attr:`same_tuple` is
        True."""
        if self.same_tuple:
            return None
        pairs = (
            (self._projections.get(name), coarsest_scheme(self._sources, name, spec.scheme))
            for name, spec in self._view.modules.items()
        )
        return {projection: scheme for projection, scheme in pairs if projection is not None}

    def passthrough(self) -> None:
        """Compare every tensor that belongs to no quantised module."""
        cast: dict[str, int] = {}
        for name in self._view.passthrough:
            theirs = self._unquantized_original(name)
            if theirs is None:
                self._unquantized.failures.append(f"{name}: not in {self._original.path}")
                continue
            mine = self._view.checkpoint.tensor(name)
            if mine.dtype != theirs.dtype and name in self._routing:
                kinds = f"{mine.dtype}, the original has {theirs.dtype}".replace("torch.", "")
                self._unquantized.failures.append(f"{name}: {kinds}; what chooses experts is never recast")
                continue
            if mine.dtype != theirs.dtype:
                kinds = f"{theirs.dtype} to {mine.dtype}".replace("torch.", "")
                cast[kinds] = cast.get(kinds, 0) + 1
                theirs = theirs.to(mine.dtype)
            if mine.shape != theirs.shape:
                self._unquantized.failures.append(
                    f"{name}: shape {list(mine.shape)}, the original has {list(theirs.shape)}"
                )
            elif self._other is None and name.removesuffix(".weight") in self._dequantized:
                self._judge_dequantized(name.removesuffix(".weight"), mine, theirs)
            elif name in self._may_be_tuned and not _same_bits(mine, theirs):
                self._tuned += 1
                if (reason := too_far(mine, theirs)) is not None:
                    self._unquantized.failures.append(f"{name}: {reason}")
            elif not _same_bits(mine, theirs):
                self._unquantized.failures.append(f"{name}: differs from the original")
        self._cast = "".join(f"; {count} after a cast from {kinds}" for kinds, count in cast.items())

    def module(self, name: str, spec: ModuleSpec, stored: Mapping[str, Tensor], q: QuantizedWeight) -> None:
        """Compares one quantised module: ``stored`` are its tensors by suffix, ``q`` the weight in them."""
        if self._other is not None:
            self._same_tuple(name, q)
            return
        try:
            weight = self._weight(name, spec)
        except CheckpointError as error:
            self._weights.failures.append(str(error))
            return
        if not bool(torch.isfinite(q.scales.float()).all()) or not bool(torch.isfinite(weight).all()):
            self._weights.failures.append(f"{name}: NaN or infinity, so no error can be given")
            return
        weight, q = weight.to(self._device), q.to(self._device)
        norm = float(weight.norm()) or 1.0
        mine = float((weight - q.dequantize()).norm()) / norm
        # With activation order, round-to-nearest needs the channels in the order of their groups.
        ordered = weight if q.has_trivial_g_idx else weight[:, torch.argsort(q.g_idx, stable=True)]
        # A conversion to more bits brings no weight nearer to the original.
        rtn = self._rtn_error(ordered, coarsest_scheme(self._sources, name, q.scheme), norm)
        self.errors[name] = (mine, rtn)
        self._judge_error(name, mine, rtn, q.element, self._weights)
        if q.element.table is not None and rtn is not None and mine > _WORTH_A_LOOK * rtn:
            self._places.failures += [f"{name}: {fault}" for fault in whole_module_faults(weight, q)]
        if q.sparsity is not None and (apart := misplaced_channels(weight, q)) is not None:
            self._weights.failures.append(f"{name}: {apart}")

        def take(evidence: Evidence) -> None:
            self._judged.append(evidence)
            fails = [finding for finding in evidence.findings if finding.fails]
            self._report(name, fails, self._places.failures)
            others = [finding for finding in evidence.findings if not finding.fails]
            self._report(name, others, self._places.warnings)

        layout = self._view.layouts[name]
        if q.element.table is not None:
            self.background.do(lambda: find_float_faults(weight, q), take)
        else:
            self.background.do(lambda: find_faults(weight, q, layout, spec, stored, self._run), take)

    @staticmethod
    def _report(name: str, findings: list[SuspectPlace], lines: list[str]) -> None:
        for finding in findings[:_SHOWN_FAULTS]:
            # No evidence ratio for errors beyond what rounding to nearest allows: they are certain damage.
            ratio = f"log-likelihood ratio {finding.evidence:.0f}; {_by_chance(finding)}"
            lines.append(f"{name}: {finding.what}" + ("" if math.isinf(finding.evidence) else f" ({ratio})"))
        if len(findings) > _SHOWN_FAULTS:
            lines.append(f"{name}: and {len(findings) - _SHOWN_FAULTS} more places")

    def _judge_dequantized(self, module: str, mine: Tensor, theirs: Tensor) -> None:
        """Compare a module that a conversion dequantised with the original's weight."""
        scheme = self._dequantized[module]
        weight, values = theirs.to(self._device, torch.float32), mine.to(self._device, torch.float32)
        projection = self._projections.get(module)
        if projection is not None and projection.whole:
            weight, values = projection.view(weight).contiguous(), projection.view(values).contiguous()
        if not bool(torch.isfinite(values).all()) or not bool(torch.isfinite(weight).all()):
            self._unquantized.failures.append(f"{module}: NaN or infinity, so no error can be given")
            return
        reason = off_grid(values, scheme)
        if reason is not None:
            self._unquantized.failures.append(f"{module}: dequantised by a conversion, but {reason}")
        norm = float(weight.norm()) or 1.0
        error = float((weight - values).norm()) / norm
        rtn = self._rtn_error(weight, scheme, norm)
        self._judge_error(module, error, rtn, scheme.element, self._unquantized)

    @staticmethod
    def _judge_error(
        name: str, error: float, rtn: float | None, element: Element, findings: Findings
    ) -> None:
        if rtn is None:
            return
        # Round-to-nearest is exact on constant weights, which GPTQ may still move by a part of a step.
        usual = max(rtn, 1 / (2 * element.codes))
        if error > ABOVE_RTN * usual:
            text = f"{name}: relative error {error:.4f}, round-to-nearest's is {rtn:.4f}"
            if rtn > 0:
                text = f"{name}: relative error {error:.4f}, {error / rtn:.1f} times round-to-nearest's"
            (findings.failures if error > FAR_ABOVE_RTN * usual else findings.warnings).append(text)

    def _same_tuple(self, name: str, q: QuantizedWeight) -> None:
        if self._other is None or name not in self._other.modules:
            self._weights.failures.append(f"{name}: not quantised in {self._original.path}")
            return
        try:
            difference = q.difference(self._other.load(name))
        except MarlinqError as error:
            difference = str(error)
        if difference is not None:
            self._weights.failures.append(f"{name}: {difference}")

    def _unquantized_original(self, name: str) -> Tensor | None:
        if name in self._stored.tensors:
            return self._stored.tensor(name)
        source = self._find(name)
        if source is not None:
            return self._original.tensor(source)
        module = name.removesuffix(".weight")
        projection = self._projections.get(module)
        if projection is not None and not projection.whole and self._other is None:
            return self._expert_weight(projection)
        if self._other is not None and module in self._other.modules:
            # A conversion dequantises what the target layout can't hold.
            return self._other.load(module).dequantize()
        return None

    def _find(self, name: str) -> str | None:
        if name in self._original.tensors:
            return name
        return self._names.find(name) if self._names is not None else None

    def _tied(self, projection: Projection) -> str | None:
        """Name of the original's embedding, for an output head without a tensor of its own."""
        blueprint = self._blueprint
        if blueprint is None or projection.name != blueprint.head or blueprint.embedding is None:
            return None
        return self._find(blueprint.embedding)

    def _weight(self, name: str, spec: ModuleSpec) -> Tensor:
        """The original weight, float32 [N, K]."""
        projection = self._projections.get(name)
        if projection is not None and not projection.whole:
            return self._expert_weight(projection)
        source = self._find(f"{name}.weight" if projection is None else projection.parameter)
        if source is None and projection is not None:
            source = self._tied(projection)
        where = f"{self._original.path}: {name}.weight"
        if source is None:
            raise CheckpointError(f"{where}: missing; pass the original that was quantised")
        weight = self._original.tensor(source).to(torch.float32)
        expected = (spec.out_features, spec.in_features)
        if projection is not None:
            weight = projection.view(weight)
        elif tuple(weight.shape) != expected and self._names is None:
            # Without a blueprint, the shape alone tells that the model stores weights as [K, N].
            weight = weight.t()
        if tuple(weight.shape) != expected:
            raise CheckpointError(f"{where}: expected shape {list(expected)}, found {list(weight.shape)}")
        return weight.contiguous()

    def _expert_weight(self, projection: Projection) -> Tensor:
        """The original weight of one expert, float32 [N, K], whether the original has it fused or not."""
        shape = (projection.out_features, projection.in_features)
        weight: Tensor | None = None
        assert self._names is not None, "projections are found by their names"
        if (source := self._names.own(f"{projection.name}.weight")) is not None:
            weight = self._original.tensor(source)
        elif (source := self._names.own(projection.parameter)) is not None:
            weight = replace(projection, expert=None).view(
                self._original.part(source, projection.expert or 0)
            )
        if weight is None or tuple(weight.shape) != shape:
            found = "none" if weight is None else str(list(weight.shape))
            raise CheckpointError(
                f"{self._original.path}: {projection.name}: expected a weight {list(shape)}, found {found}"
            )
        return weight.to(torch.float32).contiguous()

    @staticmethod
    def _rtn_error(weight: Tensor, scheme: Scheme, norm: float) -> float | None:
        """Relative error of round-to-nearest for ``weight``, whose channels are in the order of their groups;
        None where the last group would be short."""
        if scheme.granularity.kind == "group" and not scheme.granularity.divides(weight.shape[1]):
            return None
        rounded = round_to_nearest(weight, scheme.for_channels(weight.shape[1]))
        return float((weight - rounded.dequantize()).norm()) / norm

    def results(self) -> list[Check]:
        """The rows; one fewer when the original is quantised itself."""
        names = {name.removesuffix(".weight") for name in self._view.passthrough}
        dequantized = len(names & set(self._dequantized)) if self._other is None else 0
        count = len(self._view.passthrough) - dequantized - self._tuned
        kept = (
            f"; {dequantized} dequantised by a conversion, no farther off than quantised"
            if dequantized
            else ""
        )
        kept += f"; {self._tuned} tuned, near the original's" if self._tuned else ""
        rows = [self._unquantized.result(f"{count} equal the original's bit for bit{self._cast}{kept}")]
        if self._other is not None:
            modules = len(self._view.modules)
            text = f"codes, scales, zero points and g_idx of {modules} modules are the same"
            return [*rows, self._weights.result(text)]
        ratios = {name: error / rtn for name, (error, rtn) in self.errors.items() if rtn}
        text = "no module to compare"
        if ratios:
            worst = max(ratios, key=lambda name: ratios[name])
            text = (
                f"errors {min(ratios.values()):.2f} to {ratios[worst]:.2f} times round-to-nearest's, "
                f"worst {worst}"
            )
        rows.append(self._weights.result(text))
        words = sum(evidence.words for evidence in self._judged)
        groups = sum(evidence.groups for evidence in self._judged)
        values = sum(evidence.values for evidence in self._judged)
        parts = []
        if groups or not values:
            parts.append(
                f"{counted(words, 'words')} and {counted(groups, 'groups')}, no outliers beyond the "
                "false-alarm rate"
            )
        if values:
            parts.append(f"{values} floating-point values, none beyond its rounding")
        if others := sum(not evidence.rounded for evidence in self._judged):
            parts.append(f"{others} modules were not rounded to nearest: judged by pieces that stand out")
        rows.append(self._places.result("; ".join(parts)))
        return rows


def _elements(view: QuantizedCheckpoint) -> set[tuple[str, Granularity | None]]:
    """Element types, of floats with the weights that share a scale: MXFP4 and NVFP4 have one element."""
    schemes = [spec.scheme for spec in view.modules.values()]
    return {
        (scheme.element.name, None if scheme.element.table is None else scheme.granularity)
        for scheme in schemes
    }


def _by_chance(finding: SuspectPlace) -> str:
    """Text on how often an undamaged checkpoint of this size would show the same finding."""
    runs = 1 / max(finding.expected, 1e-99)
    return f"by chance in 1 of {runs:.0e} runs" if runs < 1e12 else "by chance practically never"


def _by_stored_name(blueprint: Blueprint, view: QuantizedCheckpoint) -> dict[str, Projection]:
    """Every projection by its name in ``view``, whether it is quantised there or not."""
    tensors = view.checkpoint.tensors
    names = TensorNames(blueprint, tensors.keys(), source=str(view.checkpoint.path))
    projections = {}
    for projection in blueprint.by_name.values():
        for stem in (names.quantized(projection.name, view), names.stem(projection, "weight")):
            if stem is not None:
                projections[stem] = projection
    return projections


def _routing(blueprint: Blueprint, view: QuantizedCheckpoint) -> set[str]:
    """Names of the stored tensors that choose experts: routers' weights and correction biases."""
    names = TensorNames(blueprint, view.checkpoint.tensors.keys(), source=str(view.checkpoint.path))
    stems = tuple(f"{router}." for router in blueprint.routers)
    routers = {name for name in blueprint.parameters if name.startswith(stems)}
    stored = (names.own(name) for name in (*routers, *(blueprint.buffers if blueprint.routers else ())))
    return {name for name in stored if name is not None}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )
