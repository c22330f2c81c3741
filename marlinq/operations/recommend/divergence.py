"""KL divergence of each type of weights from the original: from a table, or measured on the model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from marlinq.core.errors import UnsupportedError
from marlinq.core.progress import ReportProgress
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.evaluate import DEFAULT_SEED, divergence, write_windows
from marlinq.operations.loading import load
from marlinq.operations.recommend.shape import ModelShape, is_expert
from marlinq.operations.recommend.weight_types import Weights
from marlinq.runtime.generation import position_limit

_FILE = Path(__file__).with_name("quality.toml")
_WINDOWS, _LENGTH = 4, 256
"""Windows, and tokens per window, of text that the model writes: enough to rank schemes, in minutes on a
CPU."""


@dataclass(frozen=True)
class Divergence:
    """A divergence from the original.

    Attributes:
        kl: mean KL divergence in nats per token.
        model: model that it was measured on.
        how: text and method of the measurement, in a few words.
    """

    kl: float
    model: str
    how: str

    def describe(self) -> str:
        """One line with all three."""
        return f"{self.kl:.4f} ({self.how})"


def known_quality(name: str) -> Divergence | None:
    """The divergence of a type of weights in ``quality.toml``; None where it has none."""
    if name == "16 bits":
        return Divergence(0.0, "any", "the original")
    found = _table().get(name)
    if found is None:
        return None
    return Divergence(float(found["kl"]), str(found["model"]), f"{found['model']}, {found['text']}")


def measure(
    model: str,
    shape: ModelShape,
    kinds: tuple[Weights, ...],
    *,
    revision: str | None,
    device: str | None,
    progress: ReportProgress,
) -> dict[str, Divergence]:
    """Measures the divergence of ``model`` with its weights rounded to nearest, for each type of weights.

    The result is an upper bound: the recipes of ``quantize`` give less. Memory holds the model twice.

    Raises:
        CheckpointError: the checkpoint can't be loaded.
        UnsupportedError: the checkpoint's experts are quantised.
    """
    original, rounded = (
        load(model, revision=revision, device=device, exact=True, progress=progress) for _ in range(2)
    )
    length = min(_LENGTH, position_limit(original.model) or _LENGTH)
    text = write_windows(original, windows=_WINDOWS, length=length, seed=DEFAULT_SEED, progress=progress)
    plain = dict(original.model.named_parameters())
    targets = dict(rounded.model.named_parameters())
    packed = next((one for one in shape.projections if one.parameter not in plain), None)
    if packed is not None:
        raise UnsupportedError(
            f"{model}: --measure rounds 16-bit weights, and {packed.name} is quantised; pass the original, "
            "or what marlinq convert --to dense makes of this folder"
        )
    found: dict[str, Divergence] = {}
    for done, kind in enumerate(kinds):
        progress("measuring kinds of weights", done, len(kinds))
        if kind.scheme is None:
            continue
        with torch.no_grad():
            for projection in shape.projections:
                source, target = plain[projection.parameter], targets[projection.parameter]
                if kind.experts_only and not is_expert(projection):
                    projection.view(target).copy_(projection.view(source))
                    continue
                weight = projection.view(source).float()
                granularity = kind.granularity(projection.in_features)
                scheme = replace(kind.scheme, granularity=granularity)
                made = round_to_nearest(weight, scheme, name=projection.name).dequantize()
                projection.view(target).copy_(made.to(target.dtype))
        kl = divergence(rounded, original, text)
        found[kind.name] = Divergence(kl, model, "this model, rounded to nearest")
    progress("measuring kinds of weights", len(kinds), len(kinds))
    return found


@cache
def _table() -> Mapping[str, Mapping[str, float | str]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
