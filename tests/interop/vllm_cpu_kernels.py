"""A plugin with the parts that vLLM for CPUs lacks to run 4- and 8-bit checkpoints on any processor.

vLLM's own kernel for CPUs needs AVX-512, and it has none for packed experts. Here are a linear layer in plain
arithmetic, which shares no code with marlinq, and the switches that let the plugin's linear layers and
experts run on a CPU, as their reference. Loading, merging and everything else is vLLM's.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

PLUGIN = "MARLINQ_INTEROP_PLUGIN"
"""Names of the layers that marlinq's plugin runs: ``linear``, ``experts``."""


def register() -> None:
    """Called by vLLM in each of its processes."""
    import vllm.model_executor.kernels.linear as kernels

    platform = kernels.PlatformEnum.CPU
    taken, plugin = kernels._POSSIBLE_KERNELS[platform], os.environ.get(PLUGIN, "").split(",")
    if any(kernel.__name__ in ("PlainLinearKernel", "IntegerLinearKernel") for kernel in taken):
        return
    if "linear" in plugin:
        integers, floats = _linear_on_a_cpu()
        taken.insert(0, integers)
        kernels._POSSIBLE_WFP8A16_KERNELS[platform].insert(0, floats)
    else:
        taken.insert(0, _plain_kernel())
    if "experts" in plugin:
        _experts_on_a_cpu()


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """The codes of int32 words, slot by slot along ``dim``."""
    shifts = torch.arange(0, 32, bits)
    slots = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return slots.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _plain_kernel() -> type:
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.model_executor.parameter import permute_param_layout_

    class PlainLinearKernel(MPLinearKernel):  # type: ignore[misc]
        """Dequantises once, multiplies in float32."""

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            kind = self.config.weight_type
            bits = kind.size_bits
            words = permute_param_layout_(
                getattr(layer, self.w_q_name), input_dim=0, output_dim=1, packed_dim=0
            )
            scales = permute_param_layout_(getattr(layer, self.w_s_name), input_dim=0, output_dim=1)
            codes, steps = unpacked(words.data, bits, 0).float(), scales.data.float()
            zeros: Tensor | float = float(2 ** (bits - 1))
            if self.config.zero_points:
                points = permute_param_layout_(
                    getattr(layer, self.w_zp_name or ""), input_dim=0, output_dim=1, packed_dim=1
                )
                zeros = self._rows(unpacked(points.data, bits, 1).float(), len(codes))
            dense = (codes - zeros) * self._rows(steps, len(codes))
            delattr(layer, self.w_q_name)
            layer.register_parameter(self.w_q_name, nn.Parameter(dense.t().contiguous(), requires_grad=False))

        def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            found = nn.functional.linear(x.float(), getattr(layer, self.w_q_name))
            return (found if bias is None else found + bias.float()).to(x.dtype)

        @staticmethod
        def _rows(of_groups: Tensor, channels: int) -> Tensor:
            return of_groups.repeat_interleave(channels // len(of_groups), 0)

    return PlainLinearKernel


def _linear_on_a_cpu() -> tuple[type, type]:
    """The plugin's kernels for integers and for FP8 weights."""
    import marlinq.kernels  # noqa: F401 - registers the operators
    from marlinq.integrations.vllm import float_linear, linear

    for module in (linear, float_linear):
        module.current_platform = SimpleNamespace(is_cuda=lambda: True)  # type: ignore[attr-defined]
        module.missing_package = lambda: None  # type: ignore[attr-defined]
    return linear.IntegerLinearKernel, float_linear.FloatWeightKernel


def _experts_on_a_cpu() -> None:
    import vllm.model_executor.layers.fused_moe.oracle.int_wna16 as oracle
    import vllm.model_executor.layers.quantization.auto_awq as awq
    import vllm.model_executor.layers.quantization.auto_gptq as gptq
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as packed,
    )

    from marlinq.integrations.vllm import experts

    # vLLM's methods for experts want a kernel of vLLM's before they make parameters; it is never run.
    marlin = oracle.WNA16MoEBackend.MARLIN
    chosen = marlin, oracle.backend_to_kernel_cls(marlin)[0]
    for module in (gptq, awq, packed):
        module.select_wna16_moe_backend = lambda *_, **__: chosen
        for check in ("check_moe_marlin_supports_layer", "check_moe_marlin_supports_config"):
            if hasattr(module, check):
                setattr(module, check, lambda *_, **__: True)
        if hasattr(module, "marlin_make_workspace_new"):
            module.marlin_make_workspace_new = lambda device, *_: torch.zeros(
                1, dtype=torch.int32, device=device
            )
    experts.current_platform = SimpleNamespace(is_cuda=lambda: True)  # type: ignore[attr-defined]
    experts.missing_package = lambda: None  # type: ignore[attr-defined]
    experts.register_experts()
