"""Peak memory: a conversion holds less than two shards and the largest tensor, whatever the model's size."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from tests.testing.quantized_folders import random_tuple, write

SHARD = 8 * 2**20
CHILD = """
import resource, sys
from marlinq.operations.convert import convert
tiny, model, target, shard = sys.argv[1:]
convert(tiny, f"{tiny}-{target}", target_format=target)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(model, f"{model}-{target}", target_format=target, max_shard_size=int(shard))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


K, N, COUNT = 4096, 2048, 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of ``COUNT`` large modules, and one of a small one."""
    folder = tmp_path_factory.mktemp("memory")
    # Their values make no difference, so all have the same.
    names = [f"model.layers.{number}.mlp.up_proj" for number in range(COUNT)]
    weight = random_tuple(K, N, 0, group_size=128)
    model = write(folder / "model", "gptq", {name: deepcopy(weight) for name in names})
    return model, write(folder / "tiny", "gptq", {names[0]: random_tuple(256, 256, 1)})


@pytest.mark.parametrize("target", ["marlin", pytest.param("compressed-tensors", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_model(folders: tuple[Path, Path], target: str) -> None:
    model, tiny = folders
    largest = K * N // 2
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny), str(model), target, str(SHARD)],
        check=True,
        capture_output=True,
        text=True,
    )
    limit = 2 * SHARD + largest
    assert int(run.stdout) * 1024 < limit
    assert COUNT * largest > 3 * limit
