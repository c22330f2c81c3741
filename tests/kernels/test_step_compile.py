"""The kernels between products compile for every architecture without spilling registers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from marlinq.kernels import ARCHITECTURES
from marlinq.kernels.jit.compiler import compile_text
from marlinq.kernels.jit.instantiation import Instantiation, unit
from marlinq.kernels.step import (
    AttentionShape,
    Division,
    Gather,
    HeadNorm,
    Prepared,
    RowNorm,
    Workspace,
    activate,
    append,
    attend,
    residual,
)

HALF, BFLOAT16 = torch.float16, torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def residuals() -> list[Prepared]:
    """The widest rows, which take most registers, and every kind of norm, source and addend."""
    prepared = []
    for width, dtype in ((16384, HALF), (4096, HALF), (576, BFLOAT16)):
        x, weight = empty(2, width, dtype=dtype), empty(width, dtype=dtype)
        norms = [RowNorm(kind, weight, weight, 1e-5) for kind in ("RMS", "RMS_WIDE", "LAYER")]
        gather = Gather(torch.zeros(2, dtype=torch.int64), x, positions=x)
        prepared += [
            residual(x, stored=x, out=x, norm=norms[0], first=x),
            residual(x, stored=x, out=x, norm=norms[1], first=x, post=norms[1]),
            residual(x, stored=x, out=x, norm=norms[2], first=x, second=x),
            residual(gather, stored=x, out=x, norm=norms[2]),
        ]
    return prepared


def appends() -> list[Prepared]:
    prepared = []
    lengths = torch.zeros(1, dtype=torch.int32)
    for size, channels, kind, wide, interleaved, dtype in (
        (128, 128, None, False, False, HALF),
        (256, 256, "RMS_WIDE", False, False, BFLOAT16),
        (80, 32, "LAYER", False, False, HALF),
        (64, 64, "RMS", True, True, BFLOAT16),
    ):
        weight = empty(8 * size if wide else size, dtype=dtype)
        norm = None if kind is None else HeadNorm(kind, weight, None, 1e-6, wide=wide)
        cache = empty(1, 8, 32, size, dtype=dtype)
        prepared.append(
            append(
                *(empty(1, 24 * size, dtype=dtype), empty(1, 8, size, dtype=dtype), cache, cache, lengths),
                table=torch.empty(32, channels // 2, 2),
                interleaved=interleaved,
                query_norm=norm,
                key_norm=norm,
            )
        )
    return prepared


def attentions() -> list[Prepared]:
    prepared = []
    lengths = torch.zeros(1, dtype=torch.int32)
    for size, dtype in ((64, HALF), (80, BFLOAT16), (128, HALF), (128, BFLOAT16), (256, HALF)):
        for ahead, softcap in ((False, None), (True, 20.0)):
            if not ahead or size <= 128:
                division = Division(2, ahead, early=ahead)
                shape = AttentionShape(1, 8, 2, size, 64)
                q, cache = empty(1, 8, size, dtype=dtype), empty(1, 2, 64, size, dtype=dtype)
                workspace = Workspace.of([(shape, division)], torch.device("cpu"))
                prepared.append(
                    attend(
                        *(q, cache, cache, q, lengths, workspace),
                        scale=1.0,
                        division=division,
                        softcap=softcap,
                    )
                )
    return prepared


def activations() -> list[Prepared]:
    return [
        activate(empty(1, 256), empty(1, 128), name, arrangement)
        for name, arrangement in (
            ("silu", "tiles"),
            ("gelu", "halves"),
            ("gelu_tanh", "tiles"),
            ("relu", "plain"),
            ("relu2", "plain"),
        )
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", [residuals, appends, attentions, activations])
def test_no_kernel_spills_on_any_architecture(
    kernel: Callable[[], list[Prepared]], architecture: str
) -> None:
    chosen = list(dict.fromkeys(prepared.instantiation for prepared in kernel()))
    named = tuple((f"kernel_{number}", instantiation) for number, instantiation in enumerate(chosen))
    compiled = compile_text(unit(named), kernel.__name__, architecture)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), compiled.log


def test_spills_would_be_found() -> None:
    crowded = next(prepared.instantiation for prepared in attentions() if prepared.threads == 128)
    parameters = dict(crowded.parameters) | {"D": 128, "MIN_BLOCKS": 12}
    instantiation = Instantiation(crowded.header, crowded.function, tuple(parameters.items()))
    assert compile_text(instantiation.text(), "crowded", "sm_90a").spill_bytes
