"""The fate of every decoder family of transformers: quantised, verified, loaded, compared, inspected.

    python -m lab.models.survey [FAMILY ...] [--from FAMILY] [--accept]

Each family's tiny random model (``lab/models/families.py``) is planned, quantised (round to nearest),
verified against the original, loaded, and compared in its logits with transformers' own model that holds the
dequantised weights. Rows go into ``lab/models/survey.json``, and as a table into ``docs/models.md``, each
as soon as it is known: ``--from`` continues a run that was ended. The exit code is 1 when a family that
worked does not work any more; ``--accept`` records that instead.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import marlinq
from lab.models.families import Family, NotBuilt, families, random_model
from lab.models.shrink import TEXT_TOKENS
from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, without_quantization_config
from marlinq.core.errors import MarlinqError
from marlinq.models import build_blueprint
from marlinq.models.anatomy import Anatomy
from marlinq.models.recognise import recognise
from marlinq.runtime.loading import match_tensors

RESULTS = Path(__file__).with_name("survey.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WORKS, PARTLY, REFUSED, FAILED, NOT_BUILT = "works", "works without text", "refused", "fails", "untried"
_UNKNOWN = {
    r"^a parameter|^is used by neither": "parameters outside linears and norms",
    r"attention interface$": "their own attention code",
    r"before the first block|runs between two": "linears, norms or lookups outside the blocks",
    r"argument 'indices'": "attention behind an indexer",
    r"can't be recorded": "a forward pass that needs more than text, or that fails without weights",
    r"biased by distance|mask is neither": "special attention masks or biases",
    r"^a buffer": "buffers in layers of experts",
    r"first block is not a multiple|does not look|follows this norm": "unusual embeddings",
    r"part in the block|residual stream|of attention|attention does not|queries are|values are": (
        "inputs or outputs of attention, or a norm after it"
    ),
    r"no known activation": "an unknown activation",
    r"behind the last block": "an output head of several layers",
}
"""regular expression for a refusal of recognition -> its short form on the page"""
_TOKENS = 24
_TOLERANCE = 2e-4
"""Relative error of float32 logits: sums of a few hundred products in another order."""


@dataclass(frozen=True)
class Row:
    """The fate of a family.

    Attributes:
        model_type, architecture, wrapper: as in :class:`~lab.models.families.Family`.
        outcome: ``works``; ``works without text`` (all but the logits, which need more than text);
            ``refused``, by an error of marlinq; ``fails``; ``untried``, for there is no tiny model.
        reason: one line, empty for what works.
        step: ``own`` decode step, or why not; empty where that was not asked.
        kept: linears inside the decoder blocks that stay in 16 bits.
    """

    model_type: str
    architecture: str
    wrapper: bool
    outcome: str
    reason: str = ""
    step: str = ""
    kept: tuple[str, ...] = ()


def examine(family: Family) -> Row:
    """One row; every error becomes one."""

    def row(outcome: str, reason: str = "", step: str = "", kept: Sequence[str] = ()) -> Row:
        return Row(family.model_type, family.architecture, family.wrapper, outcome, reason, step, tuple(kept))

    try:
        model = random_model(family)
    except NotBuilt as error:
        return row(NOT_BUILT, str(error))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "model")
        try:
            model.save_pretrained(source)
            return row(*_through(model, source, Path(folder, "quantized")))
        except MarlinqError as error:
            if not _read_back(model, source):
                return row(NOT_BUILT, "transformers does not read back what it saves of this class")
            return row(REFUSED, _line(error).replace(str(source), "model"))
        except Exception as error:  # noqa: BLE001 - a row of the table
            return row(FAILED, f"{type(error).__name__}: {_line(error)}".replace(folder, ""))


def _read_back(model: PreTrainedModel, source: Path) -> bool:
    """Whether transformers finds all of the model's tensors in the folder that it has written."""
    _, found = type(model).from_pretrained(source, output_loading_info=True)
    return not found["missing_keys"]


