"""The package ``humming-kernels``, with its own tuning."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.formats.layouts.marlin import permute_scales
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.experts import ExpertWeights, StoredExperts
from marlinq.kernels.experts.launch import Workspace, shape_of, start, sum_step
from marlinq.kernels.experts.layout import permute_single
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.peers.base import Routing, Run, RunLayer
from marlinq.operations.bench.synthetic_experts import gate_then_up
from marlinq.operations.bench.weights import Weight


class Humming:
    """Products by humming."""

    name = "humming"
    any_format = False

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        return _missing()

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
            "weight": pack_rows(weight.codes().t()),
            "weight_scale": weight.natural_scales().t().contiguous(),
        }
        if zeros is not None:
            tensors["zero_point"] = pack_rows(zeros).t().contiguous()
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


class HummingExperts:
    """Routed layers by humming's indexed products and activation.

    Humming has no kernel that sorts ids: they are sorted before the time is measured. The sum over experts
    runs in marlinq's own kernel.
    """

    name = "humming"

    def __init__(self) -> None:
        self._layers: list[Any] = []
        self._weights: ExpertWeights | None = None
        self._layer: ExpertsLayer | None = None

    def unavailable(self) -> str | None:
        return _missing()

    def load(self, layer: ExpertsLayer, weights: ExpertWeights) -> None:
        from humming.layer import HummingLayer

        if weights.down.format != INT4:
            raise UnsupportedError(f"it is measured with {INT4.name} weights alone")
        self._weights, self._layer = weights, layer
        order = gate_then_up(layer, weights)
        self._layers = []
        for stored, columns in ((weights.gate_up, order), (weights.down, None)):
            experts, k, n = stored.shape
            config = {
                "dtype": "uint4",
                "group_size": stored.granularity.channels,
                "has_zero_point": stored.zeros is not None,
            }
            packed = HummingLayer(
                shape_n=n,
                shape_k=k,
                num_experts=experts,
                weight_config=config,
                torch_dtype=stored.scales.dtype,
            ).to(stored.words.device)
            made = [_natural(stored, expert, columns) for expert in range(experts)]
            tensors = {
                "weight": torch.stack([pack_rows(codes.t()) for codes, _, _ in made]),
                "weight_scale": torch.stack([scales.t().contiguous() for _, scales, _ in made]),
            }
            if stored.zeros is not None:
                points = [zeros for _, _, zeros in made if zeros is not None]
                tensors["zero_point"] = torch.stack([pack_rows(zeros).t().contiguous() for zeros in points])
            packed.load_from_tensors(tensors)
            packed.transform()
            self._layers.append(packed)

    def prepare(self, m: int, routings: Sequence[Routing]) -> RunLayer:
        from humming.forward import may_process_input
        from humming.testing.data import generate_moe_tensors
        from humming.tune import get_heuristics_config

        layer, weights = self._layer, self._weights
        assert layer is not None
        assert weights is not None
        pairs = m * layer.top
        tunings, sorted_ids = [], []
        for packed in self._layers:
            chosen = get_heuristics_config(
                packed.humming_config, shape_m=pairs, gemm_type="indexed", device=packed.weight.device
            )
            tunings.append(json.dumps([[0, 1 << 30, chosen]]))
            block = chosen["block_shape"][0]
            sorted_ids.append(
                [
                    generate_moe_tensors(routing.ids, layer.experts, "indexed", block)[2:]
                    for routing in routings
                ]
            )
        compute = json.dumps({"gemm_type": "indexed"})
        places = torch.arange(pairs, dtype=torch.int32, device=routings[0].ids.device)

        def product(which: int, x: Tensor, number: int, top: int) -> Tensor:
            ids, experts, padded = sorted_ids[which][number]
            result: Tensor = self._layers[which](
                x,
                sorted_ids=ids,
                expert_ids=experts,
                num_tokens_padded=padded,
                top_k=top,
                compute_config=compute,
                tuning_config=tunings[which],
            )
            return result

        def run(number: int, x: Tensor) -> Tensor:
            routing = routings[number]
            both = product(0, x, number, layer.top)
            inner, _, _ = may_process_input(
                self._layers[1].humming_config,
                both,
                activation_type="binary_split",
                activation_impl="a / (1.f + __expf(-a)) * b",
            )
            rows = product(1, inner, number, 1)
            out = torch.empty_like(x)
            shape = shape_of(x, routing.ids, weights)
            nothing = rows[:0]
            workspace = Workspace(nothing, nothing, nothing, places, rows, nothing)
            start([sum_step(shape, routing.weights, out, workspace)], x.device.index)
            return out

        return run


def _natural(
    stored: StoredExperts, expert: int, columns: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [K, N], scales and zero points [G, N] of one expert in channel order, columns reordered."""
    words, scales = stored.words[expert], stored.scales[expert]
    codes = (INT4.dequantize(words, torch.ones_like(scales[:1]), None, torch.float32) + 8).to(torch.uint8)

    def ordered(value: Tensor) -> Tensor:
        natural = permute_single(value[None])[0] if value.shape[0] == 1 else permute_scales(value)
        return natural if columns is None else natural[:, columns]

    zeros = None if stored.zeros is None else ordered(stored.zeros[expert]).to(torch.uint8)
    return codes if columns is None else codes[:, columns], ordered(scales), zeros


def _missing() -> str | None:
    if importlib.util.find_spec("humming") is None:
        return "not installed; pip install humming-kernels==0.1.19"
    return None


def pack_rows(codes: Tensor) -> Tensor:
    """uint8 [R, C] to int32 [R, C/8], eight codes a word, the first in the lowest bits."""
    packed = torch.zeros((codes.shape[0], codes.shape[1] // 8), dtype=torch.int32, device=codes.device)
    for position in range(8):
        packed |= codes[:, position::8].to(torch.int32) << (4 * position)
    return packed
