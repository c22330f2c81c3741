"""The rotation of the residual stream, and the tensors of a model that it changes.

The residual stream h of a decoder can be rotated to h Q without changing the model's function, if all weights
that write to it and read from it are rotated too (Ashkboos et al. 2024, SliceGPT and QuaRot; Liu et al. 2024,
SpinQuant, where it is R1). Readers see the stream through a norm, x / rms(x) * w. A rotation keeps rms(x),
but does not commute with w; w is therefore multiplied into the readers' weights and replaced by ones. For
weights [N, K]:

    readers     W diag(w) Q       the norm before them: w = 1
    writers     Q^T W, and b Q of a bias
    embedding   E Q

The rotation spreads the stream's large channels, for which readers have small weights, over all channels.
Weights of a group that shares a scale then have more similar sizes.
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

# Inside a block: each reader with the norm before it, and the writers.
_READERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
# Parameters that the rotation does not touch: biases of readers, and norms of queries and keys.
_BESIDE = {*(f"{name}.bias" for name in _READERS), "self_attn.q_norm.weight", "self_attn.k_norm.weight"}
_ROWS = 16384
"""rows of a weight that are multiplied at a time, because an embedding table is large"""


def rotation_matrix(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix, float64 [size, size].

    Random signs times the Kronecker product of a Hadamard matrix (for the power of two in ``size``) and a
    random orthogonal matrix (for the odd factor). Its entries have similar sizes, so that every channel is
    spread over all.
    """
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
    """Full names of the parameters that read from or write to the residual stream.

    Attributes:
        readers: weight [N, H] -> norm before it.
        writers: weights [H, K].
        biases: biases [H] of writers.
        norms: norms [H].
        embedding: embedding table [vocabulary, H].
        head: the output head's weight [vocabulary, H], one of :attr:`readers`.
        tied: whether the head shares the embedding's tensor; it then gets one of its own.
    """

    readers: Mapping[str, str]
    writers: frozenset[str]
    biases: frozenset[str]
    norms: frozenset[str]
    embedding: str
    head: str
    tied: bool


def plan_stream(blueprint: Blueprint, source: str) -> StreamPlan:
    """Finds the parameters that touch the residual stream of a model with Llama's structure.

    Raises:
        UnsupportedError: the model has a parameter that Llama does not have, or lacks one.
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
    """``W diag(w) Q``, computed in float32.

    Args:
        weight: W, float [N, H].
        norm: w, float [H]; None for ones, as for the embedding.
        turn: Q, float32 [H, H], on the device that multiplies.
        dtype: dtype of the result.

    Returns:
        [N, H], on the device of ``weight``.
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
