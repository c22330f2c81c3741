"""The Hessian of a layer's squared output error, gathered from its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from marlinq.core.devices import multiplies_bfloat16
from marlinq.core.errors import NumericsError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_CHUNK_ROWS = 8192

# Number of row panels in which a wide Hessian is summed on a GPU, where each panel is computed only from the
# diagonal on (9/16 of the products with 8 panels); K from which that is done; and fewest rows of a panel,
# below which the GPU is underused.
_PANELS, _WIDE, _LEAST = 8, 4096, 1024

# Rows of a panel on a CPU, where narrow products are not slower.
_CPU_PANEL = 256

# K from which bfloat16 products on a CPU save more time than rounding the operands takes.
_NARROW = 256

# Rows of the Hessian that are mirrored at once.
_TILE = 2048


class HessianAccumulator:
    """The mean of 2 x x^T over the inputs x of a linear layer: the Hessian of its squared output error.

    A running mean keeps the numbers in range however many tokens come (GPTQ, Frantar et al. 2023, section 3).
    Inputs of 16 bits on a GPU go through its tensor cores (:func:`add_products`), others are multiplied in
    float32.

    Args:
        in_features: K.
        device: the device that the sum is kept and computed on, in float32.
        name: name of the layer in error messages.

    Attributes:
        tokens: number of tokens added so far.
        outputs: accumulators of the loss's gradients at the outputs of projections that read the input, by
            name of the projection (:mod:`marlinq.methods.outputs`); empty unless the method uses them.
    """

    def __init__(self, in_features: int, *, device: torch.device, name: str) -> None:
        # Above the diagonal; what lies below is filled in by `hessian`.
        self._mean = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        # Factor that `hessian` has applied to the entries off the diagonal.
        self._kept = 1.0
        self._name = name
        self.tokens = 0
        self.outputs: dict[str, HessianAccumulator] = {}

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the inputs of one call.

        Args:
            x: float [..., K]; [B, T, K] or [B * T, K] with ``mask``.
            mask: bool [B, T], false at padding; None without padding.

        Raises:
            UnsupportedError: there is a mask, but the rows of x are not the batch's tokens in order.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        if mask is not None:
            if rows.shape[0] != mask.numel():
                raise UnsupportedError(
                    f"{self._name}: expected inputs of {list(mask.shape)} tokens, found {list(x.shape)}; it "
                    "does not see every token once, so padding is not recognised; skip it with --override"
                )
            rows = rows[mask.to(rows.device).flatten()]
        if not rows.shape[0]:
            return
        self._shrink(0.0)
        for chunk in torch.split(rows, _CHUNK_ROWS):
            total = self.tokens + chunk.shape[0]
            add_products(self._mean, chunk, chunk, self.tokens / total, 2.0 / total, upper=True)
            self.tokens = total

    def merge(self, other: HessianAccumulator) -> None:
        """Add the statistics ``other``, of the same layer, of another shard of the calibration.

        The result equals that of one accumulator for both shards, up to rounding.

        Raises:
            ValueError: ``other`` is of another K.
        """
        self._check_channels(other)
        total = self.tokens + other.tokens
        if total == 0:
            return
        self._mix(other, self.tokens / total, other.tokens / total)
        self.tokens = total

    def blend(self, other: HessianAccumulator, share: float) -> None:
        """Replace the Hessian by ``(1 - share)`` of itself plus ``share`` of ``other``'s; :attr:`tokens` is
        unchanged.

        Raises:
            ValueError: ``other`` is of another K.
        """
        self._check_channels(other)
        if other.tokens:
            share = share if self.tokens else 1.0
            self._mix(other, 1 - share, share)

    def _check_channels(self, other: HessianAccumulator) -> None:
        if other._mean.shape != self._mean.shape:
            raise ValueError(
                f"{self._name}: expected statistics of {self._mean.shape[0]} channels, "
                f"found {other._mean.shape[0]}"
            )

    def _mix(self, other: HessianAccumulator, mine: float, theirs: float) -> None:
        for each in (self, other):
            each._shrink(0.0)
        self._mean.mul_(mine).add_(other._mean.to(self._mean.device), alpha=theirs)

    def as_share(self, tokens: int) -> list[Tensor]:
        """Weight the statistics as those of one of several shards with ``tokens`` tokens together.

        Returns:
            Tensors to be summed in place over all shards; the sums are the statistics of all tokens.
        """
        self._shrink(0.0)
        self._mean.mul_(self.tokens / tokens if tokens else 0.0)
        self.tokens = tokens
        return [self._mean]

    def hessian(self, shrinkage: float = 0.0) -> Tensor:
        """The Hessian, float32 [K, K], exactly symmetric, not a copy; zero when nothing was added.

        Args:
            shrinkage: share, below 1, by which entries off the diagonal are lowered (Ledoit and Wolf 2004).
                Inputs of other texts have other correlations, so compensation that relies on them would fail
                there.

        Raises:
            NumericsError: the inputs held NaN or infinity, or overflowed float32.
        """
        if not bool(torch.isfinite(self._mean.diagonal()).all()):
            bad = int((~torch.isfinite(self._mean.diagonal())).sum())
            raise NumericsError(
                f"{self._name}: {bad} of {self._mean.shape[0]} input channels are NaN or infinite in the "
                "calibration; check the source checkpoint, and its dtype's range"
            )
        # Mirrored, since products may round differently on both sides of the diagonal, or skip the lower one.
        # In place, since a copy would take as much memory again.
        k = self._mean.shape[0]
        for start in range(0, k, _TILE):
            part = slice(start, start + _TILE)
            below = slice(start + _TILE, k)
            square = self._mean[part, part].triu()
            self._mean[part, part] = square + square.triu(1).t()
            self._mean[below, part] = self._mean[part, below].t()
        self._shrink(shrinkage)
        return self._mean

    def _shrink(self, shrinkage: float) -> None:
        """Multiply entries off the diagonal by 1 - ``shrinkage``, in place of any earlier shrinkage."""
        if self._kept != 1 - shrinkage:
            diagonal = self._mean.diagonal().clone()
            self._mean.mul_((1 - shrinkage) / self._kept).diagonal().copy_(diagonal)
            self._kept = 1 - shrinkage


def add_products(
    total: Tensor, left: Tensor, right: Tensor, kept: float, weight: float, *, upper: bool = False
) -> None:
    """``total = kept * total + weight * left^T right``, in float32.

    Args:
        total: float32 [K, K], overwritten.
        left, right: float [tokens, K]. If both have 16 bits and are on a GPU, its tensor cores multiply:
            products of such numbers are exact in float32, in which they are summed.
        kept, weight: factors.
        upper: whether entries below the diagonal are not needed, so that they may keep their values.
    """
    k = left.shape[1]
    if not (left.is_cuda and left.dtype == right.dtype and left.dtype in (torch.float16, torch.bfloat16)):
        left, right = left.to(torch.float32), right.to(torch.float32)
        width = k if left.is_cuda or not upper else _CPU_PANEL
        for start in range(0, k, width):
            first = start if upper else 0
            own = left[:, start : start + width].t()
            total[start : start + width, first:].addmm_(own, right[:, first:], beta=kept, alpha=weight)
        return
    width = max(-(-k // _PANELS), _LEAST) if upper and k >= _WIDE else k
    for start in range(0, k, width):
        first = start if upper else 0
        panel = total[start : start + width, first:]
        torch.addmm(
            panel,
            left[:, start : start + width].t(),
            right[:, first:],
            out_dtype=torch.float32,
            beta=kept,
            alpha=weight,
            out=panel,
        )


def add_rounded_products(total: Tensor, left: Tensor, right: Tensor, kept: float, weight: float) -> None:
    """:func:`add_products` with less precision, for a small correction.

    On a CPU with bfloat16 products, wide operands and their product are rounded to bfloat16, each by a share
    of at most 2**-9; ``total`` stays float32.
    """
    if not (multiplies_bfloat16(left.device) and left.shape[1] >= _NARROW):
        add_products(total, left, right, kept, weight)
        return
    product = left.to(torch.bfloat16).t() @ right.to(torch.bfloat16)
    total.mul_(kept).add_(product, alpha=weight)


def add_float32_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left^T right`` on a GPU's tensor cores, with relative errors of products of at most 2**-19.

    Each operand is split into its first 11 bits and a rest below 2**-10 of it, which TF32 rounds by a share
    of at most 2**-11. The product of the two rests is left out.

    Args:
        total: float32 [M, N], changed.
        left, right: float32 [K, M] and [K, N].
    """
    high = [_first_bits(each) for each in (left, right)]
    low = [each - first for each, first in zip((left, right), high, strict=True)]
    with tensor_cores():
        total.addmm_(torch.cat([high[0], low[0], high[0]]).t(), torch.cat([high[1], high[1], low[1]]))


def _first_bits(x: Tensor) -> Tensor:
    """x in float32 without the low 13 bits of its significand, which TF32 lacks."""
    return x.view(torch.int32).bitwise_and(-(1 << 13)).view(torch.float32)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Allow TF32 for float32 products inside: precise enough for reports and corrections."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before
