"""Seeded attacks on everything beside the checkpoint itself: ``python -m tests.fuzz.surfaces``.

Where :mod:`tests.fuzz.campaign` damages checkpoints, a case here forges what else marlinq reads: a manifest
that ``report`` shows, the answers of a Hub, recipes and options, the original's card, chat templates, a
folder for ``from_pretrained``, an unfinished folder and its journal, the cache; and it kills ranks. Commands
run in this process, as do those of the first campaign, and templates in processes of their own, as always.
What single operations read is attacked in :mod:`tests.fuzz.operations`.
The kinds of findings are those of the first campaign; ``wrong`` is here

* a report whose table holds a formula, or that is no JSON;
* a download that holds other bytes than the Hub has, or a file outside the cache;
* a recipe that is read as another one than is written back;
* a card that no YAML reader reads, or a run that a card or template ended after its work;
* logits of ``from_pretrained`` that are not those of ``load``;
* a resumed run with other bytes, cached kernels or notes with other content than was kept.

``MARLINQ_FUZZ_CASES``, ``MARLINQ_FUZZ_SEED`` and ``MARLINQ_FUZZ_ONLY`` as there; ``MARLINQ_FUZZ_SHARD`` is
``N/M`` for every M-th case from the N-th on.
"""

from __future__ import annotations

import contextlib
import csv
import faulthandler
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

import marlinq
from marlinq.checkpoint.hub_download import download
from marlinq.checkpoint.journal import JOURNAL
from marlinq.core import confined, hub_answers, kept
from marlinq.core import hub as core_hub
from marlinq.core.errors import MarlinqError
from marlinq.formats.dialects import DIALECTS
from marlinq.integrations.transformers.quantizer import MarlinqQuantizer
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver import cache as kernel_cache
from marlinq.kernels.driver.compiler import CompiledKernel
from marlinq.operations.quantize.recipe import read_recipe
from tests.fuzz import operations
from tests.fuzz.campaign import (
    MEMORY_LIMIT,
    TIME_LIMIT,
    Base,
    Hang,
    Result,
    Tally,
    killing,
    limited,
    make_bases,
    peak_bytes,
    quiet,
    run_here,
)
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.testing import forks
from tests.testing.hub_server import Hub, Lie, Repository, hub_server
from tests.testing.original_folders import folder_bytes
from tests.testing.recipes import write_recipe

_PACKAGE = Path(marlinq.__file__).parent
QUICKLY = ("--group-size", "32", "--method", "rtn", "--device", "cpu")
"""Options with which the tiny model is quantised without text."""
_MEASURED = ("relative_error", "quantity", "fallback", "figures")
"""Fields of a module's note that nobody can tell from forged ones without the work they stand for."""
RANKS_EVERY = 100
"""Cases of which one starts two ranks, which takes seconds."""
RANKS_TIME_LIMIT = 300
"""Seconds for the imports of two ranks, the time-out of the one that is left, and the run that continues."""

_NUMBERS = ("9" * 400, "9" * 5_000, "-1", "0", "1e999", "nan", "inf", "0x" + "f" * 5_000, "\uff11", "1_0", "")
_TEMPLATES = (
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3,
    "{{ '%0999999999d' % 1 }}",
    "{% for",
    "{{ 1 / 0 }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ x.y.z }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ raise_exception('a\nb\x1b[2J') }}",
    "",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ '\ud800' }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% set x = namespace(t='a') %}{% for i in range(99) %}{% set x.t = x.t + x.t %}{% endfor %}",
    "{{ 'a' * 100000000 }}",
    "{{ range(10 ** 9) | list }}",
    "{{ messages[0].content | center(10 ** 9) }}",
)
_RECIPE = (
    "scheme: int4\ngroup_size: 32\nmethod: rtn\nformat: gptq\nseed: 3\noverrides:\n"
    "- match: layers.0\n  scheme: int8\n"
)
_CARD = (
    "---\nlicense: mit\nlanguage: [en, no]\ntags: [a, b]\ndatasets: [x/y]\n"
    "pipeline_tag: text-generation\n---\nText.\n"
)


