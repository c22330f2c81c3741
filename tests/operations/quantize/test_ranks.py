"""Several processes that share a run, over gloo on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marlinq.calibration import Document, make_batches
from marlinq.core.devices import rank_and_size, resolve_device
from marlinq.core.errors import EnvironmentProblem, UsageError
from marlinq.methods.hessian import HessianAccumulator
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.ranks import Ranks, joined_ranks, own_batches, own_share, share_out
from marlinq.operations.quantize.recipe import Recipe, read_recipe
from tests.operations.quantize.test_quantize import open_quantized
from tests.testing import forks
from tests.testing.mixtures import calibration_text, save_mixture
from tests.testing.original_folders import READ, RECIPE, save_tiny
from tests.testing.recipes import write_recipe

ROOT = Path(__file__).parents[3]


def text_file(folder: Path) -> Path:
    """Token ids of twelve documents, of two lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 120, (24 + 16 * (n % 2),), generator=generator).tolist() for n in range(12)]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def recipe_file(folder: Path, **changes: Any) -> Path:
    recipe = RECIPE.replace(calibration=str(text_file(folder)), samples=12, **changes)
    write_recipe(recipe, folder / "recipe.yaml")
    return folder / "recipe.yaml"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def environment(size: int, rank: int, port: int, **more: str) -> dict[str, str]:
    """Environment variables that torchrun sets for a rank."""
    own = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return {**os.environ, **own, **more}


def start(size: int, *arguments: str, dies: int | None = None) -> list[forks.Process]:
    """The command line on ``size`` ranks; rank ``dies`` is killed while it quantises its second block."""
    port = free_port()
    code = f"from marlinq.cli import main\nmain({list(arguments)!r})"
    killing = (
        "import os, signal\nfrom marlinq.operations.quantize.blocks import BlockQuantizer\n"
        "before = BlockQuantizer._quantize\n"
        "def quantize(self, index, *rest, **named):\n"
        "    if index == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return before(self, index, *rest, **named)\n"
        "BlockQuantizer._quantize = quantize\n"
    )
    return [
        forks.start(
            (killing if rank == dies else "") + code,
            modules=forks.QUANTIZE,
            env=environment(size, rank, port),
        )
        for rank in range(size)
    ]


def finished(processes: list[forks.Process]) -> list[tuple[int | None, str, str]]:
    """Exit code, output and errors of each."""
    try:
        found = [(*process.communicate(timeout=150), process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.poll(), out, errors) for out, errors, process in found]


def run_ranks(size: int, source: Path, out: Path, recipe: Path, *more: str) -> None:
    asked = ("quantize", str(source), str(out), "--recipe", str(recipe), "--device", "cpu", *more)
    for code, _, errors in finished(start(size, *asked)):
        assert code == 0, errors


def assert_agree(one: Path, other: Path) -> None:
    """The same sums in another order: a weight that lay between two codes may fall to the other side, and
    what follows the block sees that. Fewer than 1 code in 1000, and errors that agree to 1 in 1000."""
    first, second = open_quantized(one), open_quantized(other)
    assert first.modules.keys() == second.modules.keys()
    for name in first.modules:
        mine, theirs = first.load(name), second.load(name)
        assert (mine.codes != theirs.codes).float().mean() < 1e-3, name
    notes = [json.loads((folder / "marlinq.json").read_text())["run"] for folder in (one, other)]
    assert notes[0].keys() == notes[1].keys()
    assert notes[0]["calibration"] == notes[1]["calibration"]
    for key in notes[0]:
        if key.startswith("module "):
            for exact in ("tokens", "fallback", "scheme"):
                assert notes[0][key][exact] == notes[1][key][exact]
            assert notes[0][key]["relative_error"] == pytest.approx(notes[1][key]["relative_error"], rel=1e-3)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "model")


