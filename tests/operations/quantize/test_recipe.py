from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlinq.core.errors import UsageError
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep
from marlinq.core.scheme import INT8
from marlinq.methods import GPTQOptions, RTNOptions
from marlinq.operations.quantize import recipe as recipe_module
from marlinq.operations.quantize.module_settings import ModuleSettings, common_group_size
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.quality import QUALITIES
from marlinq.operations.quantize.recipe import Recipe, read_recipe
from tests.testing.layouts import INTEGERS
from tests.testing.recipes import write_recipe

_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "scheme": st.sampled_from(["int4", "int8"]),
        "group_size": st.sampled_from([32, 64, 128, -1, "auto"]),
        "symmetric": st.booleans(),
        "clip_search": st.booleans(),
        "damp": st.floats(0.001, 0.9),
        "act_order": st.sampled_from(["none", "static"]),
    },
)
_OPTIONS = st.builds(
    GPTQOptions,
    clip_search=st.booleans(),
    damp=st.floats(0.001, 0.9),
    act_order=st.sampled_from(["none", "static"]),
)
_PATTERNS = st.sampled_from(["down_proj", r"^model\.layers\.\d+\.", "a=b", r"(k|v)_proj$", "é"])
_OVERRIDES = st.builds(
    lambda pattern, settings: Override(pattern, skip=not settings, settings=settings), _PATTERNS, _SETTINGS
)
_RECIPES = st.builds(
    Recipe,
    format=st.sampled_from(["gptq", "gptq-v2", "compressed-tensors"]),
    scheme=st.sampled_from(["int4", "int8"]),
    group_size=st.sampled_from([32, 64, 128, -1, "auto"]),
    symmetric=st.booleans(),
    options=_OPTIONS,
    calibration=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1),
    samples=st.integers(1, 10**6),
    max_length=st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
    overrides=st.lists(_OVERRIDES, max_size=3).map(tuple),
)


@hypothesis.settings(max_examples=30)
@given(_RECIPES)
def test_dict_and_json_round_trip(recipe):
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@hypothesis.settings(max_examples=30)
@given(recipe=_RECIPES)
def test_yaml_round_trip(tmp_path_factory, recipe):
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    write_recipe(recipe, path)
    assert read_recipe(path) == recipe


def test_another_method_has_its_own_options():
    recipe = Recipe(group_size=64).replace(damp=0.02, method="gptq")
    assert recipe.options == GPTQOptions(damp=0.02)
    rounded = recipe.replace(method="rtn")
    assert rounded.options == RTNOptions()
    assert rounded.group_size == 64
    assert "damp" not in rounded.to_dict()
    assert Recipe.from_dict(rounded.to_dict()) == rounded
    assert Recipe(method="rtn").replace(clip_search=True).options == RTNOptions(clip_search=True)
    with pytest.raises(UsageError, match="damp: no option of method rtn, but of gptq; leave it out"):
        rounded.replace(damp=0.02)
    with pytest.raises(UsageError, match="unknown setting 'group_sise'; expected one of .*group_size"):
        Recipe(group_sise=64)
    with pytest.raises(UsageError, match="override 'x': damp: no option of method rtn"):
        Recipe(method="rtn", overrides=(Override("x", settings={"damp": 0.1}),))
    with pytest.raises(UsageError, match="method rtn: expected RTNOptions, found GPTQOptions"):
        Recipe(method="rtn", options=GPTQOptions())


@pytest.mark.parametrize("quality", QUALITIES)
def test_the_constructor_applies_a_quality(quality):
    made = Recipe(quality=quality, group_size=64)
    assert made == Recipe(quality, group_size=64) == Recipe.from_dict({"quality": quality, "group_size": 64})
    assert made == Recipe().replace(quality=quality, group_size=64)
    assert made.quality_record()["changed"] == []
    assert replace(made, seed=1) == made.replace(seed=1)
    assert copy.deepcopy(made) == made


def test_settings_given_beside_a_quality_win():
    tuned_less = Recipe(quality="best", tune_steps=7)
    assert (tuned_less.tune_steps, tuned_less.tune_codes) == (7, True)
    assert tuned_less.quality_record()["changed"] == ["tune_steps"]
    assert Recipe(quality="best", method="rtn").options == RTNOptions()
    assert Recipe(quality="best", options=GPTQOptions(damp=0.02)).options == GPTQOptions(damp=0.02)
    assert Recipe(quality="best", tune_own_text=False).tune_own_text is False


