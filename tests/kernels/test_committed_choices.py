"""Choices in the cells of the committed tables of times (``docs/results``).

The cost models are free to change where nothing was measured. In a cell of these tables they keep the
configuration whose time stands there, and no such time is more than 3 % behind another way of multiplying.
A change of a model that fails here needs new measurements, and then new tables and new data files.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from marlinq.core.granularity import Granularity
from marlinq.kernels import decide
from marlinq.kernels.choose.measured import measured_choice
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.experts.configurations import ExpertsShape
from marlinq.kernels.experts.experts_decision import decide_experts
from tests.kernels.problems import int4_problem

ROOT = Path(__file__).resolve().parents[2]
MOST = 1.03
"""multiple of the fastest known time that a choice may take"""


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


LAYERS = _read("docs/results/kernels-h200.json")
ROUTED = _read("docs/results/experts-h200.json")


def _flat(values: dict[str, Any]) -> list[object]:
    """Values of a configuration, those of a nested one in its place, numbers as integers."""
    flat: list[object] = []
    for value in values.values():
        flat += _flat(value) if isinstance(value, dict) else [value if isinstance(value, str) else int(value)]
    return flat


def test_layers_keep_the_configurations_that_were_measured() -> None:
    chosen: dict[str, dict[str, list[object]]] = {}
    for layer, (n, k) in LAYERS["shapes"].items():
        chosen[layer] = {}
        for m in LAYERS["batches"]:
            decision = decide(int4_problem(m, n, k, 128, False, False), H200)
            assert decision.config is not None
            chosen[layer][str(m)] = [decision.kernel, *_flat(asdict(decision.config))]
    assert chosen == _read("tests/kernels/data/chosen_variants_h200.json")


def test_routed_layers_keep_the_configurations_that_were_measured() -> None:
    group = Granularity.group(ROUTED["group_size"])
    chosen: dict[str, dict[str, list[list[object]]]] = {}
    for name, layer in ROUTED["layers"].items():
        sizes = layer["top"], layer["experts"], layer["hidden"], layer["inner"]
        chosen[name] = {}
        for m in ROUTED["batches"]:
            decision = decide_experts(ExpertsShape(m, *sizes, group, False, False, INT4), H200)
            chosen[name][str(m)] = [
                [type(config).__name__, *_flat(asdict(config))]
                for config in (decision.gate_up, decision.down)
            ]
    assert chosen == _read("tests/kernels/data/chosen_experts_h200.json")


@pytest.mark.parametrize("layer", LAYERS["shapes"])
def test_no_layer_is_behind_a_peer_or_a_measured_choice(layer: str) -> None:
    n, k = LAYERS["shapes"][layer]
    for place, m in enumerate(LAYERS["batches"]):
        times = {name: listed[place] for name, listed in LAYERS["microseconds"][layer].items()}
        own = times.pop("marlinq")
        measured = measured_choice(int4_problem(m, n, k, 128, False, False), H200)
        if measured is not None:
            times["measured choice"] = 1e6 * measured.seconds
        assert {name: time for name, time in times.items() if own > MOST * time} == {}, f"M={m}"


@pytest.mark.parametrize("name", ROUTED["layers"])
def test_no_routed_layer_is_behind_its_peer(name: str) -> None:
    layer = ROUTED["layers"][name]
    behind = [
        m
        for m, own, peer in zip(ROUTED["batches"], layer["marlinq"], layer["humming"], strict=True)
        if own > MOST * peer
    ]
    assert behind == []
