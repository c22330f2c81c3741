"""Checks modules that a conversion dequantised because its target can't hold them (``--skip-unsupported``).

Their weights are floats, but not the original's: each lies on the grid that it was once quantised to. The
manifest names these modules, and the source's config in it says how they were quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlinq.checkpoint import MANIFEST, read_quantization_config
from marlinq.checkpoint.reader import read_json
from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.core.scheme import Scheme


def dequantized_modules(folder: Path) -> dict[str, Scheme]:
    """Module -> former scheme, for modules dequantised by the conversions that led to ``folder``.

    Empty for folders without a manifest.

    Raises:
        CheckpointError: the manifest contradicts itself.
    """
    if not (folder / MANIFEST).exists():
        return {}
    schemes: dict[str, Scheme] = {}
    for level in _conversions(read_json(folder, MANIFEST)):
        skipped, raw = level.get("skipped"), level.get("source_quantization_config")
        if not isinstance(skipped, dict) or not skipped:
            continue
        where = f"{folder / MANIFEST}: source_quantization_config"
        try:
            config = read_quantization_config(folder, {"quantization_config": raw})
        except MarlinqError as error:
            raise CheckpointError(f"{where}: can't be read: {error}") from None
        for module in skipped:
            scheme = None if config is None else config.rules.scheme(module)
            if scheme is None:
                raise CheckpointError(f"{where}: does not say how the skipped {module} was quantised")
            schemes.setdefault(module, scheme)
    return schemes


def _conversions(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The conversion manifests of this folder and of the folders it was converted from."""
    level: object = manifest
    while isinstance(level, dict):
        if level.get("operation") == "convert":
            yield level
        level = level.get("source")


def off_grid(weight: Tensor, scheme: Scheme) -> str | None:
    """Why ``weight``, float [N, K], is not a dequantised weight of ``scheme``, or None.

    A group can't hold more different values than there are codes. With activation order the groups are not
    known any more, and None is returned.
    """
    n, k = weight.shape
    size = scheme.channels_per_group(k)
    codes = scheme.element.codes
    if scheme.act_order or k % size or size <= codes:
        return None
    ordered = weight.reshape(n, k // size, size).sort(dim=-1).values
    values = (ordered[..., 1:] != ordered[..., :-1]).sum(dim=-1) + 1
    worst = int(values.max())
    if worst <= codes:
        return None
    row, group = divmod(int(torch.argmax(values)), k // size)
    place = f"group {group} of output channel {row}"
    return f"{place} holds {worst} different values, {scheme.element.name} has {codes}"
