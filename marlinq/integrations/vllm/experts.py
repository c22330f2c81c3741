"""Runs a mixture's routed experts in vLLM on marlinq's grouped kernels.

vLLM has no registry of expert kernels, but asks custom quantisation configs first. The plugin registers one
(:data:`NAME`) that takes checkpoints of mixtures with 4- or 8-bit integers. It returns vLLM's own config for
the checkpoint's format, in which vLLM's method for experts has two functions replaced: the step after
loading, and the product. Parameters, loading, the split over GPUs, and linear layers stay vLLM's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from marlinq.core.boundaries import reason
from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.kept import one_process_at_a_time
from marlinq.core.scheme import INT4, INT8, Element, Scheme
from marlinq.formats import LAYOUTS, StoredWeight
from marlinq.formats.layouts import ModuleSpec
from marlinq.formats.packing import pack_columns
from marlinq.integrations.vllm.interface import (
    EXPERT_METHODS,
    QuantizationConfig,
    capture_sizes,
    current_platform,
    max_batched_tokens,
    missing_package,
    quantization_config_class,
    register_quantization_config,
)
from marlinq.kernels.experts import ExpertWeights, StoredExperts, interleave_gate_up
from marlinq.kernels.experts.stored_experts import permute_single
from marlinq.runtime.kernel_operand import stored_operand

logger = logging.getLogger("vllm.plugins.marlinq")

NAME = "marlinq"
"""Name of the quantisation method in vLLM's log and metrics for mixtures that the plugin runs."""

_FORMATS = ("gptq", "awq", "compressed-tensors")
# Keys for the number of routed experts in models' configs.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
_MOST_EXPERTS = 512
# Bits of a code -> type of the codes.
_ELEMENTS = {element.bits: element for element in (INT4, INT8)}
_PREFIX = "marlinq_"
# Shapes whose kernels have been compiled and logged.
_prepared: set[tuple[object, ...]] = set()


class MixtureConfig(QuantizationConfig):  # type: ignore[misc]
    """The config class under :data:`NAME`; never instantiated, since :meth:`from_config` returns vLLM's."""

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """:data:`NAME` for a mixture of 4- or 8-bit integers, unless the user names a method; else None."""
        if user_quant is not None or not current_platform.is_cuda():
            return None
        try:
            taken = is_mixture(hf_config) and may_have_integers(hf_quant_cfg)
        except Exception as error:  # noqa: BLE001 - vLLM asks this for every model
            logger.warning("marlinq: %s; vLLM's kernels run experts", reason(error))
            return None
        return NAME if taken else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """vLLM's config for the checkpoint's format, with marlinq's experts where the kernels take them."""
        built = quantization_config_class(config["quant_method"]).from_config(config)
        try:
            built.__class__ = _config_with_experts(type(built))
        except Exception as error:  # noqa: BLE001 - vLLM's config is unchanged
            logger.warning("marlinq: %s; vLLM's kernels run experts", reason(error))
        return built

    def get_quant_method(self, layer: nn.Module, prefix: str) -> None:
        """Required by the base class; never called."""


