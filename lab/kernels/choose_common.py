"""Choose the warpgroup kernel's variants that serve batches which are no powers of two.

    python lab/kernels/choose_common.py --count 8

Needs no GPU. By the cost model, one variant after the other is added that lowers the squared logarithm of
what the chosen ones cost over the best of all, summed over the layers of some models and over batches. A
line says what the variants chosen so far cost. The table is ``_COMMON`` of ``kernels/variants/warpgroup.py``.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict

from marlinq.core.granularity import Granularity
from marlinq.kernels import Problem, decide
from marlinq.kernels.choose.decision import buckets
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.variants import warpgroup, warpgroup_costs
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from marlinq.operations.bench.shapes import MODELS

Shape = tuple[int, int, int, int, int, bool]
_UNSERVED = math.log(3.0)
"""cost of a batch that no chosen variant serves, as a logarithm of time over the best"""
_BATCHES = (48, *range(80, 257, 16), *range(272, 1025, 32), *range(1088, 8193, 192))


def shape(config: WarpgroupConfig) -> Shape:
    """The entry of ``_COMMON`` for a configuration."""
    return config.tile_m, config.words, config.warpgroups_n, config.parts_k, config.cluster, config.stream_k


def excesses(problem: Problem) -> dict[Shape, float]:
    """Variant -> logarithm of its expected time over the best variant's."""
    found = {
        shape(config): warpgroup_costs.estimate(problem, H200, config)[0]
        for config in warpgroup.candidates(problem, H200)
        if config.rows == 8 and config.min_blocks == 1
    }
    best = min(found.values())
    return {one: math.log(seconds / best) for one, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=8, help="variants to choose")
    parser.add_argument("--model", action="append", choices=sorted(MODELS), default=[])
    models = parser.parse_args().model or ["llama-3-8b", "llama-3-70b", "qwen3-32b"]
    count = parser.parse_args().count
    layers = [layer for model in models for layer in MODELS[model].layers(model)]
    cells = [
        excesses(
            Problem(m, layer.n, layer.k, Granularity.group(128), zeros=False, bfloat16=False, format=INT4)
        )
        for layer in layers
        for m in _BATCHES
        if m.bit_count() > 1
    ]
    powers = {
        decide(
            Problem(m, layer.n, layer.k, Granularity.group(128), zeros=False, bfloat16=False, format=INT4),
            H200,
        ).config
        for layer in MODELS[models[0]].layers(models[0])
        for m in buckets(8192)
        if m.bit_count() == 1
    }
    print(f"{models[0]} has {len(powers)} variants for powers of two")
    cost = [_UNSERVED] * len(cells)
    for number in range(1, count + 1):
        gained: defaultdict[Shape, float] = defaultdict(float)
        for now, cell in zip(cost, cells, strict=True):
            for one, excess in cell.items():
                if excess < now:
                    gained[one] += now**2 - excess**2
        chosen = max(gained, key=gained.__getitem__)
        cost = [min(now, cell.get(chosen, now)) for now, cell in zip(cost, cells, strict=True)]
        mean, worst = math.exp(sum(cost) / len(cost)), math.exp(max(cost))
        print(f"{number:3} {chosen!s:34} chosen / best {mean:.3f}, worst {worst:.2f}", flush=True)


if __name__ == "__main__":
    main()
