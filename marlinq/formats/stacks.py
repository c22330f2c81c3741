"""Experts of a layer in one tensor, as GPT-OSS files hold MXFP4 weights (docs/formats.md).

    <experts>.gate_up_proj_blocks   uint8 [E, 2I, H/32, 16]   codes; rows of gate and up take turns
    <experts>.gate_up_proj_scales   uint8 [E, 2I, H/32]       E8M0
    <experts>.down_proj_blocks      uint8 [E, H, I/32, 16]
    <experts>.down_proj_scales      uint8 [E, H, I/32]

A *part* is what one expert's linear has in them: the tensor that compressed-tensors stores for it, byte for
byte. Everything but reading and writing files knows the parts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_LINEARS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SUFFIXES = {"blocks": "weight_packed", "scales": "weight_scale"}
_BLOCK_BYTES = 16
"""Bytes that the codes of 32 channels, which share a scale, take."""
STACKS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)")
"""Names of stacks."""
_PART = re.compile(r"(.+\.experts)\.(\d{1,6})\.(gate_proj|up_proj|down_proj)\.(weight_packed|weight_scale)")
STACKED_BIAS = "gate_up_proj_bias"
"""A parameter of experts that only models of this family have."""


@dataclass(frozen=True)
class Part:
    """One expert's tensor in a stack.

    Attributes:
        name: name of the tensor by itself.
        stack: name of the stacked tensor.
        expert: index along the first axis of the stack.
        first, step: rows first, first + step, ... of the expert's matrix in the stack.
        blocks: the stack has the bytes of a row in blocks of 16.
    """

    name: str
    stack: str
    expert: int
    first: int
    step: int
    blocks: bool

    def taken(self, matrix: Tensor) -> Tensor:
        """The part as a tensor of its own, [N, K/2] or [N, K/32], out of the expert's ``matrix``."""
        rows = matrix[self.first :: self.step]
        return (rows.flatten(1) if self.blocks else rows).contiguous()

    def put(self, stack: Tensor, value: Tensor) -> None:
        """Writes ``value``, as :meth:`taken` gives it, to its place in the whole ``stack``."""
        place = stack[self.expert, self.first :: self.step]
        place.copy_(value.reshape(place.shape))

    def taken_shape(self, stack: Sequence[int]) -> tuple[int, int]:
        """Shape of :meth:`taken`, from the stack's."""
        return stack[1] // self.step, stack[2] * (_BLOCK_BYTES if self.blocks else 1)

    def stack_shape(self, shape: Sequence[int], experts: int) -> tuple[int, ...]:
        """Shape of the stack of so many experts, from a part's."""
        rows, width = shape
        inner = (width // _BLOCK_BYTES, _BLOCK_BYTES) if self.blocks else (width,)
        return experts, rows * self.step, *inner


def part_named(name: str) -> Part | None:
    """The part that the tensor ``name`` is, or None."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    experts, number, linear, suffix = found.groups()
    fused, members = next((fused, members) for fused, members in _LINEARS.items() if linear in members)
    kind = next(kind for kind, own in _SUFFIXES.items() if own == suffix)
    return Part(
        name,
        f"{experts}.{fused}_{kind}",
        int(number),
        members.index(linear),
        len(members),
        kind == "blocks",
    )


def is_stack(name: str) -> bool:
    """Whether the tensor ``name`` is a stack."""
    return STACKS.fullmatch(name) is not None


def stack_refusal(name: str, dtype: str, shape: Sequence[int]) -> str | None:
    """How the stack ``name`` differs from what its name promises, or None."""
    found = STACKS.fullmatch(name)
    assert found is not None, "not a stack"
    blocks, parts = found[3] == "blocks", len(_LINEARS[found[2]])
    axes = 4 if blocks else 3
    whole = len(shape) == axes and all(shape) and (not blocks or shape[3] == _BLOCK_BYTES)
    if whole and dtype == "uint8" and shape[1] % parts == 0:
        return None
    wanted = "[E, 2I, ..." if parts == 2 else "[E, H, ..."
    wanted += f", {_BLOCK_BYTES}]" if blocks else "]"
    return f"{name}: expected uint8 {wanted} of {axes} axes, found {dtype} {list(shape)}"


def parts_of(name: str, experts: int) -> Iterator[Part]:
    """All parts of the stack ``name``, expert by expert."""
    found = STACKS.fullmatch(name)
    assert found is not None, "not a stack"
    for expert in range(experts):
        for linear in _LINEARS[found[2]]:
            part = part_named(f"{found[1]}.{expert}.{linear}.{_SUFFIXES[found[3]]}")
            assert part is not None, "the names above"
            yield part
