from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from marlinq.core import native_output
from marlinq.core.native_output import told_as_warning
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model


def test_keys_that_tokenizers_does_not_know_are_a_warning(tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model("llama"))
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"0": {"content": "<pad>", "special": True, "\x1b[2J\n{}": 1}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "marlinq", "inspect", str(tmp_path), "--for", "marlinq", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["servers"][0]["loads"]
    assert ended.stderr == (
        f"warning: {tmp_path}: printed while its tokenizer or processor was read: "
        "Ignored unknown kwarg option \\x1b[2J {}\n"
    )


def test_stdout_is_caught_only_where_it_is_the_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_output, "command_line", lambda: None)
    with told_as_warning(tmp_path):
        os.write(1, b"before")
    assert capfd.readouterr().out == "before"
    monkeypatch.setattr(native_output, "command_line", lambda: "marlinq inspect")
    with (
        pytest.warns(
            UserWarning, match=f"{tmp_path}: printed while its tokenizer or processor was read: said x+$"
        ),
        told_as_warning(tmp_path),
    ):
        os.write(1, b"said\n" + b"x" * 10_000)
    with pytest.raises(KeyError), told_as_warning(tmp_path):
        raise KeyError
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"
