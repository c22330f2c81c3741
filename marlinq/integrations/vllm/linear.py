"""Runs vLLM's linear layers with 4- or 8-bit integer weights on marlinq's kernels.

vLLM loads GPTQ, AWQ and compressed-tensors checkpoints with three methods that give one kernel class the same
parameters: packed codes, scales, zero points and g_idx of a rank's shard, with q, k, v and gate, up merged.
The order of their dimensions depends on the format. They are brought into the order of compressed-tensors and
converted to the kernel's operand once, after loading.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.core.boundaries import reason
from marlinq.core.dtypes import dtype_name
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, INT8, Element, Scheme
from marlinq.formats import LAYOUTS, StoredWeight
from marlinq.formats.layouts import ModuleSpec
from marlinq.integrations.vllm.interface import (
    MPLinearKernel,
    MPLinearLayerConfig,
    current_platform,
    max_batched_tokens,
    missing_package,
    own_linear_kernel,
    permute_param_layout_,
    replace_parameter,
    scalar_types,
)

if TYPE_CHECKING:
    from marlinq.kernels import Operand

logger = logging.getLogger("vllm.plugins.marlinq")

_ONE_SCALE_PER_CHANNEL = Granularity.channel().group_size

SMALLEST_CAPABILITY = 80
"""lowest compute capability, times ten, that the kernels run on"""
_GROUP_STEP = 32
# (shape, dtype, device) of layers whose kernels have been compiled and logged.
_prepared: set[tuple[object, ...]] = set()


def _element(config: MPLinearLayerConfig) -> Element | None:
    """Type of the layer's codes; None if the plugin does not support it."""
    elements = (
        ((scalar_types.uint4, INT4), (scalar_types.uint8, INT8))
        if config.zero_points
        else ((scalar_types.uint4b8, INT4), (scalar_types.uint8b128, INT8))
    )
    return next((element for kind, element in elements if kind == config.weight_type), None)


def refusal(config: MPLinearLayerConfig) -> str | None:
    """Why the kernel can't run a layer with vLLM's description ``config``, or None."""
    channels, total = config.partition_weight_shape[0], config.full_weight_shape[0]
    group = config.group_size
    if config.act_type not in (torch.float16, torch.bfloat16):
        return f"activations in {config.act_type}; the kernels take float16 and bfloat16"
    if _element(config) is None:
        kind, expected = (
            ("with", "uint4 or uint8") if config.zero_points else ("without", "uint4b8 or uint8b128")
        )
        return f"weights of type {config.weight_type} {kind} zero points; expected {expected}"
    if group != _ONE_SCALE_PER_CHANNEL and (group <= 0 or group % _GROUP_STEP):
        return f"group size {group} is neither one group nor a multiple of {_GROUP_STEP}"
    if group != _ONE_SCALE_PER_CHANNEL and channels % min(group, total):
        return f"{channels} input channels of this rank are no multiple of the group size {group}"
    if channels % 8 or config.partition_weight_shape[1] % 8:
        return f"a shard of {list(config.partition_weight_shape)} channels is no multiple of 8"
    if getattr(config, "has_g_idx", False) and channels != total:
        return "activation order with input channels split over ranks"
    return None


