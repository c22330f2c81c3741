"""Round-to-nearest on scales that mind the inputs: an importance matrix, as llama.cpp calls it.

A squared error of a weight counts as much as its input channel is strong: the mean square of the channel over
the calibration, the diagonal of the Hessian that GPTQ uses. Weights don't make up for each other's errors, so
one pass over the text, of the original, with a vector per input is all that is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import NumericsError
from marlinq.core.scheme import Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.base import Method, MethodOptions, SolveReport, check_weight, real_rows, whole_groups
from marlinq.methods.gpu import has_panel_kernel
from marlinq.methods.grid import search_factors, search_grid, storable_scales
from marlinq.methods.quantity import ErrorQuantity

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from marlinq.kernels.solve import PanelTensors
else:
    from marlinq.core.lazy import torch


RoundPanels = Callable[["PanelTensors", Scheme, "Tensor"], None]


@dataclass(frozen=True)
class ImatrixOptions(MethodOptions):
    """There is nothing to choose."""


class InputPower:
    """The mean square of each input channel over the calibration.

    Args:
        in_features: K.
        device: where it is kept, in float32.
        name: name of the layer in error messages.
    """

    def __init__(self, in_features: int, *, device: torch.device, name: str) -> None:
        self._mean = torch.zeros(in_features, dtype=torch.float32, device=device)
        self._name = name
        self.tokens = 0

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Counts the inputs of one call, float [..., K]; ``mask`` bool [B, T] is true at real tokens.

        Raises:
            UnsupportedError: there is a mask, but the rows of x are not the batch's tokens in order.
        """
        rows = real_rows(x, mask, self._name)
        if len(rows) == 0:
            return
        total = self.tokens + len(rows)
        power = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32).square_()
        self._mean.mul_(self.tokens / total).add_(power, alpha=1 / total)
        self.tokens = total

    def merge(self, other: InputPower) -> None:
        """Counts what ``other`` has seen: another shard of the calibration, of the same layer."""
        total = self.tokens + other.tokens
        if total:
            self._mean.mul_(self.tokens / total).add_(
                other._mean.to(self._mean.device), alpha=other.tokens / total
            )
            self.tokens = total

    def blend(self, other: InputPower, share: float) -> None:
        """Makes ``share`` of the mean ``other``'s, whatever the tokens of both; :attr:`tokens` stays."""
        if other.tokens:
            self._mean.lerp_(other._mean.to(self._mean.device), share if self.tokens else 1.0)

    def as_share(self, tokens: int) -> list[Tensor]:
        """Weighs what was seen as a share of ``tokens`` in all; all shards' tensors add up to the whole's."""
        self._mean.mul_(self.tokens / tokens if tokens else 0.0)
        self.tokens = tokens
        return [self._mean]

    def importance(self) -> Tensor:
        """float32 [K]; ones when nothing was added.

        Raises:
            NumericsError: the inputs held NaN or infinity, or overflowed float32.
        """
        if not bool(torch.isfinite(self._mean).all()):
            bad = int((~torch.isfinite(self._mean)).sum())
            raise NumericsError(
                f"{self._name}: {bad} of {len(self._mean)} input channels are NaN or infinite in the "
                "calibration; check the source checkpoint, and its dtype's range"
            )
        return self._mean if self.tokens else torch.ones_like(self._mean)


