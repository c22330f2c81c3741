"""A quantised checkpoint as quantised weights by module name, and its other tensors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marlinq.checkpoint.draft_head import BLOCK_NUMBER, beyond_blocks, find_draft_head, is_of_draft_head
from marlinq.checkpoint.quantization_config import config_place, read_quantization_config
from marlinq.checkpoint.reader import Checkpoint
from marlinq.checkpoint.stacked import with_parts
from marlinq.checkpoint.undeclared import bare_codes, check_declared
from marlinq.core.dtypes import FLOATS
from marlinq.core.errors import CheckpointError, ConversionRefused, MarlinqError, UnsupportedError
from marlinq.core.rules import Keep
from marlinq.core.weight import Grid, QuantizedWeight
from marlinq.formats import FORMATS, LAYOUTS, Format, Layout, ModuleSpec, StoredWeight, TensorSpec
from marlinq.formats.dialects import QuantizationConfig, is_head
from marlinq.formats.layouts.layout import UNQUANTIZED
from marlinq.formats.stored import check_grid

if TYPE_CHECKING:
    from torch import Tensor

_CODE_DTYPES = ("int32", "float8_e4m3fn", "float8_e5m2")
"""Dtypes of matrices that can only be codes."""

_LINEAR = re.compile(r"(?:^|\.)(?:[^.]*proj[^.]*|dense\w*|fc\d|c_attn|c_fc|wo|wqkv|w\d|query_key_value)$")
_EXPERTS = "experts"
_EMBEDDING_MARKS = ("embed", "wte", "wpe", "norm")
_BLOCK_MARKS = ("norm", "ln_", "gate", "router")


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """An open quantised checkpoint.

    Attributes:
        checkpoint: the checkpoint; experts that a file holds in one tensor appear as separate tensors.
        config: parsed quantization_config.
        format: format of the checkpoint.
        modules: shape and scheme of every quantised module, in file order.
        layouts: layout of every quantised module.
        passthrough: names of tensors of no quantised module (norms, embeddings, biases), in file order.
    """

    checkpoint: Checkpoint
    config: QuantizationConfig
    format: Format
    modules: dict[str, ModuleSpec]
    layouts: dict[str, Layout]
    passthrough: list[str]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> QuantizedCheckpoint | None:
        """The quantised view of ``checkpoint``; None if no tensor is quantised, even if its config claims it.

        Raises:
            CheckpointError: config and tensors contradict each other.
            UndeclaredError: there is no config, and tensors are those of quantised linears.
            UnsupportedError: the quantisation method is not one marlinq reads.
        """
        try:
            config = read_quantization_config(checkpoint.path, checkpoint.config)
        except UnsupportedError as error:
            if any(info.dtype not in FLOATS for info in checkpoint.tensors.values()):
                raise
            # A model fine-tuned with bitsandbytes and then merged keeps the config of bitsandbytes.
            warnings.warn(
                f"{error}; every tensor is in floating point, so the model is read as an unquantised one",
                stacklevel=2,
            )
            return None
        if config is None:
            check_declared(checkpoint)
            return None
        form = FORMATS[config.format]
        if form.stacked:
            checkpoint = with_parts(checkpoint)
        modules: dict[str, ModuleSpec] = {}
        layouts: dict[str, Layout] = {}
        for name, info in checkpoint.tensors.items():
            stem, _, suffix = name.rpartition(".")
            if stem and form.is_codes(suffix, info.dtype):
                layouts[stem], modules[stem] = _module(checkpoint, config, form, stem)
        if not modules:
            place = config_place(checkpoint.path, checkpoint.config)
            raise CheckpointError(
                f"{place} says {form.name}, but no quantised tensor ends in "
                f"{' or '.join(f'.{key}' for key in form.keys)}; remove it if the model is not quantised"
            )
        owned = {f"{module}.{suffix}" for module, layout in layouts.items() for suffix in layout.suffixes}
        passthrough = [name for name in checkpoint.tensors if name not in owned]
        for name in passthrough:
            reason = misplaced(name, form, layouts)
            if reason is not None:
                raise CheckpointError(f"{checkpoint.path}: {reason}")
            info = checkpoint.tensors[name]
            if info.dtype in _CODE_DTYPES and len(info.shape) > 1:
                raise UnsupportedError(
                    f"{checkpoint.path}: tensor {name} is {info.dtype} {list(info.shape)} and no part of a "
                    f"{form.name} linear; stacked experts and other packings are not supported"
                )
            reason = bare_codes(checkpoint, name)
            if reason is not None:
                raise CheckpointError(reason)
        return cls(checkpoint, config, form, modules, layouts, passthrough)

    def mismatch(self, module: str) -> str | None:
        """How the stored names, shapes and dtypes of ``module`` differ from the layout's, or None."""
        infos = {suffix: self.checkpoint.tensors[name] for suffix, name in self.tensor_names(module).items()}
        specs = {suffix: TensorSpec(info.dtype, info.shape) for suffix, info in infos.items()}
        return self.layouts[module].mismatch(specs, self.modules[module])

    def load_grid(self, module: str) -> Grid:
        """The weight of ``module`` without its codes: scales, zeros and g_idx, which are small.

        Raises:
            CheckpointError, ConversionRefused: as :meth:`load`.
        """
        names = self.tensor_names(module)
        layout = self.layouts[module]
        names.pop(layout.key)
        declared = self.config.rules.scheme(module)
        try:
            grid = layout.unpack_grid(
                {suffix: self.checkpoint.tensor(name) for suffix, name in names.items()}, self.modules[module]
            )
            check_grid(grid, declared, lambda: self._codes(module))
        except MarlinqError as error:
            raise type(error)(f"{self.checkpoint.path}: {module}: {error}") from None
        return grid

    def _codes(self, module: str) -> Tensor:
        layout = self.layouts[module]
        mask = None if layout.mask_key is None else self.checkpoint.tensor(f"{module}.{layout.mask_key}")
        return layout.unpack_codes(self.codes(module), self.modules[module], mask)

    def codes(self, module: str) -> Tensor:
        """The codes of ``module`` as stored."""
        return self.checkpoint.tensor(self.codes_name(module))

    def codes_name(self, module: str) -> str:
        """Name of the stored tensor with the codes of ``module``."""
        return f"{module}.{self.layouts[module].key}"

    def load(self, module: str, *, refuse_faults: bool = True) -> QuantizedWeight:
        """The weight of ``module``.

        Args:
            module: name of the module in the checkpoint.
            refuse_faults: whether to refuse scales and codes that no quantiser writes.

        Raises:
            CheckpointError: a tensor is missing, of the wrong shape or out of range, or its values are not
                what a quantiser writes (:func:`marlinq.formats.stored.check_grid`).
            ConversionRefused: its stored values are ambiguous (GPTQ v1 zeros of an unknown writer).
        """
        return self._stored(module, self.checkpoint.tensor, refuse_faults=refuse_faults).weight()

    def stored(self, module: str, read: Callable[[str], Tensor] | None = None) -> StoredWeight:
        """The tensors of ``module``; its codes are read but not decoded.

        Args:
            module: name of the module in the checkpoint.
            read: function that returns a stored tensor by name, on any device; by default read from the
                checkpoint to the CPU.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or of the wrong shape or dtype; or as
                :func:`marlinq.formats.stored.check_grid`.
            ConversionRefused: as :meth:`load`.
        """
        weight = self._stored(module, read or self.checkpoint.tensor, refuse_faults=True)
        # Kernels may take words and scales as stored, and so past other checks.
        weight.check_values()
        return weight

    def _stored(self, module: str, read: Callable[[str], Tensor], *, refuse_faults: bool) -> StoredWeight:
        name = f"{self.checkpoint.path}: {module}"
        reason = self.mismatch(module)
        if reason is not None:
            raise CheckpointError(f"{name}: {reason}")
        names = self.tensor_names(module)
        tensors = {suffix: read(stored) for suffix, stored in names.items()}
        return StoredWeight(
            name,
            self.layouts[module],
            self.modules[module],
            tensors,
            self.config.rules.scheme(module),
            checked=refuse_faults,
        )

    def tensor_names(self, module: str) -> dict[str, str]:
        """Names of the stored tensors of ``module`` by suffix."""
        names = {suffix: f"{module}.{suffix}" for suffix in self.layouts[module].suffixes}
        return {suffix: name for suffix, name in names.items() if name in self.checkpoint.tensors}

    def doubtful_linears(self) -> list[str]:
        """Quantised modules that may not be linears of the model, which only building the model can tell.

        Their names are unusual for a linear, or their block's number is beyond the config's last.
        """

        def doubtful(module: str) -> bool:
            return self.beyond_blocks(module) or not (is_head(module) or _LINEAR.search(module))

        return [module for module in self.modules if doubtful(module)]

    def beyond_blocks(self, name: str) -> bool:
        """Whether the number in ``name`` is of no block that the config counts: a draft head (multi-token
        prediction) lies behind the last."""
        return beyond_blocks(name, self.checkpoint.config)

    def unquantized_linears(self) -> list[str]:
        """Linears that are not quantised (:func:`floating_linears`), with lm_head, which has no tensor if it
        is tied."""
        floating = floating_linears(self.checkpoint, self.passthrough)
        if not any(is_head(name) for name in (*floating, *self.modules)):
            floating.append("lm_head")
        return floating