class IntegerLinearKernel(MPLinearKernel):  # type: ignore[misc]
    """marlinq's kernel behind vLLM's interface for packed integer weights (``MPLinearKernel``)."""

    @classmethod
    def get_min_capability(cls) -> int:
        return SMALLEST_CAPABILITY

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if not current_platform.is_cuda():
            return False, "marlinq's kernels run on NVIDIA GPUs alone"
        reason = refusal(c) or missing_package()
        return reason is None, reason

    _own: MPLinearKernel | None = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replaces the layer's parameters by the kernel's operand, and compiles kernels for its shape.

        If either fails, vLLM's own choice takes the layer.
        """
        from marlinq.runtime.kernel_operand import stored_operand

        try:
            stored = self._stored(layer)
            operand = stored_operand(stored, self.config.act_type, stored.words.device)
            self._prepare(operand)
        except Exception as error:  # noqa: BLE001 - the parameters are unchanged, whatever failed
            kernel = own_linear_kernel(self.config, type(self))
            logger.warning("marlinq: %s; %s runs a layer", reason(error), kernel.__name__)
            names = [self.w_q_name, self.w_s_name, self.w_zp_name]
            self._own = kernel(self.config, *names, *filter(None, [self._g_idx_name]))
            self._own.process_weights_after_loading(layer)
            return
        self._product = getattr(torch.ops.marlinq, operand.format.operator)
        self._group_size = operand.granularity.group_size
        self._out_features = operand.out_features
        self._padding = operand.padded_shape[0] - operand.in_features
        self._trimmed = operand.padded_shape[1] != operand.out_features
        self._replace(layer, self.w_q_name, operand.words)
        self._replace(layer, self.w_s_name, operand.scales)
        self._zeros_name = self._replace(layer, self.w_zp_name or "marlinq_zeros", operand.zeros)
        self._order_name = self._replace(layer, self._g_idx_name or "marlinq_order", operand.order)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._own is not None:
            found: Tensor = self._own.apply_weights(layer, x, bias)
            return found
        order = getattr(layer, self._order_name) if self._order_name else None
        if self._padding and order is None:
            x = F.pad(x, (0, self._padding))
        out: Tensor = self._product(
            x,
            getattr(layer, self.w_q_name),
            getattr(layer, self.w_s_name),
            getattr(layer, self._zeros_name) if self._zeros_name else None,
            bias,
            self._group_size,
            self._out_features,
            order,
        )
        return out.contiguous() if self._trimmed else out

    @property
    def _g_idx_name(self) -> str | None:
        return getattr(self, "w_gidx_name", None)

    def _stored(self, layer: nn.Module) -> StoredWeight:
        """The layer's parameters in the order of compressed-tensors."""
        config = self.config
        k, n = config.partition_weight_shape
        scales = getattr(layer, self.w_s_name)
        packed = permute_param_layout_(getattr(layer, self.w_q_name), input_dim=1, output_dim=0, packed_dim=1)
        tensors = {
            "weight_packed": packed.data.contiguous(),
            "weight_scale": permute_param_layout_(scales, input_dim=1, output_dim=0).data.contiguous(),
            "weight_shape": torch.tensor([n, k]),
        }
        extras = frozenset[str]()
        if config.zero_points:
            zeros = getattr(layer, self.w_zp_name)
            tensors["weight_zero_point"] = permute_param_layout_(
                zeros, input_dim=1, output_dim=0, packed_dim=0
            ).data.contiguous()
        if getattr(config, "has_g_idx", False):
            tensors["weight_g_idx"] = getattr(layer, self.w_gidx_name).data
            extras = frozenset({"weight_g_idx"})
        group, element = config.group_size, _element(config)
        assert element is not None, "refusal says so"
        scheme = Scheme(
            element=element,
            granularity=Granularity.from_group_size(group).for_channels(k),
            zero_point="stored" if config.zero_points else "midpoint",
            scale_dtype=dtype_name(scales.dtype),
        )
        spec = ModuleSpec(k, n, scheme, extras=extras)
        return StoredWeight("layer", LAYOUTS["compressed-tensors"], spec, tensors)

    @staticmethod
    def _replace(layer: nn.Module, name: str, tensor: Tensor | None) -> str | None:
        """Replaces the parameter ``name`` by ``tensor`` and returns the name; with None, removes it and
        returns None."""
        if tensor is None:
            if hasattr(layer, name):
                delattr(layer, name)
            return None
        parameter = nn.Parameter(tensor, requires_grad=False)
        if hasattr(layer, name):
            replace_parameter(layer, name, parameter)
        else:
            layer.register_parameter(name, parameter)
        return name

    def _prepare(self, operand: Operand) -> None:
        """Compiles the kernels of this shape for every batch, and logs once which kernel runs."""
        device = operand.words.device
        if device.type != "cuda":
            return
        from marlinq.kernels import LayerShape, explain, precompile_model

        shape, dtype = LayerShape.of(operand), self.config.act_type
        key = shape, dtype, device.index
        if key in _prepared:
            return
        compiled = precompile_model([shape], dtype, device.index, most_rows=max_batched_tokens())
        # Only now: where compiling fails, it fails for each layer of this shape, and vLLM's kernels run all.
        _prepared.add(key)
        decision = explain(device, operand.problem(1))
        logger.info(
            "marlinq: layers of %d x %d, %s: %s%s",
            shape.k,
            shape.n,
            shape.granularity.describe(),
            decision.reason,
            f"; {compiled} kernels compiled" if compiled else "",
        )
