from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from marlinq.checkpoint import Checkpoint
from marlinq.checkpoint.reader import REPORTS
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.finish import amount_of_text
from marlinq.operations.quantize.recipe import Recipe, read_recipe
from marlinq.operations.report import CARD, card, hub_id
from tests.testing.original_folders import RECIPE, ROWS, save_tiny

ORIGINAL = """---
license: other
license_name: tiny-licence
license_link: https://example.org/licence
language:
- en
- no
datasets: [org/text]
tags: [llama, 7, conversational]
base_model: org/another
model-index: {name: x}
---
# Tiny

Its own words.
"""


def made(tmp_path: Path, card: str | None, **changes: Any) -> tuple[dict[str, Any], str]:
    """Front matter and text of the card of a quantised tiny model."""
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    if card is not None:
        (source / CARD).write_text(card, encoding="utf-8")
    report = quantize(source, tmp_path / "out", recipe=RECIPE.replace(**changes), device="cpu")
    # Report and card name the same median, whose two middle errors differ where linears are even in number.
    (told,) = re.findall(r"median \S+, largest \S+", report.render())
    assert told in (tmp_path / "out" / CARD).read_text(encoding="utf-8")
    _, front, text = (tmp_path / "out" / CARD).read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_licence_and_languages_are_carried(tmp_path: Path) -> None:
    front, text = made(tmp_path, ORIGINAL)
    assert front == {
        "license": "other",
        "license_name": "tiny-licence",
        "license_link": "https://example.org/licence",
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "datasets": ["org/text"],
        "library_name": "transformers",
        "tags": ["marlinq", "quantized", "4-bit", "gptq", "llama", "conversational"],
    }
    assert text.lstrip().startswith("# model in 4 bits\n")
    assert text.endswith("## The original's card\n\n# Tiny\n\nIts own words.\n")
    manifest = json.loads((tmp_path / "out" / "marlinq.json").read_text())
    errors = sorted(v["relative_error"] for k, v in manifest["run"].items() if k.startswith("module "))
    assert f"median {median(errors):.2e}, largest {errors[-1]:.2e} in " in text
    tokens = manifest["run"]["calibration"]["tokens"]
    assert f"| calibration | 8 documents, {tokens} tokens: text that the model wrote itself |" in text
    assert f"| quantised | {len(errors)} linears as int4, groups of 32, symmetric |" in text
    use = text.partition("## Use\n")[2]
    assert use.index("vllm serve .\n") < use.index("marlinq.register()") < use.index(".from_pretrained(")


def test_the_recipe_in_the_card_repeats_the_run(tmp_path: Path) -> None:
    _, text = made(tmp_path, None, damp=0.03)
    block = text.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "recipe.yaml").write_text(block)
    assert read_recipe(tmp_path / "recipe.yaml") == RECIPE.replace(damp=0.03)
    assert "The original's card" not in text
    assert isinstance(RECIPE, Recipe)


@pytest.mark.parametrize(
    ("kept_step", "gain"),
    [
        (2, "mean KL divergence on 1 held-out document: 0.5000, then 0.2500 nats"),
        (0, "undone, since the mean KL divergence on 1 held-out document got no better than 0.5000 nats"),
    ],
)
def test_a_card_says_what_tuning_gained(kept_step: int, gain: str) -> None:
    tuning = {"steps": 2, "held_out": 1, "kl_before": 0.5, "kl_after": 0.25, "kept_step": kept_step}
    assert card._tuned(tuning) == [f"| tuned | 2 steps; {gain} |"]


