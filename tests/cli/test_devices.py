"""Every command that takes a device answers alike when it is not there, and when it is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized
from tests.testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint as it was, and quantised."""
    root = tmp_path_factory.mktemp("devices")
    save_plain(root / "plain", tiny_model("llama"))
    save_quantized(root / "quantized", tiny_model("llama"), "gptq", random_quantizer())
    return str(root / "plain"), str(root / "quantized")


def command_lines(folders: tuple[str, str], out: Path) -> list[list[str]]:
    plain, quantized = folders
    return [
        ["quantize", plain, str(out)],
        ["verify", quantized],
        ["eval", plain],
        ["generate", quantized, "--prompt", "x"],
        ["bench", "kernels"],
        ["bench", "decode", quantized],
    ]


@pytest.mark.parametrize(
    ("device", "code", "message"),
    [
        (
            "cuda:7",
            8,
            (
                "error: device cuda:7: torch sees no CUDA devices; run `marlinq doctor`, or choose "
                "the device cpu\n"
            ),
        ),
        ("tpu", 2, "error: device: expected auto, cpu, cuda or cuda:N, found 'tpu'\n"),
    ],
)
def test_all_commands_say_the_same_of_a_device(
    marlinq: Callable,
    folders: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in command_lines(folders, tmp_path / "out"):
        outcome = marlinq(*arguments, "--device", device)
        assert (outcome.code, outcome.err) == (code, message), arguments
    assert not list(tmp_path.glob("out*"))
