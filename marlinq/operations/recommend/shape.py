"""The sizes of a model's products and cache, from its ``config.json`` alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import AutoModelForMaskedLM

from marlinq.checkpoint import without_quantization_config
from marlinq.checkpoint.reader import CONFIG, locate, read_json
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.progress import ReportProgress
from marlinq.core.safe_text import shown
from marlinq.formats.dialects.name_patterns import FUSED
from marlinq.formats.stacks import STACKED_BIAS
from marlinq.models import Blueprint, Projection, build_blueprint
from marlinq.models.blueprint import Block

_JOINED = tuple(parts for _, parts in FUSED)
"""Last names of projections with one input, which the decode step and servers multiply as one."""
_TOP = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_CHANNELS = re.compile(r"(_size|_dim|_heads|_rank)$|^(d|n)_")
"""keys of a config that count channels, heads or ids"""
_JUDGED_EXPERTS = 4
_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "wqkv")
_MOST = 4096
"""largest accepted number of layers, and of experts in a layer"""
_MOST_CHANNELS = 1 << 24
"""largest accepted number of heads, of channels, and of tokens of a window"""


@dataclass(frozen=True)
class ProductSize:
    """A product of a layer.

    Attributes:
        parts: output channels of each projection that is joined in this product.
        k: input channels.
    """

    parts: tuple[int, ...]
    k: int

    @property
    def n(self) -> int:
        """Output channels of all projections together."""
        return sum(self.parts)


@dataclass(frozen=True)
class Routed:
    """Experts of a layer.

    Attributes:
        experts: number of experts.
        top: number of experts per token.
        hidden: channels of the layer's input.
        inner: intermediate channels of an expert.
        parts: matrices in an expert's first product: 2 for gate and up, 1 for up alone.
    """

    experts: int
    top: int
    hidden: int
    inner: int
    parts: int = 2

    @property
    def weights(self) -> int:
        """Number of weights of one expert."""
        return (self.parts + 1) * self.hidden * self.inner

    def touched(self, rows: int) -> float:
        """Expected number of experts that ``rows`` tokens reach, if they choose evenly."""
        return self.experts * (1 - (1 - self.top / self.experts) ** rows)


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer.

    Attributes:
        products: products without those of experts.
        routed: experts; None in a dense layer.
        norms: number of norms of the residual stream.
        queries: channels of all query heads.
        cached: number of values per token in the cache.
        window: number of tokens that attention looks back; None for all.
    """

    products: tuple[ProductSize, ...]
    routed: Routed | None
    norms: int
    queries: int
    cached: int
    window: int | None


@dataclass(frozen=True)
class ModelShape:
    """A model's shape.

    Attributes:
        name: model as the user named it.
        config: content of ``config.json``.
        architecture: class of the model.
        layers: every distinct layer and how often it occurs.
        hidden: channels of the residual stream.
        vocabulary: number of logits.
        others: number of parameters that always stay in 16 bits, with the output head.
        tied: whether the output head is the embedding.
        projections: quantised projections, with those of experts.
        judged: quantised projections of which servers judge the rest likewise: of the first layer of each
            kind, and of its first experts.
        stateful: number of layers without attention.
        stacks: whether files can hold the experts of a layer in one tensor, as those of GPT-OSS do.
    """

    name: str
    config: Mapping[str, Any]
    architecture: str
    layers: tuple[tuple[DecoderLayer, int], ...]
    hidden: int
    vocabulary: int
    others: int
    tied: bool
    projections: tuple[Projection, ...]
    judged: tuple[Projection, ...]
    stateful: int
    stacks: bool = False

    @cached_property
    def expert_sizes(self) -> Counter[tuple[int, int]]:
        """:attr:`sizes` of experts alone."""
        return Counter((one.out_features, one.in_features) for one in filter(is_expert, self.projections))

    @cached_property
    def sizes(self) -> Mapping[tuple[int, int], int]:
        """Quantised projections of each (out_features, in_features)."""
        return Counter((one.out_features, one.in_features) for one in self.projections)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.layers)

    def cached(self, tokens: float, *, windows: bool) -> float:
        """Number of values in the cache of a sequence with ``tokens`` tokens; with ``windows``, only those
        that attention reads."""
        return sum(
            count * layer.cached * (min(tokens, layer.window) if windows and layer.window else tokens)
            for layer, count in self.layers
        )