# Every time a job of three ranks that continues one of two is compared, below.
@pytest.mark.slow
@pytest.mark.parametrize("head", ["none", "int4"])
def test_two_ranks_and_one_process_give_nearly_the_same_codes(
    source: Path, tmp_path: Path, head: str
) -> None:
    recipe = recipe_file(tmp_path, quantize_head=head)
    run_ranks(2, source, tmp_path / "two", recipe)
    quantize(source, tmp_path / "one", recipe=read_recipe(recipe), device="cpu")
    assert_agree(tmp_path / "one", tmp_path / "two")
    report = json.loads((tmp_path / "two" / "report.json").read_text())["checkpoints"][0]
    assert report["time"]["ranks"] == 2


@pytest.mark.slow
def test_experts_are_shared_too(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "qwen3-moe", num_experts_per_tok=1)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    # Nobody chooses expert 3, whose score is 0 where one of the first two is above.
    router = tensors["model.layers.0.mlp.gate.weight"]
    router[1], router[3] = -router[0], 0
    save_file(tensors, path, metadata={"format": "pt"})
    calibration_text(tmp_path)
    text = str(tmp_path / "calibration.txt")
    recipe = Recipe(group_size=32, calibration=text, samples=8, max_length=48, expert_tokens=40)
    write_recipe(recipe, tmp_path / "recipe.yaml")
    run_ranks(2, tmp_path / "model", tmp_path / "two", tmp_path / "recipe.yaml")
    quantize(tmp_path / "model", tmp_path / "one", recipe=recipe, device="cpu")
    assert_agree(tmp_path / "one", tmp_path / "two")
    run = json.loads((tmp_path / "two" / "marlinq.json").read_text())["run"]
    starved = run["module model.layers.0.mlp.experts.3.gate_proj"]
    assert starved["tokens"] == 0
    assert starved["fallback"].startswith("0 tokens, fewer than 40 tokens: Hessian blended")


@pytest.mark.slow
def test_only_the_first_rank_prints(source: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, method="rtn")
    asked = ("quantize", str(source), str(tmp_path / "two"), "--recipe", str(recipe), "--device", "cpu")
    (code, out, errors), (other, silence, noise) = finished(start(2, *asked))
    assert (code, other) == (0, 0), errors + noise
    assert out.startswith("made ")
    assert silence == noise == ""
    # Each weight is rounded on its own: no bit depends on who did it.
    quantize(source, tmp_path / "one", recipe=read_recipe(recipe), device="cpu")
    names = ("model.safetensors", "config.json", "quantize_config.json")
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_a_dead_rank_ends_the_job_and_another_number_of_ranks_resumes_it(
    source: Path, tmp_path: Path
) -> None:
    recipe = recipe_file(tmp_path, quantize_head="int4")
    asked = ("quantize", str(source), str(tmp_path / "out"), "--recipe", str(recipe), "--device", "cpu")
    began = time.monotonic()
    (code, out, errors), (dead, _, _) = finished(start(2, *asked, dies=1))
    assert dead == -signal.SIGKILL
    assert code == EnvironmentProblem.exit_code, errors
    assert time.monotonic() - began < 120
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "rank 0 of 2: another rank ended, or did not answer" in lines[0]
    assert "start the command again with --resume and any number of ranks" in lines[0]
    assert "Traceback" not in errors
    assert out == ""
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / "journal.jsonl").exists()

    # Three continue what two began.
    run_ranks(3, source, tmp_path / "out", recipe, "--resume")
    quantize(source, tmp_path / "one", recipe=read_recipe(recipe), device="cpu")
    assert_agree(tmp_path / "one", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())["checkpoints"][0]
    assert report["time"]["ranks"] == 3


