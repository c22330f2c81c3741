"""Prompts through the kernels of a step, in pieces of bounded size.

All but attention works on rows independently, so a long prompt is read in pieces of rows, one layer after the
other: every piece appends its keys and values, attention sees all of them, and every piece continues to the
next layer. So only the residual stream, queries and attention's results exist for the whole prompt, and the
wider rows inside an MLP for one piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marlinq.models.anatomy import Attention
from marlinq.models.formulas import GATES
from marlinq.runtime.step.attention import causal_attention
from marlinq.runtime.step.bound_forward import BoundForward
from marlinq.runtime.step.latent_prompts import prompt_attention
from marlinq.runtime.step.walk import Pending, Walk

MOST_ROWS = 2048
"""Rows that go through a product at a time, which bounds the memory between products. Measured on an H200:
more rows make a product of Llama-3-8B's shape 1 % faster."""
TILE_ROWS = 128
"""Rows of a product's largest tile: pieces of a long prompt are whole tiles."""


def read_prompts(
    forward: BoundForward, ids: Tensor, part: slice, counts: Sequence[int], most_rows: int = MOST_ROWS
) -> tuple[Tensor, Pending]:
    """The residual stream [b, hidden] behind the last token of every prompt, and the addends still pending.

    Args:
        forward: forward with an empty cache.
        ids: int64 [b, T], contiguous; of a single prompt where they are more than ``most_rows`` tokens.
        part: the rows of the batch.
        counts: tokens of each prompt, 1..T.
        most_rows: rows that go through a product at a time, at most.
    """
    batch, width = ids.shape
    tokens, total = ids.view(-1), ids.numel()
    # ``observe`` gets whole prompts.
    piece = total if forward.observe is not None else piece_rows(total, most_rows)
    pieces = [slice(begin, min(begin + piece, total)) for begin in range(0, total, piece)]
    if len(pieces) == 1:
        walks = [Walk(forward, tokens, part, width)]
        places = [row * width + count - 1 for row, count in enumerate(counts)]
    else:
        before = forward.lengths[part]
        walks = [
            Walk(forward, tokens[rows], part, rows.stop - rows.start, before + rows.start) for rows in pieces
        ]
        places = [(counts[0] - 1) % piece]
    # Copied to the device now, while the copy need not wait for other work.
    chosen = torch.tensor(places, device=ids.device)
    ends = torch.tensor(counts, device=ids.device)
    for index, layer in enumerate(forward.layers):
        if layer.qkv is None:
            for walk in walks:
                walk.without_attention(index)
            continue
        if layer.mixer is not None:
            made = []
            for walk, rows in zip(walks, pieces, strict=True):
                start = rows.start if len(pieces) > 1 else 0
                made.append(walk.read_mixer(layer.mixer, walk.before_attention(index), start, ends))
            for walk, given in zip(walks, made, strict=True):
                walk.after_attention(index, given)
            del made
            continue
        if layer.latent is not None:
            parts = []
            for walk, rows in zip(walks, pieces, strict=True):
                start = rows.start if len(pieces) > 1 else 0
                parts.append(walk.append_latents(layer.latent, walk.before_attention(index), start))
            heads = torch.cat(parts)
            del parts
            mixed = prompt_attention(
                layer.latent, heads.view(batch, width, *heads.shape[1:]), layer.latent.cache[part, :width]
            )
            del heads
            for walk, rows in zip(walks, pieces, strict=True):
                walk.after_attention(index, mixed[rows])
            del mixed
            continue
        attention = layer.attention
        factors = []
        q = walks[0].empty("queries", total, attention.heads * attention.head_dim)
        for walk, rows in zip(walks, pieces, strict=True):
            joined = walk.before_attention(index)
            walk.mix_beside(index, rows.start if len(pieces) > 1 else 0, ends)
            walk.append(index, joined, q[rows])
            if attention.gated or attention.gate is not None:
                factors.append(_factors(joined, attention))
        queries = q.view(batch, width, attention.heads, attention.head_dim).transpose(1, 2)
        keys, values = (cache[part, :, :width] for cache in (layer.keys, layer.values))
        mixed = causal_attention(queries, keys, values, attention, layer.sinks)
        mixed = mixed.transpose(1, 2).reshape(total, -1)
        del q, queries
        if factors:
            mixed = mixed * torch.cat(factors)
        for walk, rows in zip(walks, pieces, strict=True):
            walk.after_attention(index, mixed[rows])
        del mixed
    if forward.hidden_states is not None:
        for walk, rows in zip(walks, pieces, strict=True):
            _, normed = walk.add(*walk.end(), forward.final_norm)
            forward.hidden_states[rows] = normed
    # Several pieces are those of a single prompt.
    last = (counts[0] - 1) // piece if len(pieces) > 1 else 0
    x, pending = walks[last].end()
    return x.index_select(0, chosen), pending.select(chosen)


def _factors(joined: Tensor, attention: Attention) -> Tensor:
    """Factors [M, H * D] of attention's result, from the product before it."""
    widths, heads, size = attention.qkv.widths, attention.heads, attention.head_dim
    if attention.gate is None:
        return joined[:, : widths[0]].reshape(-1, heads, 2, size)[:, :, 1].sigmoid().flatten(1)
    gates = joined[:, sum(widths) :][:, : heads * (1 if attention.gate.by_head else size)]
    factors = GATES[attention.gate.activation](gates.float()).to(joined.dtype)
    return factors.repeat_interleave(size, 1) if attention.gate.by_head else factors


def piece_rows(total: int, most_rows: int = MOST_ROWS) -> int:
    """Rows of each piece but the last of a prompt of ``total`` rows, at most ``most_rows``: equal pieces, in
    whole tiles of a product where ``most_rows`` holds one."""
    pieces = -(-total // most_rows)
    tile = min(TILE_ROWS, most_rows)
    return min(most_rows, -(-total // (pieces * tile)) * tile)
