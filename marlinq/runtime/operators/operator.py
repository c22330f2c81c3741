"""The protocol of operators: weights that one multiplies, its estimated time, and its module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import EnvironmentProblem
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.core.version import CUDA_PACKAGES
from marlinq.formats import StoredWeight

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Setting:
    """Device, dtype and required precision of a module.

    Attributes:
        device: device of weights and activations.
        dtype: dtype of activations and results.
        exact: True if products must not round operands further than to ``dtype``; False lets operators do so
            whose decisions say it.
        fp8_activations: True if activations of INT4 weights are rounded to FP8 in large batches, where a
            kernel multiplies such.
    """

    device: torch.device
    dtype: torch.dtype
    exact: bool = True
    fp8_activations: bool = False


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a product.

    Attributes:
        seconds: estimated seconds; None where they are neither measured nor modelled.
        reason: one clause of text.
    """

    seconds: float | None
    reason: str


def kernel_refusal(setting: Setting) -> str | None:
    """Why CUDA kernels do not run in ``setting``, or None.

    Raises:
        EnvironmentProblem: CuPy is not installed.
    """
    if setting.device.type != "cuda":
        return f"the kernel runs on CUDA devices, not on {setting.device.type}"
    if setting.dtype not in _KERNEL_DTYPES:
        names = " and ".join(map(dtype_name, _KERNEL_DTYPES))
        return f"the kernel takes {names}, not {dtype_name(setting.dtype)}"
    if find_spec("cupy") is None:
        raise EnvironmentProblem(
            f"CuPy is not installed, which launches the kernel; {CUDA_PACKAGES}; or choose the device cpu"
        )
    return None


class Operator(ABC):
    """A way to multiply activations with a quantised weight.

    An operator decides by the scheme, shape and layout of a :class:`~marlinq.formats.StoredWeight`.
    """

    name: str
    dense: bool = False
    """Whether it keeps the weight dequantised, which takes more memory than the checkpoint."""
    rounds_to: str | None = None
    """Dtype that its products are rounded to where it can differ from the model's; None for the model's."""
    device_types: tuple[str, ...] | None = None
    """Types of device that it is meant for; None for any. On others, decisions don't mention it."""

    def serves(self, device: torch.device) -> bool:
        """Whether it is meant for devices of this type."""
        return self.device_types is None or device.type in self.device_types

    def knows(self, stored: StoredWeight) -> bool:
        """Whether it is meant for weights of this element; for others, decisions don't mention it."""
        return True

    @abstractmethod
    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        """Why it can't multiply with ``stored`` there, or None.

        Raises:
            EnvironmentProblem: it could, but a package is missing that the user can install.
        """

    @abstractmethod
    def estimate(self, stored: StoredWeight, setting: Setting, rows: int) -> Estimate:
        """The expected time of a product with activations [rows, K], for a weight that is not refused."""

    @abstractmethod
    def build(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> nn.Module:
        """The linear layer: [..., K] in ``setting.dtype`` to [..., N].

        Args:
            stored: a weight that is not refused.
            bias: [N] of any float dtype, on any device, or None.
            setting: device and dtype of the module.

        Raises:
            UnsupportedError: the values themselves can't be held (a scale overflows the dtype).
        """

    def compile(
        self, modules: Iterable[nn.Module], setting: Setting, progress: ReportProgress = no_progress
    ) -> int:
        """Compile the kernels that this operator's modules, among ``modules``, need at their first use.

        Returns:
            Number of kernels compiled.

        Raises:
            EnvironmentProblem: a kernel does not compile.
        """
        return 0
