"""What the kernel is measured against: each contender packs the same codes and scales in its own way."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.formats.layouts.marlin import pack_tiles
from marlinq.kernels import GEMMS, Operand, batch_invariant, precompile
from marlinq.kernels.contract.weight_formats import E4M3, INT4, WeightFormat
from marlinq.operations.bench.shapes import Layer

Run = Callable[[int, Tensor], Tensor]
"""``run(copy, x)``: x [M, K] times one of the prepared copies of the weight, [M, N]."""

_ZERO = 8
_EVEN_EXPONENTS = 0xF7F7F7F7 - 2**32


@dataclass(frozen=True)
class Weight:
    """A random weight as the kernel takes it. Codes and scales in channel order are those of 4 bits."""

    layer: Layer
    operand: Operand

    @property
    def words(self) -> Tensor:
        """Words of the weight format."""
        return self.operand.words

    @property
    def scales(self) -> Tensor:
        """[G, N] in stored order."""
        return self.operand.scales

    @property
    def zeros(self) -> Tensor | None:
        """Zero points like the scales, or None."""
        return self.operand.zeros

    @property
    def group_size(self) -> int:
        """What peers call the granularity: 32, 64, 128 or -1."""
        return self.operand.granularity.group_size

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and zero points."""
        return self.words.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def dense(self) -> Tensor:
        """[K, N] float32."""
        return self.operand.dequantize(torch.float32)

    def codes(self) -> Tensor:
        """[K, N] uint8."""
        ones = torch.ones_like(self.scales[:1])
        values = self.operand.format.dequantize(self.words, ones, None, torch.float32)
        return (values + _ZERO).to(torch.uint8)

    def natural_scales(self) -> Tensor:
        """[G, N] in channel order."""
        return self._natural(self.scales)

    def natural_zeros(self) -> Tensor | None:
        """[G, N] uint8 in channel order."""
        return None if self.zeros is None else self._natural(self.zeros).to(torch.uint8)

    def _natural(self, stored: Tensor) -> Tensor:
        # Code 9 with zero 8 dequantises to the scale itself, channel by channel.
        nine = torch.full(
            (stored.shape[0], self.words.shape[1]),
            0x99999999 - 2**32,
            dtype=torch.int32,
            device=stored.device,
        )
        return self.operand.format.dequantize(nine, stored, None, torch.float32)[::16].to(stored.dtype)


