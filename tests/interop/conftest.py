"""The interoperability job: checkpoints by the published peers, and what the peers make of ours.

Everything of a peer runs in a process of its own. Checkpoints are written below MARLINQ_PEER_CHECKPOINTS
when that is set, and kept there; llm-compressor, which needs older companions, adds its own to that folder
from another environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = ("gptqmodel", "optimum", "compressed_tensors")
"""Packages that the tests of this folder import, unless :data:`FEWER_PEERS` says otherwise."""
FEWER_PEERS = {"test_vllm.py": (), "test_harness.py": (), "test_float_logits.py": ("compressed_tensors",)}
"""File -> packages of :data:`PEERS` that its tests need. vLLM's start programs in vLLM's own environment;
those of the evaluation harness need that package alone."""
_HERE = Path(__file__).parent
_ROWS = pytest.StashKey[list[str]]()
"""lines of the table of logits that is printed at the end of a run"""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    for item in items:
        lacking = [name for name in FEWER_PEERS.get(item.path.name, PEERS) if name in missing]
        if lacking and item.get_closest_marker("interop"):
            reason = f"needs the published peers ({', '.join(lacking)} not installed); run: make interop"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[_ROWS]:
        terminalreporter.section("logits against the peers")
        for row in config.stash[_ROWS]:
            terminalreporter.write_line(row)


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[str]:
    """Lines to print after the run."""
    return request.config.stash[_ROWS]


@pytest.fixture(scope="session")
def tokens() -> Any:
    """Token ids [2, 48] int64 that every model of this job is run on."""
    import torch

    from tests.interop.make_peer_checkpoints import VOCABULARY

    return torch.randint(3, VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def peer_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with ``base/`` and ``checkpoints/`` as make_peer_checkpoints.py lays them out."""
    kept = os.environ.get("MARLINQ_PEER_CHECKPOINTS")
    root = Path(kept).absolute() if kept else tmp_path_factory.mktemp("peers")
    _run("make_peer_checkpoints.py", str(root), "--writer", "gptqmodel", "--writer", "compressed-tensors")
    return root


class Answers:
    """Answers of the peers to a list of checkpoints, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def error(self, name: str) -> str | None:
        """The peer's message when it could not load or run the checkpoint."""
        path = self._folder / f"{name}.json"
        return json.loads(path.read_text())["error"] if path.exists() else None

    def tensors(self, name: str) -> dict[str, Any]:
        """The tensors that peer_side.py describes."""
        from safetensors.torch import load_file

        assert self.error(name) is None, self.error(name)
        return load_file(self._folder / f"{name}.safetensors")


def loader_of(folder: Path) -> str:
    """Name of the loader with which peer_side.py reads a checkpoint of the peers."""
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    # transformers drops per-module rules, GPTQModel's own loader follows them.
    return "gptqmodel" if raw.get("dynamic") else "transformers"


def ask_peers(
    folder: Path,
    tokens: Any,
    jobs: dict[str, tuple[Path, str]],
    *,
    dtype: str = "float32",
    decoded: bool = True,
) -> Answers:
    """Run peer_side.py over ``{name: (checkpoint, loader)}``, its files in ``folder``.

    In ``dtype``, but GPTQModel's own loader in float16; with the ``decoded`` modules, or the logits alone.
    """
    request = {
        "tokens": tokens.tolist(),
        "jobs": [
            {
                "folder": str(path),
                "out": str(folder / f"{name}.safetensors"),
                "loader": loader,
                "dtype": "float16" if loader == "gptqmodel" else dtype,
                "decoded": decoded,
            }
            for name, (path, loader) in jobs.items()
        ],
    }
    (folder / "request.json").write_text(json.dumps(request))
    _run("peer_side.py", str(folder / "request.json"))
    return Answers(folder)


@pytest.fixture(scope="session")
def peer_answers(peer_root: Path, tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The peers' reading of their own checkpoints."""
    jobs = {path.name: (path, loader_of(path)) for path in sorted((peer_root / "checkpoints").iterdir())}
    return ask_peers(tmp_path_factory.mktemp("answers"), tokens, jobs)


def _run(script: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(_HERE / script), *arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-4000:]}"
