"""The model card of a quantised checkpoint: ``README.md`` with YAML front matter as the Hub reads it.

Licence, languages and tags are taken from the original's card, value by value, if they have the type that the
Hub expects. Nothing in the card depends on the date or speed of the run, so the same run writes the same
card.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from marlinq.checkpoint import Checkpoint
from marlinq.core.display import counted
from marlinq.core.files import read_regular
from marlinq.core.model_source import is_hub_id
from marlinq.core.plain_values import load_yaml
from marlinq.core.safe_text import escaped, one_line
from marlinq.core.schemes import SCHEMES

CARD = "README.md"

_MAX_BYTES = 4 << 20
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
_TAGS = ("marlinq", "quantized")
_MOST_VALUES = 200
_LONGEST = 20_000


def model_card(
    source: Checkpoint,
    *,
    base_model: str | None,
    recipe: Mapping[str, Any],
    tool: str,
    schemes: Mapping[str, int],
    errors: Mapping[str, Mapping[str, float]],
    calibration: Mapping[str, Any] | None,
    tuning: Mapping[str, Any] | None,
    nbytes: int,
    vllm: bool,
) -> str:
    """The text of the card.

    Args:
        source: the original, from whose card values are taken.
        base_model: Hub id of the original; None where it is not known.
        recipe: keys and values of the recipe, as in the manifest.
        tool: program that made the checkpoint, with its version.
        schemes: scheme in words -> number of modules that have it.
        errors: label of a quantity -> module name -> relative squared error.
        calibration: documents, tokens and source of the text; None for a method without calibration.
        tuning: steps and divergences, as in the manifest; None for a run that did not tune.
        nbytes: bytes of the tensors.
        vllm: whether vLLM loads the layout.
    """
    matter, body = _read_card(source.path / CARD) if CARD in source.side_files else ({}, "")
    front = _front_matter(matter, base_model, recipe)
    name = (base_model or source.path.absolute().name).rpartition("/")[2]
    yaml_text = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    original = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "the original model"
    lines = [
        f"# {inline(name)} in {_bits(recipe)} bits",
        "",
        f"Made from {original} by {inline(tool)}: {_bytes(source.nbytes)} became {_bytes(nbytes)}.",
        "",
        "| | |",
        "| --- | --- |",
        *(
            f"| quantised | {counted(count, 'linears')} as {inline(scheme)} |"
            for scheme, count in schemes.items()
        ),
        *_calibration(calibration),
        *_tuned(tuning),
        *(line for label, known in errors.items() for line in _errors(label, known)),
        "",
        "`marlinq.json` lists every tensor with its hash. `quantization_config` in `config.json` names the",
        "layout of the tensors; `marlinq convert` writes the same weights in another one.",
        "",
        "## Use",
        "",
        *_use(vllm),
        "",
        "## Recipe",
        "",
        *_fenced(yaml.safe_dump(_public(recipe), sort_keys=False, allow_unicode=True), "yaml"),
        "",
        "Saved as `recipe.yaml`, it repeats the run: `marlinq quantize MODEL OUT --recipe recipe.yaml`.",
    ]
    if body:
        lines += ["", "## The original's card", "", body.strip()]
    return f"---\n{yaml_text}---\n\n" + "\n".join(lines) + "\n"


def hub_id(model: str, source: Checkpoint) -> str | None:
    """The Hub id of the original: the user's spelling, or the name of a snapshot in the Hub's cache.

    Args:
        model: model as the user named it.
        source: the opened checkpoint.
    """
    if source.path != Path(model) and is_hub_id(model):
        return model
    real = source.path.absolute()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        repository = real.parent.parent.name.removeprefix("models--").replace("--", "/")
        return repository if is_hub_id(repository) else None
    return None


def _front_matter(
    matter: Mapping[str, Any], base_model: str | None, recipe: Mapping[str, Any]
) -> dict[str, Any]:
    front: dict[str, Any] = {}
    if base_model is not None:
        front |= {"base_model": base_model, "base_model_relation": "quantized"}
    for key in _CARRIED:
        value = _carried(matter.get(key))
        if value is not None:
            front[key] = value
    front.setdefault("pipeline_tag", "text-generation")
    front["library_name"] = "transformers"
    # No layout: the card goes with the weights into another, and the Hub reads the layout from config.json.
    own = [*_TAGS, f"{_bits(recipe)}-bit", str(recipe.get("method", ""))]
    tags = matter.get("tags")
    others = (
        [_line(tag) for tag in tags[:_MOST_VALUES] if isinstance(tag, str)] if isinstance(tags, list) else []
    )
    front["tags"] = list(dict.fromkeys(tag for tag in (*own, *others) if tag))
    return front


def _carried(value: Any) -> str | list[str] | None:
    """A value of the original's card, if it is a line of text or a list of lines; else None."""
    if isinstance(value, str) and value.strip():
        return _line(value)
    if isinstance(value, list):
        # YAML 1.1 reads "no", the code of Norwegian, as False.
        items = ["no" if item is False else item for item in value[:_MOST_VALUES]]
        return [_line(item) for item in items if isinstance(item, str) and item.strip()] or None
    return None


