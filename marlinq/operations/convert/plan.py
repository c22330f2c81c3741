"""The plan of a conversion: every output tensor, decided before anything is written.

Headers and config are checked first (shapes, group sizes, widths), then the small tensors of every module
(zeros, g_idx, scales), then the codes and masks of sparse modules. A conversion that can't be exact is
refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint import (
    TRANSPOSED_WEIGHTS,
    Checkpoint,
    QuantizedCheckpoint,
    TensorPlan,
    check_stacks,
    misplaced,
    model_dtype,
    own_head,
    says_tied,
    says_untied,
    untied_config,
)
from marlinq.core.display import counted
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import CheckpointError, ConversionRefused, NumericsError, UsageError
from marlinq.core.progress import ReportProgress
from marlinq.core.rules import Keep
from marlinq.core.scheme import Scheme
from marlinq.core.schemes import SCHEMES, NamedScheme
from marlinq.core.weight import Grid
from marlinq.formats import FORMATS, Format, Layout, ModuleSpec
from marlinq.formats.dialects import write_quantization_config
from marlinq.formats.dialects.name_patterns import FUSED, in_wrapper
from marlinq.operations.convert.recast import Recast, recast
from marlinq.operations.convert.sparsity_checks import with_sparsity
from marlinq.operations.inspect.load_refusal import doubtful_refusal

if TYPE_CHECKING:
    import torch
else:
    from marlinq.core.lazy import torch

_SIXTEEN_BIT = ("float16", "bfloat16")


@dataclass(frozen=True)
class ConversionPlan:
    """Everything that a conversion will write.

    Attributes:
        source: the opened source checkpoint.
        target: format of the output.
        modules: shape and scheme in the output, for each module that stays quantised.
        skipped: modules stored dequantised, with the reason.
        tensors: every output tensor, in the source's order.
        weight_dtype: dtype name of dequantised weights.
        transposed: whether dequantised weights are stored [K, N] instead of [N, K].
        config: the source's ``config.json``, with ``tie_word_embeddings: false`` where the head's stored
            weight differs from the embedding.
        quantization_config: quantization settings for the output's ``config.json``.
        recasts: change of scheme, for each module whose scheme changes.
        allow_loss: whether values that the target can't hold exactly are rounded.
        lossy: whether any module loses precision.
        notes: sentences that the report shows to the user.
    """

    source: QuantizedCheckpoint
    target: Format
    modules: dict[str, ModuleSpec]
    skipped: Mapping[str, Keep]
    tensors: list[TensorPlan]
    weight_dtype: str
    transposed: bool
    config: dict[str, Any]
    quantization_config: dict[str, Any]
    recasts: Mapping[str, Recast]
    allow_loss: bool
    lossy: bool
    notes: tuple[str, ...]

    def layout_of(self, module: str) -> Layout:
        """The layout of a module that stays quantised in the output."""
        return self.target.layout_of(self.modules[module].scheme)


def plan_conversion(
    source: QuantizedCheckpoint,
    target: Format,
    *,
    scheme: NamedScheme | None = None,
    allow_loss: bool = False,
    strict_marlin: bool,
    skip_unsupported: bool,
    progress: ReportProgress,
) -> ConversionPlan:
    """Decide a conversion.

    Args:
        source: checkpoint to convert.
        target: format of the output.
        scheme: scheme that every module gets; None keeps each module's scheme.
        allow_loss: round values that the target can't hold exactly, and add a note about it.
        strict_marlin, skip_unsupported: as for :func:`~marlinq.operations.convert.convert`.
        progress: called with (activity, steps done, steps in all).

    Raises:
        ConversionRefused: the target can't hold a module without loss; nothing has been written.
        CheckpointError: the source contradicts itself.
        UsageError: the target can't hold ``scheme``.
    """
    unknown = _check_linears(source)
    recasts = _recasts(source, target, scheme)
    specs = {
        name: replace(spec, scheme=recasts[name].target.for_channels(spec.in_features))
        if name in recasts
        else spec
        for name, spec in source.modules.items()
    }
    specs = with_sparsity(source, target, specs, progress)
    skipped = _excluded_shapes(source, specs, target, strict_marlin, skip_unsupported)
    kept = {name: spec for name, spec in specs.items() if name not in skipped}
    if not kept:
        raise ConversionRefused(
            f"{source.checkpoint.path}: {target.name} can hold no module; "
            f"the first reason is {_first(skipped)}"
        )
    unquantized = [*source.unquantized_linears(), *skipped]
    if in_wrapper([*source.modules, *unquantized]):
        # Their files may have names of their own. Needs transformers, which other conversions do without.
        from marlinq.models import linears_in_memory

        unquantized = list(dict.fromkeys([*unquantized, *linears_in_memory(source, kept)]))
    # Raises before any tensor is read when the config dialect can't describe the schemes.
    write_quantization_config(target, kept, unquantized)

    grids = _Scan(source, target, specs, recasts, allow_loss)
    for done, name in enumerate(source.modules):
        progress("checking", done, len(source.modules))
        grids.check(name, stored=name in kept)
    progress("checking", len(source.modules), len(source.modules))
    modules = {name: grids.target_spec(name) for name in kept}

    weight_dtype = (
        model_dtype(source.checkpoint.config) or next(iter(source.modules.values())).scheme.scale_dtype
    )
    config, mistied = stored_ties(source)
    transposed = config.get("model_type") in TRANSPOSED_WEIGHTS
    return ConversionPlan(
        source=source,
        target=target,
        modules=modules,
        skipped=skipped,
        tensors=_tensors(source, target, modules, weight_dtype, transposed),
        weight_dtype=weight_dtype,
        transposed=transposed,
        config=config,
        quantization_config=write_quantization_config(target, modules, unquantized),
        recasts=recasts,
        allow_loss=allow_loss,
        lossy=grids.lossy,
        notes=(
            *([] if unknown is None else [unknown]),
            *unknown_tensors(source.checkpoint, source),
            *grids.notes(kept),
            *_fused_notes(set(skipped), kept),
            *mistied,
        ),
    )


def unknown_tensors(checkpoint: Checkpoint, source: QuantizedCheckpoint | None) -> list[str]:
    """A note on tensors that the model does not have, or has in another shape, which a conversion copies."""
    refusal = doubtful_refusal(checkpoint, source)
    return [] if refusal is None else [f"{refusal}; marlinq will not load the output either"]


def _check_linears(source: QuantizedCheckpoint) -> str | None:
    if not source.doubtful_linears():
        return None
    # Needs transformers, which most conversions do without.
    from marlinq.models import check_linears

    return check_linears(source)


def stored_ties(source: QuantizedCheckpoint) -> tuple[dict[str, Any], list[str]]:
    """``config.json`` with ``tie_word_embeddings: false`` where the head has a weight of its own, and the
    notes about that change (none or one).

    Raises:
        CheckpointError: a file was changed since it was opened, or ends early.
    """
    config = source.checkpoint.config
    own = None if says_untied(config) else own_head(source.checkpoint, source.modules)
    if own is None:
        return dict(config), []
    note = f"the source says tie_word_embeddings: true, but {own.replace(': ', ' ')}; the output says false"
    return untied_config(config), [note] if says_tied(config) else []


def _recasts(source: QuantizedCheckpoint, target: Format, scheme: NamedScheme | None) -> dict[str, Recast]:
    """Change of scheme of every module whose scheme changes.

    Raises:
        ConversionRefused: a module's scheme can't be changed to the wanted one.
        UsageError: the target can't hold the wanted scheme.
    """
    recasts: dict[str, Recast] = {}
    for name, spec in source.modules.items():
        wanted = spec.scheme if scheme is None else scheme.example(spec.scheme)
        if (reason := target.scheme_refusal(wanted)) is not None:
            if scheme is not None:
                raise UsageError(f"--scheme {scheme.name}: {target.name} can't hold {reason}; leave it out")
            continue  # _excluded_shapes refuses it, with its reason
        way = recast(spec.scheme, target.layout_of(wanted), scheme)
        if isinstance(way, str):
            raise ConversionRefused(f"{source.checkpoint.path}: {name}: {way}")
        if way is not None:
            recasts[name] = way
    return recasts


def _excluded_shapes(
    source: QuantizedCheckpoint,
    specs: Mapping[str, ModuleSpec],
    target: Format,
    strict_marlin: bool,
    skip_unsupported: bool,
) -> dict[str, Keep]:
    excluded: dict[str, Keep] = {}
    for name, spec in specs.items():
        reason = source.mismatch(name)
        if reason is not None:
            raise CheckpointError(f"{source.checkpoint.path}: {name}.{reason}")
        reason = _shape_refusal(target, spec, strict_marlin)
        if reason is not None:
            excluded[name] = Keep(reason)
    if excluded and not skip_unsupported:
        others = f" ({len(excluded) - 1} more modules)" if len(excluded) > 1 else ""
        raise ConversionRefused(
            f"{source.checkpoint.path}: {target.name} can't hold {_first(excluded)}{others}; "
            f"{_way_out(specs, excluded, source.format, target)}"
        )
    return excluded


def _way_out(
    specs: Mapping[str, ModuleSpec], excluded: Mapping[str, Keep], own: Format, target: Format
) -> str:
    """Advice for the message that ``target`` can't hold the modules ``excluded``; ``own`` is the source's."""
    if len(excluded) < len(specs):
        return "--skip-unsupported keeps such modules unquantised"
    scheme = specs[next(iter(excluded))].scheme
    related = [
        named
        for named in SCHEMES.values()
        if (named.element.table is None) == (scheme.element.table is None)
        and target.scheme_refusal(named.example(scheme)) is None
    ]
    if not related:
        return "integers and floats are never converted into each other; quantise the original again"
    ways = [named for named in related if named.activations is None or named.activations.dynamic]
    if scheme.element.table is None or not ways:
        others = [
            form.name
            for form in FORMATS.values()
            if form not in (own, target)
            and form.read_only is None
            and (form.sparsity is None or own.sparsity is not None)
            and not any(_shape_refusal(form, spec, strict_marlin=False) for spec in specs.values())
        ]
        return f"no module would stay quantised; choose --to {' or '.join([*others, 'dense'])}"
    names = " or ".join(named.name for named in ways)
    return f"no module would stay quantised; add --scheme {names}, which {target.name} holds"


def _shape_refusal(target: Format, spec: ModuleSpec, strict_marlin: bool) -> str | None:
    try:
        layout = target.layout_of(spec.scheme)
    except ConversionRefused:
        return target.scheme_refusal(spec.scheme)
    return layout.strict_refusal(spec) if strict_marlin else layout.shape_refusal(spec)


def _first(skipped: Mapping[str, Keep]) -> str:
    name, keep = next(iter(skipped.items()))
    return f"{name}: {keep.reason}"


class _Scan:
    """Reads zeros, g_idx and scales of every module once; refuses what the target can't hold, and keeps what
    decides the output's schemes and notes."""

    def __init__(
        self,
        source: QuantizedCheckpoint,
        target: Format,
        specs: Mapping[str, ModuleSpec],
        recasts: Mapping[str, Recast],
        allow_loss: bool,
    ) -> None:
        self._source, self._target = source, target
        self._specs, self._recasts, self._allow_loss = specs, recasts, allow_loss
        self._losses: dict[str, tuple[float, str]] = {}
        self._model_dtype = model_dtype(source.checkpoint.config)
        self._stores_zeros: dict[Scheme | None, bool] = {}
        self._act_order: dict[str, bool] = {}
        self._exact_in_model_dtype = self._model_dtype in _SIXTEEN_BIT
        self._flag_without_order = False

    def check(self, name: str, *, stored: bool) -> None:
        """Check that the target holds the values of module ``name``.

        Raises:
            ConversionRefused: it does not.
        """
        path = self._source.checkpoint.path
        grid = self._source.load_grid(name)
        declared = self._source.config.rules.scheme(name)
        if not stored:
            self._check_dequantized(name)
            return
        rounds = self._source.layouts[name].rounds
        if rounds is not None:
            self._lose(name, rounds, 2.0**-24)
        if name in self._recasts:
            grid = self._recast(name)
        grid = replace(grid, sparsity=self._specs[name].scheme.sparsity)
        reason = self._target.layout_of(grid.scheme).refusal(grid, self._scale_dtype(name))
        if reason is not None:
            raise ConversionRefused(f"{path}: {name}: {self._target.name} can't hold it: {reason}")
        self._stores_zeros[declared] = self._stores_zeros.get(declared, False) or grid.scheme.stores_zeros
        self._act_order[name] = grid.scheme.act_order
        if declared is not None and declared.act_order and not grid.scheme.act_order:
            self._flag_without_order = True
        if self._exact_in_model_dtype:
            self._exact_in_model_dtype = _exact(grid, self._model_dtype)

    def _check_dequantized(self, name: str) -> None:
        dtype = self._model_dtype or self._specs[name].scheme.scale_dtype
        if not bool(torch.isfinite(self._source.load(name).dequantize(torch_dtype(dtype))).all()):
            raise ConversionRefused(
                f"{self._source.checkpoint.path}: {name}: its dequantised weights overflow {dtype}, the "
                "dtype that config.json names"
            )

    def _recast(self, name: str) -> Grid:
        """Module ``name`` in its new scheme, rounded where it must be and may be.

        Raises:
            ConversionRefused: it would be rounded, which is not allowed or not possible.
            NumericsError: its weights are not finite.
        """
        way, weight = self._recasts[name], self._source.load(name)
        exact = way.exact(weight)
        if exact is not None:
            return exact
        before = weight.dequantize()
        odd = int((~torch.isfinite(before)).sum())
        if odd:
            raise NumericsError(
                f"{self._source.checkpoint.path}: {name}: {odd} of {before.numel()} weights are NaN or "
                "infinite; marlinq verify names what is damaged; copy the checkpoint again"
            )
        if way.lossy is None or not self._allow_loss:
            self._lose(name, way.refusal, None)
        rounded = way.apply(weight, allow_loss=True)
        assert rounded is not None, "a lossy way holds every weight"
        error = float((rounded.dequantize() - before).norm()) / (float(before.norm()) or 1.0)
        self._lose(name, way.refusal, error)
        return rounded

    def _lose(self, name: str, why: str, error: float | None) -> None:
        """Records the relative error of module ``name``.

        Raises:
            ConversionRefused: loss is not allowed, or ``error`` is None (nothing can round it).
        """
        if error is None or not self._allow_loss:
            raise ConversionRefused(
                f"{self._source.checkpoint.path}: {name}: {why}; --allow-loss converts it nevertheless"
            )
        self._losses[name] = error, why

    def target_spec(self, name: str) -> ModuleSpec:
        """Shape and scheme of ``name`` in the output; call it after :meth:`check` of every module."""
        spec = self._specs[name]
        # One answer for all modules with the same declared scheme: servers fuse projections (q, k, v) and
        # need the parts to have one scheme.
        stores_zeros = self._stores_zeros[self._source.config.rules.scheme(name)]
        dtype = self._scale_dtype(name)
        if dtype is None:
            same = self._model_dtype if self._exact_in_model_dtype else None
            dtype = same or spec.scheme.scale_dtype
        scheme = replace(
            spec.scheme,
            zero_point="stored" if stores_zeros else spec.scheme.element.zero_point,
            scale_dtype=dtype,
            act_order=self._act_order[name],
        )
        layout = self._target.layout_of(scheme)
        return ModuleSpec(spec.in_features, spec.out_features, layout.as_stored(scheme))

    @property
    def lossy(self) -> bool:
        """Whether any module loses precision."""
        return bool(self._losses)

    def notes(self, kept: Mapping[str, ModuleSpec]) -> list[str]:
        """Facts about the output that a user should know."""
        notes = []
        if self._losses:
            worst = max(self._losses, key=lambda name: self._losses[name][0])
            error, why = self._losses[worst]
            notes.append(
                f"{counted(len(self._losses), 'modules')} lost precision; {worst} most, by {error:.2g} of "
                f"its norm: {why}"
            )
        if any(self._act_order.values()):
            notes.append("the g_idx is in activation order; vLLM refuses such checkpoints since 0.30")
        if self._flag_without_order:
            notes.append(
                "the source says desc_act: true, but its g_idx is in channel order; the output says false"
            )
        name, spec = next(iter(kept.items()))
        stored, wanted = spec.scheme.scale_dtype, self._model_dtype
        follows = self._scale_dtype(name) is None and wanted in _SIXTEEN_BIT
        if follows and not self._exact_in_model_dtype and stored != wanted:
            notes.append(
                f"scales stay in {stored}: the model's {wanted} can't hold all of them "
                "exactly, and a loader that casts them rounds"
            )
        return notes

    def _scale_dtype(self, name: str) -> str | None:
        """dtype of the output's scales; None where the target's scales take the model's dtype."""
        scheme = self._specs[name].scheme
        target = self._target.layout_of(scheme)
        same = self._source.layouts[name].family == target.family and name not in self._recasts
        return scheme.scale_dtype if same else target.scale_dtype