def test_a_recipe_from_before_methods_means_the_same(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(
        "format: compressed-tensors\ngroup_size: 64\nsymmetric: false\nclip_search: false\ndamp: 0.05\n"
        "act_order: none\ncalibration: self\nsamples: 9\nmax_length: 100\nseed: 3\n"
        "overrides:\n- match: down_proj\n  damp: 0.2\n  act_order: static\n",
        encoding="utf-8",
    )
    recipe = read_recipe(path)
    assert (recipe.method, recipe.scheme) == ("gptq", "int4")
    assert recipe.options == GPTQOptions(clip_search=False, damp=0.05, act_order="none")
    down = recipe.rules.outcome("model.layers.0.mlp.down_proj")
    assert isinstance(down, ModuleSettings)
    assert down.options == GPTQOptions(clip_search=False, damp=0.2, act_order="static")


def test_the_common_group_size_is_the_largest_that_divides_all():
    for channels, size in (
        ([4096], 128),
        ([4096, 576], 64),
        ([1056, 4096], 32),
        ([128], 128),
        ([80, 96], None),
    ):
        assert common_group_size(channels) == size
    settings = Recipe().rules.outcome("x")
    assert isinstance(settings, ModuleSettings)
    assert settings.granularity is None
    assert settings.group_refusal(576) is None
    assert "none of the group sizes 128, 64, 32 divides" in (settings.group_refusal(80) or "")
    fixed = Recipe(group_size=128).rules.outcome("x")
    assert isinstance(fixed, ModuleSettings)
    assert fixed.scheme(4096, "float16").granularity == Granularity.group(128)
    assert fixed.scheme(128, "float16").granularity == Granularity.channel()
    assert "576 is not a multiple of group size 128, but of 64" in (fixed.group_refusal(576) or "")


@given(_PATTERNS, _SETTINGS)
def test_command_line_override_round_trip(pattern, settings):
    text = ",".join(f"{key}={value}" for key, value in settings.items()) or "skip"
    assert Override.parse(f"{pattern}={text}") == Override(pattern, skip=not settings, settings=settings)


def test_formats_are_the_registered_ones():
    assert set(INTEGERS) >= {"gptq", "gptq-v2", "awq", "marlin", "compressed-tensors"}


def test_reading_a_recipe_does_not_import_torch():
    code = "import sys, marlinq.operations.quantize.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_first_matching_override_decides():
    recipe = Recipe(
        group_size=64,
        overrides=(
            Override.parse(r"layers\.0\.=skip"),
            Override.parse("down_proj=group_size=32,sym=false,scheme=int8,damp=0.1"),
            Override.parse("proj=group_size=128"),
        ),
    )
    assert isinstance(recipe.rules.outcome("model.layers.0.mlp.down_proj"), Keep)
    down = recipe.rules.outcome("model.layers.10.mlp.down_proj")
    assert isinstance(down, ModuleSettings)
    assert (down.granularity, down.symmetric, down.element) == (Granularity.group(32), False, INT8)
    assert down.options == GPTQOptions(damp=0.1)
    assert "down_proj" in down.reason
    up = recipe.rules.outcome("model.layers.10.mlp.up_proj")
    assert isinstance(up, ModuleSettings)
    assert (up.granularity, up.symmetric) == (Granularity.group(128), True)
    plain = recipe.rules.outcome("model.layers.10.mlp.fc")
    assert isinstance(plain, ModuleSettings)
    assert (plain.granularity, plain.reason) == (Granularity.group(64), "recipe")
    assert recipe.unused_overrides(["model.layers.1.up_proj", "model.layers.0.fc"]) == (recipe.overrides[1],)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"group_size": 48}, "group_size: expected one of 32, 64, 128, -1, auto, found 48"),
        ({"group_size": 64.0}, "group_size"),
        ({"group_size": "64"}, "group_size"),
        ({"symmetric": 1}, "symmetric: expected true or false"),
        ({"symmetric": "no"}, "symmetric"),
        ({"damp": 0}, "damp"),
        ({"damp": 1.5}, "damp"),
        ({"damp": True}, "damp"),
        ({"damp": float("nan")}, "damp"),
        ({"act_order": "dynamic"}, "act_order"),
        ({"format": "gguf"}, "format"),
        ({"samples": 0}, "samples: expected a whole number of at least 1"),
        ({"max_length": True}, "max_length"),
        ({"seed": -1}, "seed"),
        ({"calibration": ""}, "calibration"),
        ({"groupsize": 64}, "unknown key 'groupsize'"),
        ({"scheme": "int3"}, "scheme: expected one of int4, int8"),
        ({"method": "awq"}, "method: expected one of gptq, imatrix, rtn, rtn-static, found 'awq'"),
        ({"method": ["rtn"]}, "method: expected one of"),
        ({"method": "rtn", "damp": 0.1}, "damp: no option of method rtn"),
        ({"options": {"damp": 0.1}}, "unknown key 'options'"),
        ({"format": "awq", "scheme": "int8"}, "recipe: awq can't hold int8 weights; awq holds int4 only"),
        (
            {"format": "marlin", "overrides": [{"match": "x", "scheme": "int8"}]},
            "override 'x': marlin can't hold int8",
        ),
        ({"format": "marlin", "symmetric": False}, "recipe: marlin can't hold asymmetric"),
        (
            {"format": "marlin", "overrides": [{"match": "x", "symmetric": False}]},
            "override 'x': marlin can't hold",
        ),
        ({"overrides": {"x": "skip"}}, "overrides: expected a list"),
        ({"overrides": ["x"]}, "overrides: expected a mapping"),
        ({"overrides": [{"match": "x"}]}, "expected either skip or settings"),
        ({"overrides": [{"match": "x", "skip": True, "group_size": 32}]}, "expected either skip or settings"),
        ({"overrides": [{"match": "x", "skip": "yes"}]}, "skip: expected true or false"),
        ({"overrides": [{"match": "(", "skip": True}]}, "not a regular expression"),
        ({"overrides": [{"match": "x", "scheme": 3}]}, "override 'x': scheme: expected one of int4, int8"),
        ({"overrides": [{"match": "x", "element": "int8"}]}, "element: unknown key"),
        ({"overrides": [{"match": "x", "group_size": 1}]}, "override 'x': group_size: expected one of"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(UsageError) as error:
        Recipe.from_dict(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "skip",
        "=skip",
        "x",
        "x=",
        "x=groups=3",
        "x=group_size",
        "x=group_size=a",
        "x=group_size=3",
        "x=sym=maybe",
        "x=sym=true,symmetric=false",
        "x=damp=-1",
        "(=skip",
    ],
)
def test_wrong_command_line_overrides_are_refused(text):
    with pytest.raises(UsageError, match="override"):
        Override.parse(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1\n", "expected a mapping"),
        (b"", "expected a mapping"),
        (b"group_size: [", "not a YAML recipe"),
        (b"\xff\xfe\xfa", "not a YAML recipe"),
        (b"!!python/object/apply:os.system ['true']", "not a YAML recipe"),
        (b"group_size: 7", "group_size: expected one of"),
        (b"1: 2", "unknown key '1'"),
    ],
)
def test_bad_recipe_files_are_named(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_recipe(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_recipe_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="can't read the recipe"):
        read_recipe(tmp_path / "none.yaml")


def test_absent_keys_keep_their_defaults(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("group_size: 32\noverrides:\n  - match: lm_head\n    skip: true\n", encoding="utf-8")
    expected = Recipe(group_size=32, overrides=(Override("lm_head", skip=True),))
    assert read_recipe(path) == expected
    assert recipe_module.Recipe().replace(group_size=32).group_size == 32


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "damp: 2024-13-45", "\0", "a: &a [*a]", "seed: " + "9" * 5000]
)
def test_a_recipe_of_nonsense_is_one_line(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"recipe\.yaml") as caught:
        read_recipe(path)
    assert "\n" not in str(caught.value)


def test_a_recipe_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it is a named pipe, not a regular file"):
        read_recipe(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * 2_000_000)
    with pytest.raises(UsageError, match="more than 262144 bytes"):
        read_recipe(tmp_path / "large")


@pytest.mark.parametrize("text", ["(?:a{1000}){1000}=skip", "a" * 50_000 + "=skip", "=" * 30_000])
def test_an_override_costs_no_time_and_no_memory(text):
    with pytest.raises(UsageError):
        Override.parse(text)
