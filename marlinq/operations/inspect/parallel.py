"""A quantised linear as a server multiplies it: split over GPUs, and fused with its siblings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Element
from marlinq.formats.dialects import is_head
from marlinq.operations.inspect.servers import Vocabulary, axes

SMALLER_GROUPS = (64, 32)
"""Group sizes below 128 that every server takes."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class LinearFacts:
    """Facts about one quantised linear that decide which servers load it.

    Attributes:
        layout: name in :data:`marlinq.formats.FORMATS`.
        in_features, out_features: K and N.
        element: type of a code.
        granularity: weights that share a scale; a group of K or more is a channel.
        declared_symmetric: whether the config says symmetric, which loaders trust.
        symmetric: whether every stored zero point is the middle code; None where they can't be decoded.
        declared_act_order: whether the config says ``desc_act: true``.
        in_order: whether there is no g_idx, or it is ``k // group_size``.
        sortable: whether the sorted g_idx is ``k // group_size``.
        zero_writer: program that packed GPTQ v1 zeros; None where the config does not tell.
        problem: reason why the zeros can't be decoded, or None.
        named: scheme of weights and activations, as ``--scheme`` names it; empty where it has no name.
    """

    layout: str
    in_features: int
    out_features: int
    element: Element
    granularity: Granularity
    declared_symmetric: bool
    symmetric: bool | None
    declared_act_order: bool = False
    in_order: bool = True
    sortable: bool = True
    zero_writer: str | None = None
    problem: str | None = None
    named: str = ""

    @property
    def groups(self) -> int:
        """G, the number of groups along K."""
        return self.granularity.groups(self.in_features)

    @property
    def weights(self) -> str:
        """Name of the weights in ``servers.toml``, such as ``int4 symmetric``."""
        return f"{self.element.name} {'symmetric' if self.declared_symmetric else 'asymmetric'}"

    @property
    def scheme(self) -> tuple[object, ...]:
        """Settings that all members of a fused layer must share."""
        return self.element, self.granularity, self.declared_symmetric, self.declared_act_order

    def agrees_with(self, other: LinearFacts) -> bool:
        """Whether one scheme describes both layers. Groups as long as a layer's K are the same as one group
        per output channel."""
        one, another = (
            replace(layer, granularity=layer.granularity.for_channels(channels)).scheme
            for layer, channels in ((self, other.in_features), (other, self.in_features))
        )
        return self.scheme == other.scheme or one == another


@dataclass(frozen=True)
class Split:
    """Tensor parallelism.

    Attributes:
        parts: number of GPUs.
        heads, kv_heads: number of attention and key-value heads; None where the config does not say.
    """

    parts: int
    heads: int | None = None
    kv_heads: int | None = None


def split(name: str, layer: LinearFacts, by: Split) -> LinearFacts | str:
    """The part of ``layer`` that one GPU holds, or why it can't be split; for all but the output head
    (:func:`split_head`).

    The last part of ``name`` decides: row-parallel layers split K, column-parallel layers split N, others
    stay whole on every GPU. Key and value projections are repeated where there are more GPUs than heads.
    """
    known, last, parts = axes(), name.rpartition(".")[2], by.parts
    if last in known.row:
        if layer.in_features % parts:
            return f"K={layer.in_features} can't be split over {parts} GPUs"
        part = layer.in_features // parts
        if layer.granularity.channels and part % layer.granularity.channels:
            size = layer.granularity.channels
            return (
                f"K={part} of each of {parts} GPUs is not a multiple of the group size {size}"
                f"{_smaller_groups(part)}"
            )
        return replace(layer, in_features=part)
    if last in known.column:
        pieces = parts
        if last in known.kv_heads and by.kv_heads is not None and parts > by.kv_heads:
            if parts % by.kv_heads:
                return f"{by.kv_heads} key-value heads can't be shared by {parts} GPUs"
            pieces = by.kv_heads
        heads = by.kv_heads if last in known.kv_heads else by.heads if last == "q_proj" else None
        if heads is not None and heads % pieces:
            return f"{heads} heads can't be split over {parts} GPUs"
        if layer.out_features % pieces:
            return f"N={layer.out_features} can't be split over {parts} GPUs"
        return replace(layer, out_features=layer.out_features // pieces)
    return layer


def _smaller_groups(in_features: int) -> str:
    fitting = [str(size) for size in SMALLER_GROUPS if in_features % size == 0]
    return f"; groups of {' or '.join(fitting)} would be" if fitting else ""


def split_head(layer: LinearFacts, by: Vocabulary, parts: int, *, full: bool) -> LinearFacts | str:
    """The part of the output head that one of ``parts`` GPUs multiplies, or why it can't be loaded.

    Args:
        layer: the head; its N is the vocabulary.
        by: how the server pads and splits the vocabulary.
        parts: number of GPUs; padding is added for one GPU too.
        full: whether the head can't be padded, because the server's loader pads only the first axis of a
            tensor.
    """
    n = layer.out_features
    padded = by.padded(n, parts)
    if padded % parts:
        return f"a vocabulary of {n}, padded to {padded}, can't be split over {parts} GPUs"
    if full and padded != n:
        return f"a vocabulary of {n} would be padded to {padded}, which its loader can't do in this layout"
    return replace(layer, out_features=padded // parts)


def unknown_axes(names: Collection[str]) -> list[str]:
    """Layers that are assumed to stay whole on every GPU, because no axis is known for their names."""
    known = axes()
    return [
        name
        for name in names
        if name.rpartition(".")[2] not in known.row | known.column and not is_head(name)
    ]


def experts(layers: Mapping[str, LinearFacts]) -> dict[str, dict[str, LinearFacts]]:
    """The linears of experts, by layer: ``...mlp.experts`` -> name -> linear."""
    by_layer: dict[str, dict[str, LinearFacts]] = {}
    for name, layer in layers.items():
        if (match := _EXPERT.search(name)) is not None:
            by_layer.setdefault(name[: match.start()] + ".experts", {})[name] = layer
    return by_layer


def fused(
    layers: Mapping[str, LinearFacts], fusions: Mapping[str, tuple[str, ...]], unquantized: Collection[str]
) -> tuple[dict[str, tuple[LinearFacts, int]], str | None]:
    """Layers after fusion, by name, each with the number of linears in it; and why they can't be fused, or
    None.

    Args:
        layers: linears by name.
        fusions: last name of a fused layer -> last names of its members, in order.
        unquantized: linears that are stored in floating point.
    """
    owner = {member: (whole, members) for whole, members in fusions.items() for member in members}
    units: dict[str, tuple[LinearFacts, int]] = {}
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        whole, members = owner.get(last, (None, ()))
        siblings = {f"{parent}.{member}": layers.get(f"{parent}.{member}") for member in members}
        plain = [sibling for sibling in siblings if sibling in unquantized]
        if plain:
            return {}, f"{name}: is quantised, but {plain[0]}, which is fused with it, is not"
        quantized = {sibling: each for sibling, each in siblings.items() if each is not None}
        if whole is None or len(quantized) < len(members):
            units[name] = (layer, 1)
            continue
        for sibling, each in quantized.items():
            if each.scheme != layer.scheme:
                return {}, f"{name}: is quantised in another way than {sibling}, which is fused with it"
        width = sum(each.out_features for each in quantized.values())
        units[f"{parent}.{whole}"] = (replace(layer, out_features=width), len(quantized))
    return units, None
