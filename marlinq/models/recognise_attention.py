"""Recognises the attention of a recorded block: projections, norms of heads, rotation, mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.models.anatomy import Attention, AttentionGate, Norm, Rotary, Slices
from marlinq.models.blueprint import towers
from marlinq.models.formulas import GATES, factor, rotate
from marlinq.models.recording import TOKENS, AttentionCall, Call, MaskFunction, Refusal

# Exceptions of a module's forward pass on numbers where it expects other values.
FORWARD_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    KeyError,
    IndexError,
    NotImplementedError,
)
_FAR = 1 << 22
"""position beyond every context; a window that reaches so far counts as none"""


@dataclass(frozen=True, eq=False)
class _Frequencies:
    module: str
    buffer: str
    values: Tensor
    scaling: float
    limit: int | None


class RotaryModules:
    """All buffers that may hold rotary frequencies: those of modules without other buffers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._found: list[_Frequencies] = []
        self._positions = torch.arange(TOKENS)
        # Without vision and audio towers, whose positions have other shapes.
        outside = tuple(f"{name}." for name in towers(model))
        for name, module in model.named_modules():
            if name.startswith(outside):
                continue
            if any(True for _ in module.children()) or any(True for _ in module.parameters()):
                continue
            for key, values in module.named_buffers(recurse=False):
                # "original" buffers are transformers' copies of those that a longer sequence overwrites.
                if values.dim() != 1 or not values.is_floating_point() or "original" in key:
                    continue
                prefix = key.removesuffix("inv_freq")
                scaling = getattr(
                    module, f"{prefix}attention_scaling", getattr(module, "attention_scaling", 1.0)
                )
                try:
                    limit = _limit(name, module, key, prefix.rstrip("_") or None)
                except FORWARD_ERRORS:
                    # It takes something else than hidden states and positions: no rotation of text.
                    continue
                # The copy holds the frequencies up to the limit, beyond which the buffer is overwritten.
                stays = f"{prefix}original_inv_freq"
                named = key if limit is None or not hasattr(module, stays) else stays
                self._found.append(_Frequencies(name, named, values.float(), float(scaling), limit))

    def limits(self) -> list[int]:
        """Lengths, in tokens, above which frequencies change."""
        return [found.limit for found in self._found if found.limit is not None]

    def at(self, positions: Tensor) -> RotaryModules:
        """These modules for tokens at ``positions`` [T]."""
        moved = copy(self)
        moved._positions = positions
        return moved

    def explain(
        self, found: Tensor, base: Tensor, *, reordered: bool = False
    ) -> tuple[Rotary | None, float] | None:
        """(rotation or None, factor) that turn ``base`` into ``found`` [1, heads, T, D]; None if no
        combination does.

        With ``reordered`` pairs of neighbours may also lie in halves behind the rotation, which changes no
        product of a query and a key.
        """
        plain = factor(found, base)
        if plain is not None:
            return None, plain
        for candidate in self._found:
            channels = 2 * len(candidate.values)
            if channels > base.shape[-1]:
                continue
            for interleaved, backward in product((False, True), repeat=2):
                turned = rotate(
                    base,
                    -candidate.values if backward else candidate.values,
                    self._positions,
                    interleaved=interleaved,
                    scaling=candidate.scaling,
                )
                scale = factor(found, turned)
                if scale is None and interleaved and reordered and channels == base.shape[-1]:
                    scale = factor(found, torch.cat((turned[..., 0::2], turned[..., 1::2]), -1))
                if scale is not None:
                    rotary = Rotary(
                        candidate.module,
                        candidate.buffer,
                        channels,
                        interleaved,
                        candidate.scaling,
                        candidate.limit,
                        backward,
                    )
                    return rotary, scale
        return None


