"""Peak memory: a conversion holds less than two shards and the largest tensor, whatever the model's size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.quantized_folders import random_tuple, write

SHARD = 8 * 2**20
CHILD = """
import resource, sys
from marlinq.operations.convert import convert
tiny, model, target, shard = sys.argv[1:]
convert(tiny, tiny + "-out", target_format=target)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(model, model + "-out", target_format=target, max_shard_size=int(shard))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("target", ["marlin", "compressed-tensors"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, target: str) -> None:
    k, n, count = 4096, 2048, 16
    largest = k * n // 2
    modules = {f"model.layers.{i}.mlp.up_proj": random_tuple(k, n, i, group_size=128) for i in range(count)}
    model = write(tmp_path / "model", "gptq", modules)
    tiny = write(tmp_path / "tiny", "gptq", {"model.layers.0.mlp.up_proj": random_tuple(256, 256, 1)})
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny), str(model), target, str(SHARD)],
        check=True,
        capture_output=True,
        text=True,
    )
    limit = 2 * SHARD + largest
    assert int(run.stdout) * 1024 < limit
    assert count * largest > 3 * limit
