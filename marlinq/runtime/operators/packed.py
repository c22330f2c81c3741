"""Our CUDA kernels for packed weights; on a CPU their reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import EnvironmentProblem
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.formats import StoredWeight
from marlinq.kernels import LayerShape, Problem, explain, precompile_model
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.runtime.linear import QuantLinear
from marlinq.runtime.operand import format_of, operand_refusal, operand_shape, stored_operand
from marlinq.runtime.operators.base import Estimate, Operator, Setting

_DTYPES = (torch.float16, torch.bfloat16)


class Packed(Operator):
    """:class:`~marlinq.runtime.linear.QuantLinear` over packed words, as stored where they fit.

    Args:
        name: of the operator.
        formats: weight formats that it multiplies with.
    """

    def __init__(self, name: str, formats: Sequence[WeightFormat]) -> None:
        self.name = name
        self.formats = tuple(formats)

    def knows(self, stored: StoredWeight) -> bool:
        return stored.scheme.element.name in [each.name for each in self.formats]

    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        if not self.knows(stored):
            names = " and ".join(each.name for each in self.formats)
            return f"{stored.scheme.element.name} weights; the kernel multiplies {names}"
        reason = operand_refusal(stored)
        if reason is not None or setting.device.type == "cpu":
            return reason
        if setting.device.type != "cuda":
            return f"the kernel runs on CUDA devices, not on {setting.device.type}"
        if setting.dtype not in _DTYPES:
            names = " and ".join(map(dtype_name, _DTYPES))
            return f"the kernel takes {names}, not {dtype_name(setting.dtype)}"
        if find_spec("cupy") is None:
            raise EnvironmentProblem(
                "CuPy is not installed, which launches the kernel; install marlinq[cuda12] or "
                "marlinq[cuda13], matching the driver, or use --device cpu"
            )
        try:
            self.estimate(stored, setting, 1)
        except EnvironmentProblem as error:
            # An old GPU: nothing the user could install would change it.
            return str(error)
        return None

    def estimate(self, stored: StoredWeight, setting: Setting, rows: int) -> Estimate:
        if setting.device.type == "cpu":
            return Estimate(None, "a CPU runs its reference, which unpacks the weight for every product")
        k, n, granularity = operand_shape(stored)
        bfloat16 = setting.dtype == torch.bfloat16
        zeros = stored.scheme.stores_zeros
        problem = Problem(rows, n, k, granularity, zeros, bfloat16, format_of(stored.scheme))
        found = explain(setting.device, problem)
        return Estimate(found.seconds, f"{found.kernel} kernel: {found.reason}")

    def build(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> nn.Module:
        return QuantLinear(stored_operand(stored, setting.dtype, setting.device), bias)

    def compile(
        self, modules: Iterable[nn.Module], setting: Setting, progress: ReportProgress = no_progress
    ) -> int:
        if setting.device.type != "cuda":
            return 0
        shapes = {LayerShape.of(module.operand) for module in modules if isinstance(module, QuantLinear)}
        if not shapes:
            return 0
        return precompile_model(shapes, setting.dtype, setting.device.index or 0, progress=progress)
