"""A small set of a decode step's kernels for compute-sanitizer to watch: all that stands between products,
the sampler, and the launch of all layers.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.kernels.small_steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.kernels import test_persistent, test_sample, test_step_gpu


def checks() -> Iterator[Callable[[], None]]:
    """Of each kind of kernel the GPU tests' own cases, the small ones."""
    for dtype in test_step_gpu.DTYPES:
        for kind, width in (("RMS", 576), ("RMS_WIDE", 64), ("LAYER", 4096)):
            yield partial(test_step_gpu.test_residual_stream_and_norm, kind, width, 3, dtype)
        yield partial(test_step_gpu.test_activations, 5, "silu", dtype)
        yield partial(test_step_gpu.test_rotation_and_cache, 7, 9, 3, 64, dtype)
        for heads, kv, size in test_step_gpu.SHAPES[:4]:
            yield partial(test_step_gpu.test_attention, 2, heads, kv, size, dtype)
        yield partial(test_persistent.test_captured_steps_are_those_of_float64, dtype, [500])
    yield test_step_gpu.test_embeddings_and_lengths
    yield test_sample.test_faults_are_reported_on_the_gpu


def main() -> None:
    torch.manual_seed(0)
    done = 0
    for check in checks():
        check()
        done += 1
    print(f"{done} checks of a step's kernels passed")


if __name__ == "__main__":
    main()
