"""A small set of a decode step's kernels for compute-sanitizer to watch: all that stands between products,
the sampler, and the launch of all layers.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.kernels.small_steps
    ... --tool racecheck ... python -m tests.kernels.small_steps --no-single-launch

The single launch is left out for racecheck and synccheck. To the first, an mbarrier at which one lane arrives
for its warp orders that lane's accesses alone: it reports sums that a warp leaves and another one adds, and
nothing once every lane arrives. The second reports warps that come to a numbered barrier on different ways.
The emulation checks both (``tests/emulation``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.kernels import test_persistent, test_sample, test_step_gpu


def checks(*, single_launch: bool) -> Iterator[Callable[[], None]]:
    """The small ones of the GPU tests' cases for each kind of kernel."""
    for dtype in test_step_gpu.DTYPES:
        for kind, width in (("RMS", 576), ("RMS_WIDE", 64), ("LAYER", 4096)):
            yield partial(test_step_gpu.test_residual_stream_and_norm, kind, width, 3, dtype)
        for correction, experts, scoring in (
            ("none", 60, "softmax"),
            ("plain", 130, "sigmoid"),
            ("groups", 256, "sigmoid"),
            ("zeroed", 64, "softmax"),
        ):
            yield partial(test_step_gpu.test_routers, correction, experts, 320, 4, scoring, 3, dtype)
        yield partial(test_step_gpu.test_activations, 5, "silu", dtype)
        yield partial(test_step_gpu.test_rotation_and_cache, 7, 9, 3, 64, dtype)
        for heads, kv, size in test_step_gpu.SHAPES[:4]:
            yield partial(test_step_gpu.test_attention, 2, heads, kv, size, dtype)
        if single_launch:
            yield partial(test_persistent.test_captured_steps_are_those_of_float64, dtype, [500])
    yield test_step_gpu.test_embeddings_and_lengths
    yield test_sample.test_faults_are_reported_on_the_gpu


def main() -> None:
    """Run all cases; the first that fails ends the run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--no-single-launch", action="store_true", help="leave the launch of all layers out")
    options = parser.parse_args()
    torch.manual_seed(0)
    done = 0
    for check in checks(single_launch=not options.no_single_launch):
        check()
        done += 1
    print(f"{done} checks of a step's kernels passed")


if __name__ == "__main__":
    main()
