"""Each command hands its arguments to one operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from marlinq.core.settings import kinds
from marlinq.methods import GPTQOptions, RTNOptions
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.layouts import INTEGERS
from tests.testing.recipes import write_recipe


def test_quantize_defaults_are_the_recipes(marlinq: Callable, operation: Callable) -> None:
    quantize = operation("marlinq.operations.quantize", "quantize")
    assert marlinq("quantize", "model", "out").code == 0
    assert quantize.arguments == ("model", Path("out"))
    assert quantize.options["recipe"] == Recipe()
    assert (quantize.options["resume"], quantize.options["trust_remote_code"]) == (False, False)


def test_quantize_options_become_the_recipe(marlinq: Callable, operation: Callable) -> None:
    quantize = operation("marlinq.operations.quantize", "quantize")
    options = "--format awq --group-size -1 --asym --no-clip-search --damp 0.05 --act-order static"
    more = "--calibration organisation/text --samples 3 --max-length 77 --seed 5 --override q_proj=skip"
    assert marlinq("quantize", "model", "out", *options.split(), *more.split()).code == 0
    assert quantize.options["recipe"] == Recipe(
        format="awq",
        group_size=-1,
        symmetric=False,
        options=GPTQOptions(clip_search=False, damp=0.05, act_order="static"),
        calibration="organisation/text",
        samples=3,
        max_length=77,
        seed=5,
        overrides=(Override("q_proj", skip=True),),
    )


def test_methods_bits_and_automatic_groups(marlinq: Callable, operation: Callable) -> None:
    quantize = operation("marlinq.operations.quantize", "quantize")
    options = "--method RTN --scheme int8 --group-size auto --format GPTQ_V2 --override o_proj=scheme=int4"
    outcome = marlinq("quantize", "model", "out", *options.split())
    assert (outcome.code, outcome.err) == (0, "")
    assert quantize.options["recipe"] == Recipe(
        format="gptq-v2",
        method="rtn",
        scheme="int8",
        group_size="auto",
        options=RTNOptions(),
        overrides=(Override("o_proj", settings={"scheme": "int4"}),),
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--scheme int5", "'--scheme': expected one of"),
        ("--group-size 48", "'--group-size': expected one of 32, 64, 128, -1, auto, found '48'"),
        ("--method gtpq", "did you mean gptq?"),
        ("--damp 2", "--damp: expected a number above 0 and below 1"),
        ("--samples 0", "--samples: expected a whole number of at least 1"),
        ("--samples many", "--samples: expected a whole number"),
        ("--method rtn --damp 0.5", "damp"),
        ("--scheme int8 --format awq", "awq"),
        ("--format marlin --asym", "marlin"),
    ],
)
def test_settings_that_do_not_fit(marlinq: Callable, options: str, expected: str) -> None:
    outcome = marlinq("quantize", "model", "out", *options.split())
    assert outcome.code == 2
    assert expected in outcome.err
    assert outcome.err.count("\n") == 1


def test_every_setting_of_a_recipe_is_an_option() -> None:
    from marlinq.cli.quantize import command

    names = {parameter.name for parameter in command.params}
    assert {*kinds(Recipe), *kinds(GPTQOptions), *kinds(RTNOptions)} <= names


def test_given_options_win_over_the_recipe_file(
    marlinq: Callable, operation: Callable, tmp_path: Path
) -> None:
    quantize = operation("marlinq.operations.quantize", "quantize")
    rule = Override("down", settings={"group_size": 32})
    written = Recipe(group_size=64, symmetric=False, samples=9, overrides=(rule,))
    write_recipe(written, tmp_path / "recipe.yaml")
    given = ["--group-size", "128", "--override", "up=skip"]
    assert marlinq("quantize", "model", "out", "--recipe", str(tmp_path / "recipe.yaml"), *given).code == 0
    # 128 is also the default: what counts is that it was given.
    assert quantize.options["recipe"] == Recipe(
        group_size=128, symmetric=False, samples=9, overrides=(Override("up", skip=True), rule)
    )


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("512MiB", 512 * 2**20), ("1.5 gb", 1_500_000_000), ("4096", 4096)]
)
def test_shard_sizes(marlinq: Callable, operation: Callable, text: str, size: int) -> None:
    quantize = operation("marlinq.operations.quantize", "quantize")
    assert marlinq("quantize", "model", "out", "--max-shard-size", text).code == 0
    assert quantize.options["max_shard_size"] == size


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_convert_pairs(marlinq: Callable, operation: Callable, source: str, target: str) -> None:
    convert = operation("marlinq.operations.convert", "convert")
    outcome = marlinq("convert", f"{source}-to-{target}", "a", "b")
    if source == target:
        assert outcome.code == 2
        assert "nothing to convert" in outcome.err
        return
    assert outcome.code == 0
    assert convert.arguments == ("a", Path("b"))
    assert (convert.options["source_format"], convert.options["target_format"]) == (source, target)


@pytest.mark.parametrize(
    ("arguments", "source", "target"),
    [
        ("a b --to awq", None, "awq"),
        ("--to AWQ a b", None, "awq"),
        ("auto a b --to awq", None, "awq"),
        ("a b --from GPTQ --to gptq_v2", "gptq", "gptq-v2"),
        ("a b --to Compressed_Tensors", None, "compressed-tensors"),
        ("gptq_to_awq a b", "gptq", "awq"),
        ("GPTQ-to-Marlin a b", "gptq", "marlin"),
        ("gptq_v2_to_compressed_tensors a b", "gptq-v2", "compressed-tensors"),
    ],
)
def test_convert_spellings(
    marlinq: Callable, operation: Callable, arguments: str, source: str | None, target: str
) -> None:
    convert = operation("marlinq.operations.convert", "convert")
    outcome = marlinq("convert", *arguments.split(), "--skip-unsupported")
    assert (outcome.code, outcome.err) == (0, "")
    assert convert.arguments == ("a", Path("b"))
    assert (convert.options["source_format"], convert.options["target_format"]) == (source, target)
    assert (convert.options["skip_unsupported"], convert.options["strict_marlin"]) == (True, False)


@pytest.mark.parametrize("target", ["marlin", "marlin-24"])
def test_strict_marlin_reaches_the_operation(marlinq: Callable, operation: Callable, target: str) -> None:
    convert = operation("marlinq.operations.convert", "convert")
    assert marlinq("convert", "a", "b", "--to", target, "--strict-marlin").code == 0
    assert convert.options["strict_marlin"]
