"""What every operator offers: which weights it multiplies with, how fast, and the module that does it."""

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
from marlinq.formats import StoredWeight

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Setting:
    """Where a module runs.

    Attributes:
        device: device of weights and activations.
        dtype: dtype of the activations, and of what the module returns.
        exact: products round no more than ``dtype`` makes them. Otherwise an operator may round operands
            further, if its decision says so.
    """

    device: torch.device
    dtype: torch.dtype
    exact: bool = True


@dataclass(frozen=True)
class Estimate:
    """How long a product should take.

    Attributes:
        seconds: None where nobody has measured or modelled it.
        reason: one clause, for people.
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
            "CuPy is not installed, which launches the kernel; install marlinq[cuda12] or "
            "marlinq[cuda13], matching the driver, or use --device cpu"
        )
    return None


class Operator(ABC):
    """One way to multiply activations with a quantised weight.

    An operator looks at a weight's scheme, shape and layout through
    :class:`~marlinq.formats.StoredWeight`; its module then multiplies without asking again.
    """

    name: str
    dense: bool = False
    """Whether it keeps the weight dequantised, which takes more memory than the checkpoint."""
    device_types: tuple[str, ...] | None = None
    """The types of device that it is for; None for any. Elsewhere nobody has to hear why it is not taken."""

    def serves(self, device: torch.device) -> bool:
        """Whether it is for devices of this type at all."""
        return self.device_types is None or device.type in self.device_types

    def knows(self, stored: StoredWeight) -> bool:
        """Whether it is for weights of this element at all; elsewhere nobody hears why it is not taken."""
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
            setting: where the module's buffers have to be.

        Raises:
            UnsupportedError: the values themselves can't be held (a scale overflows the dtype).
        """

    def compile(
        self, modules: Iterable[nn.Module], setting: Setting, progress: ReportProgress = no_progress
    ) -> int:
        """Compile what those of ``modules`` that are this operator's need at their first use.

        Returns:
            How many kernels were compiled.

        Raises:
            EnvironmentProblem: a kernel does not compile.
        """
        return 0
