"""Options and recipes that no honest user types: one line and exit code 2, before anything is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from marlinq.core.errors import OutputError, UsageError
from marlinq.operations.quantize.recipe import Recipe, read_recipe
from marlinq.operations.quantize.spelling import from_command_line
from marlinq.operations.quantize.unused_settings import unused_settings
from tests.cli.conftest import Outcome


def refusal(outcome: Outcome) -> str:
    """The line that refuses a command."""
    assert outcome.code == UsageError.exit_code, outcome.err
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    return outcome.err


@pytest.mark.parametrize(
    "options",
    [
        ["--max-shard-size", "9" * 400],
        ["--max-shard-size", "9" * 400 + "GB"],
        ["--max-shard-size", "\uff11GB"],
        ["--seed", "9" * 400],
        ["--seed", "9" * 5_000],
        ["--samples", str(1 << 64)],
        ["--max-length", "-" + "9" * 5_000],
        ["--damp", "9" * 5_000],
        ["--recipe", "x" * 5_000],
        ["--method", "x" * 5_000],
    ],
    ids=lambda options: f"{options[0]} {options[1][:8]}",
)
def test_odd_options_are_usage_errors(marlinq: Callable[..., Outcome], options: list[str]) -> None:
    refusal(marlinq("quantize", "model", "out", *options))


@pytest.mark.parametrize("out", ["x" * 5_000, "/".join(["x" * 200] * 30)])
def test_a_path_that_no_system_has(marlinq: Callable[..., Outcome], out: str) -> None:
    for command in (["quantize"], ["convert", "gptq-to-awq"], ["rotate"]):
        outcome = marlinq(*command, "model", out)
        assert outcome.code in (UsageError.exit_code, OutputError.exit_code), (command, outcome.err[-300:])
        assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: 0x" + "f" * 5_000, "5002 characters"),
        ("seed: " + "9" * 30, "at most 9223372036854775807"),
        ("seed: !!int 3", "tag"),
        ("a: &a [x]\nb: *a", "aliases"),
        ("bits: 4\nbits: 8", "stands twice"),
        ("overrides: " + "[" * 300, "nested deeper"),
        ("damp: [" + "1, " * 1_000 + "1]", r"found [\[(]1, 1"),
    ],
    ids=lambda value: value[:12],
)
def test_a_hostile_recipe_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem) as caught:
        read_recipe(path)
    assert len(str(caught.value)) < 1_000


def test_a_number_that_python_does_not_print() -> None:
    with pytest.raises(UsageError, match="seed: .*type int that can't be printed"):
        Recipe(seed=1 << 100_000)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["recommend", "model", "--servers", ","], "--servers"),
        (["eval", "model", "--tasks", ""], "--tasks"),
        (["bench", "kernels", "--against", " , "], "--against"),
    ],
)
def test_lists_without_names_are_refused(
    marlinq: Callable[..., Outcome], arguments: list[str], option: str
) -> None:
    assert f"'{option}': expected names, found" in refusal(marlinq(*arguments))


def test_a_loader_without_a_target_would_be_ignored() -> None:
    with pytest.raises(UsageError, match=r"served_by: sglang only goes with target_bits or target_size"):
        Recipe(served_by="sglang")


@pytest.mark.parametrize(
    ("recipe", "options", "says"),
    [
        (None, "--quality fast --sparsity 2:4", "imatrix, the method of --quality fast, can't make 2:4"),
        ("quality: fast", "--sparsity 2:4", "imatrix, the method of quality fast, can't make 2:4"),
        (None, "--method imatrix --sparsity 2:4", "imatrix can't make 2:4 sparse weights"),
        (None, "--for sglang", "--for: sglang only goes with --target-bits or --target-size"),
        ("served_by: sglang", "", "recipe.yaml: served_by: sglang only goes with target_bits or target_size"),
        (None, "--asym --scheme fp8", "--asym: fp8 has no zero points"),
        ("symmetric: false", "--scheme fp8", "symmetric: fp8 has no zero points"),
        ("group_size: 64", "--scheme mxfp4", "group_size: mxfp4 has groups of 32"),
        ("group_size: 32", "--scheme mxfp4 --group-size 64", "--group-size: mxfp4 has groups of 32"),
        (
            "method: rtn",
            "--damp 0.1",
            "--damp: no option of method rtn, but of gptq; leave it out, or choose",
        ),
        (
            None,
            "--target-size 1MB --scheme int8",
            "--scheme: --target-size chooses the scheme of each module",
        ),
        ("target_size: 1MB", "--scheme int8", "--scheme: target_size chooses the scheme of each module"),
        (None, "--quantize-head nvfp4", "--quantize-head nvfp4: gptq can't hold fp4_e2m1 weights"),
    ],
)
def test_messages_spell_a_setting_as_its_user_did(
    marlinq: Callable[..., Outcome], tmp_path: Path, recipe: str | None, options: str, says: str
) -> None:
    arguments = options.split()
    if recipe is not None:
        (tmp_path / "recipe.yaml").write_text(recipe)
        arguments += ["--recipe", "recipe.yaml"]
    assert refusal(marlinq("quantize", "model", "out", *arguments)).startswith(f"error: {says}")


def test_settings_without_effect_are_spelled_as_their_user_did() -> None:
    recipe = Recipe(method="rtn", max_length=100, samples=3, tune_norms=False)
    assert [each.partition(":")[0] for each in unused_settings(recipe)] == [
        "samples, max_length",
        "tune_norms",
    ]
    with from_command_line({"samples"}):
        said = unused_settings(recipe)
    assert said == [
        "samples, --max-length: no effect, since method rtn reads no text",
        "--no-tune-norms: no effect, since --tune-steps is 0",
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "generate model --prompt a --greedy --seed 0 --top-k 3",
            "--top-k and --seed: no effect with --greedy",
        ),
        ("generate model --prompt a --prompt b --speculate mtp", "--speculate: several prompts"),
        ("generate model --prompt a --prompt b --speculate lookup", "--speculate: several prompts"),
        ("eval model --text self", "--text self: leave --text out"),
        ("eval model --task-batch 8", "--task-batch: only with --tasks"),
        ("eval model --trust-task-code --shots 0", "--shots and --trust-task-code: only with --tasks"),
        ("recommend model --device auto", "--device: only with --measure; --gpu names the GPU"),
        ("recommend llama-3-8b --synthetic --revision main", "--revision: --synthetic reads no checkpoint"),
        ("bench decode model --scheme int4", "--scheme: only with --synthetic"),
        ("bench decode model --layers 1 --head 16", "--layers and --head: only with --synthetic"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    marlinq: Callable[..., Outcome], arguments: str, problem: str
) -> None:
    assert refusal(marlinq(*arguments.split())).startswith(f"error: {problem}")


@pytest.mark.parametrize(
    "arguments",
    ["recommend model --measure --plot", "bench serve model --plot", "bench decode model --profile"],
)
def test_a_file_without_a_folder_is_refused_before_the_work(
    marlinq: Callable[..., Outcome], arguments: str
) -> None:
    assert "absent: no such folder" in refusal(marlinq(*arguments.split(), "absent/file"))


@pytest.mark.parametrize(
    "arguments", [["recommend", "model", "--plot", ""], ["bench", "decode", "--profile", ""]]
)
def test_an_empty_path_is_no_file(marlinq: Callable[..., Outcome], arguments: list[str]) -> None:
    assert "expected the path of a file, found ''" in refusal(marlinq(*arguments))