def _through(model: PreTrainedModel, source: Path, out: Path) -> tuple[str, str, str, tuple[str, ...]]:
    """Outcome, reason, decode step and kept linears of a model that was saved in ``source``."""
    recipe = marlinq.Recipe(method="rtn", group_size=32)
    marlinq.quantize(source, out, recipe=recipe, device="cpu", progress=False, message=lambda text: None)
    report = marlinq.verify(out, against=source, device="cpu", progress=False)
    broken = [check for check in report.checks if check.status == "failed"]
    if broken:
        return FAILED, f"verify: {broken[0].name}: {(broken[0].problems or (broken[0].detail,))[0]}", "", ()
    marlinq.inspect(out, progress=False)
    loaded = marlinq.load(out, device="cpu", dtype="float32", exact=True, progress=False)
    checkpoint = Checkpoint.open(out)
    quantized = QuantizedCheckpoint.of(checkpoint)
    assert quantized is not None
    blueprint = build_blueprint(without_quantization_config(checkpoint.config), source=str(out))
    blueprint, replaced = match_tensors(blueprint, checkpoint, quantized)
    anatomy = recognise(blueprint.build(), blueprint.blocks_name)
    step = "own" if isinstance(anatomy, Anatomy) else f"{anatomy.part}: {anatomy.reason}"
    kept = sorted({_role(name) for name in blueprint.kept if name.startswith(f"{blueprint.blocks_name}.")})
    # In a model that also speaks this is the thinker.
    model = next(e for e in model.modules() if type(e).__name__ == blueprint.architecture)
    for name, stored in replaced.items():
        projection = blueprint.by_name[name]
        dense = quantized.load(stored).dequantize(torch.float32)
        projection.view(model.get_parameter(projection.parameter)).copy_(dense)
    ids = torch.randint(3, TEXT_TOKENS, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    # Some models want an image or sound besides text; their language model does not.
    part = ""
    try:
        expected = _logits(model, ids)
    except Exception:  # noqa: BLE001 - transformers' own model does not run on text
        part = blueprint.text_root_name or blueprint.replay_root_name
        try:
            expected = _logits(model.get_submodule(part), ids)
        except Exception as error:  # noqa: BLE001 - nor does its language model
            return PARTLY, f"transformers: {type(error).__name__}: {_line(error)}", step, tuple(kept)
    found = _logits(loaded.model.get_submodule(part), ids)
    difference = float((found - expected).norm() / expected.norm())
    if not difference <= _TOLERANCE:
        return FAILED, f"logits differ from the dequantised model's by {difference:.2g}", step, tuple(kept)
    return WORKS, "", step, tuple(kept)


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """float32 [T, vocabulary], or the last hidden states of a model without a head."""
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False)
    result: torch.Tensor = (output.logits if hasattr(output, "logits") else output[0])[0]
    return result.float()


