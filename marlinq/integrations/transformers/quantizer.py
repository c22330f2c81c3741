"""A quantizer for transformers that replaces quantised linears by marlinq's operators.

Steps of ``from_pretrained`` after :func:`marlinq.register`:

1. The tables of :mod:`~marlinq.integrations.transformers.registry` parse a ``quantization_config`` to a
   :class:`MarlinqConfig`.
2. transformers asks :class:`MarlinqQuantizer` for the device, and builds the model without weights.
3. The quantizer finds the place of every stored tensor, and removes the quantised linears from the model.
4. transformers reads the other tensors.
5. The quantizer puts an operator in the place of each removed linear.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from marlinq.core.devices import resolve_device
from marlinq.core.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from marlinq.checkpoint import QuantizedCheckpoint
    from marlinq.models import Blueprint, ModelInstance
    from marlinq.runtime import Decision
    from marlinq.runtime.placement import Placement

METHOD = "marlinq"
"""Name of the quantizer in transformers' table; ``config.json`` keeps the ``quant_method`` of its format."""

_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
_TURN_OFF = "after marlinq.unregister() transformers' own quantizer loads it"


class MarlinqConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """``model.config.quantization_config`` of a model that marlinq loads.

    Attributes:
        operator: name of the operator for quantised weights, used where it can be; see
            :func:`marlinq.runtime.decide`.
        compile_kernels: whether kernels are compiled while the model is loaded, and not at their first use.
        stored: ``quantization_config`` of the folder.
    """

    quant_method = METHOD

    def __init__(self) -> None:
        self.operator = "auto"
        self.compile_kernels = True
        self.stored: dict[str, Any] = {}

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The config of a folder whose ``quantization_config`` is ``config_dict``."""
        config = cls()
        config.stored = dict(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """The folder's own ``quantization_config``, which names its format and not marlinq."""
        return deepcopy(self.stored)


class _Gap(nn.Module):
    """Placeholder for a quantised linear while transformers reads the other tensors."""

    def __init__(self) -> None:
        super().__init__()
        # Empty attributes, because some blocks initialise their linears' weights; not in the state dict.
        self.weight = self.bias = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the model is still being loaded")


@dataclass(frozen=True)
class _Loading:
    """State between the steps before and after transformers reads weights."""

    instance: ModelInstance
    quantized: QuantizedCheckpoint
    replaced: Mapping[str, str]
    placement: Placement


