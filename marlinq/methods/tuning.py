"""Quantised weights that follow a gradient: scales, and codes through a straight-through estimate.

Tuning changes numbers and nothing else: the element, the groups, the zero points and the dtypes stay, so the
result fits wherever the weight that it began with did. What a forward pass computes with is always what would
be stored: scales rounded to their dtype, codes rounded to integers. Gradients pass the rounding unchanged
(Bengio et al. 2013).
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
from marlinq.methods.gpu import has_panel_kernel
from marlinq.methods.grid import storable_scales

# A latent code begins at most so far from its code, and counts as far beyond the ends: half a step would be a
# coin's toss which code it means, and what is nearer is changed by chance more often than by the gradient.
_LARGEST_REMAINDER = 0.3


class TunableWeight:
    """A quantised weight with parameters for an optimiser.

    ``change`` [G, N] is the relative change of each scale. ``latent`` [K, N] rounds to the codes; it begins
    at the code, moved towards the original weight by at most 0.3 of a step, so that codes which the
    quantiser rounded away from the nearest value change first. Without ``original`` there is none, and the
    codes stay. Pruned weights of a sparse scheme stay at the zero point: no gradient reaches them.

    Args:
        quantized: weight to begin with; its groups are runs of neighbouring channels.
        original: float [N, K], the weight that was quantised; None to leave the codes alone.
        name: name of the weight in error messages.

    Raises:
        UnsupportedError: the groups are not runs of channels, or codes of a table are to follow.
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
        # The kernels know integers alone.
        self._fused = quantized.element.table is None and has_panel_kernel(self.change.device)

    @property
    def count(self) -> int:
        """How many weights there are."""
        return self._quantized.codes.numel()

    def _latent(self, original: Tensor) -> Tensor:
        codes = self._grouped(self._quantized.codes).to(torch.float32)
        exact = self._grouped(original.t().to(torch.float32)) / self._scales.unsqueeze(1) + self._zeros
        remainder = (exact - codes).clamp_(-_LARGEST_REMAINDER, _LARGEST_REMAINDER)
        return (codes + remainder).reshape(self._quantized.codes.shape).contiguous()

    def _pruned(self, original: Tensor, sparsity: Sparsity) -> Tensor:
        """bool [K, N]: the weights that stay zero. Of a span with fewer values than may be, the largest of
        the others' originals are kept too, since kept weights may have been rounded to zero."""
        magnitude = original.t().to(torch.float32).abs()
        return ~sparsity.largest(magnitude.masked_fill(self._quantized.used(), torch.inf))

    def _fix(self, pruned: Tensor) -> None:
        """Keep the latent codes at ``pruned``, bool [K, N], where they are."""
        assert self.latent is not None
        with torch.no_grad():
            self.latent.copy_(torch.where(pruned, self._quantized.codes.to(torch.float32), self.latent))
        self.latent.register_hook(lambda gradient: gradient.masked_fill(pruned, 0))  # type: ignore[no-untyped-call]

    def _grouped(self, tensor: Tensor) -> Tensor:
        """[K, N] as [G, g, N]."""
        return tensor.reshape(self._quantized.groups, -1, tensor.shape[-1])

    def parameters(self) -> dict[str, Tensor]:
        """What an optimiser changes, by name."""
        return (
            {"change": self.change} if self.latent is None else {"change": self.change, "latent": self.latent}
        )

    def scales(self) -> Tensor:
        """float32 [G, N], as they would be stored; differentiable."""
        wanted = self._scales * (1 + self.change)
        stored = storable_scales(wanted.detach(), self._quantized.scales.dtype)
        return wanted + (stored - wanted).detach()

    def _levels(self) -> Tensor:
        """Codes less zero points, float32 [G, g, N]; differentiable where codes follow."""
        if self.latent is None:
            decoded = self._quantized.element.decode(self._quantized.codes).to(torch.float32)
            return self._grouped(decoded) - self._zeros
        # Beyond the last code nothing is gained by going on, and the gradient ends.
        bounded = self.latent.clamp(-_LARGEST_REMAINDER, self._top + _LARGEST_REMAINDER)
        codes = bounded + (bounded.detach().round() - bounded).detach()
        return self._grouped(codes) - self._zeros

    @property
    def _top(self) -> int:
        return self._quantized.element.codes - 1

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K], what the weight would be loaded as, in float32 or rounded to ``dtype``; differentiable."""
        if self._fused:
            return fused_dense(self.tensors(), dtype)
        product = self._levels() * self.scales().unsqueeze(1)
        return product.reshape(self._quantized.codes.shape).t().to(dtype)

    def tensors(self) -> TunedTensors:
        """What the weight is made of, for the kernels."""
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
        """The weight as it is now."""
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
        tensors: stored parts of the weight.
        dtype: float32 or bfloat16, of the result.
        launch: starts a prepared kernel.

    Raises:
        ValueError: tensors that the kernels can't read.
        EnvironmentProblem: a kernel can't be compiled or loaded.
    """
    dense: Tensor = _Dense.apply(tensors.given, tensors.change, tensors, dtype, launch)  # type: ignore[no-untyped-call]
    return dense.t()


class _Dense(torch.autograd.Function):
    """[K, N]; both roundings pass gradients unchanged."""

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
    """A parameter of one dimension (a norm's weight, a bias) that follows a gradient.

    ``change`` is relative to the vector's root mean square, so that one rate suits vectors of any size, and
    elements that are zero can move.

    Args:
        stored: float [n], as the checkpoint holds it; the result has its dtype.
    """

    def __init__(self, stored: Tensor) -> None:
        self._stored = stored
        self._wide = stored.to(torch.float32)
        self._unit = float(self._wide.square().mean().sqrt()) or 1.0
        self.change = torch.zeros_like(self._wide, requires_grad=True)

    def parameters(self) -> dict[str, Tensor]:
        """What an optimiser changes, by name."""
        return {"change": self.change}

    def dense(self) -> Tensor:
        """float32 [n], as it would be stored; differentiable."""
        wanted = self._wide + self._unit * self.change
        stored = wanted.detach().to(self._stored.dtype).to(torch.float32)
        return wanted + (stored - wanted).detach()

    def tensor(self) -> Tensor:
        """The vector as it is now, in the dtype that it is stored in."""
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
        student: hidden states [rows, H] to logits [rows, vocabulary], differentiable.
        teacher: value of the original.
        rows: float32 [R, H], the student's last hidden states.
        expected: float [R, H], the teacher's.
        chunk: rows whose logits are held at once.
        weight: the gradient is that of ``weight`` times the sum.
        parameters: leaves that ``student`` computes with; their gradients are accumulated.
        gradient: False computes the sum alone.

    Returns:
        The sum in nats, and the gradient [R, H] with respect to ``rows``, None where none was asked for.
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
        # By logits it is q - p: taken down in place, where automatic differentiation would keep each step.
        slope = log_q.exp_().sub_(p).mul_(weight).to(logits.dtype)
        torch.autograd.backward(logits, slope, inputs=[leaf, *parameters])
        assert leaf.grad is not None
        result[part] = leaf.grad
    return float(total), result
