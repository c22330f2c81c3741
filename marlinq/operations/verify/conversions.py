"""What the manifest says of modules that conversions stored in another way than they were quantised.

Modules that a target can't hold were dequantised (``--skip-unsupported``): their weights are floats, but not
the original's. Others got another scheme (``--scheme``), in which they are no nearer to the original. The
source's config, which the manifest carries, says how both were quantised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlinq.checkpoint import MANIFEST, parse_quantization_config
from marlinq.checkpoint.reader import read_json
from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.core.scheme import Scheme
from marlinq.formats import FORMATS
from marlinq.formats.dialects import QuantizationConfig


def sources_of(folder: Path) -> tuple[QuantizationConfig, ...]:
    """Configs of the checkpoints that conversions made ``folder`` of, the last one first.

    Empty for folders without a manifest; a config that can't be read is left out.

    Raises:
        CheckpointError: the manifest can't be read.
    """
    if not (folder / MANIFEST).exists():
        return ()
    found = []
    for level in _conversions(read_json(folder, MANIFEST)):
        raw, where = level.get("source_quantization_config"), _place(folder)
        with suppress(MarlinqError):
            found.append(parse_quantization_config(raw, where))
    return tuple(config for config in found if config is not None)


def coarsest_scheme(sources: Iterable[QuantizationConfig], name: str, scheme: Scheme) -> Scheme:
    """The scheme of fewest bits that a module had in ``sources``, or ``scheme`` if none has fewer."""
    for config in sources:
        former = config.rules.scheme(name)
        if former is not None and former.element.bits < scheme.element.bits:
            scheme = FORMATS[config.format].layout_of(former).as_stored(former)
    return scheme


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
        where = _place(folder)
        try:
            config = parse_quantization_config(raw, where)
        except MarlinqError as error:
            raise CheckpointError(str(error)) from None
        for module in skipped:
            scheme = None if config is None else config.rules.scheme(module)
            if scheme is None:
                raise CheckpointError(
                    f"{where}: expected the scheme of the skipped {module}, found none; restore the file"
                )
            schemes.setdefault(module, scheme)
    return schemes


def _place(folder: Path) -> str:
    return f"{folder / MANIFEST}: source_quantization_config"


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