class Surfaces:
    """Cases in ``scratch``; case ``n`` depends on the seed and ``n`` alone."""

    AREAS: ClassVar[tuple[str, ...]] = (
        "report",
        "hub",
        "recipe",
        "options",
        "card",
        "template",
        "load",
        "partial",
        "cache",
        *operations.AREAS,
    )

    def __init__(self, scratch: Path, hub: Hub, *, seed: int) -> None:
        self.scratch, self.hub, self.seed = scratch, hub, seed
        self.tally = Tally()
        self.bases = make_bases(scratch / "bases")
        self.plain = self.bases[-1].folder
        self.prepared = operations.prepare(scratch / "prepared", self.plain)
        files = {path.name: path.read_bytes() for path in self.bases[0].folder.iterdir() if path.is_file()}
        hub.repositories["org/tiny"] = Repository({"main": files})
        self.files = files

    def case(self, number: int) -> None:
        """Run one case and note what it breaks."""
        rng = Random(f"surfaces:{self.seed}:{number}")
        ranks = number % RANKS_EVERY == RANKS_EVERY - 1
        area = "ranks" if ranks else self.AREAS[number % len(self.AREAS)]
        home = self.scratch / f"case-{number}"
        home.mkdir()
        self.tally.cases += 1
        self.tally.areas[area] += 1
        case = _Case(self, number, rng, area, home)
        before = peak_bytes()
        seconds = RANKS_TIME_LIMIT if ranks else 2 * TIME_LIMIT
        try:
            # A signal ends no loop in C: then the campaign itself ends, and says where it was.
            faulthandler.dump_traceback_later(5 * seconds, exit=True)
            with warnings.catch_warnings(), limited(seconds):
                warnings.simplefilter("ignore")
                getattr(case, area)()
        except Hang:
            case.found("hang", "the case itself")
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            case.found("traceback", traceback.format_exc()[-3000:])
        finally:
            faulthandler.cancel_dump_traceback_later()
        if peak_bytes() - before > MEMORY_LIMIT:
            case.found("memory", f"{(peak_bytes() - before) / 1e6:.0f} MB more than any case before")
        self.hub.lie = None
        shutil.rmtree(home, ignore_errors=True)