def read_config(model: str, revision: str | None, progress: ReportProgress) -> Mapping[str, Any]:
    """The content of ``config.json`` of a folder or Hub id; nothing else is downloaded.

    Raises:
        UsageError: there is a revision, but the model is a folder.
        CheckpointError: the file is missing, or is no JSON object.
        EnvironmentProblem: the Hub can't be reached.
    """
    folder = locate(model, revision=revision, progress=progress, wanted=(CONFIG,))
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; pass the folder of a Hugging Face checkpoint")
    return read_json(folder, CONFIG)


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config describes.

    Raises:
        CheckpointError: transformers can't build a model from it, or a number in it is absurd.
        UnsupportedError: it is no decoder, or writes no text.
    """
    config = without_quantization_config(config)
    _check_counts(name, config)
    blueprint = build_blueprint(dict(config), source=name)
    _check_writes(name, blueprint)
    text = blueprint.config.get_text_config()
    kept = set(blueprint.usually_kept)
    layers: Counter[DecoderLayer] = Counter()
    found: list[Projection] = []
    judged: dict[tuple[DecoderLayer, tuple[str, ...]], list[Projection]] = {}
    stateful = 0
    for index, block in enumerate(blueprint.blocks):
        projections = [one for one in block.projections if one.name not in kept]
        layer = _layer(name, blueprint, text, index, block, projections)
        layers[layer] += 1
        stateful += layer.queries == 0
        found += projections
        few = [one for one in projections if _expert(one.name) < _JUDGED_EXPERTS]
        judged.setdefault((layer, tuple(one.name.removeprefix(block.name) for one in few)), few)
    total = sum(math.prod(shape) for shape in blueprint.parameters.values())
    head = blueprint.head
    return ModelShape(
        name=name,
        config=config,
        architecture=blueprint.architecture,
        layers=tuple(layers.items()),
        hidden=int(text.hidden_size),
        vocabulary=int(text.vocab_size),
        others=total - sum(one.in_features * one.out_features for one in found),
        tied=head is not None and f"{head}.weight" in blueprint.tied,
        projections=tuple(found),
        judged=tuple(one for few in judged.values() for one in few),
        stateful=stateful,
        stacks=any(each.endswith(f".{STACKED_BIAS}") for each in blueprint.parameters),
    )


def is_expert(projection: Projection) -> bool:
    """Whether a projection belongs to an expert."""
    return _expert(projection.name) >= 0


def _expert(name: str) -> int:
    """The index of the expert that a projection belongs to; -1 outside of experts."""
    match = _OF_EXPERT.search(name)
    return int(match[1]) if match else -1


def _check_writes(name: str, blueprint: Blueprint) -> None:
    """Refuse models that are built of such blocks but have no decode step.

    Raises:
        UnsupportedError: an encoder, or a model without an output head.
    """
    config = blueprint.config
    masked = type(config) in AutoModelForMaskedLM._model_mapping
    if masked and not getattr(config, "is_decoder", False):
        raise UnsupportedError(
            f"{name}: {config.model_type} is an encoder, which fills masks and has no decode step; "
            "expected a model that writes text"
        )
    if blueprint.head is None:
        raise UnsupportedError(
            f"{name}: {blueprint.architecture} has no output head, so no decode step; expected a model that "
            "writes text"
        )


def _check_counts(name: str, config: Mapping[str, Any]) -> None:
    """Refuses absurd counts of layers, experts and channels before a model with so many is built.

    Raises:
        CheckpointError: a count is out of range.
    """
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in (*_LAYERS, *_EXPERTS):
            value = part.get(key)
            if isinstance(value, int) and value > _MOST:
                raise CheckpointError(
                    f"{name}/{CONFIG}: {key}: expected {_MOST} at most, found {value}; restore the file"
                )
        for key, value in part.items():
            if _CHANNELS.search(key) and isinstance(value, int) and value > _MOST_CHANNELS:
                raise CheckpointError(
                    f"{name}/{CONFIG}: {key}: expected a whole number up to {_MOST_CHANNELS}, found "
                    f"{shown(value)}; restore the file"
                )
        for key in _TOP[:-1]:  # the last may be the sampler's, where 0 is for all tokens
            value = part.get(key)
            if isinstance(value, int) and value < 1 and any(part.get(one) for one in _EXPERTS):
                raise CheckpointError(
                    f"{name}/{CONFIG}: {key}: expected 1 or more, found {value}; restore the file"
                )


def _number(source: str, text: Any, key: str) -> int | None:
    """A number of the config; None where it has none.

    Raises:
        CheckpointError: it is no whole number, or absurd.
    """
    value = getattr(text, key, None)
    if value is None or (type(value) is int and 0 <= value <= _MOST_CHANNELS):
        return value
    raise CheckpointError(
        f"{source}/{CONFIG}: {key}: expected a whole number up to {_MOST_CHANNELS}, found {shown(value)}; "
        "restore the file"
    )


def _layer(
    source: str, blueprint: Blueprint, text: Any, index: int, block: Block, projections: Iterable[Projection]
) -> DecoderLayer:
    dense = [one for one in projections if one.expert is None and ".experts." not in one.name]
    # Where heads differ between layers (Gemma 4), the config as a whole refuses to say their size.
    each = getattr(text, "per_layer_config", ())
    text = each[index] if index < len(each) else text
    heads = _number(source, text, "num_attention_heads") or 1
    size = _number(source, text, "head_dim") or text.hidden_size // heads
    kv_heads = _number(source, text, "num_key_value_heads") or heads
    kinds = getattr(text, "layer_types", None) or ()
    kind = kinds[index] if index < len(kinds) else ""
    latent = _number(source, text, "kv_lora_rank")
    cached = (
        2 * kv_heads * size if latent is None else latent + (_number(source, text, "qk_rope_head_dim") or 0)
    )
    window = _number(source, text, "sliding_window")
    slides = kind == "sliding_attention" or (not kinds and getattr(text, "use_sliding_window", True))
    attends = any(_is_attention(one.name.removeprefix(block.name)) for one in block.projections)
    if (kind and "attention" not in kind) or "linear" in kind or not attends:
        cached = 0  # a state of fixed size
    norms = sum(
        name.startswith(f"{block.name}.") and "norm" in name and name.endswith("weight")
        and shape == (text.hidden_size,)
        for name, shape in blueprint.parameters.items()
    )  # fmt: skip
    return DecoderLayer(
        products=_products(dense),
        routed=_routed(block, projections, text),
        norms=norms,
        queries=heads * size if attends else 0,
        cached=cached,
        window=window if slides and window else None,
    )


def _is_attention(name: str) -> bool:
    """Whether a projection, by its name in the block, belongs to attention over a cache."""
    path = name.lower()
    return ("attn" in path or "attention" in path or path.endswith(_ATTENTION)) and "linear_att" not in path


def _products(dense: Iterable[Projection]) -> tuple[ProductSize, ...]:
    groups: dict[tuple[str, int], list[int]] = {}
    for one in dense:
        parent, _, last = one.name.rpartition(".")
        first = next((names[0] for names in _JOINED if last in names), last)
        groups.setdefault((f"{parent}.{first}", one.in_features), []).append(one.out_features)
    return tuple(ProductSize(tuple(parts), k) for (_, k), parts in groups.items())


def _routed(block: Block, projections: Iterable[Projection], text: Any) -> Routed | None:
    top = next((int(value) for name in _TOP if isinstance(value := getattr(text, name, None), int)), 1)
    top = max(top, 1)
    if block.experts:
        first = block.experts[0]
        return Routed(first.count, min(top, first.count), first.hidden, first.intermediate, first.parts)
    apart = [one for one in projections if one.expert is None and ".experts." in one.name]
    count = len({one.name.partition(".experts.")[2].partition(".")[0] for one in apart})
    if not count:
        return None
    hidden = int(text.hidden_size)
    inner = next(one.out_features for one in apart if one.in_features == hidden)
    return Routed(count, min(top, count), hidden, inner, len(apart) // count - 1)
