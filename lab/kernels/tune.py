"""Write what sweeps measured to be fastest, where the model would choose otherwise, to ``tuned/<gpu>.json``.

    python lab/kernels/kernel_sweep.py --model llama-3-8b --batch 1,4,8,16,32,64,128 --json sweep.json
    python lab/kernels/step_variants.py --json chain.json
    python lab/kernels/tune.py sweep.json chain.json ...

Needs no GPU. All sweeps have to be of the same GPU. A variant is taken where the model's own choice was
measured beside it and took longer by ``--gain`` or more: less is what two runs of the same variant differ by.
In a chain the layer has to be faster by ``--chain-gain`` seconds, and by three standard errors of both.
What the file holds stays, if it gains as much over the model's choice and the fastest does not over it, or if
it is of other problems.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from marlinq.core.granularity import Granularity
from marlinq.kernels import Problem
from marlinq.kernels.choose import measured
from marlinq.kernels.choose.decision import bucket, model_choice
from marlinq.kernels.contract.demands import Demands
from marlinq.kernels.contract.device import H200, Device, slug
from marlinq.kernels.contract.weight_formats import INT4

DEVICES: dict[str, Device] = {H200.name: H200}
"""GPUs whose decisions can be made here, without asking the driver."""


_Row = dict[str, Any]
_Key = tuple[Any, ...]


def _key(row: _Row) -> _Key:
    names = ("dependent", "bfloat16", "n", "k", "m", "group_size", "zeros")
    return (*(row[name] for name in names), row["activation"] or "")


def choices(
    sweep: dict[str, Any], device: Device, gain: float, chain_gain: float, before: Mapping[_Key, _Row | None]
) -> tuple[dict[_Key, _Row | None], int]:
    """Rows of the file by cell, None where the model's choice stands, and how many cells of the sweep say
    nothing: of a batch that decides for no bucket, of variants with other fields, or without that choice.

    ``before`` is what the file holds.
    """
    found: dict[_Key, _Row | None] = {}
    skipped = 0

    def gains(one: _Row, other: _Row, *, dependent: bool) -> bool:
        saved = other["seconds"] - one["seconds"]
        if not dependent:
            return bool(saved >= gain * one["seconds"])
        return bool(saved >= max(chain_gain, 3 * math.hypot(one["standard_error"], other["standard_error"])))

    for row in sweep["rows"]:
        group, zeros = row.get("group_size", 128), row.get("asymmetric", False)
        dependent, activation = row.get("dependent", False), row.get("activation")
        shape, bfloat16 = (row["m"], row["n"], row["k"]), row.get("bfloat16", False)
        problem = Problem(*shape, Granularity.from_group_size(group), zeros, bfloat16, INT4, activation)
        try:
            timed = {measured.config_of(one["kernel"], one["config"]): one for one in row["candidates"]}
        except ValueError:
            timed = {}
        estimate, _, own = model_choice(problem, device, Demands(dependent=dependent))
        if own not in timed or bucket(problem.m) != problem.m:
            skipped += 1
            continue
        best = min(timed.values(), key=lambda one: one["seconds"])
        cell = {each.name: getattr(problem, each.name) for each in fields(problem)}
        cell["group_size"] = cell.pop("granularity").group_size
        cell |= {"format": problem.format.name, "dependent": dependent}
        found[_key(cell)] = None
        recorded = before.get(_key(cell))
        held = recorded and timed.get(measured.config_of(recorded["kernel"], recorded["config"]))
        if held and gains(held, timed[own], dependent=dependent):
            best = best if gains(best, held, dependent=dependent) else held
        elif not gains(best, timed[own], dependent=dependent):
            continue
        seconds = best["seconds"]
        if dependent:
            # Differences are seconds of a layer; the file holds seconds of a product.
            seconds = max(estimate - (timed[own]["seconds"] - seconds), 0.0)
        found[_key(cell)] = {
            **cell,
            "kernel": best["kernel"],
            "config": best["config"],
            "seconds": seconds,
        }
    return found, skipped


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", nargs="+", type=Path, help="JSON files of kernel_sweep.py")
    parser.add_argument("--gain", type=float, default=0.02, help="least gain over the model's own choice")
    parser.add_argument(
        "--chain-gain", type=float, default=0.2e-6, help="least gain of a layer in a chain, in seconds"
    )
    parser.add_argument("--out", type=Path, default=measured.FOLDER, help="folder to write to")
    options = parser.parse_args()
    sweeps = [json.loads(path.read_text(encoding="utf-8")) for path in options.sweeps]
    lines = {sweep["hardware"] for sweep in sweeps}
    names = {slug(line.partition(",")[0]) for line in lines}
    if len(names) != 1 or not names <= set(DEVICES):
        print(f"error: the sweeps are of {sorted(names)}; expected one of {sorted(DEVICES)}", file=sys.stderr)
        return 1
    (name,) = names
    options.out.mkdir(exist_ok=True)
    path = options.out / f"{name}.json"
    rows: dict[_Key, _Row | None] = {}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        lines.update(before["hardware"].split("; "))
        rows = {_key(row): row for row in before["choices"]}
    skipped = 0
    for sweep in sweeps:
        found, left_out = choices(sweep, DEVICES[name], options.gain, options.chain_gain, rows)
        skipped += left_out
        # A later sweep of the same cell replaces an earlier one.
        rows |= found
    kept = [row for _, row in sorted(rows.items(), key=lambda item: item[0]) if row]
    listed = ",\n".join(f"  {json.dumps(row)}" for row in kept)
    hardware = json.dumps("; ".join(sorted(lines)))
    path.write_text(
        f'{{"gpu": "{name}", "hardware": {hardware}, "choices": [\n{listed}\n]}}\n', encoding="utf-8"
    )
    print(f"{path}: {len(kept)} choices; {skipped} cells left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
