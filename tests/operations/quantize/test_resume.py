from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from marlinq.checkpoint import CheckpointWriter
from marlinq.checkpoint.partial import PartialFolder
from marlinq.core.errors import CheckpointError, EnvironmentProblem, OutputError, UnsupportedError, UsageError
from marlinq.methods import METHODS
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.faults import flipped
from tests.testing.interrupted import Killed, interrupt, interrupted, steps_of
from tests.testing.original_folders import READ, RECIPE, folder_bytes, save_tiny
from tests.testing.pairs import slow_but


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_bytes_of_an_undisturbed_one(tmp_path: Path, count: int) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=2)
    steps = steps_of(source, tmp_path / "whole", RECIPE)
    expected = folder_bytes(tmp_path / "whole")
    generator = random.Random(count)
    for attempt, step in enumerate([0, steps - 1, *generator.sample(range(1, steps - 1), count)]):
        out = tmp_path / f"out-{attempt}"
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, step)
            with pytest.raises(Killed):
                quantize(source, out, recipe=RECIPE, device="cpu")
        assert not out.exists()
        report = quantize(source, out, recipe=RECIPE, device="cpu", resume=True)
        assert folder_bytes(out) == expected, step
        assert report.modules.keys()
    # The last interruption point is after all blocks, so nothing is left to compute there.
    assert report.blocks == 2


