"""Operators that multiply packed weights: by CUDA kernels, on a CPU in torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.core.scheme import Activations
from marlinq.formats import StoredWeight
from marlinq.kernels import LayerShape, Problem, device_numbers, explain, precompile_model
from marlinq.kernels.choose.eight_bit_decision import BESIDE_INT4, decide_eight_bits
from marlinq.kernels.contract.weight_formats import INT4, WeightFormat
from marlinq.kernels.driver.cache import compile_missing
from marlinq.runtime.kernel_operand import format_of, operand_refusal, operand_shape, stored_operand
from marlinq.runtime.operators.operator import Estimate, Operator, Setting, kernel_refusal
from marlinq.runtime.quant_linear import QuantLinear


def _activations(stored: StoredWeight, setting: Setting) -> Activations | None:
    """Format to which activations of large batches may be rounded: the setting's, or the checkpoint's."""
    if setting.fp8_activations and format_of(stored.scheme) == INT4:
        return BESIDE_INT4
    return None if setting.exact else stored.scheme.activations


def _eight_bits(problem: Problem, stored: StoredWeight, setting: Setting) -> str:
    """Text that says from how many rows activations are quantised, or why they are not."""
    activations = _activations(stored, setting)
    if activations is None and stored.scheme.activations is None:
        return f"activations stay in 16 bits: FP8 ones go with {INT4.name} weights"
    if activations is None:
        return "activations stay in 16 bits: products are to round no more than the dtype"
    if stored.scheme.act_order:
        return "activations stay in 16 bits: the weight has an activation order"
    return decide_eight_bits(problem, activations, device_numbers(setting.device.index or 0)).reason


class Packed(Operator):
    """:class:`~marlinq.runtime.quant_linear.QuantLinear` over packed words, as stored where they fit.

    Args:
        name: name of the operator.
        formats: weight formats that it multiplies with.
    """

    def __init__(self, name: str, formats: Sequence[WeightFormat]) -> None:
        self.name = name
        self.formats = tuple(formats)

    def knows(self, stored: StoredWeight) -> bool:
        return stored.scheme.element.name in [each.name for each in self.formats]

    def format_of(self, stored: StoredWeight) -> WeightFormat:
        """The weight format that holds a weight it knows."""
        return format_of(stored.scheme)

    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        if not self.knows(stored):
            names = " and ".join(each.name for each in self.formats)
            return f"{stored.scheme.element.name} weights; the kernel multiplies {names}"
        reason = operand_refusal(stored, self.format_of(stored))
        if reason is not None or setting.device.type == "cpu":
            return reason
        reason = kernel_refusal(setting)
        if reason is not None:
            return reason
        try:
            self.estimate(stored, setting, 1)
        except EnvironmentProblem as error:
            # The GPU is too old: a refusal, since nothing that the user installs would help.
            return str(error)
        return None

    def estimate(self, stored: StoredWeight, setting: Setting, rows: int) -> Estimate:
        if setting.device.type == "cpu":
            return Estimate(None, "a CPU runs its reference, which unpacks the weight for every product")
        weight_format = self.format_of(stored)
        k, n, granularity = operand_shape(stored, weight_format)
        bfloat16 = setting.dtype == torch.bfloat16
        zeros = stored.scheme.stores_zeros
        problem = Problem(rows, n, k, granularity, zeros, bfloat16, weight_format)
        choice = explain(setting.device, problem)
        reason = f"{choice.kernel} kernel: {choice.reason}"
        if stored.scheme.activations is not None or setting.fp8_activations:
            reason += f"; {_eight_bits(problem, stored, setting)}"
        return Estimate(choice.seconds, reason)

    def build(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> nn.Module:
        operand = stored_operand(stored, setting.dtype, setting.device, self.format_of(stored))
        activations = _activations(stored, setting)
        if activations is not None:
            scale = stored.grid.input_scale
            if scale is not None:
                scale = scale.to(device=setting.device, dtype=torch.float32).reshape(())
            if activations.dynamic or scale is not None:
                operand = replace(operand, activations=activations, input_scale=scale)
        return QuantLinear(operand, bias)

    def compile(
        self, modules: Iterable[nn.Module], setting: Setting, progress: ReportProgress = no_progress
    ) -> int:
        if setting.device.type != "cuda":
            return 0
        linears = [module for module in modules if isinstance(module, QuantLinear)]
        if not linears:
            return 0
        index = setting.device.index or 0
        shapes = {LayerShape.of(module.operand) for module in linears}
        beside = dict.fromkeys(one for module in linears for one in module.rounding_instantiations())
        compiled = compile_missing(device_numbers(index).architecture, list(beside)) if beside else 0
        return compiled + precompile_model(shapes, setting.dtype, index, progress=progress)