class _Case(operations.OperationCases):
    def copy(self, base: Base | None = None) -> Path:
        source = self.home / "source"
        shutil.copytree(self.campaign.plain if base is None else base.folder, source)
        return source

    def quantize(self, source: Path, *more: str) -> Result | None:
        return self.command("quantize", str(source), str(self.out), *QUICKLY, *more)

    # The areas.

    def report(self) -> None:
        base = self.rng.choice([base for base in self.campaign.bases if base.manifest])
        source = self.copy(base)
        path = source / "marlinq.json"
        manifest = json.loads(path.read_text())
        names = sorted({name.rpartition(".")[0] for name in manifest["tensors"]})
        numbers = (0.1, 1e308, 5e-324, -1, 1 << 100, None)
        module = {"relative_error": self.rng.choice(numbers), "tokens": self.odd(), "fallback": self.odd()}
        manifest |= {"operation": "quantize", "run": {f"module {name}": dict(module) for name in names}}
        manifest["run"]["calibration"] = {"tokens": self.odd(), "source": self.odd()}
        for _ in range(self.rng.randrange(4)):
            self.what += f", {mutate_json(self.rng, manifest)}"
        text = json.dumps(manifest).encode()
        if self.rng.random() < 0.1:
            text, _ = mutate_bytes(self.rng, text)
        path.write_bytes(text)
        time_of = {
            "total": self.odd(),
            "device": self.odd(),
            "stages": [[self.odd(), self.odd()]],
            "blocks": [1],
        }
        forged = {"checkpoints": [{"fingerprint": manifest.get("fingerprint"), "time": time_of}]}
        (source / "report.json").write_text(json.dumps(forged))
        pair = [str(base.folder)] if self.rng.random() < 0.3 else []
        as_json = self.rng.random() < 0.3
        result = self.command("report", str(source), *pair, "--out", str(self.out), as_json=as_json)
        if result is None or result.code:
            return
        json.loads((self.out / "report.json").read_text())
        with (self.out / "report.csv").open(newline="", encoding="utf-8") as file:
            for cell in (cell for row in csv.reader(file) for cell in row):
                number = cell.lstrip("-").replace(".", "").replace("e-", "").replace("e+", "").isdigit()
                if cell[:1] in ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20") and not number:
                    self.found("wrong", f"a formula in the table: {cell[:80]!r}")

    def hub(self) -> None:
        rng, hub = self.rng, self.campaign.hub
        part = rng.choice(("/revision/", "/tree/", "/resolve/", "/api/", ""))
        method = rng.choice(("", "GET", "HEAD"))
        lie = self.lie()
        self.what += f" {method} {part}: {str(lie)[:200]}"
        hub.lie = lambda asked, path: lie if part in path and method in asked else None
        folder = self.home / "hub"
        constants.HF_HUB_CACHE = str(folder)
        self.campaign.tally.runs += 1
        start = time.monotonic()
        try:
            with quiet(), limited():
                came = download("org/tiny", progress=lambda *stage: None)
            self.campaign.tally.outcomes["hub ok"] += 1
            for name, data in self.campaign.files.items():
                path = came / name
                if path.exists() and path.read_bytes() != data and not (lie.body is not None or lie.endless):
                    self.found("wrong", f"{name} came with other bytes")
        except MarlinqError as error:
            self.campaign.tally.outcomes[f"hub exit {error.exit_code}"] += 1
        if time.monotonic() - start > 30:
            self.found("hang", f"{time.monotonic() - start:.0f} s")
        if extra := {path.name for path in self.home.iterdir()} - {"hub"}:
            self.found("dirt", f"outside the cache: {sorted(extra)}")
        for path in folder.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
                self.found("dirt", f"a link that leads out of the cache: {path}")

    def lie(self) -> Lie:
        rng = self.rng
        commit = self.campaign.hub.commit("org/tiny", "main")
        outside = str(self.home / "written")
        odd = rng.choice(
            (None, 3, [], {}, "", "..", "../../x", outside, "x" * 300, "a\nb", "a\\b", "C:\\x", ".")
        )
        entry = {
            "type": "file",
            "path": rng.choice(("config.json", odd)),
            "size": rng.choice((2, -1, 10**30, "2")),
            "oid": rng.choice((commit, odd)),
            "lfs": rng.choice((None, odd, {"oid": odd, "size": 1})),
        }
        tag = rng.choice((f'"{outside}"', '"../../x"', '".."', "", "x" * 200, 'W/"/x"', '"a/b"'))
        header = rng.choice(
            (
                ("ETag", tag),
                ("X-Linked-ETag", tag),
                ("X-Repo-Commit", str(odd).replace("\n", "")),
                ("X-Linked-Size", rng.choice(("9" * 30, "-1", "x", "7", "0"))),
                ("ETag", None),
                ("X-Repo-Commit", None),
                ("Retry-After", rng.choice(("9" * 9, "-1", "x"))),
                ("RateLimit", '"a";r=0;t=99999999'),
                (
                    "Location",
                    rng.choice(
                        ("/login", "file:///etc/passwd", "http://[", "?", "//", "http://:0/", outside)
                    ),
                ),
                ("Link", rng.choice(('<http://127.0.0.1:1/x>; rel="next"', "<?>; rel=next", "garbage"))),
                ("Content-Encoding", rng.choice(("gzip", "br", "x"))),
                ("Content-Length", rng.choice(("0", "1", "x"))),
            )
        )
        status = rng.choice((None, None, 200, 204, 206, 301, 302, 304, 307, 400, 401, 404, 429, 500))
        kind = rng.randrange(6)
        if kind == 0:
            return Lie(headers=dict([header]))
        if kind == 1:
            return Lie(
                status=status,
                headers=dict([header]),
                body=rng.choice((b"", b"<html>", b"[]", b"{}", b"null")),
            )
        if kind == 2:
            return Lie(body=json.dumps([entry] * rng.choice((1, 2))).encode())
        if kind == 3:
            value = {
                "id": "org/tiny",
                "sha": rng.choice((commit, odd)),
                "siblings": rng.choice(([], odd, [{"rfilename": odd}])),
            }
            return Lie(body=json.dumps(value).encode())
        if kind == 4:
            body, _ = mutate_bytes(rng, json.dumps([entry]).encode())
            return Lie(status=status, body=rng.choice((body, b"[" * 10_000, b"9" * 5_000, b'{"sha": NaN}')))
        return Lie(silent=rng.random() < 0.2, endless=True)

    def recipe(self) -> None:
        lines = _RECIPE.splitlines()
        for _ in range(self.rng.randrange(1, 4)):
            place = self.rng.randrange(len(lines))
            key = lines[place].partition(":")[0]
            lines[place] = self.rng.choice(
                (
                    f"{key}: {self.rng.choice(operations.TEXTS)}",
                    f"{key}: {self.rng.choice(_NUMBERS)}",
                    f"{key}: {json.dumps(self.odd())}",
                    self.rng.choice(operations.TEXTS),
                    f"{lines[place]}\n{lines[place]}",
                )
            )
        text = "\n".join(lines).encode("utf-8", "surrogatepass")
        if self.rng.random() < 0.3:
            text, _ = mutate_bytes(self.rng, text)
        path = self.home / "recipe.yaml"
        path.write_bytes(text)
        self.what += f" {text[:200]!r}"
        result = self.command(
            "quantize", str(self.campaign.plain), str(self.out), "--plan", "--recipe", str(path)
        )
        if result is not None and result.code == 0:
            read = read_recipe(path)
            write_recipe(read, self.home / "again.yaml")
            if read_recipe(self.home / "again.yaml") != read:
                self.found("wrong", "a recipe that is written back is another one")

    def options(self) -> None:
        rng = self.rng
        base = rng.choice(self.campaign.bases[:-1])
        source, out = str(base.folder), str(self.out)
        commands: dict[str, tuple[list[str], tuple[str, ...]]] = {
            "quantize": (
                [str(self.campaign.plain), out, "--plan"],
                (
                    "--scheme",
                    "--group-size",
                    "--damp",
                    "--samples",
                    "--max-length",
                    "--seed",
                    "--max-shard-size",
                    "--override",
                    "--skip",
                    "--format",
                    "--method",
                    "--calibration",
                    "--recipe",
                    "--device",
                ),
            ),
            "convert": (
                [source, out, "--to", "marlin"],
                ("--max-shard-size", "--to", "--from", "--revision"),
            ),
            "generate": (
                [source, "--prompt", "ab", "--max-new-tokens", "1", "--device", "cpu"],
                (
                    "--max-new-tokens",
                    "--temperature",
                    "--top-k",
                    "--top-p",
                    "--seed",
                    "--prompt",
                    "--dtype",
                    "--device",
                ),
            ),
            "eval": (
                [
                    source,
                    "--text",
                    str(self.campaign.plain / "config.json"),
                    "--windows",
                    "1",
                    "--length",
                    "8",
                    "--device",
                    "cpu",
                ],
                ("--text", "--windows", "--length", "--against", "--device"),
            ),
            "inspect": ([source], ("--revision", "--tensor-parallel")),
            "report": ([source], ("--out", "--revision")),
            "verify": ([source, "--device", "cpu"], ("--against", "--device")),
            "rotate": ([str(self.campaign.plain), out], ("--seed", "--max-shard-size")),
        }
        name = rng.choice(sorted(commands))
        arguments, options = commands[name]
        arguments = [*arguments] if name != "report" else [*arguments, "--out", out]
        if rng.random() < 0.2:
            place = rng.randrange(len(arguments))
            arguments[place] = rng.choice((*operations.TEXTS, "x" * 5_000, "/".join(["x" * 200] * 30)))
        for _ in range(rng.randrange(1, 3)):
            arguments += [rng.choice(options), rng.choice((*_NUMBERS, *operations.TEXTS))]
        # A command line has no null bytes and no halves of surrogate pairs.
        self.what += f" {name} {[argument[:40] for argument in arguments]}"
        here = Path.cwd()
        os.chdir(self.home)
        try:
            self.command(name, *arguments)
        finally:
            os.chdir(here)

    def card(self) -> None:
        source = self.copy()
        text = _CARD
        for _ in range(self.rng.randrange(1, 4)):
            lines = text.split("\n")
            place = self.rng.randrange(len(lines))
            key = lines[place].partition(":")[0]
            value = self.rng.choice((*operations.TEXTS, *_NUMBERS, json.dumps(self.odd())))
            lines[place] = self.rng.choice((f"{key}: {value}", value, ""))
            text = "\n".join(lines)
        data = text.encode("utf-8", "surrogatepass")
        if self.rng.random() < 0.3:
            data, _ = mutate_bytes(self.rng, data)
        (source / "README.md").write_bytes(data)
        self.what += f" {data[:200]!r}"
        result = self.quantize(source)
        if result is None:
            return
        if result.code:
            self.found("wrong", f"a card ended the run: {result.err[-300:]}")
            return
        made = (self.out / "README.md").read_text(encoding="utf-8")
        front = yaml.safe_load(made.split("---\n")[1]) if made.startswith("---\n") else None
        if not isinstance(front, dict) or front.get("library_name") != "transformers":
            self.found("wrong", "the card that was made has no front matter")

    def template(self) -> None:
        quantized = self.rng.random() < 0.5
        source = self.copy(self.rng.choice(self.campaign.bases[:-1]) if quantized else None)
        template = self.rng.choice(_TEMPLATES)
        if self.rng.random() < 0.2:
            template = mutate_bytes(self.rng, template.encode("utf-8", "surrogatepass"))[0].decode(
                "utf-8", "replace"
            )
        (source / "chat_template.jinja").write_text(template, encoding="utf-8", errors="replace")
        self.what += f" {template[:100]!r}"
        if quantized:
            self.command(
                "generate",
                str(source),
                "--chat",
                "--prompt",
                "ab",
                "--max-new-tokens",
                "1",
                "--greedy",
                "--device",
                "cpu",
            )
            return
        rows = self.home / "rows.jsonl"
        message = {
            "role": self.rng.choice(("user", "\x1b", "x")),
            "content": self.rng.choice(("ab", "", "a" * 10_000)),
        }
        rows.write_text(json.dumps({"messages": [message]}) + "\n" + json.dumps({"messages": []}) + "\n")
        result = self.command(
            "quantize",
            str(source),
            str(self.out),
            "--group-size",
            "32",
            "--calibration",
            str(rows),
            "--samples",
            "2",
            "--max-length",
            "24",
            "--device",
            "cpu",
        )
        if result is not None and result.code and self.out.exists():
            self.found("dirt", "a failed run left a folder that looks finished")

    def load(self) -> None:
        base = self.rng.choice(self.campaign.bases[:-1])
        source = self.copy(base)
        path = source / self.rng.choice(("config.json", "config.json", "generation_config.json"))
        value = json.loads(path.read_text()) if path.exists() else {"eos_token_id": 2}
        for _ in range(self.rng.randrange(3)):
            self.what += f", {mutate_json(self.rng, value)}"
        path.write_text(json.dumps(value))
        tokens = torch.tensor([[3, 4, 5]])
        self.campaign.tally.runs += 1
        with quiet(), torch.inference_mode():
            ours: torch.Tensor | None = None
            refused: Exception | None = None
            try:
                loaded = marlinq.load(source, device="cpu")
                ours = self.computed(loaded.model, tokens)
            except MarlinqError as error:
                refused = error
            if not _ours(value, path.name):
                # transformers makes up what weights are missing, as large as the config says.
                self.campaign.tally.outcomes["load without marlinq"] += 1
                return
            marlinq.register()
            try:
                model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
                theirs = model(tokens).logits.float()
            except Exception as error:  # noqa: BLE001 - transformers raises all there is on its own files
                self.campaign.tally.outcomes["load refused by from_pretrained"] += 1
                last = traceback.extract_tb(error.__traceback__)[-1].filename
                if not isinstance(error, MarlinqError) and last.startswith(str(_PACKAGE)):
                    self.found("traceback", traceback.format_exc()[-3000:])
                return
            finally:
                marlinq.unregister()
        if not isinstance(getattr(model, "hf_quantizer", None), MarlinqQuantizer):
            # A config that names no method of ours is transformers' own business.
            self.campaign.tally.outcomes["load without marlinq"] += 1
            return
        self.campaign.tally.outcomes["load ok"] += 1
        if ours is None:
            self.found("wrong", f"from_pretrained loads what load refuses: {refused}")
        elif ours.shape != theirs.shape or not torch.allclose(
            ours, theirs, rtol=0.05, atol=0.05, equal_nan=True
        ):
            self.found("wrong", "from_pretrained computes other logits than load")

    @staticmethod
    def computed(model: Any, tokens: torch.Tensor) -> torch.Tensor | None:
        """Logits, or None where transformers' own forward makes nothing of its config."""
        try:
            logits: torch.Tensor = model(tokens).logits.float()
        except MarlinqError:
            raise
        except Exception as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(str(_PACKAGE)):
                raise
            return None
        return logits

    def partial(self) -> None:
        rng = self.rng
        source = self.copy()
        shards = ("--max-shard-size", f"{rng.choice((40, 80, 500))}KB")
        arguments = ["quantize", str(source), str(self.out), *QUICKLY, *shards]
        whole = self.home / "whole"
        result = self.command(*arguments[:2], str(whole), *arguments[3:])
        if result is None or result.code:
            return
        step = rng.randrange(60)
        with killing(step):
            killed = run_here(arguments) == "killed"
        partial = self.out.with_name("out.partial")
        if not killed or not partial.is_dir():
            return
        forged = self.forge(partial)
        self.what += f" killed at {step}, {forged}"
        result = self.command(*arguments, "--resume")
        if result is None or result.code or any(f".{name}" in forged for name in _MEASURED):
            return
        made, expected = (_results(folder) for folder in (self.out, whole))
        if made != expected:
            self.found(
                "wrong",
                f"the resumed run gave other bytes: {sorted(set(made) ^ set(expected)) or 'same names'}",
            )

    def forge(self, partial: Path) -> str:
        """Change a file of an unfinished folder, check sums included."""
        rng = self.rng
        journal = partial / JOURNAL
        kind = rng.choice(("nothing", "line", "value", "value", "value", "bytes", "sparse", "deep"))
        if kind == "nothing" or not journal.exists():
            return "nothing"
        lines = journal.read_bytes().splitlines()
        place = rng.randrange(len(lines))
        if kind == "bytes":
            path = rng.choice(sorted(path for path in partial.iterdir() if path.is_file()))
            data, what = mutate_bytes(rng, path.read_bytes())
            path.write_bytes(data)
            return f"{path.name} {what}"
        if kind == "sparse":
            os.truncate(journal, 1 << 34)
            return kind
        value = json.loads(lines[place].partition(b" ")[2])
        if kind == "value":
            # Hashes stay: without them a forger can only say that more was done, which no one can tell.
            kind = mutate_json(rng, value)
        entry = b"[" * 5_000 + b"]" * 5_000 if kind == "deep" else json.dumps(value).encode()
        if kind == "line":
            entry = json.dumps(self.odd()).encode()
        lines[place] = hashlib.sha256(entry).hexdigest()[:16].encode() + b" " + entry
        journal.write_bytes(b"\n".join(lines) + b"\n")
        return kind

    def cache(self) -> None:
        rng = self.rng
        os.environ["MARLINQ_CACHE"] = str(self.home / "cache")
        kernel = Instantiation("kernels/gather.cuh", "gather", (("THREADS", 128),))
        compiled = [0]

        def compile_kernel(instantiation: Instantiation, architecture: str) -> CompiledKernel:
            compiled[0] += 1
            return CompiledKernel(b"\x7fELF", 40, 0, 0, "")

        before, kernel_cache.compile_kernel = kernel_cache.compile_kernel, compile_kernel
        try:
            kernel_cache.cached_cubin(kernel, "sm_90a")
            kept.write_note("note", b"what was found out")
            folder = self.home / "cache" / "kernels"
            path = rng.choice(sorted(folder.iterdir()))
            self.what += f" {_replace(rng, path)} {path.suffix}"
            with contextlib.suppress(MarlinqError):
                cubin = kernel_cache.cached_cubin(kernel, "sm_90a")
                # The file may be endless, so its size is asked first.
                if not cubin.is_file() or cubin.stat().st_size > 4 or cubin.read_bytes() != b"\x7fELF":
                    self.found("wrong", "a cubin with other content than was compiled")
            if path.name != "note" and kept.read_note("note") not in (b"what was found out", None):
                self.found("wrong", "a note with other content than was kept")
            kept.write_note("note", b"again")
            self.campaign.tally.outcomes["cache " + ("again" if compiled[0] > 1 else "kept")] += 1
            self.campaign.tally.runs += 1
        finally:
            kernel_cache.compile_kernel = before
            del os.environ["MARLINQ_CACHE"]

    def ranks(self) -> None:
        from tests.operations.quantize.test_ranks import environment, free_port, recipe_file

        recipe = recipe_file(self.home)
        asked = [
            "quantize",
            str(self.campaign.plain),
            str(self.out),
            "--recipe",
            str(recipe),
            "--device",
            "cpu",
        ]
        code = f"from marlinq.cli import main\nmain({asked!r})"
        port = free_port()
        more = {"MARLINQ_RANK_TIMEOUT": "20"}
        processes = [
            forks.start(code, modules=forks.QUANTIZE, env=environment(2, rank, port, **more))
            for rank in (0, 1)
        ]
        victim, after = self.rng.randrange(2), self.rng.uniform(0.5, 6.0)
        self.what += f" rank {victim} killed after {after:.1f} s"
        try:
            time.sleep(after)
            if processes[victim].poll() is None:
                os.kill(processes[victim].pid, signal.SIGKILL)
            other = processes[1 - victim]
            _, errors = other.communicate(timeout=RANKS_TIME_LIMIT / 2)
            if "Traceback" in errors:
                self.found("traceback", errors[-3000:])
            if self.out.exists() and other.poll() != 0 and processes[victim].poll() != 0:
                self.found("dirt", "a killed job left a folder that looks finished")
        finally:
            for process in processes:
                process.kill()
        if not self.out.exists():
            resume = ["--resume"] if self.out.with_name("out.partial").exists() else []
            result = self.command(*asked, *resume)
            if result is not None and result.code:
                self.found("wrong", f"a killed job does not continue: {result.err[-500:]}")


