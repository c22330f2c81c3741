"""The report of a finished run, for ``--resume`` on a folder where nothing is left to do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marlinq.checkpoint import MANIFEST, Checkpoint
from marlinq.checkpoint.reader import read_json
from marlinq.core.errors import MarlinqError, OutputError
from marlinq.core.progress import ReportProgress
from marlinq.core.rules import Keep
from marlinq.models import build_blueprint
from marlinq.operations.quantize.calibration_text import outside_sources
from marlinq.operations.quantize.journal_notes import TEXT, check_notes, module_reports
from marlinq.operations.quantize.quantize_report import QuantizeReport
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.tuning import NOTE

_BLOCK = re.compile(r".*?\.\d+\.")


def finished_run(
    model: str | os.PathLike[str],
    out: Path,
    recipe: Recipe,
    *,
    revision: str | None,
    trust_remote_code: bool,
    progress: ReportProgress,
) -> QuantizeReport | None:
    """The report of the finished run that wrote the folder ``out``; None where ``out`` does not exist.

    Raises:
        OutputError: another recipe, source or program wrote the folder, or a source of its calibration text
            gives other text now.
        CheckpointError: the source is damaged.
    """
    if not os.path.lexists(out):
        return None
    source = Checkpoint.open(model, revision=revision, progress=progress)
    try:
        made = Checkpoint.open(out)
        manifest = read_json(out, MANIFEST)
        run = manifest.get("run", {})
        check_notes(run, out)
        modules = module_reports(run)
        environment, quality = manifest["environment"], manifest["quality"]
        kept = {str(name): Keep(str(reason)) for name, reason in manifest["kept"].items()}
        written, asked = dict(manifest["recipe"]), recipe.to_dict()
        if recipe.wants_allocation:
            # The run chose the schemes itself, and wrote its choice into the recipe.
            written["allocation"] = asked["allocation"]
        same = _plain(written) == _plain(asked)
        same &= manifest["source"]["identity"] == source.identity() and quality == recipe.quality_record()
        head = manifest.get("head", {}).get("module")
        device, dtype = str(environment["device"]), str(environment["dtype"])
    except (MarlinqError, LookupError, TypeError, AttributeError):
        same = False
    if not same:
        raise OutputError(
            f"{out}: already exists, and was not written by this recipe and source; choose another output "
            "folder or remove it"
        )
    if run.get(TEXT) is not None:
        _check_text(source, recipe, run[TEXT], out, trust_remote_code=trust_remote_code)
    blocks = len({match[0] for name in modules if (match := _BLOCK.match(name)) is not None})
    return QuantizeReport(
        out=out,
        format=recipe.format,
        method=recipe.method,
        modules=modules,
        kept=kept,
        head=head,
        calibration=run.get(TEXT),
        quality=quality,
        tuning=run.get(NOTE),
        device=device,
        dtype=dtype,
        blocks=blocks,
        resumed_blocks=blocks,
        source_bytes=source.nbytes,
        output_bytes=made.nbytes,
        seconds=0.0,
        peak_host_bytes=0,
        peak_device_bytes=None,
    )


def _check_text(
    source: Checkpoint, recipe: Recipe, noted: Mapping[str, Any], out: Path, *, trust_remote_code: bool
) -> None:
    """Refuses a folder that was calibrated on other text than its sources hold now. A source that can't be
    read any more, such as a file that was removed, is not compared.

    Raises:
        OutputError: it names the source.
    """
    try:
        blueprint = build_blueprint(
            source.config,
            source=str(source.path),
            tensors=source.tensors,
            trust_remote_code=trust_remote_code,
        )
        read = outside_sources(source, blueprint, recipe, trust_remote_code=trust_remote_code)
    except MarlinqError:
        return
    noted_sources = {each["source"]: each for each in noted.get("sources", (noted,))}
    for each in read:
        before = noted_sources.get(each["source"], {})
        if any(before.get(key, value) != value for key, value in each.items()):
            raise OutputError(
                f"{out}: already exists, and {each['source']} gives other text than it was calibrated on; "
                "choose another output folder or remove it"
            )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
