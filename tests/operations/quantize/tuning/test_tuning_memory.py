"""Tuning: what is tuned follows from the memory of the device."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import EnvironmentProblem
from marlinq.models import build_blueprint
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.tuning import loop, tuning_run
from tests.operations.quantize.tuning.runs import TUNED
from tests.testing.original_folders import save_tiny


@pytest.mark.parametrize(
    ("memory", "rate", "expected"),
    [(10**9, 0.1, 0.1), (2 * 10**6, 0.1, 0.0), (2 * 10**6, 0.0, 0.0), (10**5, 0.1, None)],
)
def test_codes_are_tuned_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, rate: float, expected: float | None
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    # 110,592 weights, of which the tuning of codes would take 2.0 MB.
    plan = plan_output(checkpoint, blueprint, TUNED)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory)
    )
    settings = loop.TuningSettings(1, 1, 0.1, rate, True, 0)
    cuda = torch.device("cuda:0")
    if expected is None:
        with (
            pytest.warns(UserWarning, match="only scales are tuned"),
            pytest.raises(EnvironmentProblem, match="even if only scales are tuned"),
        ):
            tuning_run.settings_that_fit(plan, settings, cuda, 40)
        return
    with pytest.warns(UserWarning, match="only scales are tuned") if rate != expected else nullcontext():
        assert tuning_run.settings_that_fit(plan, settings, cuda, 40).code_rate == expected


def test_hidden_states_leave_room_for_what_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    plan = plan_output(checkpoint, blueprint, TUNED)
    device = SimpleNamespace(total_memory=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    settings = loop.TuningSettings(1, 1, 0.1, 0.1, True, 0)
    cuda = torch.device("cuda:0")
    tuned_bytes = tuning_run.tuning_bytes(plan, settings, cuda, 40)
    assert tuned_bytes == 110_592 * 18
    for memory, expected in (
        (10**8, 12_500_000),
        (3_000_000, int((3_000_000 * 0.7 - tuned_bytes) / 2)),
        (2_500_000, 0),
    ):
        device.total_memory = memory
        assert tuning_run.bytes_for_states(plan, settings, cuda, 40) == expected
    assert tuning_run.bytes_for_states(plan, settings, torch.device("cpu"), 40) == 0
    monkeypatch.setattr(loop, "_SMALL", 0)
    assert tuning_run.bytes_for_states(plan, settings, cuda, 40) == 0


def test_gradients_count_where_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    plan = plan_output(checkpoint, blueprint, TUNED)
    # 110,592 weights: 1.55 MB of 1.7 without gradients, 1.99 with them.
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1.7e6 / 0.7)
    )
    cuda = torch.device("cuda:0")
    # A micro-batch of 8192 places has 204 rows of 40 tokens: 8160.
    for small, tokens, expected in ((0, 8160, 0.1), (1 << 30, 8160, 0.0), (0, 8161, 0.0)):
        monkeypatch.setattr(loop, "_SMALL", small)
        settings = loop.TuningSettings(1, tokens, 0.1, 0.1, True, 0)
        with pytest.warns(UserWarning, match="only scales are tuned") if not expected else nullcontext():
            assert tuning_run.settings_that_fit(plan, settings, cuda, 40).code_rate == expected