def _limit(name: str, module: nn.Module, key: str, layer_type: str | None) -> int | None:
    """Length, in tokens, above which a rotary module changes its frequencies; None if it never does.

    Raises:
        Refusal: they change at a length that its config does not name.
    """
    config = getattr(module, "config", None)
    if config is None or not _changes(module, key, layer_type, _FAR):
        return None
    numbers = set(_integers(config.to_dict()))
    for length in sorted(number for number in numbers if 1 < number < _FAR):
        if _changes(module, key, layer_type, length + 1) and not _changes(module, key, layer_type, length):
            return length
    raise Refusal(
        f"{name}.{key}", "its frequencies change with the length, from no length that the config names"
    )


def _integers(values: Mapping[str, object]) -> Iterator[int]:
    for value in values.values():
        if isinstance(value, dict):
            yield from _integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


def _changes(module: nn.Module, key: str, layer_type: str | None, length: int) -> bool:
    """Whether a sequence of ``length`` tokens changes the buffer ``key``."""
    probe = deepcopy(module)
    before = probe.get_buffer(key).clone()
    told = {} if layer_type is None else {"layer_type": layer_type}
    position = torch.tensor([[length - 1]])
    if hasattr(module, "mrope_section"):
        # Rotary modules of image models take three rows of positions: time, height and width.
        position = position.expand(3, 1, 1)
    probe(torch.zeros(1, 1, 1), position, **told)
    after = probe.get_buffer(key)
    return before.shape != after.shape or not torch.equal(before, after)


def attention_part(
    call: AttentionCall,
    before: Sequence[Call],
    after: Sequence[Call],
    norms: Mapping[str, Norm],
    rotary: RotaryModules,
    earlier: Sequence[AttentionCall] = (),
) -> tuple[Attention, list[Call], Tensor, Call]:
    """The attention that ``call`` belongs to.

    Args:
        call: recorded call of attention.
        before, after: calls of its block before and after it.
        norms: all norms of the model.
        rotary: buffers with rotary frequencies.
        earlier: calls of attention in earlier blocks.

    Returns:
        (attention, calls that belong to it with projections first, input of its projections, call of the
        output projection).

    Raises:
        Refusal: a part of it is not understood.
    """
    heads, kv_heads, head_dim = call.input.shape[1], call.keys.shape[1], call.input.shape[3]
    if call.values.shape[-1] != head_dim:
        raise Refusal(call.name, f"keys of {head_dim} channels and values of {call.values.shape[-1]}")
    if heads % kv_heads or call.values.shape[1] != kv_heads:
        raise Refusal(call.name, f"{heads} heads of queries over {kv_heads} of keys")
    projections = [each for each in before if each.kind == "linear"]
    if not projections:
        raise Refusal(call.name, "no linear runs before attention")
    read = projections[0].input
    behind = [each for each in after if each.kind == "linear"]
    output = next((each for each in behind if not torch.equal(each.input, read)), None)
    gate = None
    if output is not None:
        gates = (*projections, *behind[: behind.index(output)])
        gate = _own_gate(call.output, read, output.input, gates)
    if gate is not None:
        projections = [each for each in projections if each is not gate[0]]
    if not 1 <= len(projections) <= 3:
        raise Refusal(call.name, f"expected one to three linears before attention, found {len(projections)}")
    for each in projections:
        if not torch.equal(each.input, read):
            raise Refusal(each.name, f"does not read what {projections[0].name} reads")
    shared = next((each for each in earlier if _reads_the_same(call, each)), None)
    found = _explain(call, projections, before, norms, rotary, shared is not None)
    query, key, value = found.query, found.key, found.value
    if key is not None and (query.rotary != key.rotary or query.behind != key.behind):
        raise Refusal(call.name, "queries and keys are not rotated alike")
    result = call.output.reshape(1, call.output.shape[1], -1)
    if found.gate is not None:
        result = result * torch.sigmoid(found.gate)
    plain = output is not None and torch.equal(output.input.flatten(), result.flatten())
    if output is None or plain == (gate is not None):
        raise Refusal(
            call.name if output is None else output.name, "does not read the result of attention as it is"
        )
    attention = Attention(
        qkv=found.slices,
        output=output.name,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=call.scale * query.scale * (1.0 if key is None else key.scale),
        window=window_of(call.name, call.mask),
        softcap=call.softcap,
        query_norm=query.norm,
        key_norm=None if key is None else key.norm,
        rotary=query.rotary,
        gated=found.gate is not None,
        sinks=call.sinks,
        value_norm=None if value is None else value.norm,
        keys_are_values=shared is None and len(found.slices.widths) == 2,
        shared=None if shared is None else shared.block,
        norms_behind=query.behind,
        gate=None if gate is None else gate[1],
    )
    inner = (
        *(each.call for each in (query, key, value) if each is not None),
        None if gate is None else gate[0],
    )
    used = [*projections, output, *(each for each in inner if each is not None)]
    return attention, used, projections[0].input, output


