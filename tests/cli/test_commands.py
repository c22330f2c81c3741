"""Each command hands its arguments to one operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from marlinq.formats import LAYOUTS
from marlinq.methods import GPTQOptions
from marlinq.operations.quantize.recipe import Override, Recipe, write_recipe


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


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_convert_pairs(marlinq: Callable, operation: Callable, source: str, target: str) -> None:
    convert = operation("marlinq.operations.convert", "convert")
    assert marlinq("convert", f"{source}-to-{target}", "a", "b").code == 0
    assert convert.arguments == (Path("a"), Path("b"))
    assert (convert.options["source_format"], convert.options["target_format"]) == (source, target)


def test_convert_auto(marlinq: Callable, operation: Callable) -> None:
    convert = operation("marlinq.operations.convert", "convert")
    assert (
        marlinq("convert", "auto", "a", "b", "--to", "awq", "--strict-marlin", "--skip-unsupported").code == 0
    )
    assert (convert.options["source_format"], convert.options["target_format"]) == (None, "awq")
    assert convert.options["strict_marlin"]
    assert convert.options["skip_unsupported"]