def is_mixture(hf_config: Any) -> bool:
    """Whether a model's config, or its text model's, has a number of routed experts."""
    parts = (hf_config, getattr(hf_config, "text_config", None))
    counts = (getattr(part, name, None) for part in parts if part is not None for name in _COUNTS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def may_have_integers(quantization: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's quantisation config has a known format and 4- or 8-bit integer weights alone."""
    if quantization.get("quant_method") not in _FORMATS:
        return False
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping):
        return _are_bits(quantization.get("bits", quantization.get("w_bit")))
    return any(_has_integers(group) for group in groups.values())


def _has_integers(group: Any) -> bool:
    """Whether a group of compressed-tensors' config has 4- or 8-bit integer weights and plain activations."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("input_activations") is not None:
        return False
    return _are_bits(weights.get("num_bits")) and weights.get("type", "int") == "int"


def _are_bits(value: Any) -> bool:
    return isinstance(value, int) and value in _ELEMENTS


def _config_with_experts(config: Any) -> Any:
    """A subclass of vLLM's config class with marlinq's experts, and with its name, which vLLM compares."""

    def get_quant_method(self: Any, layer: nn.Module, prefix: str) -> Any:
        method = config.get_quant_method(self, layer, prefix)
        if type(method).__name__ not in EXPERT_METHODS:
            return method
        try:
            refusal = experts_refusal(method, layer)
            if refusal is None:
                method.__class__ = _method_with_kernels(type(method))
        except Exception as error:  # noqa: BLE001 - names differ between vLLM's versions
            refusal = reason(error)
        if refusal is not None:
            logger.info("marlinq: %s: vLLM's kernels run: %s", prefix, refusal)
        return method

    return type(config.__name__, (config,), {"get_quant_method": get_quant_method})


def experts_refusal(method: Any, layer: Any) -> str | None:
    """Why the kernels can't run a layer's experts, or None; called before vLLM makes parameters."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    activation = getattr(layer.activation, "value", layer.activation)
    limits = [getattr(layer, f"swiglu_{name}", None) for name in ("limit", "alpha", "beta")]
    hidden, inner, group = moe.hidden_dim, moe.intermediate_size_per_partition, _group_size(method)
    reasons = {
        f"weights of {_bits(method)} bits": _bits(method) not in _ELEMENTS,
        "activation order": _has_order(method),
        f"activations in {moe.in_dtype}": moe.in_dtype not in (torch.float16, torch.bfloat16),
        f"activation {activation}": activation not in _ACTIVATIONS
        or any(each is not None for each in limits),
        "biases": bool(getattr(moe, "has_bias", False)),
        "LoRA": bool(getattr(moe, "is_lora_enabled", False)),
        "router weights applied to inputs": bool(getattr(layer, "apply_router_weight_on_input", False)),
        "data parallel experts": parallel.dp_size > 1 or parallel.use_all2all_kernels,
        "expert load balancing": parallel.enable_eplb,
        f"hidden size {hidden} or intermediate size {inner} is no multiple of 64": bool(
            hidden % 64 or inner % 64
        ),
        f"group size {group}": group != -1
        and (group not in (32, 64, 128) or bool(hidden % group or inner % group)),
        f"{moe.num_local_experts} experts": moe.num_local_experts > _MOST_EXPERTS,
    }
    refusal = next((refusal for refusal, holds in reasons.items() if holds), None)
    if refusal is not None:
        return refusal
    return None if current_platform.is_cuda() and (why := missing_package()) is None else why


def _method_with_kernels(method: Any) -> Any:
    """A subclass of vLLM's method for experts with two functions replaced, and with its name, which vLLM
    compares. It has no other base class, so that an object of vLLM's class can become one of this class."""

    class Int4Experts(method):  # type: ignore[misc]
        """vLLM's method until weights are loaded, marlinq's kernels afterwards."""

        _operands: Operands | None = None
        _routed_experts: Any = None

        def process_weights_after_loading(self, layer: Any) -> None:
            """Replaces the parameters by the kernels' operands; if that fails, does what vLLM does."""
            try:
                weights = expert_weights(self, layer)
                prepare(weights, _activation(layer), layer.moe_config.experts_per_token)
            except Exception as error:  # noqa: BLE001 - the parameters are unchanged, whatever failed
                logger.warning("marlinq: %s: %s; vLLM's kernels run", layer.layer_name, reason(error))
                super().process_weights_after_loading(layer)
                return
            self._operands = put_operands(layer, weights)
            self._routed_experts = torch.ops.marlinq_early.routed_experts.default

        def get_fused_moe_quant_config(self, layer: Any) -> Any:
            """None, because no kernel of vLLM reads the parameters."""
            return super().get_fused_moe_quant_config(layer) if self._operands is None else None

        def apply(
            self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *others: Any, **named: Any
        ) -> Any:
            """The weighted sum of routed experts for ``x`` [M, H]; vLLM adds it up over ranks."""
            if self._operands is None:
                return super().apply(layer, x, topk_weights, topk_ids, *others, **named)
            return self._routed_experts(
                x,
                topk_ids.contiguous(),
                topk_weights.float().contiguous(),
                *(getattr(layer, name) for name in self._operands.names),
                self._operands.weight_format,
                self._operands.group_size,
                self._operands.activation,
                layer.expert_map,
            )

    Int4Experts.__name__ = method.__name__
    return Int4Experts


class Operands(NamedTuple):
    """Arguments of ``routed_experts`` for a layer.

    Attributes:
        names: names of the layer's parameters: words, scales and zero points of gate with up, then of down.
        weight_format: name of the words' format.
        group_size: input channels per scale; -1 for all.
        activation: name of the activation.
    """

    names: tuple[str, ...]
    weight_format: str
    group_size: int
    activation: str


def put_operands(layer: Any, weights: ExpertWeights) -> Operands:
    """Replaces vLLM's parameters of ``layer`` by ``weights``."""
    for name, _ in list(layer.named_parameters(recurse=False)):
        if name.startswith(("w13_", "w2_")):
            delattr(layer, name)
    names = []
    for product, stored in (("gate_up", weights.gate_up), ("down", weights.down)):
        for kind in ("words", "scales", "zeros"):
            value = getattr(stored, kind)
            names.append(f"{_PREFIX}{product}_{kind}")
            parameter = None if value is None else nn.Parameter(value, requires_grad=False)
            layer.register_parameter(names[-1], parameter)
    stored = weights.down
    return Operands(tuple(names), stored.format.name, stored.granularity.group_size, _activation(layer))


def _activation(layer: Any) -> str:
    """The kernels' name for the layer's activation; a ``KeyError`` where they have none."""
    return _ACTIVATIONS[getattr(layer.activation, "value", layer.activation)]


def expert_weights(method: Any, layer: Any) -> ExpertWeights:
    """The operands made from the parameters that vLLM has loaded into ``layer``, which are kept.

    Raises:
        UnsupportedError: parameters of an unknown shape, or a scale overflows the activations' dtype.
    """
    moe = layer.moe_config
    hidden, inner, dtype = moe.hidden_dim, moe.intermediate_size_per_partition, moe.in_dtype
    group, bits = _group_size(method), _bits(method)
    assert bits is not None, "experts_refusal says so"
    element = _ELEMENTS[bits]
    gate_up = _parameters(layer, "w13", method)
    products = [_stored(gate_up.half(number), element, hidden, inner, group, dtype) for number in (0, 1)]
    products.append(_stored(_parameters(layer, "w2", method), element, inner, hidden, group, dtype))
    if any(stored.zeros is not None for stored in products):
        # A product whose zero points are all the middle code is returned without zero points.
        products = [
            replace(
                stored,
                zeros=torch.full_like(stored.scales, element.midpoint)
                if stored.zeros is None
                else stored.zeros,
            )
            for stored in products
        ]
    gate, up, down = products
    return ExpertWeights(interleave_gate_up(gate, up), down)


class _Loaded(NamedTuple):
    """Parameters of a product: words [E, K packed, N], scales and packed zero points [E, groups, N]."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None

    def half(self, number: int) -> _Loaded:
        """The columns of gate (0) or up (1)."""
        zeros = None if self.zeros is None else self.zeros.chunk(2, dim=2)[number]
        return _Loaded(self.words.chunk(2, dim=2)[number], self.scales.chunk(2, dim=2)[number], zeros)


def _parameters(layer: Any, product: str, method: Any) -> _Loaded:
    """The parameters that vLLM has loaded as ``w13`` (gate and up) or ``w2`` (down)."""
    stored = dict(layer.named_parameters(recurse=False))
    packed = f"{product}_weight_packed" in stored
    words = stored[f"{product}_weight_packed" if packed else f"{product}_qweight"]
    scales = stored[f"{product}_weight_scale" if packed else f"{product}_scales"]
    zeros = None
    if packed:
        zeros = stored.get(f"{product}_weight_zero_point")
    elif _interleaved(method):
        zeros = stored[f"{product}_qzeros"]
    if packed and not getattr(words, "is_transposed", True):
        # Newer versions of vLLM keep the order of compressed-tensors, output channels first.
        return _Loaded(words.data.mT, scales.data.mT, None if zeros is None else zeros.data.mT)
    return _Loaded(words.data, scales.data, None if zeros is None else zeros.data)


def _stored(
    loaded: _Loaded, element: Element, k: int, n: int, group_size: int, dtype: torch.dtype
) -> StoredExperts:
    """One product of all experts, converted as a single weight with the experts concatenated along K."""
    words, scales, zeros = loaded
    experts, rows, columns = words.shape
    slots = 32 // element.bits  # codes of an int32
    interleaved = element == INT4 and rows == k and columns * slots == n
    groups = 1 if group_size == -1 else k // group_size
    if not interleaved and (rows * slots, columns) != (k, n):
        raise UnsupportedError(f"experts' words of shape {list(words.shape)}, expected {k} x {n} codes")
    if scales.shape != (experts, groups, n):
        raise UnsupportedError(
            f"experts' scales of shape {list(scales.shape)}, expected {[experts, groups, n]}"
        )
    layout = LAYOUTS["awq" if interleaved else "gptq-v2"]
    scheme = Scheme(
        element=element,
        granularity=Granularity.from_group_size(k // groups),
        zero_point="midpoint" if zeros is None else "stored",
        scale_dtype=str(scales.dtype).removeprefix("torch."),
    )
    if zeros is None:
        middle = torch.full((experts * groups, n), element.midpoint, dtype=torch.uint8, device=words.device)
        zeros = pack_columns(middle, element.bits)
    tensors = {
        "qweight": words.reshape(-1, columns).contiguous(),
        "scales": scales.reshape(-1, n).contiguous(),
        "qzeros": zeros.reshape(experts * groups, -1).contiguous(),
    }
    if not interleaved:
        tensors["g_idx"] = torch.arange(experts * k, dtype=torch.int32, device=words.device) // (k // groups)
    stored = StoredWeight("experts", layout, ModuleSpec(experts * k, n, scheme), tensors)
    operand = stored_operand(stored, dtype, words.device)
    if groups == 1:
        # A single group over all of K has a layout of its own, whatever its group size is called.
        factor = operand.format.scale_factor(dtype)
        own = [
            (factor * stored.grid.scales.to(torch.float32)).to(dtype),
            stored.grid.zeros.to(dtype) if stored.scheme.stores_zeros else None,
        ]
        kept = [None if each is None else permute_single(each.view(experts, 1, n)) for each in own]
    else:
        kept = [
            None if each is None else each.view(experts, groups, n)
            for each in (operand.scales, operand.zeros)
        ]
    granularity = Granularity.from_group_size(group_size)
    words = operand.words.view(experts, k // operand.format.row_channels, n * operand.format.row_words)
    return StoredExperts(operand.format, granularity, words, kept[0], kept[1])  # type: ignore[arg-type]


def prepare(weights: ExpertWeights, activation: str, top: int) -> None:
    """Compiles the kernels that such layers need for every batch, and logs once which kernels run."""
    device = weights.down.words.device
    if device.type != "cuda":
        return
    from marlinq.kernels import device_numbers
    from marlinq.kernels.experts.configurations import ExpertsShape
    from marlinq.kernels.experts.experts_decision import decide_experts
    from marlinq.kernels.experts.launch import precompile_experts

    experts, inner, hidden = weights.down.shape
    zeros, dtype = weights.down.zeros is not None, weights.down.scales.dtype
    granularity, weight_format = weights.down.granularity, weights.down.format
    key = experts, inner, hidden, top, granularity, weight_format, zeros, dtype, activation, device.index
    if key in _prepared:
        return
    shapes = [
        ExpertsShape(
            m,
            top,
            experts,
            hidden,
            inner,
            granularity,
            zeros,
            dtype == torch.bfloat16,
            weight_format,
        )
        for m in batches(max_batched_tokens(), capture_sizes())
    ]
    # Ranks of one host have the same shapes: the first compiles, the others find the kernels.
    with one_process_at_a_time():
        compiled = precompile_experts(shapes, activation, device.index)
    # Only now: where compiling fails, it fails for each layer of this shape, and vLLM's kernels run all.
    _prepared.add(key)
    logger.info(
        "marlinq: %d experts of %d x %d, %d a token, %s: for one token %s%s",
        experts,
        hidden,
        inner,
        top,
        granularity.describe(),
        decide_experts(shapes[0], device_numbers(device.index)).reason,
        f"; {compiled} kernels compiled" if compiled else "",
    )


def batches(most: int, captured: list[int]) -> list[int]:
    """Numbers of rows, up to ``most``, whose kernels are compiled while a model loads.

    All up to 64, those that CUDA graphs are captured for, and above 64 steps of a sixteenth. A number between
    two steps nearly always needs the kernel of one of them; otherwise its first product compiles its kernel.
    """
    found = {*range(1, 65), *captured}
    rows = 64
    while rows < most:
        rows += max(1, rows // 16)
        found.add(rows)
    return sorted(m for m in found | {most} if 0 < m <= most)


def register_experts() -> None:
    """Registers :class:`MixtureConfig`; may be called any number of times."""
    register_quantization_config(NAME)(MixtureConfig)


def _bits(method: Any) -> int | None:
    config = getattr(method, "quant_config", None)
    for holder, name in ((method, "num_bits"), (config, "weight_bits")):
        if isinstance(bits := getattr(holder, name, None), int):
            return bits
    return None


def _group_size(method: Any) -> int:
    """Input channels that share a scale; -1 for all of them."""
    holder = method if hasattr(method, "weight_quant") else method.quant_config
    size = holder.group_size
    return -1 if size is None or getattr(method, "strategy", "") == "channel" else int(size)


def _has_order(method: Any) -> bool:
    order = getattr(method, "actorder", None) or getattr(
        getattr(method, "weight_quant", None), "actorder", None
    )
    if str(getattr(order, "value", order)) in ("group", "dynamic"):
        return True
    return (
        bool(getattr(getattr(method, "quant_config", None), "desc_act", False)) and _group_size(method) != -1
    )


def _interleaved(method: Any) -> bool:
    return "AWQ" in type(method).__name__
