"""Round-to-nearest with scales chosen for the calibration's inputs (llama.cpp's importance matrix).

The squared error of a weight is weighted by the mean square of its input channel over the calibration, the
diagonal of GPTQ's Hessian. Weights don't compensate for each other's errors, so one pass of the original over
the text suffices, which gathers one vector per input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import NumericsError
from marlinq.core.scheme import Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.grid import nearest_scales, search_factors, search_grid
from marlinq.methods.method import Method, MethodOptions, SolveReport, check_weight, real_rows, whole_groups
from marlinq.methods.panel_kernel import has_panel_kernel
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
    """Options of imatrix: none."""


class InputPower:
    """The mean square of each input channel over the calibration.

    Args:
        in_features: K.
        device: device of the statistics, which are float32.
        name: name of the layer in error messages.
    """

    def __init__(self, in_features: int, *, device: torch.device, name: str) -> None:
        self._mean = torch.zeros(in_features, dtype=torch.float32, device=device)
        self._name = name
        self.tokens = 0

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the inputs of one call, float [..., K]; ``mask`` bool [B, T] is false at padding.

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
        """Add the statistics ``other``, of the same layer, of another shard of the calibration."""
        total = self.tokens + other.tokens
        if total:
            self._mean.mul_(self.tokens / total).add_(
                other._mean.to(self._mean.device), alpha=other.tokens / total
            )
            self.tokens = total

    def blend(self, other: InputPower, share: float) -> None:
        """Replace the mean by ``(1 - share)`` of itself plus ``share`` of ``other``'s; :attr:`tokens` is
        unchanged."""
        if other.tokens:
            self._mean.lerp_(other._mean.to(self._mean.device), share if self.tokens else 1.0)

    def as_share(self, tokens: int) -> list[Tensor]:
        """Weight the statistics as those of one of several shards with ``tokens`` tokens together; returns
        tensors to be summed over all shards."""
        self._mean.mul_(self.tokens / tokens if tokens else 0.0)
        self.tokens = tokens
        return [self._mean]

    def importance(self) -> Tensor:
        """Mean square of each channel, float32 [K]; ones when nothing was added.

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
    """Round-to-nearest on grids chosen for the least error, weighted by the power of the inputs."""

    name = "imatrix"
    options = ImatrixOptions
    sequential = False
    # Measured: with 8,192 to 65,536 tokens of C4 a model is quantised equally well.
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
    # A dead channel gets a small power, so that its weights are still rounded sensibly: other texts may use
    # it.
    floor = importance.mean() * 1e-6
    power = importance.clamp(min=float(floor) or 1.0).reshape(groups, g)
    w = weight.t().to(torch.float32).contiguous().reshape(groups, g, n)
    solver = round_groups_on_gpu if _takes_the_kernel(weight.device, g, scheme) else round_groups
    codes, scales, zeros, loss = solver(w, power, scheme)
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
    # Groups become further output channels.
    beside = w.transpose(0, 1).reshape(g, groups * n)
    costs = power.t().repeat_interleave(n, dim=1)
    scales, zeros = search_grid(beside, costs, scheme)
    codes = scheme.element.nearest(beside / scales + zeros)
    levels = scheme.element.decode(codes) - zeros
    # With the codes known, the best scale is a weighted least-squares fit.
    overlap, norm = (costs * levels * beside).sum(dim=0), (costs * levels.square()).sum(dim=0)
    fitted = nearest_scales(overlap / norm.clamp(min=torch.finfo(torch.float32).tiny), _dtype(scheme))
    # Scales of 8 bits are magnitudes.
    fits = overlap != 0 if _dtype(scheme).itemsize > 1 else overlap > 0
    scales = torch.where((norm > 0) & fits, fitted, scales)
    loss = float((costs * (beside - levels * scales).square()).sum(dtype=torch.float64))
    in_order = codes.reshape(g, groups, n).transpose(0, 1).contiguous()
    return in_order, scales.reshape(groups, n), zeros.reshape(groups, n), loss


def round_groups_on_gpu(
    w: Tensor, power: Tensor, scheme: Scheme, launch: RoundPanels | None = None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """:func:`round_groups` in one launch: a panel of GPTQ's for each group.

    No channel compensates for another: R is diagonal, so feedback is zero, and a squared error is weighted by
    the square of R's diagonal.
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