def test_a_card_does_not_claim_a_gain_that_nothing_watched(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(ROWS.read_text(encoding="utf-8").splitlines()[0], encoding="utf-8")
    _, told = made(tmp_path, None, calibration=str(text), samples=1, tune_steps=2)
    assert "| tuned | 2 steps; no text was held out |" in told


def test_a_card_names_each_source() -> None:
    sources = [{"source": "/home/text.jsonl"}, {"source": "self"}]
    (row,) = card._calibration({"source": "x", "sources": sources, "documents": 3, "tokens": 40})
    assert row == "| calibration | 3 documents, 40 tokens: text.jsonl, text that the model wrote itself |"


def test_the_recipe_in_the_card_has_the_amount_of_text_that_the_machine_decided() -> None:
    text = SimpleNamespace(budget=SimpleNamespace(tokens=4096))
    for changes, tokens in (({}, {"tokens": 4096}), ({"samples": 8}, {}), ({"tokens": 64}, {})):
        recipe = Recipe().replace(**changes)
        assert amount_of_text(SimpleNamespace(recipe=recipe, texts=(text,), tuning=None)) == tokens
    read = SimpleNamespace(budget=None)
    for texts, tuning in (((read,), None), ((text, read), None), ((text,), object())):
        assert amount_of_text(SimpleNamespace(recipe=Recipe(), texts=texts, tuning=tuning)) == {}


def test_the_folders_of_whoever_made_it_stay_unknown(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"input_ids": [' + ", ".join(map(str, range(3, 40))) + "]}\n")
    _, text = made(tmp_path, None, calibration=str(tmp_path / "text.jsonl"), samples=1)
    assert "calibration: text.jsonl\n" in text
    assert str(tmp_path) not in text


def test_tags_name_no_layout_and_the_card_no_file_that_convert_leaves_behind(tmp_path: Path) -> None:
    front, text = made(tmp_path, None, format="awq")
    assert front["tags"] == ["marlinq", "quantized", "4-bit", "gptq"]
    assert not [name for name in REPORTS if name in text]


def test_several_sources_and_a_template_are_named_without_their_folders(tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("first.jsonl", "second.jsonl")]
    for start, path in enumerate(texts):
        path.write_text('{"input_ids": [' + ", ".join(map(str, range(3 + start, 40))) + "]}\n")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    spelled = [f"{texts[0]}=2", str(texts[1])]
    _, text = made(tmp_path, None, calibration=spelled, samples=2, chat_template=str(template))
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    assert recipe["calibration"] == ["first.jsonl=2", "second.jsonl"]
    assert recipe["chat_template"] == "template.jinja"
    assert "tokens: first.jsonl, second.jsonl |" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    "card",
    [
        "---\nlicense: &a [x, x]\ntags: [*a, *a]\n---\nbody",
        "---\nlicense: !!python/object/apply:os.system [ls]\n---\nbody",
        "---\nlicense: !!bool x\n---\nbody",
        "---\nlicense: 0x" + "f" * 5000 + "\n---\nbody",
        "---\n- a\n- b\n---\nbody",
        "---\nlicense: {a: b}\nlanguage: 3\ntags: x\n---\nbody",
        "---\n" + "[" * 5000 + "\n---\nbody",
        "---\nlicense: \ud800\n---\nbody".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    ],
    ids=["aliases", "objects", "tag", "digits", "list", "types", "depth", "surrogate"],
)
def test_a_hostile_card_gives_no_values(tmp_path: Path, card: str) -> None:
    readable = any(part in card for part in ("- a", "{a: b}", "\ufffd"))
    with nullcontext() if readable else pytest.warns(UserWarning, match="front matter can't be read"):
        front, text = made(tmp_path, card, calibration=str(ROWS))
    assert set(front) <= {"license", "pipeline_tag", "library_name", "tags"}
    assert front["tags"] == ["marlinq", "quantized", "4-bit", "gptq"]
    # Values that are no text are left out; a character without an encoding is replaced.
    assert front.get("license", "").strip("\ufffd") == ""
    assert text.endswith("body\n")


def test_a_card_cannot_break_out_of_the_front_matter(tmp_path: Path) -> None:
    front, _ = made(
        tmp_path,
        '---\nlicense: "mit\\n---\\nbase_model: a/b"\ntags: ["x\\n- y: z"]\n---\n',
        calibration=str(ROWS),
    )
    assert front["license"] == "mit --- base_model: a/b"
    assert "base_model" not in front
    assert front["tags"][-1] == "x - y: z"


def test_the_base_model_is_what_the_hub_calls_it(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    cached.parent.mkdir(parents=True)
    source = Checkpoint.open(save_tiny("llama", cached))
    assert hub_id("org/tiny", source) == "org/tiny"
    assert hub_id(str(cached), source) == "org/tiny"
    local = Checkpoint.open(save_tiny("llama", tmp_path / "org"))
    assert hub_id(str(tmp_path / "org"), local) is None
    report = quantize(cached, tmp_path / "out", recipe=RECIPE.replace(method="rtn"), device="cpu")
    front = yaml.safe_load((report.out / CARD).read_text().split("---\n")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("org/tiny", "quantized")