def doubtful_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Those of ``names``, of unquantised tensors, that may have no place in the model, which only building
    the model can tell.

    They are not in every block, their shape is not the same in all, or their name is unusual.
    """
    has_draft_head = find_draft_head(checkpoint.tensors) is not None
    places: dict[str, str] = {}
    shapes: dict[str, dict[int, tuple[int, ...]]] = {}
    for name, info in checkpoint.tensors.items():
        block = BLOCK_NUMBER.search(f"{name.rpartition('.')[0]}.")
        if block is not None:
            places[name] = f"{name[: block.start()]}.{name[block.end() :]}"
            shapes.setdefault(places[name], {})[int(block[1])] = info.shape
    every = {number for numbers in shapes.values() for number in numbers}

    def doubtful(name: str) -> bool:
        if is_of_draft_head(name, checkpoint.config):
            return not has_draft_head
        module, _, suffix = name.rpartition(".")
        if suffix not in (UNQUANTIZED, "bias"):
            return True
        last = module.rpartition(".")[2]
        if name in places:
            named = _LINEAR.search(module) or any(mark in last for mark in _BLOCK_MARKS)
            here = shapes[places[name]]
            return here.keys() != every or len(set(here.values())) > 1 or not named
        return not any(mark in last for mark in (*_EMBEDDING_MARKS, "head", "ln_f"))

    return [name for name in names if doubtful(name)]


def misplaced(name: str, form: Format, layouts: Mapping[str, Layout]) -> str | None:
    """Why the tensor ``name`` can't be copied into a folder of ``form``, or None.

    It must not have a name that ``form``, or the layout of a quantised module after a conversion, uses for a
    part of a quantised module.

    Args:
        name: a tensor that is no part of a quantised module.
        form: format of the folder.
        layouts: layout of every quantised module, by module name.
    """
    module, _, suffix = name.rpartition(".")
    layout = layouts.get(module)
    if suffix == UNQUANTIZED:
        beside = f"tensor {name} stands beside the {form.name} tensors of the same module"
        return beside if layout is not None else None
    if layout is None and suffix in form.suffixes:
        if not module:
            return f"tensor {name} belongs to no module, but has the name of a part of one in {form.name}"
        reader = f"tensor {name} would be read as part of a module in {form.name}"
        return f"{reader}, but there is no {' or '.join(f'{module}.{key}' for key in form.keys)}"
    if layout is None:
        return None
    if suffix in layout.suffixes:
        return f"tensor {name} would be read as part of a module in {layout.name}"
    owners = [other.name for other in LAYOUTS.values() if suffix in other.suffixes]
    if owners:
        return (
            f"tensor {name} is no part of a module in {layout.name}, but of one in {owners[0]}, and {module} "
            f"is quantised as {layout.name}; remove one or the other"
        )
    return None


def floating_linears(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Modules with a two-dimensional weight among ``names``, without embeddings and norms; and modules with
    one such weight for each of several experts."""
    linears = []
    for name in names:
        module, _, suffix = name.rpartition(".")
        last = module.rpartition(".")[2]
        axes = len(checkpoint.tensors[name].shape)
        if axes == 3 and last == _EXPERTS and not suffix.endswith("_bias") and module not in linears:
            linears.append(module)
        matrix = suffix == "weight" and axes == 2
        if matrix and not any(mark in last for mark in _EMBEDDING_MARKS):
            linears.append(module)
    return linears


