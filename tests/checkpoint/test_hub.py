"""Hub ids, from a server on this machine: as the command line meets them, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from marlinq import evaluate
from tests.testing import forks
from tests.testing.hub_server import Hub, Repository, hub_server
from tests.testing.original_folders import save_tiny
from tests.testing.quantized_folders import model_tuples, write
from tests.testing.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
ELSEWHERE = ("consolidated.00.safetensors", "original/params.json", "model.bin")
"""Weights as other programs want them."""


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """org/tiny has two revisions, org/gated nobody may read."""
    with hub_server() as server:
        main = content(write(tmp_path / "main", "gptq", model_tuples()))
        other = content(write(tmp_path / "other", "gptq", model_tuples(group_size=64)))
        extra = dict.fromkeys(ELSEWHERE, b"x")
        server.repositories["org/tiny"] = Repository({"main": main | extra, "v2": other})
        server.repositories["org/gated"] = Repository({"main": main}, gated=True)
        server.repositories["org/empty"] = Repository({"main": {"README.md": b"nothing"}})
        yield server


# None of them reads an environment variable of the Hub's: huggingface_hub is imported by each process.
IMPORTED = (*forks.TORCH, "filelock", "fsspec", "httpx2", "numpy", "packaging.version", "tqdm.auto", "yaml")


def python(hub: Hub, home: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process with a cache under ``home`` and without a proxy."""
    inherited = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    return forks.run(code, modules=IMPORTED, env=inherited | own | environment, cwd=home.parent)


