"""Cases of the second campaign about what single operations read: targets, sparse folders, configs, tasks.

``allocation`` forges a recipe's choice of schemes, or what an unfinished run with a target kept of its own;
``sparse`` damages 2:4 sparse folders; ``recommend`` asks about forged configs; ``tasks`` forges task files of
lm-evaluation-harness, which are read and never run. ``wrong`` is here

* a run that is larger than its target, or figures of an unfinished run that are no numbers;
* a changed byte of sparse weights that ``verify`` passes under a manifest, or passes and ``load`` refuses;
* a recommendation whose figures are negative, infinite or NaN;
* a task file whose plain values name a function.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import yaml

from marlinq.core.errors import MarlinqError
from marlinq.operations.evaluate.tasks.task_files import read_task
from marlinq.operations.quantize import quantize_model
from marlinq.operations.quantize.candidates import CANDIDATES
from marlinq.runtime import load
from tests.fuzz.campaign import EXIT_CODES, Finding, Killed, Result, limited, quiet, run_here
from tests.fuzz.mutations import mutate_bytes, mutate_json, odd_value
from tests.testing.mixtures import save_mixture

AREAS = ("allocation", "sparse", "recommend", "tasks")
TEXTS = (
    "=1+1",
    "\uff1dcmd",
    "+x",
    "@x",
    "-x",
    "a\nb",
    "\x1b[2J",
    "x" * 5_000,
    "../x",
    "/etc/passwd",
    "/dev/zero",
    "\u202e",
    "<script>",
    "|",
    "a: b",
    "[" * 300,
    "{" * 300,
    "&a [*a]",
    "!!bool x",
    "!!python/name:os.system",
    "*a",
    "<<: {a: 1}",
    "0x" + "f" * 5_000,
    "2001-13-45",
    "'",
    '"',
    "%YAML 9.9",
    "---",
    "\ufeff",
    "no",
    "~",
)
_TARGET = 6.0
"""Bits of a weight that the unfinished run was to choose schemes for."""
_TASK = """\
task: tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: docs.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: choices
num_fewshot: 0
metric_list:
- metric: acc
  aggregation: mean
  higher_is_better: true