def _module(
    checkpoint: Checkpoint, config: QuantizationConfig, form: Format, module: str
) -> tuple[Layout, ModuleSpec]:
    scheme = config.rules.outcome(module)
    where = f"{checkpoint.path}: {module}"
    if isinstance(scheme, Keep):
        raise CheckpointError(f"{where}: is quantised, but quantization_config excludes it ({scheme.reason})")
    there = {suffix: checkpoint.tensors.get(f"{module}.{suffix}") for suffix in form.suffixes}
    dtypes = {suffix: info.dtype for suffix, info in there.items() if info is not None}
    try:
        layout = form.stored_layout(dtypes, scheme)
    except ConversionRefused as error:
        raise CheckpointError(f"{where}: {error}") from None
    infos = {suffix: info for suffix in layout.suffixes if (info := there[suffix]) is not None}
    if len(infos[layout.key].shape) != 2:
        raise UnsupportedError(
            f"{where}.{layout.key}: expected two dimensions, found shape {list(infos[layout.key].shape)}; "
            "stacked experts are not supported"
        )
    k, n = layout.infer_shape({suffix: info.shape for suffix, info in infos.items()}, scheme.element)
    if k == 0 or n == 0:
        raise CheckpointError(f"{where}.{layout.key}: empty, shape {list(infos[layout.key].shape)}")
    if layout.scale_key not in infos:
        raise CheckpointError(f"{where}: the scales tensor {module}.{layout.scale_key} is missing")
    scale_dtype = layout.read_scale_dtype(infos[layout.scale_key].dtype)
    stored = replace(layout.as_stored(scheme), scale_dtype=scale_dtype)
    spec = ModuleSpec(
        in_features=k,
        out_features=n,
        scheme=stored.for_channels(k) if layout.only_groups is None else stored,
        zero_writer=config.zero_writer,
        extras=frozenset(infos) & frozenset(layout.read_only),
    )
    return layout, spec
