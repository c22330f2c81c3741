"""Quantised weights whose scales and codes an optimiser changes, with a straight-through estimator.

Tuning changes only codes and scales. Element, groups, zero points and dtypes stay, so any layout that holds
the weight before also holds it after. A forward pass computes with the values that would be stored: scales
rounded to their dtype, codes rounded to integers. Gradients pass the rounding unchanged (Bengio et al. 2013).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.sparsity import Sparsity
from marlinq.core.weight import QuantizedWeight
from marlinq.kernels.solve import TunedTensors, launch, prepare_gradients, prepare_weight
from marlinq.kernels.solve.panel import PreparedPanel
from marlinq.methods.grid import storable_scales
from marlinq.methods.panel_kernel import has_panel_kernel

# Code units: a latent code begins at most so far from its code, and may lie so far beyond the first and last
# code. Nearer to half a step, noise rather than the gradient would decide which code it rounds to.
_LARGEST_REMAINDER = 0.3


class TunableWeight:
    """A quantised weight with parameters for an optimiser.

    ``change`` [G, P] is the relative change of each scale; powers of two stay, since small steps lead to no
    other one, and so does a second-level scale. ``latent`` [K, N] rounds to the codes; it begins
    at the code, moved towards the original weight by at most 0.3 of a step, so that codes which the
    quantiser rounded away from the nearest value change first. Without ``original`` there is none, and the
    codes stay. Pruned weights of a sparse scheme stay at the zero point: no gradient reaches them.

    Args:
        quantized: weight to begin with; its groups are runs of neighbouring channels.
        original: float [N, K], the weight that was quantised; None to keep the codes.
        name: name of the weight in error messages.

    Raises:
        UnsupportedError: the groups are not runs of channels, or ``original`` is given for an element with a
        table.
    """

    def __init__(
        self, quantized: QuantizedWeight, original: Tensor | None = None, *, name: str = "weight"
    ) -> None:
        if not quantized.has_trivial_g_idx:
            raise UnsupportedError(
                f"{name}: tuning needs groups of neighbouring channels; choose no act order"
            )
        if original is not None and quantized.element.table is not None:
            raise UnsupportedError(
                f"{name}: codes of {quantized.element.name} can't be tuned, only its scales"
            )
        self._quantized = quantized
        self._codes = quantized.codes.contiguous()
        self._scales = quantized.scales.to(torch.float32).contiguous()
        self._zeros = quantized.zeros.to(torch.float32).contiguous().unsqueeze(1)
        self.change = torch.zeros_like(self._scales, requires_grad=True)
        self.latent: Tensor | None = None
        if original is not None:
            self.latent = self._latent(original).requires_grad_()
            if quantized.sparsity is not None:
                self._fix(self._pruned(original, quantized.sparsity))
        # The kernels take only integer elements.
        self._fused = quantized.element.table is None and has_panel_kernel(self.change.device)

    @property
    def count(self) -> int:
        """Number of weights."""
        return self._quantized.codes.numel()

    def _latent(self, original: Tensor) -> Tensor:
        codes = self._grouped(self._quantized.codes).to(torch.float32)
        exact = self._grouped(original.t().to(torch.float32)) / self._scales.unsqueeze(1) + self._zeros
        remainder = (exact - codes).clamp_(-_LARGEST_REMAINDER, _LARGEST_REMAINDER)
        return (codes + remainder).reshape(self._quantized.codes.shape).contiguous()

    def _pruned(self, original: Tensor, sparsity: Sparsity) -> Tensor:
        """bool [K, N], weights that stay zero.

        A span with fewer nonzero weights than allowed has kept weights that were rounded to zero: those with
        the largest originals are not pruned.
        """
        magnitude = original.t().to(torch.float32).abs()
        return ~sparsity.largest(magnitude.masked_fill(self._quantized.used(), torch.inf))

    def _fix(self, pruned: Tensor) -> None:
        """Set the gradients of the latent codes at ``pruned``, bool [K, N], to zero."""
        assert self.latent is not None
        with torch.no_grad():
            self.latent.copy_(torch.where(pruned, self._quantized.codes.to(torch.float32), self.latent))
        self.latent.register_hook(lambda gradient: gradient.masked_fill(pruned, 0))  # type: ignore[no-untyped-call]

    def _grouped(self, tensor: Tensor) -> Tensor:
        """[K, N] as [G, g, N]."""
        return tensor.reshape(self._quantized.groups, -1, tensor.shape[-1])

    def parameters(self) -> dict[str, Tensor]:
        """The tensors that an optimiser changes, by name."""
        return (
            {"change": self.change} if self.latent is None else {"change": self.change, "latent": self.latent}
        )

    def scales(self) -> Tensor:
        """The scales as they would be stored, float32 [G, P]; differentiable."""
        wanted = self._scales * (1 + self.change)
        dtype = self._quantized.scales.dtype
        moves = dtype != torch.float8_e8m0fnu
        stored = storable_scales(wanted.detach(), dtype) if moves else self._scales
        return wanted + (stored - wanted).detach()

    def _levels(self) -> Tensor:
        """Codes minus zero points, float32 [G, g, N]; differentiable if codes are trained."""
        if self.latent is None:
            return self._grouped(self._quantized.codes.to(torch.float32)) - self._zeros
        # Clamped: a latent code beyond the first or last code gets no gradient.
        bounded = self.latent.clamp(-_LARGEST_REMAINDER, self._top + _LARGEST_REMAINDER)
        codes = bounded + (bounded.detach().round() - bounded).detach()
        return self._grouped(codes) - self._zeros

    @property
    def _top(self) -> int:
        return self._quantized.element.codes - 1

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantised weight [N, K], in float32 or rounded to ``dtype``; differentiable."""
        if self._fused:
            return fused_dense(self.tensors(), dtype)
        if self._quantized.element.table is not None:
            return self._dense_floats().t().to(dtype)
        product = self._levels() * self.scales().unsqueeze(1)
        return product.reshape(self._quantized.codes.shape).t().to(dtype)

    def _dense_floats(self) -> Tensor:
        """[K, N], of values in any tiles."""
        q = self._quantized
        product = q.element.decode(q.codes) * q.per_output(self.scales())[q.g_idx.long()]
        if q.tensor_scale is None:
            return product
        return product / q.tensor_scale if q.tensor_scale_divides else product * q.tensor_scale

    def tensors(self) -> TunedTensors:
        """Codes and scales, for the kernels."""
        return TunedTensors(
            self._codes if self.latent is None else self.latent,
            self.change,
            self._scales,
            self._zeros.squeeze(1),
            self._quantized.scales.dtype,
            self._top,
            _LARGEST_REMAINDER,
        )

    def quantized(self) -> QuantizedWeight:
        """The weight with its present codes and scales."""
        with torch.no_grad():
            scales = self.scales().to(self._quantized.scales.dtype)
            codes = self._quantized.codes
            if self.latent is not None:
                codes = self.latent.round().clamp(0, self._top).to(torch.uint8)
        return replace(self._quantized, scales=scales, codes=codes)