def random_weight(
    layer: Layer,
    granularity: Granularity,
    *,
    asymmetric: bool,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat,
) -> Weight:
    """Random codes, and scales that keep the products of unit activations near one.

    4-bit codes are 1..15 with mean 8. Code 0 is left out because a peer has a faster route for symmetric
    weights without it. Its place goes to 8, so that weights have no mean: through a chain of layers that
    would grow without bound.
    """
    groups = granularity.groups(layer.k)
    rows, columns = layer.k // weight_format.row_channels, layer.n * weight_format.row_words
    words = torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int32, device=device)
    if weight_format == INT4:
        words |= (~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111) << 3
    elif weight_format == E4M3:
        # Even exponents only, since the last one has the codes of NaN.
        words &= _EVEN_EXPONENTS
    deviation = float(weight_format.values(words[:, : weight_format.tile_words], torch.float32).std())
    unit = weight_format.scale_factor(dtype) / (deviation * layer.k**0.5)
    scales = (unit * (0.5 + torch.rand(groups, layer.n, device=device))).to(dtype)
    middle = int(weight_format.midpoint)
    points = (
        torch.randint(middle // 2, middle * 3 // 2, (groups, layer.n), device=device) if asymmetric else None
    )
    zeros = None if points is None else points.to(dtype)
    return Weight(layer, Operand.whole(weight_format, granularity, words, scales, zeros))


class Contender(Protocol):
    """One implementation of the product.

    Attributes:
        name: name in options and reports.
        any_format: whether it multiplies with every weight format, not with 4-bit integers alone.
    """

    name: str
    any_format: bool

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        """Why it can't run such weights here, or None."""
        ...

    def nbytes(self, weight: Weight) -> int:
        """Bytes it reads of one copy of the weight."""
        ...

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        """Pack ``copies`` copies of the weight, to be run at ``batches`` rows."""
        ...


def _operator(weight: Weight, copies: int, order: Tensor | None) -> Run:
    operands = [
        (weight.words.clone(), weight.scales.clone(), None if weight.zeros is None else weight.zeros.clone())
        for _ in range(copies)
    ]
    n, group_size = weight.layer.n, weight.group_size
    gemm = GEMMS[weight.operand.format.name]
    return lambda copy, x: gemm(x, *operands[copy], None, group_size, n, order)


class Marlinq:
    """The kernel of this package, through its torch operator."""

    name = "marlinq"
    any_format = True

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        return None

    def nbytes(self, weight: Weight) -> int:
        return weight.nbytes

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        return _operator(weight, copies, None)


class BatchInvariant(Marlinq):
    """The same operator where a row's result must not depend on the batch around it."""

    name = "batch-invariant"

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        run = super().prepare(weight, copies, batches)

        def invariant(copy: int, x: Tensor) -> Tensor:
            with batch_invariant():
                return run(copy, x)

        if weight.words.is_cuda:
            problems = map(weight.operand.problem, batches)
            with batch_invariant():
                precompile(problems, weight.words.device.index)
        return invariant


class ActivationOrder(Marlinq):
    """The same operator with channels to be gathered first: here shuffled inside their groups."""

    name = "act-order"
    any_format = False

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        k, group_size = weight.layer.k, weight.group_size if weight.group_size > 0 else weight.layer.k
        starts = torch.arange(0, k, group_size, device=weight.words.device)[:, None]
        shuffled = torch.rand(k // group_size, group_size, device=starts.device).argsort(1) + starts
        order = shuffled.flatten()
        words = pack_tiles(weight.codes()[order])
        shuffled_weight = replace(weight, operand=replace(weight.operand, words=words))
        return _operator(shuffled_weight, copies, order.to(torch.int32))


class Cublas:
    """A dense product of 16-bit weights stored [N, K], as ``nn.Linear`` runs it."""

    name = "cublas"
    any_format = True

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        return None

    def nbytes(self, weight: Weight) -> int:
        return 2 * weight.layer.n * weight.layer.k

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        dense = weight.dense().to(weight.scales.dtype).t().contiguous()
        weights = [dense, *(dense.clone() for _ in range(copies - 1))]
        return lambda copy, x: torch.mm(x, weights[copy].t())


class Humming:
    """The package ``humming-kernels`` with its own tuning."""

    name = "humming"
    any_format = False

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        if importlib.util.find_spec("humming") is None:
            return "not installed; pip install humming-kernels==0.1.19"
        return None

    def nbytes(self, weight: Weight) -> int:
        return weight.nbytes

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        from humming.forward import humming_forward
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        config = {
            "dtype": "uint4",
            "group_size": max(weight.group_size, 0),
            "has_zero_point": weight.zeros is not None,
        }
        layer = HummingLayer(
            shape_n=weight.layer.n,
            shape_k=weight.layer.k,
            weight_config=config,
            torch_dtype=weight.scales.dtype,
        ).to(weight.words.device)
        zeros = weight.natural_zeros()
        tensors = {
            "weight": _pack_rows(weight.codes().t()),
            "weight_scale": weight.natural_scales().t().contiguous(),
        }
        if zeros is not None:
            tensors["zero_point"] = _pack_rows(zeros).t().contiguous()
        layer.load_from_tensors(tensors)
        layer.transform()
        names = ("weight", "weight_scale", "zero_point", "locks")
        packed = {name: value for name in names if (value := getattr(layer, name, None)) is not None}
        # Its stream-K locks can't be shared by launches that overlap, so each copy has its own.
        operands = [{name: value.detach().clone() for name, value in packed.items()} for _ in range(copies)]
        humming_config = layer.humming_config
        # By default about ninety variants, one an interval (first, last] of M, compile at the first call.
        # Only those that will run are kept, and the one of M = 1, which its launcher asks for.
        intervals = get_heuristics_config(humming_config, device=weight.words.device)
        needed = {1, *batches}
        used = [entry for entry in intervals if any(entry[0] < m <= entry[1] for m in needed)]
        tuning = json.dumps(used)

        def run(copy: int, x: Tensor) -> Tensor:
            result: Tensor = humming_forward(humming_config, inputs=x, tuning_config=tuning, **operands[copy])
            return result

        return run


class Tinygemm:
    """The int4 product that comes with torch."""

    name = "tinygemm"
    any_format = False

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        if dtype != torch.bfloat16:
            return "takes bfloat16 only; choose --dtype bfloat16"
        return "takes groups of 32, 64 and 128" if group_size == -1 else None

    def nbytes(self, weight: Weight) -> int:
        return weight.nbytes + weight.scales.nbytes

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        codes = weight.codes().t().contiguous()
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        scales, zeros = weight.natural_scales(), weight.natural_zeros()
        # It computes (code - 8) * scale + offset.
        offset = torch.zeros_like(scales) if zeros is None else (_ZERO - zeros.to(scales.dtype)) * scales
        both = torch.stack((scales, offset), dim=-1).contiguous()
        operands = [(packed.clone(), both.clone()) for _ in range(copies)]
        group_size = weight.group_size

        def run(copy: int, x: Tensor) -> Tensor:
            words, scales_and_offsets = operands[copy]
            result: Tensor = torch.ops.aten._weight_int4pack_mm(x, words, group_size, scales_and_offsets)
            return result

        return run


PEERS: dict[str, Contender] = {
    peer.name: peer for peer in (Cublas(), Humming(), Tinygemm(), BatchInvariant(), ActivationOrder())
}


def _pack_rows(codes: Tensor) -> Tensor:
    """uint8 [R, C] to int32 [R, C/8], eight codes a word, the first in the lowest bits."""
    packed = torch.zeros((codes.shape[0], codes.shape[1] // 8), dtype=torch.int32, device=codes.device)
    for position in range(8):
        packed |= codes[:, position::8].to(torch.int32) << (4 * position)
    return packed
