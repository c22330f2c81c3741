"""Runs vLLM's linear layers with 4- or 8-bit integer weights on marlinq's kernels.

vLLM loads GPTQ, AWQ and compressed-tensors checkpoints with three methods that give one kernel class the same
parameters: packed codes, scales, zero points and g_idx of a rank's shard, with q, k, v and gate, up merged.
The order of their dimensions depends on the format. They are brought into the order of compressed-tensors and
converted to the kernel's operand once, after loading.
"""

from __future__ import annotations

import logging

import torch
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
    missing_package,
    own_linear_kernel,
    permute_param_layout_,
    scalar_types,
)
from marlinq.integrations.vllm.operand_layer import SMALLEST_CAPABILITY, OperandLayer, prepare
from marlinq.integrations.vllm.refusals import NO_NVIDIA_GPU, verdict

logger = logging.getLogger("vllm.plugins.marlinq")

_ONE_SCALE_PER_CHANNEL = Granularity.channel().group_size
_GROUP_STEP = 32


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
        return verdict(
            lambda: refusal(c) or missing_package() if current_platform.is_cuda() else NO_NVIDIA_GPU
        )

    _own: MPLinearKernel | None = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replaces the layer's parameters by the kernel's operand, and compiles kernels for its shape.

        If either fails, vLLM's own choice takes the layer.
        """
        from marlinq.runtime.kernel_operand import stored_operand

        try:
            stored = self._stored(layer)
            operand = stored_operand(stored, self.config.act_type, stored.words.device)
            prepare(operand, self.config.act_type)
        except Exception as error:  # noqa: BLE001 - the parameters are unchanged, whatever failed
            kernel = own_linear_kernel(self.config, type(self))
            logger.warning("marlinq: %s; %s runs a layer", reason(error), kernel.__name__)
            names = [self.w_q_name, self.w_s_name, self.w_zp_name]
            self._own = kernel(self.config, *names, *filter(None, [self._g_idx_name]))
            self._own.process_weights_after_loading(layer)
            return
        self._operand = OperandLayer(
            layer, operand, self.w_q_name, self.w_s_name, self.w_zp_name, self._g_idx_name
        )

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._own is not None:
            found: Tensor = self._own.apply_weights(layer, x, bias)
            return found
        return self._operand.multiply(layer, x, bias)

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
