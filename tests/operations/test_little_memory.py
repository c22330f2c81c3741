"""Too little memory ends an operation with one line, in Python too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import marlinq
from marlinq.core.errors import EnvironmentProblem
from marlinq.operations.evaluate import measure
from marlinq.operations.quantize import plan_report, quantize_model
from marlinq.operations.quantize.plan_report import plan_quantize
from marlinq.operations.rotate import rotate_model
from marlinq.operations.verify import verify_checkpoint

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
    outputs = [] if operation in (marlinq.verify, marlinq.evaluate) else [tmp_path / "out"]
    with pytest.raises(EnvironmentProblem) as caught:
        operation(tmp_path, *outputs, device="cpu", progress=False)
    message, name = str(caught.value), operation.__name__.removeprefix("plan_")
    assert message.startswith(f"{name}: the {place} has too little memory ({type(error).__name__}: ")
    assert "\n" not in message
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("memory")])
def test_other_errors_keep_their_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(quantize_model, "prepare", failing(error))
    with pytest.raises(type(error)) as caught:
        marlinq.quantize(tmp_path, tmp_path / "out", device="cpu", progress=False)
    assert caught.value is error
