"""Measures what --target-bits gains: a model at several targets beside uniform schemes of similar sizes.

    python -m lab.quality.allocation MODEL WORK --calibration TEXT --text TEXT [--text TEXT] [--base 64]

Sensitivities are measured once. Then these are quantised and their divergence is measured: uniform groups of
--base, targets of 0, 0.1 and 0.5 bits more, uniform groups of 32, and a target of their size. Existing
folders are not made again. Prints one line per model and writes WORK/allocation.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from marlinq.checkpoint import Checkpoint
from marlinq.core.devices import resolve_device
from marlinq.models import build_blueprint, without_false_ties
from marlinq.operations.evaluate import evaluate
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.allocation.allocate import measure_sensitivities
from marlinq.operations.quantize.allocation.chosen import Allocation, Uniform
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--base", type=int, default=64)
    parser.add_argument("--served-by", default="vllm")
    parser.add_argument("--tokens", type=int, default=65_536, help="of the calibration")
    parser.add_argument("--measuring-tokens", type=int, default=16_384, help="half of them give gradients")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)

    recipe = Recipe(format="compressed-tensors", calibration=given.calibration, tokens=given.tokens)
    wanted = recipe.replace(served_by=given.served_by, target_bits=6.0, tokens=given.measuring_tokens)
    checkpoint = Checkpoint.open(given.model)
    blueprint = without_false_ties(
        build_blueprint(checkpoint.config, source=str(given.model), tensors=checkpoint.tensors), checkpoint
    )
    sensitivities = measure_sensitivities(
        checkpoint,
        blueprint,
        wanted,
        resolve_device(given.device),
        plan_of=partial(plan_output, checkpoint, blueprint),
        trust_remote_code=False,
        progress=lambda *_: None,
        message=print,
    )
    uniform = sensitivities.best(wanted).uniform
    base, fine = uniform[f"int4/{given.base}"], uniform["int4/32"]
    rows = []
    for name, bits in (
        ("base", None),
        ("plus0.1", base.bits + 0.1),
        ("plus0.5", base.bits + 0.5),
        ("fine", None),
        ("at-fine", fine.bits),
        ("at-base", base.bits),
    ):
        if bits is None:
            chosen: Allocation | Uniform = base if name == "base" else fine
            mine = recipe.replace(group_size=given.base if name == "base" else 32)
        else:
            # A hair more than a uniform scheme's own size, which its text rounds.
            allocation = sensitivities.best(wanted.replace(target_bits=bits + 1e-9))
            chosen = allocation
            mine = replace(recipe, served_by=given.served_by, target_bits=bits, allocation=allocation.modules)
        out = given.work / name
        if not out.exists():
            quantize(given.model, out, recipe=mine, device=given.device, progress=False)
        found = {
            text: evaluate(
                out,
                against=given.model,
                text=text,
                windows=given.windows,
                length=given.length,
                device=given.device,
                progress=False,
            ).kl
            for text in given.text
        }
        rows.append({"name": name, "bits": chosen.bits, "estimated": chosen.kl, "kl": found})
        print(name, f"{chosen.bits:.3f} bits, estimated {chosen.kl:.4f}", found, flush=True)
        report = {
            "arguments": {key: str(value) for key, value in vars(given).items()},
            "uniform": {key: asdict(value) for key, value in uniform.items()},
            "units": [
                {"name": unit.name, **dict(zip((o.candidate for o in unit.options), costs, strict=True))}
                for unit, costs in zip(sensitivities.units, sensitivities.costs, strict=True)
            ],
            "rows": rows,
        }
        (given.work / "allocation.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