def _role(name: str) -> str:
    """A module's name without the numbers of layers and experts."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:240]


def worse(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[str]:
    """Families that worked ``before`` and do not ``after``, with the reason."""
    return [
        f"{name}: {row.outcome}: {row.reason}"
        for name, row in after.items()
        if name in before
        and before[name].outcome in (WORKS, PARTLY)
        and row.outcome not in (WORKS, before[name].outcome)
    ]


def read_rows() -> dict[str, Row]:
    """The recorded rows by class name and model type."""
    if not RESULTS.exists():
        return {}
    entries = json.loads(RESULTS.read_text())["rows"]
    return {key_of(row): row for row in (Row(**{**each, "kept": tuple(each["kept"])}) for each in entries)}


def key_of(row: Row | Family) -> str:
    """Key that a row is recorded under."""
    return f"{row.model_type} {row.architecture}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="*", help="model types; all by default")
    parser.add_argument("--from", dest="first", help="begin with this model type, in the order of the table")
    parser.add_argument("--accept", action="store_true", help="record families that work no more")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Matrices are tiny: threads would wait for each other longer than they multiply.
    torch.set_num_threads(1)
    everything = list(families())
    types = [each.model_type for each in everything]
    unknown = {*options.family, *([options.first] if options.first else [])} - set(types)
    if unknown:
        parser.error(f"no such model type: {', '.join(sorted(unknown))}")
    rest = everything[types.index(options.first) if options.first else 0 :]
    rows = read_rows()
    lost: list[str] = []
    for family in rest:
        if options.family and family.model_type not in options.family:
            continue
        started = time.perf_counter()
        row = examine(family)
        seconds = time.perf_counter() - started
        print(f"{row.model_type:28} {row.outcome:10} {seconds:5.1f} s  {row.reason} | {row.step}", flush=True)
        lines = worse(rows, {key_of(family): row})
        lost += lines
        if options.accept or not lines:
            rows[key_of(family)] = row
            write([rows[key_of(each)] for each in everything if key_of(each) in rows])
    for line in lost:
        print(f"worked before: {line}", file=sys.stderr)
    return 1 if lost and not options.accept else 0


def write(rows: Sequence[Row]) -> None:
    """The file of results."""
    entries = [asdict(row) for row in rows]
    text = json.dumps({"transformers": transformers.__version__, "rows": entries}, indent=1)
    RESULTS.write_text(text + "\n")
    PAGE.write_text(page(rows, transformers.__version__))


def page(rows: Sequence[Row], version: str) -> str:
    """The text of ``docs/models.md``: types that work, listed by decode step, and the others with reasons."""
    lines = [
        "# Models",
        "",
        f"Types (`model_type` in `config.json`) of transformers {version}, tried as tiny random models:",
        "quantised, verified, loaded, compared and inspected (`make survey`). Encoder-decoders such as T5",
        "are refused; embedding models of these types work. `quantize --plan` lists what stays in 16 bits.",
        "",
    ]
    for wrapper, title in ((False, "Text"), (True, "Images, video, audio")):
        chosen = [row for row in rows if row.wrapper == wrapper]
        works = [row for row in chosen if row.outcome == WORKS]
        lines += [
            f"## {title}",
            "",
            f"{len(works)} of {len(chosen)} work.",
            "",
        ]
        lines += [
            f"With marlinq's [decode step](decode.md): {_names(row for row in works if row.step == 'own')}.",
            "",
            "With transformers' forward, by what marlinq's step does not support:",
            "",
        ]
        unknown: dict[str, list[str]] = {}
        for row in works:
            if row.step != "own":
                unknown.setdefault(_unknown(row.step), []).append(f"`{row.model_type}`")
        most_first = sorted(unknown.items(), key=lambda item: -len(item[1]))
        lines += [f"* {reason}: {', '.join(types)}" for reason, types in most_first]
        lines += ["", "| types | outcome |", "|---|---|"]
        causes: dict[tuple[str, str], list[Row]] = {}
        for row in chosen:
            if row.outcome != WORKS:
                causes.setdefault((row.outcome, _cause(row)), []).append(row)
        lines += [f"| {_names(same)} | {outcome}: {cause} |" for (outcome, cause), same in causes.items()]
        lines.append("")
    return "\n".join(lines)


def _unknown(step: str) -> str:
    """What recognition did not understand, in a few words, from the ``step`` of a row."""
    reason = step.partition(": ")[2]
    return next((said for cause, said in _UNKNOWN.items() if re.search(cause, reason)), reason)


def _cause(row: Row) -> str:
    """The reason of a row in a few words: without folder, module, class and shapes, and up to the advice."""
    if row.outcome == PARTLY:
        return "it takes more than text"
    text = row.reason.removeprefix("model: ")
    text = re.sub(r"^[a-z_]+(\.\w+)+: ", "", text)
    text = re.sub(r"^[A-Z]\w+ (?=is )", "", text)
    text = re.sub(r": \w+ \[.*|, \S+ \(and \d+ more\)", "", text.split(";")[0])
    return text.replace("|", "/")


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{row.model_type}`" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
