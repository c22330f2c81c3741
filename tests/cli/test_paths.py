"""A wrong path or option is answered before torch or transformers is imported."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from marlinq.core.model_source import is_hub_id, local_folder
from tests.cli.test_main import HEAVY
from tests.testing import forks
from tests.testing.quantized_folders import plain_tensors, random_tuple, write

# huggingface_hub too: what is no Hub id never gets there.
UNWANTED = (*HEAVY, "huggingface_hub", "safetensors")


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code and stderr of the command in a process of its own, and which heavy modules it imported."""
    code = (
        "import json, sys\n"
        "from marlinq.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "finally:\n"
        f"    print(','.join(name for name in {UNWANTED!r} if name in sys.modules))\n"
    )
    done = forks.run(code, modules=forks.COMMANDS, cwd=folder)
    return done.returncode, done.stderr, done.stdout.strip()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with one checkpoint folder, one empty folder, one adapter and one file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            "inspect ''",
            2,
            "Invalid value for 'CKPT': found an empty text, as a variable that is not set leaves",
        ),
        ("recommend ''", 2, "Invalid value: found an empty text"),
        ("quantize model ''", 2, "Invalid value for 'OUT': found an empty text"),
        ("convert model '' --to awq", 2, "Invalid value: found an empty text"),
        ("report model --out ''", 2, "Invalid value for '--out': found an empty text"),
        ("inspect ./nosuch", 3, "./nosuch: not a folder, and not a Hub id of the form organisation/name"),
        ("inspect mode", 3, "mode: no such folder; did you mean model or models?"),
        ("inspect models/tinny", 3, "models/tinny: no such folder; did you mean models/tiny?"),
        ("inspect models/other", 3, "models/other: no such folder in models; for the Hub model"),
        ("verify file", 3, "file: is not a folder; pass the folder of a checkpoint"),
        ("verify model --against ./nosuch", 3, "./nosuch: not a folder"),
        ("inspect models", 3, "models: holds no config.json; pass the folder of a Hugging Face checkpoint"),
        ("inspect out.partial", 3, "out.partial: holds no config.json; it is the unfinished output of a run"),
        ("quantize lora out", 3, "lora: holds no config.json; it is an adapter; merge it into its model"),
        ("quantize ./nosuch out", 3, "./nosuch: not a folder"),
        ("rotate ./nosuch out", 3, "./nosuch: not a folder"),
        ("rotate model model", 9, "model: already exists"),
        ("rotate model model/out", 9, "model/out: lies inside model"),
        ("convert ./nosuch out --to awq", 3, "./nosuch: not a folder"),
        ("eval ./nosuch", 3, "./nosuch: not a folder"),
        ("eval model --against ./nosuch", 3, "./nosuch: not a folder"),
        ("generate ./nosuch --prompt x", 3, "./nosuch: not a folder"),
        ("bench decode ./nosuch", 3, "./nosuch: not a folder"),
        ("quantize model out --format gguf", 2, "Invalid value for '--format': expected one of gptq"),
        ("quantize model out --recipe nosuch.yaml", 2, "nosuch.yaml: can't read the recipe"),
        ("quantize model out --override x=y", 2, "--override 'x=y': expected REGEX=skip"),
        ("convert model out --to gguf", 2, "Invalid value for '--to': expected one of gptq"),
        ("quantize model model", 9, "model: already exists"),
        ("convert model model --to awq", 9, "model: already exists"),
        ("convert model model/out --to awq", 9, "model/out: lies inside model"),
        ("convert model file/out --to awq", 9, "file/out: can't be created"),
        ("quantize model out", 9, "out.partial: an unfinished run is here; continue it with --resume"),
        ("quantize model new --calibration nosuch.txt", 2, "text nosuch.txt: no such file"),
        ("quantize model new --calibration ./nosuch#text", 2, "text ./nosuch#text: no such file"),
        ("eval model --text data/nosuch.jsonl", 2, "text data/nosuch.jsonl: no such file"),
        ("inspect model --tp 0", 2, "Invalid value for '--tp'"),
    ],
)
def test_wrong_input_is_answered_before_anything_heavy(
    place: Path, arguments: str, code: int, message: str
) -> None:
    exit_code, err, imported = run(place, *shlex.split(arguments))
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert (exit_code, imported) == (code, "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("convert quantised out --to gptq", 2, "quantised: is in the gptq layout already"),
        ("convert awq-to-marlin quantised out", 2, "quantised: expected a awq checkpoint, found gptq"),
        ("convert plain out --to awq", 4, "plain: is not quantised; use marlinq quantize"),
    ],
)
def test_the_layout_is_told_before_torch_is_imported(
    place: Path, arguments: str, code: int, message: str
) -> None:
    write(place / "quantised", "gptq", {"model.layers.0.mlp.up_proj": random_tuple(128, 64, 1)})
    (place / "plain").mkdir()
    (place / "plain" / "config.json").write_text("{}")
    save_file(plain_tensors({}), place / "plain" / "model.safetensors")
    exit_code, err, imported = run(place, *arguments.split())
    assert err.startswith(f"error: {message}")
    assert (exit_code, imported) == (code, "")


def test_module_is_the_command(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "marlinq", "inspect", "./nosuch", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert json.loads(done.stdout)["class"] == "CheckpointError"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("org/name", True),
        ("org-1/Name_2.0-x", True),
        ("./name", False),
        ("../name", False),
        ("org/", False),
        ("org/name/more", False),
        ("org/-name", False),
        ("org/a--b", False),
        ("org/a..b", False),
        ("org/" + "x" * 93, False),
        ("name", False),
    ],
)
def test_hub_ids(text: str, valid: bool) -> None:
    assert is_hub_id(text) is valid


def test_a_cached_model_wins_over_a_folder_of_its_organisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--org--name").mkdir(parents=True)
    assert local_folder("org/name") is None


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder("org/name") == Path("org/name")


def test_checked_paths_reach_the_operation(marlinq: Callable, operation: Callable) -> None:
    verify = operation("marlinq.operations.verify", "verify")
    assert marlinq("verify", "model", "--against", "original").code == 0
    assert verify.arguments == ("model",)
    assert verify.options["against"] == "original"
    assert marlinq("verify", "model", "--against", "organisation/name").code == 0
    assert verify.options["against"] == "organisation/name"
