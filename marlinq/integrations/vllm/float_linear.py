"""Runs vLLM's linear layers with FP8 weights and 16-bit activations on marlinq's kernels.

vLLM has a list of kernels for such layers. A layer loads E4M3 codes and float32 scales. Where the checkpoint
has one scale per weight, vLLM has repeated it for every output channel before the kernel sees it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from marlinq.core.boundaries import reason
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import UnsupportedError
from marlinq.core.float_elements import E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.formats import LAYOUTS, StoredWeight
from marlinq.formats.layouts import ModuleSpec
from marlinq.integrations.vllm.interface import (
    FP8ScaledMMLinearKernel,
    current_platform,
    missing_package,
    own_float_kernel,
)
from marlinq.integrations.vllm.operand_layer import SMALLEST_CAPABILITY, OperandLayer, prepare
from marlinq.integrations.vllm.refusals import NO_NVIDIA_GPU, verdict

logger = logging.getLogger("vllm.plugins.marlinq")


def refusal(config: Any) -> str | None:
    """Why the kernel can't run a layer with vLLM's description ``config``, or None."""
    shape = config.weight_quant_key.scale.group_shape
    if not (shape.is_per_tensor() or shape.is_per_channel()):
        return f"scales of blocks of {tuple(shape)}"
    if config.input_dtype not in (torch.float16, torch.bfloat16):
        return f"activations in {config.input_dtype}; the kernels take float16 and bfloat16"
    if any(size % 8 for size in config.weight_shape):
        return f"a shard of {list(config.weight_shape)} channels is no multiple of 8"
    return None


def gpu_refusal(compute_capability: int | None) -> str | None:
    """Why the kernels can't run on this machine, or None.

    Args:
        compute_capability: the GPU's, times ten; None where vLLM does not say.
    """
    if not current_platform.is_cuda():
        return NO_NVIDIA_GPU
    if compute_capability is not None and compute_capability < SMALLEST_CAPABILITY:
        return f"compute capability {compute_capability / 10}; expected 8.0 or above"
    return missing_package()


class FloatWeightKernel(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """marlinq's kernel behind vLLM's interface for FP8 weights (``FP8ScaledMMLinearKernel``)."""

    _own: Any = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return verdict(lambda: gpu_refusal(compute_capability))

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return verdict(lambda: refusal(c))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replaces the layer's parameters by the kernel's operand, and compiles kernels for its shape.

        If either fails, vLLM's own choice takes the layer.
        """
        from marlinq.runtime.kernel_operand import stored_operand

        words, scales = self.layer_param_names[:2]
        try:
            stored = _stored(getattr(layer, words).data, getattr(layer, scales).data)
            operand = stored_operand(stored, self.config.input_dtype, stored.words.device)
            prepare(operand, self.config.input_dtype)
        except Exception as error:  # noqa: BLE001 - the parameters are unchanged, whatever failed
            kernel = own_float_kernel(self.config, type(self))
            logger.warning("marlinq: %s; %s runs a layer", reason(error), kernel.__name__)
            self._own = kernel(self.config, self.layer_param_names)
            self._own.process_weights_after_loading(layer)
            return
        self._operand = OperandLayer(layer, operand, words, scales)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._own is not None:
            found: Tensor = self._own.apply_weights(layer, x, bias)
            return found
        return self._operand.multiply(layer, x, bias)

    def apply_scaled_mm(self, **_: Any) -> Tensor:
        """Refuses FP8 activations: vLLM's base class declares the method abstract and calls it in its own
        ``apply_weights`` alone, which :meth:`apply_weights` replaces.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "vLLM gave FP8 activations to marlinq's kernel, whose apply_weights takes 16-bit ones. "
            "Start vLLM with VLLM_PLUGINS= to run it without marlinq"
        )


def _stored(codes: Tensor, scales: Tensor) -> StoredWeight:
    """``codes`` [K, N] and one scale per output channel, in the layout of compressed-tensors."""
    k, n = codes.shape
    scheme = Scheme(E4M3, Granularity.channel(), E4M3.zero_point, dtype_name(scales.dtype))
    tensors = {"weight": codes.t().contiguous(), "weight_scale": scales.reshape(n, 1).contiguous()}
    return StoredWeight("layer", LAYOUTS["float-quantized"], ModuleSpec(k, n, scheme), tensors)