def _ours(value: Any, name: str) -> bool:
    """Whether transformers hands a folder with this ``config.json`` to marlinq; that of another file is."""
    said = value.get("quantization_config") if isinstance(value, dict) and name == "config.json" else None
    methods = {method for dialect in DIALECTS.values() for method in dialect.quant_methods}
    return name != "config.json" or (isinstance(said, dict) and str(said.get("quant_method")) in methods)


def _replace(rng: Random, path: Path) -> str:
    """Put something else into the place of a kept file, or change its folder."""
    data = path.read_bytes()
    kind = rng.choice(
        (
            "pipe",
            "zero",
            "sparse",
            "deep",
            "bytes",
            "folder",
            "link",
            "open file",
            "open folder",
            "values",
            "gone",
        )
    )
    if kind in ("pipe", "zero", "sparse", "folder", "link", "gone"):
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 3 << 30)
    elif kind == "deep":
        path.write_bytes(b"[" * 100_000)
    elif kind == "bytes":
        path.write_bytes(mutate_bytes(rng, data)[0])
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "open file":
        path.chmod(0o666)
    elif kind == "open folder":
        path.parent.chmod(0o777)
    elif kind == "values":
        value = {"sha256": "0" * 64, "registers": 1, "spill_bytes": 0, "stack_bytes": 0}
        mutate_json(rng, value)
        path.write_text(json.dumps(value))
    return kind


