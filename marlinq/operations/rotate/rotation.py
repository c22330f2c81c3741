"""The rotation, and what becomes of a model's tensors by it.

The residual stream h of a decoder can be rotated to h Q without changing what is computed, if all that
writes to it and reads from it follows (Ashkboos et al. 2024, SliceGPT and QuaRot; Liu et al. 2024, SpinQuant,
where it is R1). Between the stream and its readers stands a norm, x / rms(x) * w. A rotation leaves rms(x) as
it is, but not w, which goes into the readers' weights first and leaves ones. So, weights being [N, K]:

    readers     W diag(w) Q       the norm before them: w = 1
    writers     Q^T W, and b Q of a bias
    embedding   E Q

Large channels of the stream, which the weights behind it answer with small ones, are spread over all
channels, and a group of weights that shares a scale is more alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.errors import UnsupportedError
from marlinq.models import Blueprint

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

# Within a block: each reader with the norm before it, and the writers.
_READERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
# What is computed beside the stream: biases of readers, and norms of a head's queries and keys.
_BESIDE = {*(f"{name}.bias" for name in _READERS), "self_attn.q_norm.weight", "self_attn.k_norm.weight"}
# Rows of a reader that are multiplied at a time: a table of embeddings is large.
_ROWS = 16384


def rotation_matrix(size: int, seed: int) -> Tensor:
    """An orthogonal float64 [size, size]: random signs, then the Kronecker product of a Hadamard matrix, for
    the powers of two in ``size``, with a random orthogonal one for what is left. Its entries are as alike as
    an orthogonal matrix's can be, so that no channel keeps more than its share."""
    generator = torch.Generator().manual_seed(seed)
    two = size & -size
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < two:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    odd = size // two
    q, r = torch.linalg.qr(torch.randn(odd, odd, dtype=torch.float64, generator=generator))
    rest = q * r.diagonal().sign()
    signs = torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1
    return signs * torch.kron(hadamard / two**0.5, rest.contiguous())


@dataclass(frozen=True)
class StreamPlan:
    """What touches the residual stream, by the full names of parameters.

    Attributes:
        readers: weights [N, H] with the norm before them.
        writers: weights [H, K].
        biases: of writers, [H].
        norms: [H].
        embedding: the table [vocabulary, H].
        head: the output head's weight [vocabulary, H], one of :attr:`readers`.
        tied: the head shares the embedding's tensor, and gets one of its own.
    """

    readers: Mapping[str, str]
    writers: frozenset[str]
    biases: frozenset[str]
    norms: frozenset[str]
    embedding: str
    head: str
    tied: bool


def plan_stream(blueprint: Blueprint, source: str) -> StreamPlan:
    """Finds what touches the residual stream of a model made like Llama.

    Raises:
        UnsupportedError: a parameter is there that such a model does not have, or one is missing.
    """

    def refuse(found: str) -> UnsupportedError:
        return UnsupportedError(
            f"{source}: rotate expects blocks that are made like Llama's; {blueprint.architecture} {found}; "
            "quantise it as it is"
        )

    readers: dict[str, str] = {}
    writers, biases, norms = set[str](), set[str](), set[str]()
    left = set(blueprint.parameters)
    for block in blueprint.blocks:
        own = {name.removeprefix(f"{block.name}.") for name in left if name.startswith(f"{block.name}.")}
        wanted = {f"{name}.weight" for name in (*_READERS, *_READERS.values(), *_WRITERS)}
        if missing := sorted(wanted - own):
            raise refuse(f"has no {block.name}.{missing[0]}")
        of_writers = {f"{name}.bias" for name in _WRITERS} & own
        if other := sorted(own - wanted - of_writers - _BESIDE):
            raise refuse(f"has {block.name}.{other[0]}")
        for reader, norm in _READERS.items():
            readers[f"{block.name}.{reader}.weight"] = f"{block.name}.{norm}.weight"
        norms |= {f"{block.name}.{norm}.weight" for norm in _READERS.values()}
        writers |= {f"{block.name}.{name}.weight" for name in _WRITERS}
        biases |= {f"{block.name}.{name}" for name in of_writers}
        left -= {f"{block.name}.{name}" for name in own}
    if blueprint.head is None or blueprint.embedding is None:
        raise refuse("has no output head or no embedding")
    head = blueprint.by_name[blueprint.head].parameter
    embedding = blueprint.embedding
    left -= {head, embedding}
    final = [name for name in left if name.endswith("norm.weight")]
    if other := sorted(left - set(final)):
        raise refuse(f"has {other[0]}")
    if len(final) != 1:
        raise refuse("has no norm before its output head")
    readers[head] = final[0]
    return StreamPlan(
        readers,
        frozenset(writers),
        frozenset(biases),
        frozenset((*norms, final[0])),
        embedding,
        head,
        tied=blueprint.tied.get(head) == embedding,
    )


def rotated_reader(weight: Tensor, norm: Tensor | None, turn: Tensor, dtype: torch.dtype) -> Tensor:
    """``W diag(w) Q``, computed in float32; ``norm`` None for none, as of the embedding.

    Args:
        weight: float [N, H].
        norm: float [H].
        turn: float32 [H, H], Q, on the device that multiplies.
        dtype: dtype of the result.

    Returns:
        [N, H], where ``weight`` is.
    """
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for start in range(0, len(weight), _ROWS):
        rows = weight[start : start + _ROWS].to(turn.device, torch.float32)
        if norm is not None:
            rows = rows * norm.to(turn.device, torch.float32)
        out[start : start + _ROWS] = rows @ turn
    return out


def rotated_writer(weight: Tensor, turn: Tensor) -> Tensor:
    """``Q^T W`` in float32, [H, K]; of a bias [H], ``b Q``."""
    wide = weight.to(turn.device, torch.float32)
    return (turn.t() @ wide).to(weight.device)
