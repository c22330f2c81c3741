"""One file and one registration each: the toys go through the whole command line (tests/toys.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.weight import QuantizedWeight
from marlinq.runtime import load
from tests import toys
from tests.runtime.test_generation import wide_model
from tests.testing.commands import Run, json_runner
from tests.testing.runnable_folders import save_plain, save_tokenizer

CPU = ("--device", "cpu")


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with toys.registered():
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return json_runner(capsys)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = save_plain(tmp_path / "original", wide_model())
    save_tokenizer(folder)
    return folder


def weights(folder: Path) -> dict[str, QuantizedWeight]:
    view = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert view is not None
    return {name: view.load(name) for name in view.modules}


def quantize(run: Run, original: Path, out: Path, *options: object) -> Any:
    code, report = run("quantize", original, out, "--group-size", 32, *CPU, *options)
    assert code == 0, report
    return report


def test_a_layout_and_a_dialect(run: Run, original: Path, tmp_path: Path) -> None:
    quantize(run, original, tmp_path / "toy", "--format", "toy", "--method", "rtn")
    code, seen = run("inspect", tmp_path / "toy")
    assert (code, seen["format"], seen["bits"]) == (0, "toy", [4])
    code, checked = run("verify", tmp_path / "toy", "--against", original, *CPU)
    assert code == 0, checked

    before = weights(tmp_path / "toy")
    # Its float32 steps are not all exact in float16, which the refusal says; one layout takes any dtype.
    code, said = run("convert", tmp_path / "toy", tmp_path / "awq", "--to", "awq")
    assert code == 5
    assert "not exactly representable in float16" in said["error"]
    assert run("convert", tmp_path / "toy", tmp_path / "ct", "--to", "compressed-tensors")[0] == 0
    assert all(weight.difference(before[name]) is None for name, weight in weights(tmp_path / "ct").items())

    # From a real layout to the toy and back, bit for bit.
    quantize(run, original, tmp_path / "gptq-made", "--format", "gptq", "--method", "rtn")
    assert run("convert", tmp_path / "gptq-made", tmp_path / "there", "--to", "toy")[0] == 0
    assert run("convert", tmp_path / "there", tmp_path / "back", "--to", "gptq")[0] == 0
    there, back, made = (weights(tmp_path / name) for name in ("there", "back", "gptq-made"))
    assert before.keys() == there.keys() == back.keys() == made.keys()
    for name, weight in made.items():
        assert weight.difference(there[name]) is None
        assert weight.difference(back[name]) is None
    # A checkpoint in a real layout is verified with the toys around.
    assert run("verify", tmp_path / "gptq-made", "--against", original, "--device", "cpu")[0] == 0


def test_a_scheme_a_method_and_an_operator(run: Run, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "table"
    report = quantize(
        run, original, out, "--format", "toy-table", "--scheme", "toy4", "--method", "toy", "--keep", 0.95
    )
    assert report["format"] == "toy-table"
    stored = weights(out)
    assert {weight.element for weight in stored.values()} == {toys.TOY4}
    assert run("inspect", out)[0] == 0
    code, checked = run("verify", out, "--against", original, *CPU)
    assert code == 0, checked
    # No other layout holds the element, and each says so.
    code, said = run("convert", out, tmp_path / "never", "--to", "gptq")
    assert code == 5
    assert "toy4 weights" in said["error"]
    assert not (tmp_path / "never").exists()

    code, said = run(
        "generate", out, "--prompt", "It is", "--max-new-tokens", 4, "--greedy", "--device", "cpu"
    )
    assert code == 0, said
    assert any("toy" in note for note in said["notes"])
    code, measured = run(
        "eval", out, "--against", original, "--windows", 1, "--length", 16, "--device", "cpu"
    )
    assert code == 0, measured
    assert measured["kl"] >= 0

    loaded = load(out, device="cpu")
    assert {decision.operator for decision in loaded.decisions.values()} == {"toy"}
    dense = load(out, device="cpu", operator="dense")
    ids = torch.tensor([[1, 9, 30, 77]])
    with torch.no_grad():
        # The same float32 weights in the same products.
        assert torch.equal(loaded.model(ids).logits, dense.model(ids).logits)


def test_the_registries_are_as_before() -> None:
    from marlinq.core.scheme import ELEMENTS
    from marlinq.formats import FORMATS, LAYOUTS

    with toys.registered():
        pass
    assert "toy" in FORMATS
    assert "toy" in LAYOUTS  # this test's own fixture
    assert "toy4" in ELEMENTS