def _results(folder: Path) -> dict[str, bytes]:
    """The files of a quantise run that are the same for the same command."""
    timed = ("report.html", "report.json", "report.csv")
    return {name: data for name, data in folder_bytes(folder).items() if name not in timed}


@contextlib.contextmanager
def on_a_local_hub() -> Iterator[Hub]:
    """A Hub on this machine, with short patience."""
    patience = {"SILENCE_SECONDS": 0.5, "ANSWER_SECONDS": 2.0, "MAX_ANSWER_BYTES": 1 << 20}
    patience |= {"MAX_UNANNOUNCED_BYTES": 1 << 20}
    with hub_server() as hub, contextlib.ExitStack() as undo:
        for module, values in (
            (hub_answers, patience),
            (confined, {"SECONDS": 1.0}),
            (core_hub, {"_probe": lambda endpoint: ""}),
            (
                constants,
                {
                    "ENDPOINT": hub.endpoint,
                    "HF_HUB_OFFLINE": False,
                    "HF_HUB_CACHE": constants.HF_HUB_CACHE,
                    "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
                },
            ),
        ):
            for name, value in values.items():
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        proxies = [name for name in os.environ if name.lower().endswith("_proxy")]
        for name in proxies:
            undo.callback(os.environ.__setitem__, name, os.environ.pop(name))
        yield hub


