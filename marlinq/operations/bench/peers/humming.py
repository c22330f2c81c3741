"""The package ``humming-kernels``, with its own tuning."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlinq.formats.packing import pack_rows
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8, WeightFormat
from marlinq.kernels.experts import ExpertWeights, StoredExperts
from marlinq.kernels.experts.launch import start
from marlinq.kernels.experts.steps import place, shape_of, sum_step
from marlinq.kernels.experts.workspace import ExpertsWorkspace
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.peers.contenders import Routing, Run, RunLayer
from marlinq.operations.bench.synthetic_experts import gate_then_up
from marlinq.operations.bench.weights import Weight, scale_level, stored_codes, true_scales

_ELEMENTS = {INT4: "uint4", INT8: "uint8", E4M3: "float8e4m3", E2M1: "float4e2m1"}
"""Humming's names of the codes of weight formats."""
_STATE = ("weight", "weight_scale", "weight_scale_2", "zero_point", "locks")
"""Tensors of a layer that its products read."""


@dataclass(frozen=True)
class Given:
    """A weight, or those of a layer's E experts, as a ``HummingLayer`` takes it before it orders the codes.

    Attributes:
        config: ``weight_config``: type of the codes, channels of a scale (0 for all), types of the scales.
        tensors: ``weight`` int32 [N, K * bits / 32], codes in order from the lowest bits; ``weight_scale``
            [N, G]; where scales are E4M3, ``weight_scale_2``, float32 [1]; ``zero_point`` int32
            [N * bits / 32, G]. Those of experts begin with E.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def given(
    weight_format: WeightFormat,
    group_size: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scale_dtype: torch.dtype | None,
) -> Given:
    """A ``HummingLayer``'s weight for codes uint8 [K, N], true scales [G, N] and zero points uint8 [G, N].

    Scales are converted to ``scale_dtype``, their dtype in files, with which Humming multiplies; None keeps
    theirs.
    """
    bits = weight_format.bits
    config: dict[str, Any] = {
        "dtype": _ELEMENTS[weight_format],
        "group_size": max(group_size, 0),
        "has_zero_point": zeros is not None,
    }
    tensors = {"weight": pack_rows(codes, bits).t().contiguous()}
    rows = scales.t().contiguous()
    if scale_dtype == torch.float8_e4m3fn:
        config |= {"scale_dtype": "float8e4m3", "scale_2_type": "tensor"}
        level = scale_level(rows)
        tensors["weight_scale_2"] = torch.full((1,), level, device=rows.device)
        rows = (rows.float() / level).to(scale_dtype)
    elif scale_dtype is not None:
        config["scale_dtype"] = "float8e8m0"
        rows = rows.to(scale_dtype)
    tensors["weight_scale"] = rows
    if zeros is not None:
        tensors["zero_point"] = pack_rows(zeros.t().contiguous(), bits)
    return Given(config, tensors)


class Humming:
    """Products by humming."""

    name = "humming"
    any_format = True

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        return _missing()

    def nbytes(self, weight: Weight) -> int:
        return weight.nbytes

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        from humming.forward import humming_forward
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        loaded = given(
            weight.operand.format,
            weight.group_size,
            weight.codes(),
            weight.natural_scales(),
            weight.natural_zeros(),
            weight.scale_dtype,
        )
        layer = HummingLayer(
            shape_n=weight.layer.n,
            shape_k=weight.layer.k,
            weight_config=loaded.config,
            torch_dtype=weight.scales.dtype,
        ).to(weight.words.device)
        layer.load_from_tensors(loaded.tensors)
        layer.transform()
        packed = {name: value for name in _STATE if (value := getattr(layer, name, None)) is not None}
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

    def load(
        self, layer: ExpertsLayer, weights: ExpertWeights, scale_dtype: torch.dtype | None = None
    ) -> None:
        from humming.layer import HummingLayer

        self._weights, self._layer = weights, layer
        order = gate_then_up(layer, weights)
        self._layers = []
        for stored, columns in ((weights.gate_up, order), (weights.down, None)):
            experts, k, n = stored.shape
            loaded = experts_given(stored, columns, scale_dtype)
            packed = HummingLayer(
                shape_n=n,
                shape_k=k,
                num_experts=experts,
                weight_config=loaded.config,
                torch_dtype=stored.scales.dtype,
            ).to(stored.words.device)
            packed.load_from_tensors(loaded.tensors)
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
            workspace = ExpertsWorkspace(nothing, nothing, nothing, places, rows, nothing)
            given = x, routing.ids, routing.weights, weights, None, out, workspace
            start(place([sum_step(shape)], *given), x.device.index)
            return out

        return run


def experts_given(stored: StoredExperts, columns: Tensor | None, scale_dtype: torch.dtype | None) -> Given:
    """:func:`given` of all experts, with the stored columns ``columns``, or all in stored order."""
    weight_format = stored.format

    def ordered(value: Tensor) -> Tensor:
        return value if columns is None else value[:, columns]

    made = []
    for expert, (words, scales) in enumerate(zip(stored.words, stored.scales, strict=True)):
        zeros = None
        if stored.zeros is not None:
            zeros = ordered(weight_format.in_order(stored.zeros[expert])).to(torch.uint8)
        codes, true = (
            ordered(value)
            for value in (stored_codes(weight_format, words), true_scales(weight_format, scales))
        )
        made.append(given(weight_format, stored.granularity.group_size, codes, true, zeros, scale_dtype))
    tensors = {name: torch.stack([each.tensors[name] for each in made]) for name in made[0].tensors}
    if "weight_scale_2" in tensors:
        tensors["weight_scale_2"] = tensors["weight_scale_2"].flatten()
    return Given(made[0].config, tensors)


def _missing() -> str | None:
    if importlib.util.find_spec("humming") is None:
        return "not installed; pip install humming-kernels==0.1.19"
    return None
