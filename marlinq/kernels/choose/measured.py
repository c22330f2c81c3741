"""Configurations that measured fastest on a GPU where the cost model would choose another.

``measured/<gpu>.json`` is written by ``lab/kernels/tune.py`` from sweeps on that GPU:

    {"gpu": "nvidia-h200", "hardware": "...", "choices": [
        {"n": 6144, "k": 4096, "m": 16, "group_size": 128, "zeros": false, "bfloat16": false,
         "format": "int4", "activation": null, "dependent": false, "kernel": "bulk",
         "config": {"warps_n": 4, ...}, "seconds": 7.4e-06}, ...]}

``m`` is a value of :func:`marlinq.kernels.choose.decision.bucket`. A row that is ``dependent`` was measured
in all layers of a decode step, whose launches overlap (``lab/kernels/step_variants.py``), and is used only
for such chains. Where a context demands a kernel or batch invariance, the table is not used.
"""

from __future__ import annotations

import inspect
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.configuration import VARIANTS, Configuration
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import WEIGHT_FORMATS

FOLDER = Path(__file__).parent / "measured"


class MeasuredChoice(NamedTuple):
    """A measured configuration, and the median seconds of its launches."""

    config: Configuration
    seconds: float


def measured_choice(problem: Problem, device: Device, dependent: bool = False) -> MeasuredChoice | None:
    """The measured choice for ``problem`` on this GPU, alone or among dependent launches; None without one.

    Raises:
        ValueError: the GPU's file names a configuration that does not fit the GPU.
    """
    choice = _choices(device.name).get((problem, dependent)) if device.name else None
    if choice is not None:
        shared = choice.config.shared_bytes(problem) * choice.config.min_blocks
        if shared > device.shared_bytes:
            raise ValueError(
                f"{FOLDER.name}/{device.name}.json: {problem}: {choice.config} takes {shared} bytes of "
                f"shared memory, {device.name} has {device.shared_bytes}"
            )
    return choice


@lru_cache(maxsize=16)
def _choices(gpu: str) -> dict[tuple[Problem, bool], MeasuredChoice]:
    path = FOLDER / f"{gpu}.json"
    if not path.is_file():
        return {}
    return dict(map(_choice, json.loads(path.read_text(encoding="utf-8"))["choices"]))


def _choice(row: dict[str, Any]) -> tuple[tuple[Problem, bool], MeasuredChoice]:
    problem = Problem(
        row["m"],
        row["n"],
        row["k"],
        Granularity.from_group_size(row["group_size"]),
        row["zeros"],
        row["bfloat16"],
        WEIGHT_FORMATS[row["format"]],
        row["activation"],
    )
    choice = MeasuredChoice(config_of(row["kernel"], row["config"]), row["seconds"])
    return (problem, row["dependent"]), choice


def config_of(kernel: str, values: dict[str, Any]) -> Configuration:
    """A kernel's configuration from the names and values of its fields.

    Raises:
        ValueError: the names are not those of the kernel's configuration.
    """
    kind = VARIANTS[kernel].configuration
    expected = set(inspect.signature(kind).parameters)
    if set(values) != expected:
        raise ValueError(f"{kernel}: expected the fields {sorted(expected)}, found {sorted(values)}")
    made: Configuration = kind(**values)
    return made