def run(numbers: range | list[int], seed: int, report: Callable[[str], None] = lambda line: None) -> Tally:
    """Run the cases of these numbers and return what came of them."""
    # As many threads as a forked rank has, since those are part of what a run is resumed by.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="marlinq-surfaces-") as scratch, on_a_local_hub() as hub:
        campaign = Surfaces(Path(scratch), hub, seed=seed)
        start = time.monotonic()
        told = 0
        for done, number in enumerate(numbers, 1):
            campaign.case(number)
            for found in campaign.tally.findings[told:]:
                report(f"case {found.case} {found.kind}: {found.what[:300]}\n{found.detail}")
            told = len(campaign.tally.findings)
            if done % 50 == 0:
                report(f"{done}/{len(numbers)} cases, {told} findings, {time.monotonic() - start:.0f} s")
    return campaign.tally


def main() -> None:
    """Run what the environment asks for; exits with 1 where anything was found."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    random.seed(0)
    chosen = os.environ.get("MARLINQ_FUZZ_ONLY")
    first, _, step = os.environ.get("MARLINQ_FUZZ_SHARD", "0/1").partition("/")
    cases = int(os.environ.get("MARLINQ_FUZZ_CASES", "5000"))
    numbers = range(int(first), cases, int(step)) if chosen is None else [int(chosen)]
    seed = int(os.environ.get("MARLINQ_FUZZ_SEED", "0"))
    tally = run(numbers, seed, lambda line: print(line, file=sys.stderr, flush=True))
    print(tally.render())
    sys.exit(bool(tally.findings))


if __name__ == "__main__":
    main()
