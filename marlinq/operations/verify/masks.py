"""Checks that sparse weights follow their pattern, which the layout or the manifest names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from marlinq.checkpoint import MANIFEST, Checkpoint
from marlinq.checkpoint.reader import read_json
from marlinq.core.errors import CheckpointError
from marlinq.core.sparsity import SPARSITIES, Sparsity
from marlinq.core.weight import QuantizedWeight
from marlinq.operations.verify.verification_report import Check, Findings

_NOTE = "module "
_LEAST_COSINE = 0.7
"""Least cosine between a channel's kept and original weights, over the median of its module's channels. With
another channel's mask this ratio is 0.47, with a standard deviation of 0.13 for K = 128 and 0.09 for K = 256;
the least of 1,500 sound channels had 0.77."""


_BY_CHANCE = 1e-9
"""Probability below which codes that are zero at random don't follow a pattern."""


class Masks:
    """The check of sparsity patterns; modules are added one at a time.

    Args:
        checkpoint: the folder, whose manifest may name pruned modules.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._findings = Findings("sparsity")
        self._pruned = _pruned(checkpoint)
        self._modules = 0
        self._kept = self._used = 0

    def module(self, name: str, q: QuantizedWeight) -> QuantizedWeight:
        """Checks one module, if its layout or the manifest calls it sparse.

        Returns:
            ``q`` with the pattern that its codes follow, unless so many are zero that they may by chance.
        """
        used = q.used()
        rule = q.sparsity or self._pruned.get(name)
        if rule is None:
            telling = (each for each in SPARSITIES.values() if _followed_by_chance(used, each) < _BY_CHANCE)
            return replace(q, sparsity=next((each for each in telling if each.refusal(used) is None), None))
        self._modules += 1
        self._kept += used.numel() * rule.kept // rule.span
        self._used += int(used.sum())
        if (reason := rule.refusal(used)) is not None:
            said = "its layout" if q.sparsity is not None else MANIFEST
            self._findings.failures.append(f"{name}: {rule.describe()}, says {said}, but {reason}")
            return q
        return replace(q, sparsity=rule)

    def results(self) -> list[Check]:
        """The row of the report; none where no module is sparse."""
        if not self._modules:
            return []
        share = self._used / self._kept if self._kept else 0.0
        text = f"{self._modules} modules keep their rule; {share:.1%} of kept weights are not zero"
        return [self._findings.result(text)]


def _followed_by_chance(used: Tensor, rule: Sparsity) -> float:
    """Probability that as many zeros, at random places of [K, N], follow ``rule``."""
    share = float(used.float().mean())
    broken = sum(
        math.comb(rule.span, count) * share**count * (1 - share) ** (rule.span - count)
        for count in range(rule.kept + 1, rule.span + 1)
    )
    return math.exp(-broken * used.numel() / rule.span)


def misplaced_channels(weight: Tensor, q: QuantizedWeight) -> str | None:
    """A sentence about output channels that have another channel's mask, or None.

    The cosine between kept and original weights is about the same in all channels of a module. With another
    channel's mask it is far lower, because only two of five kept weights are in their places.

    Args:
        weight: original weight, float32 [N, K].
        q: sparse weight, on the same device.
    """
    stored = q.dequantize()
    norms = weight.norm(dim=1) * stored.norm(dim=1)
    cosines = (weight * stored).sum(dim=1)[norms > 0] / norms[norms > 0]
    if not len(cosines):
        return None
    usual = float(cosines.median())
    apart = cosines < _LEAST_COSINE * usual
    if not bool(apart.any()):
        return None
    row = int((norms > 0).nonzero()[int(cosines.argmin())])
    return (
        f"{int(apart.sum())} of {len(cosines)} output channels point elsewhere than the original's (channel "
        f"{row} with a cosine of {float(cosines.min()):.2f}, usual are {usual:.2f}): they have other masks"
    )


def _pruned(checkpoint: Checkpoint) -> dict[str, Sparsity]:
    """Module -> pattern it was pruned to, from the manifest of the folder or of its source."""
    if not (checkpoint.path / MANIFEST).exists():
        return {}
    try:
        manifest: Any = read_json(checkpoint.path, MANIFEST)
    except CheckpointError:
        return {}  # check_manifest reports a broken manifest
    sparsities: dict[str, Sparsity] = {}
    while isinstance(manifest, Mapping):
        run = manifest.get("run")
        for key, note in run.items() if isinstance(run, Mapping) else ():
            rule = note.get("sparsity") if isinstance(note, Mapping) else None
            if key.startswith(_NOTE) and isinstance(rule, str) and rule in SPARSITIES:
                sparsities[key.removeprefix(_NOTE)] = SPARSITIES[rule]
        manifest = manifest.get("source")
    return sparsities