def _line(text: str) -> str:
    return escaped(" ".join(text[:_LONGEST].split()))


def _read_card(path: Path) -> tuple[dict[str, Any], str]:
    """(front matter, text) of the original's card; empty where it has none or can't be read."""
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}, ""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    try:
        matter = load_yaml(match[1].encode())
    except ValueError as error:
        warnings.warn(
            f"{path}: its front matter can't be read ({error}); the new card has none of its licence, "
            "languages and tags",
            stacklevel=2,
        )
        matter = None
    return (matter if isinstance(matter, dict) else {}), text[match.end() :]


def _public(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without paths of the user's folders, because cards are published."""
    paths = {key: recipe[key] for key in ("calibration", "chat_template") if key in recipe}
    return {**recipe, **{key: _without_folder(value) for key, value in paths.items()}}


def _without_folder(value: Any) -> Any:
    """A source, or each of several, without the folder of an absolute path."""
    if isinstance(value, list | tuple):
        return [_without_folder(each) for each in value]
    if isinstance(value, str) and (value.startswith("~") or Path(value).is_absolute()):
        return Path(value).name
    return value


def _calibration(calibration: Mapping[str, Any] | None) -> list[str]:
    if calibration is None:
        return ["| calibration | none: the method needs no text |"]
    shown = ", ".join(
        "text that the model wrote itself" if part["source"] == "self" else Path(part["source"]).name
        for part in calibration.get("sources") or [calibration]
    )
    documents, tokens = calibration.get("documents"), calibration.get("tokens")
    return [
        f"| calibration | {counted(documents, 'documents')}, {counted(tokens, 'tokens')}: {inline(shown)} |"
    ]


def _tuned(tuning: Mapping[str, Any] | None) -> list[str]:
    if tuning is None:
        return []
    watched = f"mean KL divergence on {counted(tuning['held_out'], 'held-out documents')}"
    if tuning["kl_before"] is None:
        gain = "no text was held out"
    elif tuning["kept_step"] == 0:
        gain = f"undone, since the {watched} got no better than {tuning['kl_before']:.4f} nats"
    else:
        gain = f"{watched}: {tuning['kl_before']:.4f}, then {tuning['kl_after']:.4f} nats"
    return [f"| tuned | {counted(tuning['steps'], 'steps')}; {gain} |"]


def _errors(label: str, errors: Mapping[str, float]) -> list[str]:
    known = {name: error for name, error in errors.items() if math.isfinite(error)}
    if not known:
        return []
    worst = max(known, key=lambda name: known[name])
    largest = f"largest {known[worst]:.2e} in {inline(worst)}"
    return [f"| {label}, squared, relative | median {median(known.values()):.2e}, {largest} |"]


def _use(vllm: bool) -> list[str]:
    """Commands that serve and load the checkpoint from the current folder."""
    serve = ["vllm serve .", ""] if vllm else []
    commands = [*serve, "marlinq inspect .   # which servers load it", "marlinq generate . --prompt 'Hello'"]
    python = [
        "import marlinq",
        "from transformers import AutoModelForCausalLM",
        "",
        "marlinq.register()  # marlinq's linears in transformers",
        'model = AutoModelForCausalLM.from_pretrained(".", device_map="auto")',
    ]
    return ["```", *commands, "```", "", "```python", *python, "```"]


def _fenced(text: str, language: str) -> list[str]:
    """A code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text.rstrip("\n"), fence]


def inline(text: str) -> str:
    """``text`` escaped for a line of Markdown or a table cell."""
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", one_line(text))


def _bits(recipe: Mapping[str, Any]) -> int:
    """Bits per weight of the recipe's scheme."""
    return SCHEMES[str(recipe["scheme"])].element.bits


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
