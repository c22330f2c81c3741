"""This package's kernels, through their torch operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.formats.layouts.marlin import pack_tiles
from marlinq.kernels import GEMMS, Problem, batch_invariant, device_numbers, precompile
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.experts import ExpertWeights, routed_experts
from marlinq.kernels.ops.w4a8 import w4a8_gemm
from marlinq.kernels.variants.warpgroup_fp8 import refusal
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.peers.contenders import Routing, Run, RunLayer
from marlinq.operations.bench.weights import Weight


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
    """The operator of this package where a row's result must not depend on the batch around it."""

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


class Fp8Activations(Marlinq):
    """The product whose activations are rounded to FP8, with the launch that rounds them."""

    name = "fp8-activations"
    any_format = False

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        groups = Granularity.from_group_size(group_size)
        problem = Problem(1, 128, 128, groups, asymmetric, dtype == torch.bfloat16, INT4)
        return refusal(problem, device_numbers(torch.cuda.current_device()))

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        operands = [(weight.words.clone(), weight.scales.clone()) for _ in range(copies)]
        return lambda copy, x: w4a8_gemm(x, *operands[copy], None, weight.layer.n)


class ActivationOrder(Marlinq):
    """The operator of this package with channels to be gathered first: here shuffled inside their groups."""

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


class MarlinqExperts:
    """The kernels of this package, through their torch operator: sorting, both products, sum."""

    name = "marlinq"

    def __init__(self) -> None:
        self._weights: ExpertWeights | None = None

    def unavailable(self) -> str | None:
        return None

    def load(
        self, layer: ExpertsLayer, weights: ExpertWeights, scale_dtype: torch.dtype | None = None
    ) -> None:
        self._weights = weights

    def prepare(self, m: int, routings: Sequence[Routing]) -> RunLayer:
        weights = self._weights
        assert weights is not None

        def run(number: int, x: Tensor) -> Tensor:
            routing = routings[number]
            return routed_experts(x, routing.ids, routing.weights, weights)

        return run