def test_a_run_that_died_just_before_the_rename_is_finished(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    whole = quantize(source, tmp_path / "whole", recipe=READ, device="cpu")

    def dying(folder: PartialFolder, out: Path) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialFolder, "move", dying)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=READ, device="cpu")
    assert not (tmp_path / "out.partial" / "journal.jsonl").exists()
    report = quantize(source, tmp_path / "out", recipe=READ, device="cpu", resume=True)
    assert report.modules == whole.modules
    assert report.calibration == whole.calibration
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_block_whose_notes_are_missing_is_solved_again(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    whole = quantize(source, tmp_path / "whole", recipe=READ, device="cpu")
    commit = CheckpointWriter.commit
    dead = False

    def copier_comes_first(self: CheckpointWriter, notes: Mapping[str, Any] | None = None) -> None:
        nonlocal dead
        if not dead:
            commit(self)
        dead = dead or any("layers.1." in note for note in notes or ())
        if dead:
            raise Killed
        commit(self, notes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "commit", copier_comes_first)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=READ, device="cpu")
    report = quantize(source, tmp_path / "out", recipe=READ, device="cpu", resume=True)
    assert report.resumed_blocks == 1
    assert report.modules == whole.modules
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_blocks_that_are_there_are_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    whole = quantize(source, tmp_path / "whole", recipe=READ, device="cpu")

    interrupted(source, tmp_path / "out", READ, blocks=2)
    from marlinq.operations.quantize import own_text

    solved: list[str] = []
    solve = METHODS["gptq"].solve

    def noting(*args: Any, names: list[str], **kwargs: Any) -> Any:
        solved.extend(names)
        return solve(*args, names=names, **kwargs)

    def unexpected(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the text was written again")

    monkeypatch.setattr(METHODS["gptq"], "solve", noting)
    monkeypatch.setattr(own_text, "TextWriter", unexpected)
    report = quantize(source, tmp_path / "out", recipe=READ, device="cpu", resume=True)
    assert {name.split(".")[2] for name in solved} == {"2"}
    assert report.resumed_blocks == 2
    assert "2 of 3 blocks were there already" in report.render()
    assert report.modules == whole.modules
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_run_that_fails_while_it_writes_text_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from marlinq.operations.quantize import own_text

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("the model repeats itself")

    source = save_tiny("llama", tmp_path / "model")
    with monkeypatch.context() as patched:
        patched.setattr(own_text.TextWriter, "write", fails)
        with pytest.raises(UnsupportedError):
            quantize(source, tmp_path / "out", recipe=RECIPE, device="cpu")
    assert not (tmp_path / "out.partial").exists()
    quantize(source, tmp_path / "out", recipe=RECIPE.replace(method="rtn"), device="cpu")


# Every time one with zero points and one without: tests/formats reads every layout.
@pytest.mark.parametrize(
    "layout", slow_but(("gptq-v2", "awq", "marlin", "compressed-tensors"), "awq", "marlin")
)
def test_every_format_can_be_read_back(tmp_path: Path, layout: str) -> None:
    source = save_tiny("gpt2", tmp_path / "model")
    recipe = READ.replace(format=layout, symmetric=layout in ("marlin", "gptq-v2"))
    quantize(source, tmp_path / "whole", recipe=recipe, device="cpu")
    interrupted(source, tmp_path / "out", recipe)
    quantize(source, tmp_path / "out", recipe=recipe, device="cpu", resume=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_another_recipe_model_or_text_is_not_resumed(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    text = tmp_path / "text.jsonl"
    text.write_text('{"input_ids": [' + ", ".join(str(3 + n) for n in range(30)) + "]}\n")
    recipe = RECIPE.replace(calibration=str(text), samples=1)
    out = tmp_path / "out"
    interrupted(source, out, recipe)
    with pytest.raises(OutputError, match="continue it with --resume"):
        quantize(source, out, recipe=recipe, device="cpu")
    with pytest.raises(OutputError, match="another recipe"):
        quantize(source, out, recipe=recipe.replace(damp=0.02), device="cpu", resume=True)
    other = text.read_text()
    text.write_text(other.replace("3,", "4,"))
    with pytest.raises(OutputError, match=r"gives other text than the interrupted run had \(30 tokens then"):
        quantize(source, out, recipe=recipe, device="cpu", resume=True)
    text.write_text(other)
    quantize(source, out, recipe=recipe, device="cpu", resume=True)


def test_resuming_what_is_finished_returns_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    recipe = READ.replace(method="rtn")
    whole = quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    before = folder_bytes(tmp_path / "out")
    monkeypatch.setattr(METHODS["rtn"], "solve", _dies)
    said: list[str] = []
    again = quantize(
        source, tmp_path / "out", recipe=recipe.to_dict(), device="cpu", resume=True, message=said.append
    )
    assert said == [f"{tmp_path / 'out'}: this run is finished; nothing is left to do"]
    assert (again.modules, again.kept, again.calibration) == (whole.modules, whole.kept, whole.calibration)
    assert (again.blocks, again.resumed_blocks, again.dtype) == (whole.blocks, whole.blocks, whole.dtype)
    # A run that only reports measures no memory.
    assert "peak memory" in str(whole)
    assert "peak memory" not in str(again)
    assert again.output_bytes == whole.output_bytes
    assert "quality" not in again.render()
    assert folder_bytes(tmp_path / "out") == before
    for other in (recipe.replace(seed=7), {"method": "rtn"}):
        with pytest.raises(OutputError, match="was not written by this recipe and source"):
            quantize(source, tmp_path / "out", recipe=other, device="cpu", resume=True)
    with pytest.raises(OutputError, match="was not written by this recipe and source"):
        quantize(source, source, recipe=recipe, device="cpu", resume=True)
    with pytest.raises(UsageError, match=r"recipe: expected a marlinq\.Recipe or a dict"):
        quantize(source, tmp_path / "other", recipe="rtn", device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("beside", [False, True])
def test_a_finished_run_on_other_text_is_not_taken_for_this_one(tmp_path: Path, beside: bool) -> None:
    source = save_tiny("llama", tmp_path / "model")
    text, second = tmp_path / "text.jsonl", tmp_path / "second.jsonl"
    ids = ", ".join(str(3 + n) for n in range(30))
    text.write_text(f'{{"input_ids": [{ids}]}}\n')
    second.write_text(f'{{"input_ids": [50, {ids}]}}\n')
    both = [str(text), str(second)] if beside else str(text)
    recipe, out = RECIPE.replace(calibration=both, samples=1 + beside), tmp_path / "out"
    quantize(source, out, recipe=recipe, device="cpu")
    assert quantize(source, out, recipe=recipe, device="cpu", resume=True).resumed_blocks
    text.write_text(text.read_text().replace("3,", "4,"))
    with pytest.raises(OutputError, match=r"text\.jsonl gives other text than it was calibrated on; choose"):
        quantize(source, out, recipe=recipe, device="cpu", resume=True)
    text.unlink()  # Nothing is left to compare.
    assert quantize(source, out, recipe=recipe, device="cpu", resume=True).resumed_blocks


def test_resuming_without_an_interrupted_run_warns(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    with pytest.warns(UserWarning, match="no unfinished run to resume; starting afresh"):
        report = quantize(source, tmp_path / "out", recipe=READ, device="cpu", resume=True)
    assert report.resumed_blocks == 0


@pytest.mark.filterwarnings("ignore:.*no unfinished run to resume")
def test_resuming_checks_room_only_where_text_is_still_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save_tiny("llama", tmp_path / "model"), tmp_path / "out"

    class Memory:
        available = 1000

    with monkeypatch.context() as little:
        little.setattr("marlinq.operations.quantize.own_text.psutil.virtual_memory", lambda: Memory)
        with pytest.raises(EnvironmentProblem, match="pass --calibration FILE"):
            quantize(source, out, recipe=RECIPE, device="cpu", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    interrupted(source, out, RECIPE, blocks=1)
    checked: list[str] = []
    monkeypatch.setattr(
        "marlinq.operations.quantize.calibration_text.check_room", lambda *_, **__: checked.append("room")
    )
    quantize(source, out, recipe=RECIPE, device="cpu", resume=True)
    assert checked == []


def test_every_flipped_byte_of_what_is_taken_up_is_noticed(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    recipe = RECIPE.replace(method="rtn")
    with pytest.MonkeyPatch.context() as patch:
        # Everything is written; nothing is left to compute.
        patch.setattr(CheckpointWriter, "finish", _dies)
        with pytest.raises(Killed):
            quantize(source, out, recipe=recipe, device="cpu")
    data = (partial / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    places = json.loads(data[8:header])
    # One of each kind, its first byte and its last in turn.
    names = [
        *(f"model.layers.1.mlp.up_proj.{suffix}" for suffix in ("qweight", "scales", "qzeros", "g_idx")),
        *("model.layers.2.input_layernorm.weight", "model.embed_tokens.weight"),
    ]
    for number, name in enumerate(names):
        start, end = places[name]["data_offsets"]
        with flipped(partial / "model.safetensors", header + (end - 1 if number % 2 else start)):
            said = refusal(source, out, recipe)
        assert f"tensor {name} was changed since it was written" in said
    journal = partial / "journal.jsonl"
    for place in (0, 40, journal.stat().st_size // 2):
        with flipped(journal, place):
            assert "journal.jsonl: is damaged" in refusal(source, out, recipe)
    # With the byte flipped back the file is whole.
    quantize(source, out, recipe=recipe, device="cpu", resume=True)


def test_a_flipped_byte_of_kept_text_is_noticed(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    interrupted(source, tmp_path / "out", RECIPE, blocks=0)
    with flipped(tmp_path / "out.partial" / "calibration.json", 70):
        assert "calibration.json: is damaged" in refusal(source, tmp_path / "out", RECIPE)
    for forged in (b"[[1e400]]", b'[["3"]]', b"[[-1]]", b"[[]]", b"[7]", b"7"):
        path = tmp_path / "out.partial" / "calibration.json"
        path.write_bytes(sha256(forged).hexdigest().encode() + b"\n" + forged)
        assert "calibration.json: is damaged" in refusal(source, tmp_path / "out", RECIPE)


def _dies(*args: Any, **kwargs: Any) -> None:
    raise Killed


def refusal(source: Path, out: Path, recipe: Recipe) -> str:
    """Message with which resuming is refused."""
    with pytest.raises((CheckpointError, OutputError)) as raised:
        quantize(source, out, recipe=recipe, device="cpu", resume=True)
    assert not out.exists()
    return str(raised.value)


_CHILD = """
import os, signal, sys, threading, time
from marlinq.checkpoint import CheckpointWriter
from marlinq.operations.quantize import quantize
from tests.testing.original_folders import RECIPE

source, out, countdown = sys.argv[1], sys.argv[2], int(sys.argv[3])
write = CheckpointWriter.write

def counted(self, name, tensor):
    global countdown
    countdown -= 1
    if countdown == 0:
        # Another thread pulls the trigger, so the blow falls in the middle of whatever comes next.
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGKILL)).start()
    write(self, name, tensor)

CheckpointWriter.write = counted
quantize(source, out, recipe=RECIPE, device="cpu")
"""


@pytest.mark.slow
def test_a_killed_process_can_be_resumed(tmp_path: Path) -> None:
    source = save_tiny("gemma3", tmp_path / "model")
    quantize(source, tmp_path / "whole", recipe=RECIPE, device="cpu")
    root = Path(__file__).parents[3]
    # The number of threads decides how sums are split, so it belongs to a run's identity.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    generator = random.Random(1)
    for attempt in range(2):
        out = tmp_path / f"out-{attempt}"
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(source), str(out), str(generator.randrange(1, 60))],
            cwd=root,
            env={**os.environ, **threads, "PYTHONPATH": str(root)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert child.returncode == -signal.SIGKILL, child.stderr
        assert not out.exists()
        quantize(source, out, recipe=RECIPE, device="cpu", resume=True)
        assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