def marlinq(hub: Hub, home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in such a process."""
    code = f"from marlinq.cli import main\nmain({list(arguments)!r})"
    return python(hub, home, code, **environment)


def assert_refused(finished: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert finished.returncode == code, finished.stderr
    lines = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, finished.stderr
    assert "Traceback" not in finished.stderr
    for part in parts:
        assert part in lines[0]


def test_files_and_revisions(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = marlinq(hub, home, "inspect", "org/tiny", "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["group_sizes"] == [32]
    assert not set(ELSEWHERE) & hub.sent.keys()
    second = marlinq(hub, home, "inspect", "org/tiny", "--revision", "v2", "--json")
    assert json.loads(second.stdout)["group_sizes"] == [64]
    commit = hub.commit("org/tiny", "v2")
    assert commit is not None
    sent = dict(hub.sent)
    third = marlinq(hub, home, "inspect", "org/tiny", "--revision", commit, "--json")
    assert json.loads(third.stdout)["group_sizes"] == [64]
    assert dict(hub.sent) == sent, "a commit that is in the cache was downloaded again"


def test_absent_models_revisions_and_files_are_named(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert_refused(marlinq(hub, home, "inspect", "org/absent"), 3, "org/absent: neither a local folder nor a")
    assert_refused(
        marlinq(hub, home, "inspect", "org/tiny", "--revision", "v9"),
        3,
        "org/tiny: the Hub has no revision 'v9'",
    )
    assert_refused(
        marlinq(hub, home, "inspect", "org/gated"),
        8,
        f"org/gated: is gated and you have no access; ask for it at {hub.endpoint}/org/gated, then log in",
    )
    assert_refused(marlinq(hub, home, "inspect", "org/empty"), 3, "config.json: missing")
    assert_refused(
        marlinq(hub, home, "inspect", str(tmp_path / "main"), "--revision", "v2"),
        2,
        "is a local folder, which has no revision 'v2'; leave out --revision",
    )


def large_file(hub: Hub) -> bytes:
    """25 MB among the files of org/tiny: the library keeps what has come in pieces of 10 MiB."""
    data = b" " + bytes(range(32, 127)) * 265_000
    hub.repositories["org/tiny"].revisions["main"]["large.txt"] = data
    return data


def downloaded(home: Path) -> Path:
    (snapshot,) = (home / "hub" / "models--org--tiny" / "snapshots").iterdir()
    return snapshot


def test_a_connection_that_breaks_is_taken_up(hub: Hub, tmp_path: Path) -> None:
    data = large_file(hub)
    hub.break_after, hub.breaks = 12_000_000, 2
    finished = marlinq(hub, tmp_path / "home", "inspect", "org/tiny", "--json")
    assert finished.returncode == 0, finished.stderr
    assert hub.ranges == [("large.txt", 10 << 20), ("large.txt", 20 << 20)]
    assert (downloaded(tmp_path / "home") / "large.txt").read_bytes() == data


def test_a_download_that_was_killed_is_continued_by_the_next_command(hub: Hub, tmp_path: Path) -> None:
    data = large_file(hub)
    hub.break_after, hub.breaks = 12_000_000, 1
    home = tmp_path / "home"
    # The process ends where the library waits before its next attempt, when the weights have come.
    weights = home / "hub" / "models--org--tiny" / "snapshots"
    code = (
        "import os, pathlib, huggingface_hub.file_download as f\nwait = f.time.sleep\n"
        "def die(s):\n"
        f"    while not list(pathlib.Path({str(weights)!r}).glob('*/*.safetensors')): wait(0.1)\n"
        "    os._exit(9)\n"
        "f.time.sleep = die\nfrom marlinq.cli import main\nmain(['inspect', 'org/tiny'])"
    )
    killed = python(hub, home, code)
    assert killed.returncode == 9, killed.stderr
    offline = marlinq(hub, home, "inspect", "org/tiny", HF_HUB_OFFLINE="1")
    assert "Traceback" not in offline.stderr
    assert hub.sent["large.txt"] == hub.sent["model.safetensors"] == 1
    finished = marlinq(hub, home, "inspect", "org/tiny", "--json")
    assert finished.returncode == 0, finished.stderr
    # The library keeps files that came whole, and fetches the others anew.
    assert (hub.sent["large.txt"], hub.sent["model.safetensors"]) == (2, 1)
    assert (downloaded(home) / "large.txt").read_bytes() == data


def test_a_server_that_fails(hub: Hub, tmp_path: Path) -> None:
    hub.broken = True
    finished = marlinq(hub, tmp_path / "home", "inspect", "org/tiny")
    assert_refused(finished, 8, "org/tiny: the download broke off (", "whole are kept")


def test_the_cache_answers_without_a_network(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert_refused(
        marlinq(hub, home, "inspect", "org/tiny", HF_HUB_OFFLINE="1"),
        8,
        "org/tiny: not a local folder, and not to be had from the Hub (HF_HUB_OFFLINE is set); pass a folder",
    )
    assert marlinq(hub, home, "inspect", "org/tiny").returncode == 0
    asked = hub.sent.total()
    offline = marlinq(hub, home, "inspect", "org/tiny", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert "warning: org/tiny: read from the Hub's cache, for HF_HUB_OFFLINE is set" in offline.stderr
    assert hub.sent.total() == asked
    assert_refused(
        marlinq(hub, home, "inspect", "org/tiny", "--revision", "v2", HF_HUB_OFFLINE="1"),
        8,
        "org/tiny at v2: not a local folder",
        "models in the cache: org/tiny",
    )


def test_progress_is_told_in_megabytes(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/tiny"].revisions["main"]["large.json"] = b" " * 5_000_000 + b"{}"
    code = (
        "from marlinq.checkpoint import Checkpoint\nseen = []\n"
        "Checkpoint.open('org/tiny', progress=lambda *report: seen.append(report))\n"
        "import json\nprint(json.dumps(seen))"
    )
    finished = python(hub, tmp_path / "home", code)
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout)
    assert {stage for stage, _, _ in seen} == {"downloading org/tiny, MB"}
    done = [count for _, count, _ in seen]
    assert done == sorted(done)
    assert done[-1] == 5
    assert all(count <= total for _, count, total in seen)
    assert "Fetching" not in finished.stderr


def test_quantize_takes_a_hub_id_and_names_it_in_the_card(hub: Hub, tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "llama")
    (source / "README.md").write_text("---\nlicense: mit\n---\nOriginal.\n")
    hub.repositories["org/llama"] = Repository({"main": content(source)})
    home = tmp_path / "home"
    settings = ["--method", "rtn", "--group-size", "32", "--device", "cpu"]
    asked = ["quantize", "org/llama", "out", *settings, "--revision", "main"]
    finished = marlinq(hub, home, *asked)
    assert finished.returncode == 0, finished.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: org/llama\nbase_model_relation: quantized\nlicense: mit\n" in card
    shutil.rmtree(tmp_path / "out")


def test_eval_reads_its_model_at_a_revision(hub: Hub, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "first")
    second = tiny_model("llama")
    second.lm_head.weight.data *= 2
    second.save_pretrained(tmp_path / "second")
    revisions = {"main": content(tmp_path / "first"), "v2": content(tmp_path / "second")}
    hub.repositories["org/llama"] = Repository(revisions)
    settings = ["--against", str(tmp_path / "second"), "--windows", "1", "--length", "8", "--device", "cpu"]
    arguments = ["eval", "org/llama", "--revision", "v2", *settings, "--json"]
    finished = marlinq(hub, tmp_path / "home", *arguments)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["kl"] == 0
    # That of the main branch predicts something else.
    first = evaluate(tmp_path / "first", against=tmp_path / "second", windows=1, length=8, device="cpu")
    assert first.kl is not None
    assert first.kl > 0