Launch = Callable[[PreparedPanel, int], None]


def fused_dense(tensors: TunedTensors, dtype: torch.dtype, launch: Launch = launch) -> Tensor:
    """:meth:`TunableWeight.dense` in one kernel, and its gradients in another.

    Args:
        tensors: codes and scales of the weight.
        dtype: dtype of the result, float32 or bfloat16.
        launch: function that starts a prepared kernel.

    Raises:
        ValueError: a tensor has another shape or dtype than the kernels read, or is not contiguous.
        EnvironmentProblem: a kernel can't be compiled or loaded.
    """
    dense: Tensor = _Dense.apply(tensors.given, tensors.change, tensors, dtype, launch)  # type: ignore[no-untyped-call]
    return dense.t()


class _Dense(torch.autograd.Function):
    """The dequantised weight [K, N]; gradients pass the rounding of codes and of scales unchanged."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, change: Tensor, tensors: TunedTensors, dtype: torch.dtype, launch: Launch
    ) -> Tensor:
        out = torch.empty(given.shape, dtype=dtype, device=given.device)
        launch(prepare_weight(tensors, out), given.get_device())
        ctx.save_for_backward(given, change)
        ctx.tensors, ctx.launch = tensors, launch
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        given, change = ctx.saved_tensors
        by_change = torch.empty_like(change)
        by_latent = torch.empty_like(given) if ctx.tensors.latent else None
        d_weight = gradients[0].contiguous()
        ctx.launch(prepare_gradients(ctx.tensors, d_weight, by_change, by_latent), given.get_device())
        return by_latent, by_change, None, None, None


class TunableVector:
    """A parameter of one dimension (a norm's weight, a bias) that an optimiser changes.

    ``change`` is relative to the size of the vector's elements, so that one learning rate suits vectors of
    any size, and elements that are zero can change. The size of a factor is its root mean square. That of a
    bias is the median magnitude of its nonzero elements: key biases may hold elements of 200 among elements
    of 0.7, and in steps that suit the former, the latter would drown what they are added to.

    Args:
        stored: float [n], the vector in the checkpoint; the result has its dtype.
        added: whether it is added, as a bias, rather than multiplied, as a norm's weight.
    """

    def __init__(self, stored: Tensor, *, added: bool) -> None:
        self._stored = stored
        self._wide = stored.to(torch.float32)
        nonzero = self._wide[self._wide != 0].abs()
        size = nonzero.median() if added and nonzero.numel() else self._wide.square().mean().sqrt()
        self._unit = float(size) or 1.0
        self.change = torch.zeros_like(self._wide, requires_grad=True)

    def parameters(self) -> dict[str, Tensor]:
        """The tensors that an optimiser changes, by name."""
        return {"change": self.change}

    def dense(self) -> Tensor:
        """The vector as it would be stored, in float32 [n]; differentiable."""
        wanted = self._wide + self._unit * self.change
        stored = wanted.detach().to(self._stored.dtype).to(torch.float32)
        return wanted + (stored - wanted).detach()

    def tensor(self) -> Tensor:
        """The present vector, in its stored dtype."""
        with torch.no_grad():
            return self.dense().to(self._stored.dtype)


def divergence(
    student: Callable[[Tensor], Tensor],
    teacher: Callable[[Tensor], Tensor],
    rows: Tensor,
    expected: Tensor,
    *,
    chunk: int,
    weight: float,
    parameters: Sequence[Tensor] = (),
    gradient: bool = True,
) -> tuple[float, Tensor | None]:
    """The sum of KL(teacher || student) over positions, and its gradient, a few rows of logits at a time.

    Args:
        student: differentiable function from hidden states [rows, H] to logits [rows, vocabulary].
        teacher: the original model's function from hidden states [rows, H] to logits [rows, vocabulary].
        rows: float32 [R, H], last hidden states of the student.
        expected: float [R, H], last hidden states of the teacher.
        chunk: rows whose logits are in memory at once.
        weight: factor of the sum whose gradient is computed.
        parameters: leaves that ``student`` computes with; their gradients are accumulated.
        gradient: False computes the sum alone.

    Returns:
        The sum in nats, and the gradient [R, H] with respect to ``rows``; None without ``gradient``.
    """
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    result = torch.empty_like(rows) if gradient else None
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        leaf = rows[part].detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            logits = student(leaf)
        with torch.no_grad():
            log_p = F.log_softmax(teacher(expected[part]).float(), dim=-1)
            log_q = F.log_softmax(logits.float(), dim=-1)
            p = log_p.exp()
            total += log_p.sub_(log_q).mul_(p).sum(-1).double().sum()
        if result is None:
            continue
        # The gradient with respect to logits is q - p, computed in place: autograd would keep each step's
        # tensors.
        slope = log_q.exp_().sub_(p).mul_(weight).to(logits.dtype)
        torch.autograd.backward(logits, slope, inputs=[leaf, *parameters])
        assert leaf.grad is not None
        result[part] = leaf.grad
    return float(total), result