def _exact(grid: Grid, dtype: str | None) -> bool:
    wide = grid.scales.to(torch.float32)
    return dtype is not None and torch.equal(wide.to(torch_dtype(dtype)).to(torch.float32), wide)


def _tensors(
    source: QuantizedCheckpoint,
    target: Format,
    modules: Mapping[str, ModuleSpec],
    weight_dtype: str,
    transposed: bool,
) -> list[TensorPlan]:
    carried = set(source.passthrough)
    layouts = {name: target.layout_of(spec.scheme) for name, spec in modules.items()}
    plans: list[TensorPlan] = []
    for name, info in source.checkpoint.tensors.items():
        if name in carried:
            reason = misplaced(name, target, layouts)
            if reason is not None:
                raise ConversionRefused(f"{source.checkpoint.path}: as {target.name}, {reason}")
            plans.append(TensorPlan(name, info.dtype, info.shape))
            continue
        module = name.rpartition(".")[0]
        if name != source.codes_name(module):
            continue
        if module in modules:
            expected = layouts[module].expected(modules[module])
            plans += [TensorPlan(f"{module}.{key}", want.dtype, want.shape) for key, want in expected.items()]
        else:
            spec = source.modules[module]
            shape = (spec.out_features, spec.in_features)
            plans.append(TensorPlan(f"{module}.weight", weight_dtype, shape[::-1] if transposed else shape))
    if target.stacked:
        check_stacks(plans)
    return plans


def _fused_notes(skipped: set[str], kept: Mapping[str, ModuleSpec]) -> list[str]:
    for name in sorted(skipped):
        stem, _, last = name.rpartition(".")
        parts = next((parts for _, parts in FUSED if last in parts), ())
        if any(f"{stem}.{part}" in kept for part in parts):
            note = (
                f"{name} is unquantised and its neighbours in {'/'.join(parts)} are not; "
                "loaders that fuse them, such as vLLM, can't load this checkpoint"
            )
            return [note]
    return []
