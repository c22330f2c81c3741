"""Join projections that share an input into one product; modules in the model become slices of it.

Columns of q, k and v lie side by side; those of gate and up alternate in tiles of 64. The words are stored
once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from marlinq.formats.layouts.marlin import TILE_N
from marlinq.kernels import Operand
from marlinq.runtime.quant_linear import QuantLinear


def join_refusal(operands: Sequence[Operand], *, interleave: bool) -> str | None:
    """Why ``operands`` can't be joined, in one clause, or None.

    Args:
        operands: operands of projections with the same input, in the order of their columns.
        interleave: whether their tiles of 64 columns alternate, instead of lying side by side.
    """
    first = operands[0]
    for other in operands:
        if other.order is not None:
            return "a weight has an activation order"
        # Before channels are compared: formats pad them differently, so that their numbers would be blamed.
        if other.format != first.format:
            return f"weights in {first.format.name} and {other.format.name}"
        if other.in_features != first.in_features or other.padded_shape[0] != first.padded_shape[0]:
            return f"inputs of {first.in_features} and {other.in_features} channels"
        if other.granularity != first.granularity:
            return f"{first.granularity.describe()} and {other.granularity.describe()}"
        if (other.zeros is None) != (first.zeros is None):
            return "only some of the weights store zero points"
        if other.scales.dtype != first.scales.dtype or other.words.device != first.words.device:
            return "weights of different dtypes or devices"
        if interleave and other.out_features != first.out_features:
            return f"{first.out_features} and {other.out_features} columns can't take turns"
    if not interleave:
        for inner in operands[:-1]:
            if inner.out_features % TILE_N:
                return f"{inner.out_features} columns are not whole tiles of {TILE_N}"
    return None


def join_operands(operands: Sequence[Operand], *, interleave: bool) -> Operand:
    """One operand whose product contains the products of ``operands``.

    Side by side, product column j of part p is column ``sum(N of the parts before) + j``. Interleaved, it is
    column ``64 * (len(operands) * (j // 64) + p) + j % 64``, and columns that pad a part's last tile are
    columns of the result.

    Args:
        operands: operands that :func:`join_refusal` does not refuse.
        interleave: whether tiles of 64 columns of the parts alternate, instead of lying side by side.

    Raises:
        ValueError: :func:`join_refusal` refuses them.
    """
    reason = join_refusal(operands, interleave=interleave)
    if reason is not None:
        raise ValueError(f"operands can't be joined: {reason}")
    first = operands[0]
    columns = sum(operand.padded_shape[1] for operand in operands)
    zeros = [operand.zeros for operand in operands if operand.zeros is not None]
    alike = len({operand.activations for operand in operands}) == 1
    # All parts have the same input, so the largest of their input scales fits.
    inputs = [operand.input_scale for operand in operands if operand.input_scale is not None]
    return Operand(
        format=first.format,
        words=_joined([operand.words for operand in operands], first.format.tile_words, interleave),
        # Whole tiles may be moved: the stored order of scales permutes columns only within tiles.
        scales=_joined([operand.scales for operand in operands], TILE_N, interleave),
        zeros=_joined(zeros, TILE_N, interleave) if zeros else None,
        order=None,
        granularity=first.granularity,
        in_features=first.in_features,
        out_features=columns if interleave else sum(operand.out_features for operand in operands),
        activations=first.activations if alike else None,
        input_scale=torch.stack(inputs).amax() if alike and inputs else None,
    )


def join_biases(
    biases: Sequence[Tensor | None], operands: Sequence[Operand], *, interleave: bool
) -> Tensor | None:
    """The bias of the joined product, zeros where a part or a padding column has none; None without any."""
    present = next((bias for bias in biases if bias is not None), None)
    if present is None:
        return None
    columns = [operand.padded_shape[1] if interleave else operand.out_features for operand in operands]
    filled = [present.new_zeros(count) for count in columns]
    for target, bias in zip(filled, biases, strict=True):
        if bias is not None:
            target[: bias.shape[0]] = bias
    return _joined([row[None] for row in filled], TILE_N, interleave)[0] if interleave else torch.cat(filled)


def _joined(parts: Sequence[Tensor], tile: int, interleave: bool) -> Tensor:
    """Rows of all parts, with whole tiles of columns side by side or alternating."""
    if not interleave:
        return torch.cat(list(parts), dim=1)
    rows, columns = parts[0].shape
    tiles = torch.stack([part.view(rows, columns // tile, tile) for part in parts], dim=2)
    return tiles.view(rows, len(parts) * columns)


class JoinedLinear(QuantLinear):
    """The product of several projections with the same input.

    Attributes:
        widths: output columns of each part.
        interleaved: whether tiles of 64 columns of the parts alternate, instead of the parts lying side by
            side.
    """

    def __init__(
        self, operand: Operand, bias: Tensor | None, widths: Sequence[int], *, interleaved: bool
    ) -> None:
        super().__init__(operand, bias)
        self.widths = tuple(widths)
        self.interleaved = interleaved
        self._last: tuple[weakref.ref[Tensor], int, Tensor, int] | None = None

    def part(self, x: Tensor, index: int) -> Tensor:
        """The product of part ``index``, [..., widths[index]].

        Parts that are requested one after another with the same ``x`` share one product.
        """
        return self._slice(self._product(x, index), index)

    def _product(self, x: Tensor, index: int) -> Tensor:
        # No sharing: inference tensors have no version counter, and a compiler traces each use by itself.
        if torch.compiler.is_compiling() or x.is_inference():
            return self(x)  # type: ignore[no-any-return]
        wanted = 1 << index
        last = self._last
        if last is not None and last[0]() is x and last[1] == x._version and not last[3] & wanted:
            product, served = last[2], last[3] | wanted
        else:
            product, served = self(x), wanted
        complete = served == (1 << len(self.widths)) - 1
        self._last = None if complete else (weakref.ref(x, self._forget), x._version, product, served)
        return product

    def _forget(self, gone: object) -> None:
        last = self._last
        if last is not None and last[0] is gone:
            self._last = None

    def _slice(self, product: Tensor, index: int) -> Tensor:
        width = self.widths[index]
        if not self.interleaved:
            return product.narrow(-1, sum(self.widths[:index]), width)
        tiles = product.view(*product.shape[:-1], -1, len(self.widths), TILE_N)
        return tiles[..., index, :].flatten(-2)[..., :width]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}

    def extra_repr(self) -> str:
        order = "in turns" if self.interleaved else "side by side"
        return f"{super().extra_repr()}, parts={list(self.widths)} {order}"


class JoinedSlice(nn.Module):
    """One projection of a :class:`JoinedLinear`, in its own place in the model.

    Args:
        joined: shared with the other projections.
        index: index of the part.
    """

    def __init__(self, joined: JoinedLinear, index: int) -> None:
        super().__init__()
        self.joined = joined
        self.index = index
        self.in_features = joined.in_features
        self.out_features = joined.widths[index]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], in the dtype of x."""
        return self.joined.part(x, self.index)

    def __repr__(self) -> str:
        return f"JoinedSlice(part {self.index} of {self.joined!r})"


def join_modules(model: nn.Module, names: Sequence[str], *, interleave: bool) -> JoinedLinear | str:
    """Replace projections of ``model`` by slices of one product; repeated calls return the same one.

    While they are joined, the words exist twice.

    Args:
        model: the whole model.
        names: full module names, in the order of the parts.
        interleave: as in :func:`join_operands`.

    Returns:
        The joined product; or why there is none, in one clause, with the model unchanged.
    """
    modules = [model.get_submodule(name) for name in names]
    slices = [module for module in modules if isinstance(module, JoinedSlice)]
    if slices:
        joined = slices[0].joined
        same = len(slices) == len(joined.widths) and all(
            each.joined is joined and each.index == index for index, each in enumerate(slices)
        )
        if len(slices) == len(modules) and same and joined.interleaved == interleave:
            return joined
        return f"{names[0]} is joined otherwise already"
    linears = [module for module in modules if isinstance(module, QuantLinear)]
    if len(linears) < len(modules):
        name = next(
            name for name, module in zip(names, modules, strict=True) if not isinstance(module, QuantLinear)
        )
        return f"{name} is no packed linear"
    operands = [linear.operand for linear in linears]
    reason = join_refusal(operands, interleave=interleave)
    if reason is not None:
        return reason
    joined = JoinedLinear(
        join_operands(operands, interleave=interleave),
        join_biases([linear.bias for linear in linears], operands, interleave=interleave),
        [linear.out_features for linear in linears],
        interleaved=interleave,
    )
    for index, name in enumerate(names):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, JoinedSlice(joined, index))
    return joined
