"""Too little memory ends an operation with one line, in Python too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import marlinq
from marlinq.cli import main
from marlinq.core.errors import EnvironmentProblem
from marlinq.operations.evaluate import measure
from marlinq.operations.quantize import plan_report, quantize_model
from marlinq.operations.quantize.plan_report import plan_quantize
from marlinq.operations.rotate import rotate_model
from marlinq.operations.verify import verify_checkpoint
from marlinq.runtime import loading
from tests.testing.original_folders import save_tiny

FULL = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")
HOST = RuntimeError(
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "place"), [(FULL, "device"), (HOST, "host"), (MemoryError("array"), "host")]
)
@pytest.mark.parametrize(
    ("module", "name", "operation"),
    [
        (quantize_model, "resolve_device", marlinq.quantize),
        (plan_report, "resolve_device", plan_quantize),
        (rotate_model, "resolve_device", marlinq.rotate),
        (verify_checkpoint, "locate", marlinq.verify),
        (measure, "load", marlinq.evaluate),
        (loading, "place", marlinq.load),
    ],
)
def test_too_little_memory_is_an_error_of_the_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    place: str,
    module: Any,
    name: str,
    operation: Callable[..., Any],
) -> None:
    monkeypatch.setattr(module, name, failing(error))
    outputs = [] if operation in (marlinq.verify, marlinq.evaluate, marlinq.load) else [tmp_path / "out"]
    if operation is marlinq.load:
        save_tiny("llama", tmp_path)
    with pytest.raises(EnvironmentProblem) as caught:
        operation(tmp_path, *outputs, device="cpu", progress=False)
    message, name = str(caught.value), operation.__name__.removeprefix("plan_")
    assert message.startswith(f"{name}: the {place} has too little memory ({type(error).__name__}: ")
    assert "\n" not in message
    assert caught.value.__cause__ is error


def test_generate_tells_of_too_little_memory_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "place", failing(FULL))
    model = save_tiny("llama", tmp_path / "model")
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(model), "--prompt", "a", "--device", "cpu"])
    assert ended.value.code == EnvironmentProblem.exit_code
    assert capsys.readouterr().err.startswith("error: load: the device has too little memory (")


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("memory")])
def test_other_errors_keep_their_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(quantize_model, "prepare", failing(error))
    with pytest.raises(type(error)) as caught:
        marlinq.quantize(tmp_path, tmp_path / "out", device="cpu", progress=False)
    assert caught.value is error
