"""Compares marlinq's kernels with float64 products, on the checkpoint's own weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from marlinq.checkpoint import QuantizedCheckpoint
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import EnvironmentProblem, MarlinqError, UnsupportedError
from marlinq.core.progress import ReportProgress
from marlinq.core.weight import QuantizedWeight
from marlinq.operations.verify.verification_report import Check, Findings
from marlinq.runtime import OPERATORS, Setting

ROWS = (1, 8, 33)
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Largest allowed ||y - y64|| / ||y64|| by dtype of y. Rounding y alone gives about a quarter of it."""

_SEED = 0


def check_kernels(view: QuantizedCheckpoint, device: torch.device, progress: ReportProgress) -> Check:
    """Multiply random activations with one module of every shape and scheme."""
    findings = Findings("kernels")
    if device.type != "cuda":
        reason = f"the device is {device}" if torch.cuda.is_available() else "no GPU"
        findings.skipped = f"{reason}: the kernel was not run"
        return findings.result("")
    try:
        return compare_kernels(view, device, progress)
    except EnvironmentProblem as error:
        findings.skipped = f"the kernel can't run here: {error}"
        return findings.result("")


def compare_kernels(view: QuantizedCheckpoint, device: torch.device, progress: ReportProgress) -> Check:
    """The check for every operator that multiplies packed weights; on a CPU, for the kernels' references."""
    findings = Findings("kernels")
    distinct: dict[tuple[object, ...], str] = {}
    for name, spec in view.modules.items():
        distinct.setdefault((spec.in_features, spec.out_features, spec.scheme), name)
    operators = [found for found in OPERATORS.values() if not found.dense and found.serves(device)]
    worst, ran = 0.0, 0
    refused: list[str] = []
    for done, name in enumerate(distinct.values()):
        progress("running kernels", done, len(distinct))
        try:
            stored = view.stored(name)
            q = stored.weight(device)
        except MarlinqError:
            continue  # the round trip reports it
        # Operators for other elements are left out, unless there is no other.
        fitting = [each for each in operators if each.knows(stored)] or operators
        for operator, (dtype, bound) in product(fitting, BOUNDS.items()):
            setting = Setting(device, dtype)
            refusal = operator.refusal(stored, setting)
            if refusal is not None:
                refused.append(f"{name}: {operator.name}: {refusal}")
                continue
            try:
                linear = operator.build(stored, None, setting)
            except UnsupportedError as error:
                refused.append(f"{operator.name}: {error}")
                continue
            for rows, distance in _errors(linear, q, dtype):
                ran += 1
                worst = max(worst, distance / bound)
                if not distance <= bound:
                    findings.failures.append(
                        f"{name}: {operator.name}: {rows} rows in {dtype_name(dtype)}: relative error "
                        f"{distance:.2e}, at most {bound:.0e} expected"
                    )
    if not ran and refused:
        findings.skipped = f"no kernel takes a module of this checkpoint; {refused[0]}"
    left_out = f"; {len(refused)} refused ({refused[0]})" if refused else ""
    text = f"{len(distinct)} shapes, {ran} products, errors up to {worst:.0%} of the bound{left_out}"
    return findings.result(text)


def _errors(linear: nn.Module, q: QuantizedWeight, dtype: torch.dtype) -> Iterator[tuple[int, float]]:
    # The reference rounds scales to the activations' dtype too, as kernels get them.
    weight: Tensor = replace(q, scales=q.scales.to(dtype)).dequantize().double()
    generator = torch.Generator().manual_seed(_SEED)
    for rows in ROWS:
        x = torch.randn(rows, q.in_features, generator=generator).to(device=weight.device, dtype=dtype)
        expected = x.double() @ weight.t()
        with torch.no_grad():
            output = linear(x).double()
        yield rows, float((output - expected).norm() / expected.norm())