def _own_gate(
    mixed: Tensor, read: Tensor, wanted: Tensor, candidates: Sequence[Call]
) -> tuple[Call, AttentionGate] | None:
    """(linear, gate) of the linear that reads ``read``, and whose activation times ``mixed`` [1, T, H, D] is
    ``wanted``; None if there is none."""
    for call, (activation, function) in product(candidates, GATES.items()):
        by_head = call.output.shape[-1] == mixed.shape[2]
        if not torch.equal(call.input, read) or not (by_head or call.output.numel() == mixed.numel()):
            continue
        gate = function(call.output).view(*mixed.shape[:3], -1)
        if torch.equal((mixed * gate).flatten(), wanted.flatten()):
            return call, AttentionGate(call.name, activation, by_head)
    return None


def _reads_the_same(call: AttentionCall, other: AttentionCall) -> bool:
    """Whether both calls have the same keys and values."""
    pairs = (call.keys, other.keys), (call.values, other.values)
    return all(torch.equal(one, another) for one, another in pairs)


@dataclass(frozen=True, eq=False)
class _Heads:
    """Norm, rotation and factor between columns of the projections and queries, keys or values. ``behind``
    says that the norm follows the rotation."""

    norm: Norm | None
    call: Call | None
    rotary: Rotary | None
    scale: float
    behind: bool = False


@dataclass(frozen=True, eq=False)
class _Explained:
    """Columns of the projections, and what becomes of them; ``gate`` are gates [1, T, H * D] if heads of
    queries are followed by gates. Keys and values are None if they are another layer's."""

    slices: Slices
    query: _Heads
    key: _Heads | None
    value: _Heads | None
    gate: Tensor | None


def _explain(
    call: AttentionCall,
    projections: Sequence[Call],
    before: Sequence[Call],
    norms: Mapping[str, Norm],
    rotary: RotaryModules,
    shared: bool,
) -> _Explained:
    """The first assignment of columns to queries, keys and values that explains attention's inputs.

    Keys and values have columns of their own, or the same ones; or none if they are ``shared``."""
    heads, kv_heads, head_dim = call.input.shape[1], call.keys.shape[1], call.input.shape[3]
    failed = "values are not those of a linear, in columns that are known"
    counts = (0,) if shared else (2, 1)
    ways = product(permutations(projections), sorted({1, kv_heads, heads}), (1, 2), counts)
    for order, turns, share, count in ways:
        widths = (share * heads * head_dim, *((kv_heads * head_dim,) * count))
        joined = torch.cat([each.output for each in order], -1)
        if joined.shape[-1] != sum(widths) or any(width % turns for width in widths):
            continue
        slices = Slices(tuple(each.name for each in order), widths, turns)
        query, *others = slices.split(joined)
        value = None
        if others:
            value = _explain_values(others[-1], call.values, before, norms)
            if value is None:
                continue
        gate = None
        if share == 2:
            shares = query.reshape(*query.shape[:-1], heads, 2, -1).unbind(-2)
            query, gate = (part.flatten(-2) for part in shares)
        explained_query = _explain_heads(query, call.input, before, norms, rotary)
        explained_key = _explain_heads(others[0], call.keys, before, norms, rotary) if others else None
        if explained_query is not None and (explained_key is not None or not others):
            return _Explained(slices, explained_query, explained_key, value, gate)
        which = "queries" if explained_query is None else "keys"
        failed = f"{which} are neither what was projected nor a known rotation of it"
    raise Refusal(call.name, failed)


