"""The frame around the commands: lazy imports, exit codes, errors for people and for machines."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from marlinq.cli import COMMANDS, main
from marlinq.core import errors, progress
from marlinq.core.progress import no_progress
from tests.testing import forks
from tests.testing.original_folders import save_tiny
from tests.testing.quantized_folders import model_tuples, write

HEAVY = ("torch", "transformers", "datasets", "cupy", "gguf", "accelerate")
HELPS = [[], *([name] for name in COMMANDS), *(["bench", name] for name in ("kernels", "experts", "decode"))]
ERRORS = [value for value in vars(errors).values() if isinstance(value, type)]


def printed_without_heavy_imports(*arguments: str) -> str:
    """What a command prints on stdout; fails if it imports anything heavy."""
    code = (
        "import sys\n"
        "from marlinq.cli import cli\n"
        f"cli.main({list(arguments)!r}, standalone_mode=False)\n"
        f"sys.exit(','.join(name for name in {HEAVY!r} if name in sys.modules) or 0)\n"
    )
    run = forks.run(code, modules=forks.COMMANDS)
    assert run.stderr.strip() == ""
    return run.stdout


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert printed_without_heavy_imports(*arguments, "--help").startswith("Usage:")


def test_inspect_of_an_ordinary_folder_imports_nothing_heavy(tmp_path: Path) -> None:
    plain = save_tiny("llama", tmp_path / "plain", blocks=2)
    assert "not quantised" in printed_without_heavy_imports("inspect", str(plain))
    quantised = write(tmp_path / "gptq", "gptq", model_tuples())
    assert "zero points" in printed_without_heavy_imports("inspect", str(quantised))


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "restored afterwards")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == found


def test_import_of_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, marlinq; sys.exit(','.join(name for name in {HEAVY!r} if name in sys.modules) or 0)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.strip()) == (0, "")


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_is_one_line_and_its_own_exit_code(marlinq: Callable, operation: Callable, kind: type) -> None:
    operation("marlinq.operations.inspect", "inspect", kind("folder/x: expected a,\n  found b; do c"))
    outcome = marlinq("inspect", "folder")
    assert outcome.code == kind.exit_code
    assert outcome.err == "error: folder/x: expected a, found b; do c\n"
    assert outcome.out == ""


def test_what_is_for_a_closed_stderr_is_not_on_stdout(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m marlinq inspect {shlex.quote(str(tmp_path / 'none'))} 2>&-"
    ended = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (errors.CheckpointError.exit_code, b"")


def test_exit_codes_are_distinct() -> None:
    assert len({kind.exit_code for kind in ERRORS}) == len(ERRORS)


def test_error_as_json(marlinq: Callable, operation: Callable) -> None:
    operation("marlinq.operations.inspect", "inspect", errors.CheckpointError("no config.json"))
    outcome = marlinq("inspect", "folder", "--json")
    assert outcome.code == 3
    assert json.loads(outcome.out) == {"error": "no config.json", "class": "CheckpointError", "exit_code": 3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["quantize", "no-such-folder/model"], "Missing argument 'OUT'"),
        (["rotate", "no-such-folder/model"], "Missing argument 'DST'"),
        (["inspect"], "Missing argument 'CKPT'"),
        (["inspect", "a", "--jsonn"], "No such option '--jsonn'"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["quantise", "a", "b"], "did you mean quantize?"),
        (["convert", "gptq-to-gguf", "a", "b"], "found 'gguf'"),
        (["convert", "gptq-to-awk", "a", "b"], "did you mean awq?"),
        (["convert", "somewhere", "a", "b"], "expected SOURCE-to-TARGET"),
        (["convert", "auto", "a", "b"], "add --to"),
        (["convert", "a", "b"], "add --to"),
        (["convert", "a"], "expected a source and a target folder, found 1 paths"),
        (["convert", "gptq-to-awq", "a"], "expected SRC and DST after it"),
        (
            ["convert", "gptq-to-awq", "a", "b", "--to", "marlin"],
            "--to: gptq-to-awq names both formats already",
        ),
        (["convert", "a", "b", "--to", "awq", "--strict-marlin"], "expected --to marlin or marlin-24"),
        (["convert", "a", "b", "--to", "dense", "--strict-marlin"], "expected --to marlin or marlin-24"),
        (["convert", "a", "b", "--to", "marlinn"], "did you mean marlin?"),
        (["quantize", "a", "b", "--format", "compresed-tensors"], "did you mean compressed-tensors?"),
        (["quantize", "a", "b", "--max-shard-size", "0GB"], "expected a size such as 5GB"),
        (["quantize", "a", "b", "--device", "tpu"], "expected auto, cpu, cuda or cuda:N"),
        (["quantize", "a", "b", "--override", "x=y"], "expected REGEX=skip"),
        (["bench", "kernels", "--batch", "1,x"], "expected integers"),
        (["generate", "a", "--prompt", "x", "--greedy", "--temperature", "1"], "keep one"),
    ],
)
def test_wrong_usage(marlinq: Callable, arguments: list[str], expected: str) -> None:
    plain = marlinq(*arguments)
    assert plain.code == 2
    assert plain.err.startswith("error: ")
    assert plain.err.count("\n") == 1
    assert expected in plain.err
    machine = json.loads(marlinq(*arguments, "--json").out)
    assert expected in machine["error"]
    assert (machine["class"], machine["exit_code"]) == ("UsageError", 2)


def test_no_command_shows_the_help(marlinq: Callable) -> None:
    outcome = marlinq()
    assert outcome.code == 2
    assert "Commands:" in outcome.err


def test_interrupted_quantize_says_how_to_resume(marlinq: Callable, operation: Callable) -> None:
    operation("marlinq.operations.quantize", "quantize", KeyboardInterrupt())
    outcome = marlinq("quantize", "model", "a folder", "--group-size", "64")
    assert outcome.code == 130
    assert outcome.err.strip() == (
        "interrupted; continue with: marlinq quantize model 'a folder' --group-size 64 --resume"
    )


def test_interrupted_rotate_continues_when_it_is_repeated(marlinq: Callable, operation: Callable) -> None:
    operation("marlinq.operations.rotate", "rotate", KeyboardInterrupt())
    outcome = marlinq("rotate", "a", "b", "--seed", "1")
    assert outcome.code == 130
    assert outcome.err.strip() == "interrupted; continue with: marlinq rotate a b --seed 1"


def test_interrupted_convert_continues_when_it_is_repeated(marlinq: Callable, operation: Callable) -> None:
    operation("marlinq.operations.convert", "convert", KeyboardInterrupt())
    arguments = ["convert", "gptq-to-awq", "a", "b"]
    outcome = marlinq(*arguments)
    assert outcome.code == 130
    assert outcome.err.strip() == "interrupted; continue with: marlinq convert gptq-to-awq a b"
    outcome = marlinq(*arguments, "--json")
    assert outcome.code == 130
    assert json.loads(outcome.out) == {
        "error": "interrupted; continue with: marlinq convert gptq-to-awq a b --json",
        "class": "KeyboardInterrupt",
        "exit_code": 130,
    }


def test_commands_that_cannot_continue_say_interrupted(marlinq: Callable, operation: Callable) -> None:
    operation("marlinq.operations.inspect", "inspect", KeyboardInterrupt())
    outcome = marlinq("inspect", "folder")
    assert (outcome.code, outcome.err.strip()) == (130, "interrupted")


@pytest.mark.usefixtures("marlinq")
def test_bugs_keep_their_traceback(operation: Callable) -> None:
    from marlinq.cli import main

    operation("marlinq.operations.inspect", "inspect", ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["inspect", "folder"])


def test_report_as_text_and_as_json(marlinq: Callable, operation: Callable) -> None:
    operation("marlinq.operations.inspect", "inspect")
    assert marlinq("inspect", "folder").out == "one line of report\n"
    assert json.loads(marlinq("inspect", "folder", "--json").out) == {"value": 1, "unbounded": None}


class Full(StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_result_that_cannot_be_printed_is_one_line(
    marlinq: Callable,
    operation: Callable,
    monkeypatch: pytest.MonkeyPatch,
    json_too: list[str],
    closed: bool,
) -> None:
    operation("marlinq.operations.inspect", "inspect")
    for folder, code in (("folder", 0 if closed else 9), ("./nosuch", 3)):
        # A disk that is full; or no stdout, as with >&-.
        monkeypatch.setattr(sys, "stdout", None if closed else Full())
        outcome = marlinq("inspect", folder, *json_too)
        assert outcome.code == code
        lines = outcome.err.splitlines()
        assert all(line.startswith("error: ") for line in lines)
        assert (code == 9 or bool(json_too and not closed)) == ("No space left on device" in outcome.err)


def test_reasons_for_kernels_are_printed_on_request(
    marlinq: Callable, operation: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation("marlinq.operations.evaluate", "evaluate")
    monkeypatch.setattr(sys.modules["marlinq.operations.evaluate"], "TaskOptions", None, raising=False)
    assert marlinq("eval", "folder").out == "one line of report\n"
    explained = marlinq("eval", "folder", "--explain").out
    assert explained.split() == ["one", "line", "of", "report", "one", "reason"]
    assert "one reason" not in marlinq("eval", "folder", "--explain", "--json").out


def test_a_list_may_be_repeated(
    marlinq: Callable, operation: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = operation("marlinq.operations.recommend", "recommend")
    monkeypatch.setattr(sys.modules["marlinq.operations.recommend"], "save_plot", None, raising=False)
    assert marlinq("recommend", "folder", "--servers", "vllm, sglang", "--servers", "marlinq").code == 0
    assert asked.options["servers"] == ("vllm", "sglang", "marlinq")


def test_a_plot_that_cannot_be_written_costs_no_result(
    marlinq: Callable, operation: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise errors.OutputError("roof.svg: No space left on device")

    operation("marlinq.operations.recommend", "recommend")
    monkeypatch.setattr(sys.modules["marlinq.operations.recommend"], "save_plot", full, raising=False)
    outcome = marlinq("recommend", "folder", "--plot", "roof.svg")
    assert (outcome.code, outcome.out) == (errors.OutputError.exit_code, "one line of report\n")
    assert outcome.err == "error: roof.svg: No space left on device\n"
    outcome = marlinq("recommend", "folder", "--plot", "roof.svg", "--json")
    assert outcome.code == errors.OutputError.exit_code
    assert "error" not in json.loads(outcome.out)


def test_failed_verification_has_its_exit_code(marlinq: Callable, operation: Callable) -> None:
    operation("marlinq.operations.verify", "verify", ok=False)
    assert marlinq("verify", "folder").code == errors.VerificationFailed.exit_code
    operation("marlinq.operations.verify", "verify", ok=True)
    assert marlinq("verify", "folder", "--strict").code == 0
    operation("marlinq.operations.verify", "verify", ok=True, warnings=1)
    assert marlinq("verify", "folder").code == 0
    assert marlinq("verify", "folder", "--strict").code == errors.VerificationFailed.exit_code


def test_warnings_are_one_line(marlinq: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    marlinq("--version")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("the fallback\n  was taken", stacklevel=1)
    assert capsys.readouterr().err == "warning: the fallback was taken\n"


@pytest.mark.parametrize("place", ["before", "behind"])
def test_quiet_and_verbose(
    place: str, marlinq: Callable, operation: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []

    def showing(shown: bool, *, stages: bool) -> Any:
        seen.append((shown, stages))
        return nullcontext(no_progress)

    monkeypatch.setattr(progress, "showing", showing)
    operation("marlinq.operations.inspect", "inspect")
    for option, expected in ((None, (True, False)), ("-q", (False, False)), ("--verbose", (True, True))):
        options = [option] if option else []
        words = [*options, "inspect", "folder"] if place == "before" else ["inspect", "folder", *options]
        assert marlinq(*words).code == 0
        assert seen.pop() == expected
    refused = marlinq("-q", "inspect", "folder", "-v")
    assert refused.code == 2
    assert refused.err == "error: --quiet and --verbose contradict each other; keep one\n"