"""


@dataclass(frozen=True)
class Prepared:
    """Inputs that the cases start from.

    Attributes:
        arguments: command line of a run with a target, up to the output folder.
        partial: unfinished folder of that run, killed after the choice.
        sparse: folder of 2:4 sparse weights, with a manifest.
        mixture: folder of a tiny mixture of experts, not quantised.
    """

    arguments: tuple[str, ...]
    partial: Path
    sparse: Path
    mixture: Path


def prepare(folder: Path, plain: Path) -> Prepared:
    """Makes them of the folder ``plain``, a model that is not quantised."""
    folder.mkdir()
    text = folder / "tokens.jsonl"
    rows = ({"input_ids": [3 + (i * i + 7 * k) % 120 for k in range(48)]} for i in range(12))
    text.write_text("\n".join(map(json.dumps, rows)))
    shared = ("--method", "rtn", "--device", "cpu", "--format")
    sparse = folder / "sparse"
    narrow = ("--override", "k_proj|v_proj=skip")
    _finished(
        run_here(["quantize", str(plain), str(sparse), "--sparsity", "2:4", *narrow, *shared, "marlin-24"])
    )
    out = folder / "target"
    asked = ("--calibration", str(text), "--target-bits", str(_TARGET), *shared, "compressed-tensors")
    with mock.patch.object(quantize_model, "solve", side_effect=Killed):
        assert run_here(["quantize", str(plain), str(out), *asked]) == "killed"
    save_mixture(folder / "mixture", "qwen3-moe")
    return Prepared(asked, out.with_name("target.partial"), sparse, folder / "mixture")


def _finished(result: Result | str) -> None:
    assert isinstance(result, Result), result
    assert result.code == 0, result.err


class OperationCases:
    """A case of the campaign :mod:`tests.fuzz.surfaces`, and its areas of single operations."""

    def __init__(self, campaign: Any, number: int, rng: Random, area: str, home: Path) -> None:
        self.campaign, self.number, self.rng, self.area, self.home = campaign, number, rng, area, home
        self.out = home / "out"
        self.what = area

    def found(self, kind: str, detail: str) -> None:
        """Note a broken promise."""
        self.campaign.tally.findings.append(Finding(self.number, kind, self.what, detail))

    def command(self, *arguments: str, as_json: bool = False) -> Result | None:
        """Run a command and check what every command promises; None where it broke a promise."""
        self.campaign.tally.runs += 1
        result = run_here([*arguments, *(["--json"] if as_json else [])])
        if isinstance(result, str):
            self.found("hang" if result.startswith("hang") else "traceback", f"{arguments[:6]}\n{result}")
            return None
        outcome = "ok" if result.code == 0 else f"exit {result.code}"
        self.campaign.tally.outcomes[f"{self.area} {outcome}"] += 1
        printed = result.out + result.err
        if any(not character.isprintable() and character not in "\n\t" for character in printed):
            self.found("text", f"{arguments[:6]}: what acts on a terminal: {printed[:300]!r}")
        if result.code not in EXIT_CODES:
            self.found("traceback", f"{arguments[:6]}: exit code {result.code}\n{result.err[-2000:]}")
        elif result.code not in (0, 7) and not as_json and "error: " not in result.err:
            self.found("text", f"{arguments[:6]}: exit {result.code} without a line: {result.err[-300:]!r}")
        return result

    def odd(self) -> Any:
        """A value that no honest file holds."""
        return odd_value(self.rng, *TEXTS, 1e300, 5e-324, 1 << 200, {"a": {"b": [1e308] * 3}})

    def allocation(self) -> None:
        """A forged choice, in a recipe or in what an unfinished run kept."""
        if self.rng.random() < 0.5:
            self._allocation_of_a_recipe()
            return
        prepared: Prepared = self.campaign.prepared
        partial = self.out.with_name("out.partial")
        shutil.copytree(prepared.partial, partial)
        path = partial / "allocation.json"
        value = json.loads(path.read_text().partition("\n")[2])
        for _ in range(self.rng.randrange(1, 3)):
            self.what += f", {mutate_json(self.rng, self.rng.choice((value, *3 * [value['allocation']])))}"
        body = json.dumps(value).encode()
        if self.rng.random() < 0.1:
            body, _ = mutate_bytes(self.rng, body)
        path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        plain = str(self.campaign.plain)
        result = self.command("quantize", plain, str(self.out), *prepared.arguments, "--resume")
        if result is not None and result.code == 0:
            manifest = json.loads((self.out / "marlinq.json").read_text(), parse_constant=_no_number)
            self._check_target(manifest["allocation"]["bits"], 0, manifest["allocation"]["nbytes"])

    def _allocation_of_a_recipe(self) -> None:
        rng = self.rng
        names = [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp")]
        chosen: dict[str, list[Any]] = {}
        # Groups of 128 don't fit the tiny model: with them, hardly a recipe reaches the check of its target.
        fitting = sorted(set(CANDIDATES) - ({"int4/128"} if rng.random() < 0.9 else set()))
        for name in names:
            chosen.setdefault(rng.choice(fitting), []).append(name)
        recipe: dict[str, Any] = {"format": "compressed-tensors", "method": "rtn", "allocation": chosen}
        recipe |= rng.choice(({}, {"target_bits": rng.uniform(4, 16)}, {"target_size": rng.randrange(10**6)}))
        if rng.random() < 0.5:
            self.what += f", {mutate_json(rng, recipe)}"
        if rng.random() < 0.2:
            recipe[rng.choice(("sparsity", "served_by", "target_size", "scheme"))] = self.odd()
        path = self.home / "recipe.yaml"
        path.write_text(json.dumps(recipe))
        asked = ("quantize", str(self.campaign.plain), str(self.out), "--recipe", str(path), "--plan")
        result = self.command(*asked, "--device", "cpu", as_json=True)
        # Where the choice is gone, one is made, which says what it is.
        if result is not None and result.code == 0 and recipe.get("allocation"):
            plan = json.loads(result.out, parse_constant=_no_number)
            size = recipe.get("target_size", "none")
            self._check_target(0, plan["output_bytes"] if isinstance(size, int) else 0, size)

    def _check_target(self, bits: float, nbytes: int, size: Any) -> None:
        if bits > _TARGET or (nbytes and nbytes > size):
            self.found("wrong", f"larger than its target: {bits} bits, {nbytes} of {size} bytes")

    def sparse(self) -> None:
        """A damaged folder of sparse weights through verify, load and convert."""
        source = self.home / "source"
        shutil.copytree(self.campaign.prepared.sparse, source)
        own = self.rng.random() < 0.5
        if not own:
            (source / "marlinq.json").unlink()
        kind = self.rng.choice(("byte", "config", "manifest" if own else "byte"))
        self.what += f" {kind}"
        if kind == "byte":
            (path,) = source.glob("*.safetensors")
            data = bytearray(path.read_bytes())
            place = self.rng.randrange(int.from_bytes(data[:8], "little") + 8, len(data))
            data[place] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)
        else:
            path = source / ("config.json" if kind == "config" else "marlinq.json")
            value = json.loads(path.read_text())
            inner = value["quantization_config"] if kind == "config" else value
            self.what += f", {mutate_json(self.rng, inner)}"
            path.write_text(json.dumps(value))
        against = ("--against", str(self.campaign.plain)) if self.rng.random() < 0.5 else ()
        result = self.command("verify", str(source), "--device", "cpu", *against)
        if result is not None and result.code == 0:
            if kind == "byte" and own:
                self.found("wrong", "verify passes a byte that the manifest has otherwise")
            try:
                with quiet(), limited():
                    load(source, device="cpu", progress=False)
            except MarlinqError as error:
                self.found("wrong", f"verify passes, load refuses: {error}")
        target = self.rng.choice(("gptq", "compressed-tensors", "gptq-marlin-24", "dense"))
        self.command("convert", str(source), str(self.out), "--to", target)
        self.command("inspect", str(source), as_json=True)

    def recommend(self) -> None:
        """A forged config, and odd loads."""
        source = self.home / "source"
        source.mkdir()
        base = self.rng.choice((self.campaign.plain, self.campaign.prepared.mixture))
        value = json.loads((base / "config.json").read_text())
        for _ in range(self.rng.randrange(1, 3)):
            self.what += f", {mutate_json(self.rng, value)}"
        (source / "config.json").write_text(json.dumps(value))
        more: list[str] = []
        for option in ("--batch", "--context", "--prompt", "--gpu", "--servers"):
            if self.rng.random() < 0.1:
                more += [
                    option,
                    self.rng.choice(("0", "1", "-1", "1048576", "9" * 30, "l4", "vllm", "", "\x1b")),
                ]
        result = self.command("recommend", str(source), *more, as_json=True)
        if result is not None and result.code == 0:
            for name, number in _numbers(json.loads(result.out)):
                if not math.isfinite(number) or number < 0:
                    self.found("wrong", f"{name} of a recommendation is {number}")
                    return

    def tasks(self) -> None:
        """A forged task file."""
        task = yaml.safe_load(_TASK)
        function = self.rng.random() < 0.1
        for _ in range(0 if function else self.rng.randrange(1, 3)):
            self.what += f", {mutate_json(self.rng, task)}"
        if self.rng.random() < 0.2:
            task["include"] = self.rng.choice((self.odd(), "tiny.yaml", ["../../etc/passwd"], "/dev/zero"))
        # JSON is YAML.
        text = json.dumps(task).encode()
        if function:
            value = self.rng.choice((b'"acc"', b'"{{question}}"', b'"answer"', b'"choices"'))
            text = text.replace(value, b"!function os.system")
        if self.rng.random() < 0.2:
            text, _ = mutate_bytes(self.rng, text)
        (self.home / "docs.jsonl").write_text('{"question": "q", "choices": ["a", "b"], "answer": 0}\n')
        path = self.home / "tiny.yaml"
        path.write_bytes(text)
        self.campaign.tally.runs += 1
        try:
            with quiet(), limited():
                read = read_task(str(path), frozenset({"acc"}))
        except MarlinqError as error:
            self.campaign.tally.outcomes[f"tasks exit {error.exit_code}"] += 1
            if "\n" in str(error):
                self.found("text", f"more than a line: {error}")
            return
        self.campaign.tally.outcomes["tasks ok"] += 1
        if "!function" in json.dumps(read):
            self.found("wrong", "a function is among the plain values")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a JSON value with their names, truth values aside."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