@pytest.mark.slow
def test_torchrun_starts_it(source: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
        str(free_port()), "-m", "marlinq", "quantize", str(source), str(tmp_path / "two"), "--recipe",
        str(recipe), "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("made ")
    assert open_quantized(tmp_path / "two").modules


def test_a_silent_rank_is_waited_for_only_so_long(source: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path)
    port = free_port()
    asked = ["quantize", str(source), str(tmp_path / "out"), "--recipe", str(recipe), "--device", "cpu"]
    alone = forks.run(
        f"from marlinq.cli import main\nmain({asked!r})",
        modules=forks.QUANTIZE,
        env=environment(2, 0, port, MARLINQ_RANK_TIMEOUT="1"),
    )
    assert alone.returncode == EnvironmentProblem.exit_code, alone.stderr
    assert "did not answer within 1 s" in alone.stderr
    assert not (tmp_path / "out.partial").exists()


def test_shares_of_solves() -> None:
    llama = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    alone = sum(k**3 / 3 + n * k**2 for n, k in llama)
    for size in (1, 2, 3, 8):
        shares = share_out(llama, size)
        loads = [0.0] * size
        for (n, k), share in zip(llama, shares, strict=True):
            rows = [share.rows(n, owner) for owner in share.owners]
            # Every channel is somebody's, and only his.
            assert [part.start for part in rows] == [0, *(part.stop for part in rows[:-1])]
            assert rows[-1].stop == n
            for owner, part in zip(share.owners, rows, strict=True):
                loads[owner] += k**3 / 3 + (part.stop - part.start) * k**2
        # Each owner of the widest solve factorises its Hessian, which costs more than all its channels: it is
        # best cut evenly, and so is what is left.
        repeated = (size - 1) / size * 14336**3 / 3
        assert max(loads) <= 1.1 * (alone / size + repeated)
    assert [share.owners for share in share_out(llama, 1)] == [(0,)] * 4
    experts = share_out([(4096, 2048)] * 64, 8)
    assert all(len(share.owners) == 1 for share in experts)
    assert sorted(share.owners[0] for share in experts) == sorted(list(range(8)) * 8)


def test_shares_of_batches() -> None:
    sizes = [10, 9, 8, 7, 6, 5]
    parts = [own_share(sizes, Ranks(rank, 3)) for rank in range(3)]
    assert sorted(index for part in parts for index in part) == list(range(6))
    assert [sum(sizes[index] for index in part) for part in parts] == [15, 15, 15]
    documents = [Document((3,) * length) for length in (9, 9, 8, 8, 4, 4, 2, 2)]
    whole = make_batches(documents, token_budget=1000)
    assert len(whole) == 1
    shares = [own_batches(documents, Ranks(rank, 2), token_budget=1000, pad=True) for rank in range(2)]
    assert sorted(length for batches in shares for batch in batches for length in batch.lengths) == sorted(
        map(len, documents)
    )
    assert all(shares)
    with pytest.raises(UsageError, match="1 document for 2 ranks"):
        own_batches(documents[:1], Ranks(0, 2), token_budget=10, pad=True)


def test_shares_of_a_hessian_add_up() -> None:
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    whole = HessianAccumulator(16, device=torch.device("cpu"), name="x")
    whole.add(x)
    # The last rank saw none.
    shares = [HessianAccumulator(16, device=torch.device("cpu"), name="x") for _ in range(3)]
    shares[0].add(x[:13])
    shares[1].add(x[13:])
    (first,), *others = [share.as_share(50) for share in shares]
    for (other,) in others:
        first += other
    assert shares[0].tokens == 50
    # Two sums of 50 products of size 1 each way: a few roundings of 2**-24 relative to the diagonal.
    torch.testing.assert_close(shares[0].hessian(), whole.hessian(), rtol=1e-5, atol=1e-5)
    empty = HessianAccumulator(4, device=torch.device("cpu"), name="x")
    (zeros,) = empty.as_share(0)
    assert not zeros.any()


def test_the_environment_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert rank_and_size() == (3, 4)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(UsageError, match="WORLD_SIZE=4, but .* is not set; start several ranks with torchrun"),
        joined_ranks(torch.device("cpu")),
    ):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert resolve_device("auto") == torch.device("cuda", 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert rank_and_size() == (0, 1)
    assert resolve_device("auto") == torch.device("cuda", 0)


def test_one_process_needs_no_group(source: Path, tmp_path: Path) -> None:
    report = quantize(source, tmp_path / "out", recipe=READ, device="cpu")
    assert report.modules
    assert not torch.distributed.is_initialized()