class MarlinqQuantizer(HfQuantizer):  # type: ignore[misc]
    """``model.hf_quantizer`` of a model that marlinq loaded.

    Attributes:
        path: checkpoint folder; None before loading.
        decisions: quantised module -> operator that multiplies it, with the reason.
        notes: warnings, such as rounded scales, one line each.
    """

    requires_calibration = True

    def __init__(self, quantization_config: MarlinqConfig, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise UsageError(
                "quantization_config: expected a folder that is quantised already, found no "
                "quantization_config in its config.json; make one with `marlinq quantize`, or call "
                "marlinq.unregister() first to quantise with transformers"
            )
        super().__init__(quantization_config, **kwargs)
        self.path: Path | None = None
        self.decisions: Mapping[str, Decision] = {}
        self.notes: list[str] = []
        self._device = torch.device("cpu")
        self._loading: _Loading | None = None

    def report(self) -> list[str]:
        """One line for each choice of an operator, and the notes."""
        from marlinq.runtime.operator_choice import summarize

        return [*summarize(self.decisions.values()), *self.notes]

    def update_device_map(self, device_map: Any) -> dict[str, Any]:
        """One device for all modules: the requested one, else the first GPU, else the CPU."""
        if device_map is None or device_map in _SPREAD:
            self._device = resolve_device(None)
            if device_map is not None and torch.cuda.device_count() > 1:
                warnings.warn(
                    f"device_map={device_map!r}: marlinq puts the whole model on {self._device}; it does not "
                    "spread a model over several devices",
                    stacklevel=2,
                )
        else:
            asked = {f"cuda:{name}" if isinstance(name, int) else str(name) for name in device_map.values()}
            if len(asked) != 1:
                raise UnsupportedError(
                    f"device_map: expected one device for the whole model, found {', '.join(sorted(asked))}; "
                    "pass device_map='cuda:0', or use vLLM or SGLang, which split a model over GPUs"
                )
            self._device = resolve_device(asked.pop())
        return {"": self._device}

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
        from marlinq.formats.stacks import STACKS
        from marlinq.models import ModelInstance, describe
        from marlinq.models.classes import refuse_encoder_decoder
        from marlinq.runtime.loading import match_tensors
        from marlinq.runtime.packed_experts import hollow
        from marlinq.runtime.placement import place

        if getattr(model.config, "distributed_config", None) is not None:
            raise UnsupportedError(
                "distributed_config: marlinq keeps a model on one device; use vLLM or SGLang for several"
            )
        if not model.can_generate():
            raise UnsupportedError(
                f"{type(model).__name__}: marlinq loads causal language models; use AutoModelForCausalLM; "
                f"{_TURN_OFF}"
            )
        checkpoint = Checkpoint.open(_folder(checkpoint_files))
        self.path = checkpoint.path
        read, opened = {Path(name).name for name in checkpoint_files or ()}, set(checkpoint.shards)
        if read != opened:
            raise UnsupportedError(
                f"{checkpoint.path}: expected the files {', '.join(sorted(opened))}, found "
                f"{', '.join(sorted(read))}; load without variant; {_TURN_OFF}"
            )
        quantized = QuantizedCheckpoint.of(checkpoint)
        if quantized is None:
            raise UsageError(
                f"{checkpoint.path}: expected a quantization_config in config.json, found none; make "
                "a quantised folder with `marlinq quantize`"
            )
        checkpoint = quantized.checkpoint
        refuse_encoder_decoder(model.config, checkpoint.config, str(checkpoint.path))
        placement = place(checkpoint, quantized=True, device=self._device, dtype=model.config.dtype)
        try:
            blueprint = describe(lambda: model, source=str(checkpoint.path))
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}; {_TURN_OFF}") from error
        # transformers ties parameters only after loading, so the ties are passed here.
        blueprint = blueprint.with_ties(model.all_tied_weights_keys)
        blueprint, replaced = match_tensors(blueprint, checkpoint, quantized)
        instance = ModelInstance(blueprint, checkpoint, device=placement.device, dtype=placement.dtype)
        for name in replaced:
            projection = blueprint.by_name[name]
            if projection.expert is None:
                instance.install(projection, _Gap())
            elif projection.part == 0:
                hollow(model.get_submodule(projection.module))
        _untie(model, {blueprint.by_name[name].parameter for name in replaced})
        # Tensors of removed linears, which transformers must not report as unexpected.
        packed = "|".join((*quantized.format.suffixes, "bias"))
        known = set(model._keys_to_ignore_on_load_unexpected or ())
        biases = {re.escape(name) for name in _fused_biases(blueprint, replaced)}
        stacks = {STACKS.pattern} if quantized.format.stacked else set()
        model._keys_to_ignore_on_load_unexpected = known | {rf"\.({packed})$"} | biases | stacks
        self._loading = _Loading(instance, quantized, replaced, placement)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from marlinq.runtime.loading import install_linears, scale_notes, warn_about_dense
        from marlinq.runtime.operators import Setting

        loading, self._loading = self._loading, None
        assert loading is not None, "transformers shows the model before and after it reads the weights"
        del model._keys_to_ignore_on_load_unexpected
        setting = Setting(loading.placement.device, loading.placement.dtype)
        self.decisions = install_linears(
            loading.instance,
            loading.quantized,
            loading.replaced,
            setting,
            operator=self.quantization_config.operator,
            compile_kernels=self.quantization_config.compile_kernels,
        )
        self.notes = scale_notes(loading.quantized, setting.dtype)
        warn_about_dense(self.decisions, setting.device)
        return model

    def is_serializable(self) -> bool:
        """False, so that transformers refuses to save: weights are in the operators' layouts."""
        from marlinq.runtime.loading import NOT_SAVED

        warnings.warn(f"{self.path}: {NOT_SAVED}", stacklevel=3)
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        """True: every operator is one torch operator, or torch's own linear."""
        return True


def _fused_biases(blueprint: Blueprint, replaced: Collection[str]) -> list[str]:
    """Names of the parameters with the biases of quantised experts."""
    return [
        bias
        for block in blueprint.blocks
        for experts in block.experts
        if experts.projections[0].name in replaced
        for bias in experts.biases or ()
    ]


def _folder(checkpoint_files: list[str] | None) -> Path:
    if not checkpoint_files:
        raise UnsupportedError("state_dict: marlinq loads quantised weights from a folder; pass its path")
    folders = {Path(name).parent for name in checkpoint_files}
    if len(folders) != 1 or not all(name.endswith(".safetensors") for name in checkpoint_files):
        raise UnsupportedError(
            f"{checkpoint_files[0]}: expected safetensors files of one folder; marlinq unpickles nothing"
        )
    return folders.pop()


def _untie(model: PreTrainedModel, parameters: set[str]) -> None:
    """Removes the ties of ``parameters`` in transformers, because a quantised head has its own weight."""
    ties = model.all_tied_weights_keys
    tied = [name for name, owner in ties.items() if {name, owner} & parameters]
    for name in tied:
        del ties[name]
    if tied:
        model.config.tie_word_embeddings = False
