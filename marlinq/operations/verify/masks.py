"""Do sparse weights keep their rule: as the layout has it, or as the manifest says of dense storage?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from marlinq.checkpoint import MANIFEST, Checkpoint
from marlinq.checkpoint.reader import read_json
from marlinq.core.errors import CheckpointError
from marlinq.core.sparsity import SPARSITIES, Sparsity
from marlinq.core.weight import QuantizedWeight
from marlinq.operations.verify.report import Check, Findings

_NOTE = "module "
# Share of the median over a module's channels. Under another channel's mask it is 0.47 with a standard
# deviation of 0.13 in channels of 128 weights and 0.09 of 256; the least of 1,500 sound channels had 0.77.
_LEAST_COSINE = 0.7


class Masks:
    """Collects the check, a module at a time.

    Args:
        checkpoint: the folder, whose manifest may say which modules were pruned.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._findings = Findings("sparsity")
        self._pruned = _pruned(checkpoint)
        self._modules = 0
        self._kept = self._used = 0

    def module(self, name: str, q: QuantizedWeight) -> QuantizedWeight:
        """Check one module, where anything calls it sparse.

        Returns:
            ``q`` with the rule that its codes keep: chance makes no dense weight keep one.
        """
        rule = q.sparsity or self._pruned.get(name)
        if rule is None:
            kept = (each for each in SPARSITIES.values() if each.refusal(q.used()) is None)
            return replace(q, sparsity=next(kept, None))
        used = q.used()
        self._modules += 1
        self._kept += used.numel() * rule.kept // rule.span
        self._used += int(used.sum())
        if (reason := rule.refusal(used)) is not None:
            said = "its layout" if q.sparsity is not None else MANIFEST
            self._findings.failures.append(f"{name}: {rule.describe()}, says {said}, but {reason}")
            return q
        return replace(q, sparsity=rule)

    def results(self) -> list[Check]:
        """The row, where any module is sparse."""
        if not self._modules:
            return []
        share = self._used / self._kept if self._kept else 0.0
        text = f"{self._modules} modules keep their rule; {share:.1%} of kept weights are not zero"
        return [self._findings.result(text)]


def misplaced_channels(weight: Tensor, q: QuantizedWeight) -> str | None:
    """Which output channels have kept weights in the places of others, or None.

    A channel's kept weights point about where the original's do, in all channels of a module alike. Under
    another channel's mask two of five kept weights are where they belong.

    Args:
        weight: float32 [N, K], the original's.
        q: the sparse weight, on the same device.
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
    """The modules that a quantise run pruned, as the manifest of the folder or of its source says."""
    if not (checkpoint.path / MANIFEST).exists():
        return {}
    try:
        manifest: Any = read_json(checkpoint.path, MANIFEST)
    except CheckpointError:
        return {}  # said by the manifest's own check
    found: dict[str, Sparsity] = {}
    while isinstance(manifest, Mapping):
        run = manifest.get("run")
        for key, note in run.items() if isinstance(run, Mapping) else ():
            rule = note.get("sparsity") if isinstance(note, Mapping) else None
            if key.startswith(_NOTE) and isinstance(rule, str) and rule in SPARSITIES:
                found[key.removeprefix(_NOTE)] = SPARSITIES[rule]
        manifest = manifest.get("source")
    return found
