"""Random problems, variants and schedules, from one seed.

``MARLINQ_FUZZ_SEED`` repeats a run, ``MARLINQ_FUZZ_PROBLEMS`` sets the problems of each weight format. A
failure is listed as the
expression that repeats it alone: ``run(builder, Case(...))``.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from emulation.build import Builder
from emulation.launching import KernelFault
from marlinq.kernels import GROUP_SIZES
from marlinq.kernels.choose.decision import estimates
from marlinq.kernels.contract.weight_formats import WEIGHT_FORMATS, WeightFormat
from marlinq.kernels.variants import KERNELS
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.emulation.gemm import AMPERE, H200, Case, operands_of, run
from tests.kernels.problems import SPREADS, bound_of, int4_problem

FORMATS = [each for each in WEIGHT_FORMATS.values() if each.codec is not None]
# In units of 64. Every length of a last chunk and a last tile, and enough steps to go round every ring twice.
_CHANNELS = (1, 2, 3, 5, 8, 9, 14, 17, 24, 33)
_COLUMNS = (1, 2, 3, 5, 7, 9)
_ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 33, 48, 64, 70, 100, 130, 177)


def draw(rng: random.Random, weight_format: WeightFormat) -> Case:
    """One case: any variant that a decision might choose."""
    groups = sorted({*GROUP_SIZES, weight_format.smallest_group})
    while True:
        k, n, m = 64 * rng.choice(_CHANNELS), 64 * rng.choice(_COLUMNS), rng.choice(_ROWS)
        group = rng.choice(groups)
        # The operator takes a group as long as K for a single one.
        if k % weight_format.channel_multiple or (group > 0 and (k % group or k == group)):
            continue
        zeros = weight_format.stores_zeros and rng.random() < 0.5
        problem = int4_problem(m, n, k, group, zeros, rng.random() < 0.5, weight_format)
        device = AMPERE if rng.random() < 0.1 else H200
        invariant = rng.random() < 0.2
        configs = [config for _, _, config in estimates(problem, device, rng.choice(KERNELS), invariant)]
        if configs:
            config = rng.choice(configs)
            if isinstance(config, WarpgroupConfig):
                # Fewer blocks than any GPU has room for, so that they take tile after tile.
                fewer = replace(config, most_blocks=rng.choice((1, 2, 3, 5, config.most_blocks)))
                # Warps that store then need memory for results, which a ring cut to measure may lack.
                if fewer.shared_bytes(problem) <= device.shared_bytes - 1024:
                    config = fewer
            return Case(
                problem,
                config,
                dependent=device.has_clusters and rng.random() < 0.5,
                bias=rng.random() < 0.5,
                x_padding=rng.choice((0, 8, 64)),
                seed=rng.getrandbits(31),
                capability=device.capability,
                resident=rng.choice((1, 2, 4, 8)),
                launches=rng.choice((1, 1, 1, 2)),
                spread=rng.choice(SPREADS),
                loud=isinstance(config, StreamConfig) and config.digits and rng.random() < 0.3,
            )


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda each: each.name)
def test_random_problems(builder: Builder, weight_format: WeightFormat) -> None:
    seed = int(os.environ.get("MARLINQ_FUZZ_SEED") or 0)
    count = int(os.environ.get("MARLINQ_FUZZ_PROBLEMS") or 3)
    rng = random.Random(seed)
    failures = []
    for _ in range(count):
        case = draw(rng, weight_format)
        try:
            error = run(builder, case)
        except KernelFault as fault:
            failures.append(f"{fault}: run(builder, {case})")
        else:
            # NaN compares false with everything.
            if not error < bound_of(operands_of(case)):
                failures.append(f"relative error {error:.2e}: run(builder, {case})")
    assert not failures, f"MARLINQ_FUZZ_SEED={seed}, {len(failures)} of {count}:\n" + "\n".join(failures[:20])
