"""Our kernel against float64, on the checkpoint's own weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from marlinq.checkpoint import QuantizedCheckpoint
from marlinq.core.errors import EnvironmentProblem, MarlinqError
from marlinq.core.progress import ReportProgress
from marlinq.core.weight import QuantizedWeight
from marlinq.operations.verify.report import Check, Findings
from marlinq.runtime import decide, quantized_linear

ROWS = (1, 8, 33)
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Largest ||y - y64|| / ||y64||. Rounding y alone costs about a quarter of it."""

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
    """The check itself; on the CPU it measures the kernel's reference."""
    findings = Findings("kernels")
    distinct: dict[tuple[object, ...], str] = {}
    for name, spec in view.modules.items():
        distinct.setdefault((spec.in_features, spec.out_features, spec.scheme), name)
    worst, ran = 0.0, 0
    refused: list[str] = []
    for done, name in enumerate(distinct.values()):
        progress("run kernels", done, len(distinct))
        try:
            q = view.load(name)
        except MarlinqError:
            continue  # the round trip reports it
        for dtype, bound in BOUNDS.items():
            decision = decide(q, device=device, dtype=dtype, linears="kernel")
            if decision.path == "dense":
                refused.append(f"{name}: {decision.reason}")
                continue
            for rows, error in _errors(q, name, device, dtype):
                ran += 1
                worst = max(worst, error / bound)
                if not error <= bound:
                    findings.failures.append(
                        f"{name}: {rows} rows in {str(dtype).removeprefix('torch.')}: relative error "
                        f"{error:.2e}, at most {bound:.0e} expected"
                    )
    if not ran and refused:
        findings.skipped = f"the kernel takes no module of this checkpoint; {refused[0]}"
    left_out = f"; {len(refused)} run dense ({refused[0]})" if refused else ""
    text = f"{len(distinct)} shapes, {ran} products, errors up to {worst:.0%} of the bound{left_out}"
    return findings.result(text)


def _errors(
    q: QuantizedWeight, name: str, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int, float]]:
    moved = q.to(device)
    decision = decide(moved, device=device, dtype=dtype, linears="kernel")
    linear = quantized_linear(moved, None, decision, device=device, dtype=dtype, name=name)
    # The kernel is given scales in the activations' dtype; that rounding is not its error.
    weight: Tensor = replace(moved, scales=moved.scales.to(dtype)).dequantize().double()
    generator = torch.Generator().manual_seed(_SEED)
    for rows in ROWS:
        x = torch.randn(rows, q.in_features, generator=generator).to(device=device, dtype=dtype)
        expected = x.double() @ weight.t()
        with torch.no_grad():
            found = linear(x).double()
        yield rows, float((found - expected).norm() / expected.norm())