class Imatrix(Method[ImatrixOptions, InputPower]):
    """Every weight goes to the nearest value of a grid that was chosen for strong inputs."""

    name = "imatrix"
    options = ImatrixOptions
    sequential = False
    # A mean of squares needs no more: with 8,192 to 65,536 tokens of C4 a model is quantised equally well.
    enough_tokens = 65_536

    def statistics(
        self, in_features: int, options: ImatrixOptions, *, device: torch.device, name: str
    ) -> InputPower:
        return InputPower(in_features, device=device, name=name)

    def solve(
        self,
        weights: Sequence[Tensor],
        statistics: InputPower | None,
        scheme: Scheme,
        options: ImatrixOptions,
        *,
        names: Sequence[str],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        if statistics is None:
            raise ValueError("imatrix needs the power of the weights' input")
        importance = statistics.importance()
        reason = None if statistics.tokens else "no importance: the calibration never reached this layer"
        return [
            _solve(weight, importance, scheme, reason, name)
            for weight, name in zip(weights, names, strict=True)
        ]


def _solve(
    weight: Tensor, importance: Tensor, scheme: Scheme, fallback: str | None, name: str
) -> tuple[QuantizedWeight, SolveReport]:
    check_weight(weight, scheme, name)
    n, k = weight.shape
    g = whole_groups(scheme, k, name)
    groups = k // g
    # A dead channel still has to store something near its weight: other text may reach it.
    floor = importance.mean() * 1e-6
    power = importance.clamp(min=float(floor) or 1.0).reshape(groups, g)
    w = weight.t().to(torch.float32).contiguous().reshape(groups, g, n)
    found = round_groups_on_gpu if _takes_the_kernel(weight.device, g, scheme) else round_groups
    codes, scales, zeros, loss = found(w, power, scheme)
    size = float(torch.einsum("gkn,gkn,gk->g", w, w, power).sum(dtype=torch.float64))
    quantized = QuantizedWeight.from_codes(
        scheme, codes.reshape(k, n), scales=scales.to(_dtype(scheme)), zeros=zeros.to(torch.uint8)
    )
    quantity = ErrorQuantity.INPUTS if fallback is None else ErrorQuantity.WEIGHTS
    return quantized, SolveReport(loss / size if size > 0 else 0.0, quantity, fallback, norm=size)


def _takes_the_kernel(device: torch.device, g: int, scheme: Scheme) -> bool:
    if scheme.element.table is not None or not has_panel_kernel(device):
        return False
    from marlinq.kernels.solve import PANEL_ROWS

    return g <= PANEL_ROWS


def round_groups(w: Tensor, power: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor, float]:
    """Codes [G, g, N], scales and zeros [G, N] in float32, and the weighted squared error of w [G, g, N]
    whose channels count ``power`` [G, g]."""
    groups, g, n = w.shape
    # Groups stand beside each other, as further output channels.
    beside = w.transpose(0, 1).reshape(g, groups * n)
    costs = power.t().repeat_interleave(n, dim=1)
    scales, zeros = search_grid(beside, costs, scheme)
    codes = scheme.element.nearest(beside / scales + zeros)
    levels = scheme.element.decode(codes) - zeros
    # With the codes known, the best scale is a weighted least-squares fit.
    overlap, norm = (costs * levels * beside).sum(dim=0), (costs * levels.square()).sum(dim=0)
    fitted = storable_scales(overlap / norm.clamp(min=torch.finfo(torch.float32).tiny), _dtype(scheme))
    scales = torch.where((norm > 0) & (overlap != 0), fitted, scales)
    loss = float((costs * (beside - levels * scales).square()).sum(dtype=torch.float64))
    found = codes.reshape(g, groups, n).transpose(0, 1).contiguous()
    return found, scales.reshape(groups, n), zeros.reshape(groups, n), loss


def round_groups_on_gpu(
    w: Tensor, power: Tensor, scheme: Scheme, launch: RoundPanels | None = None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """:func:`round_groups` in one launch: a panel of GPTQ's for each group.

    No channel makes up for another: R is diagonal, so its feedback is zero, and what an error costs is the
    square of its diagonal.
    """
    from marlinq.kernels.solve import PanelTensors, round_panels

    groups, g, n = w.shape
    root = power.sqrt()
    tensors = PanelTensors(
        updated=w,
        base=w * root.unsqueeze(2),
        weight=w,
        feedback=torch.zeros(groups, g, g, device=w.device),
        diagonal=root,
        factors=torch.tensor(search_factors(), device=w.device),
        scales=torch.empty(groups, n, device=w.device),
        zeros=torch.empty(groups, n, device=w.device),
        codes=torch.empty(groups, g, n, dtype=torch.uint8, device=w.device),
        difference=torch.empty_like(w),
        loss=torch.zeros(groups, n, dtype=torch.float64, device=w.device),
    )
    (launch or round_panels)(tensors, scheme, torch.zeros(groups, device=w.device))
    assert tensors.loss is not None
    return tensors.codes, tensors.scales, tensors.zeros, float(tensors.loss.sum())


def _dtype(scheme: Scheme) -> torch.dtype:
    return torch_dtype(scheme.scale_dtype)