def _explain_heads(
    part: Tensor, found: Tensor, before: Sequence[Call], norms: Mapping[str, Norm], rotary: RotaryModules
) -> _Heads | None:
    for norm, base, call in _head_norms(part, before, norms, found):
        explained = rotary.explain(found, base)
        if explained is not None:
            return _Heads(norm, call, *explained)
    by_head = _by_head(part, found.shape[1])
    for call in before:
        if call.kind == "norm" and call.input.shape == by_head.shape:
            explained = rotary.explain(call.input, by_head)
            scale = factor(found, call.output)
            if explained is not None and explained[1] == 1 and scale is not None:
                return _Heads(norms[call.name], call, explained[0], scale, behind=True)
    return None


def _explain_values(
    part: Tensor, found: Tensor, before: Sequence[Call], norms: Mapping[str, Norm]
) -> _Heads | None:
    for norm, base, call in _head_norms(part, before, norms, found):
        if torch.equal(base, found):
            return _Heads(norm, call, None, 1.0)
    return None


def _by_head(part: Tensor, heads: int) -> Tensor:
    """[1, T, heads * D] to [1, heads, T, D]."""
    return part.reshape(*part.shape[:-1], heads, -1).transpose(1, 2)


def _head_norms(
    part: Tensor, before: Sequence[Call], norms: Mapping[str, Norm], wanted: Tensor
) -> Iterator[tuple[Norm | None, Tensor, Call | None]]:
    """(norm, its output by head, its call) for each norm that reads ``part``; for none ``part`` itself."""
    by_head = _by_head(part, wanted.shape[1])
    for call in before:
        if call.kind != "norm" or call.input.numel() != part.numel():
            continue
        if call.input.dim() == 4 and torch.equal(call.input, by_head):
            yield norms[call.name], call.output, call
        elif torch.equal(call.input.flatten(), part.flatten()):
            result = call.output.reshape(1, TOKENS, -1)
            yield norms[call.name], _by_head(result, wanted.shape[1]), call
    yield None, by_head, None


def window_of(name: str, mask: MaskFunction) -> int | None:
    """Number of positions that a query sees, from the model's mask function; None for all.

    Raises:
        Refusal: the mask is neither causal nor a sliding window.
    """

    def visible(query: Tensor, key: Tensor) -> Tensor:
        zero = torch.zeros_like(query)
        return mask(zero, zero, query, key).expand(query.shape)

    query = torch.tensor([2 * _FAR])
    low, high = 0, _FAR
    if bool(visible(query, query - high)):
        window = None
    else:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if bool(visible(query, query - middle)) else (low, middle)
        window = high
    generator = torch.Generator().manual_seed(3)
    reach = 64 if window is None else 2 * window
    queries = torch.randint(4 * reach, (4096,), generator=generator)
    distances = torch.randint(-reach, reach, (4096,), generator=generator)
    edges = torch.tensor([-1, 0, 1] if window is None else [-1, 0, 1, window - 1, window, window + 1])
    queries = torch.cat((queries, *([torch.arange(3 * reach, 3 * reach + 64)] * len(edges))))
    distances = torch.cat((distances, edges.repeat_interleave(64)))
    keys = queries - distances
    queries, distances, keys = (value[keys >= 0] for value in (queries, distances, keys))
    expected = distances >= 0 if window is None else (distances >= 0) & (distances < window)
    if not torch.equal(visible(queries, keys).bool(), expected):
        raise Refusal(name, "its mask is neither causal nor a causal sliding window")
    return window
