"""Stacks: tensors that hold all experts of a layer, in MXFP4, as in GPT-OSS files (docs/formats.md).

    <experts>.gate_up_proj_blocks   uint8 [E, 2I, H/32, 16]   codes; even rows are gate's, odd rows are up's
    <experts>.gate_up_proj_scales   uint8 [E, 2I, H/32]       E8M0
    <experts>.down_proj_blocks      uint8 [E, H, I/32, 16]
    <experts>.down_proj_scales      uint8 [E, H, I/32]

A *part* is the share of one expert's linear in a stack. Taken out, it equals the tensor that
compressed-tensors stores for that linear, byte for byte. Only code that reads and writes files handles
stacks; all other code handles parts.
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
"""Bytes of the codes of 32 channels, which share a scale."""
STACKS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)")
"""Names of stacks."""
_PART = re.compile(r"(.+\.experts)\.(\d{1,6})\.(gate_proj|up_proj|down_proj)\.(weight_packed|weight_scale)")
STACKED_BIAS = "gate_up_proj_bias"
"""Suffix of a parameter of experts that only models of GPT-OSS's family have."""


@dataclass(frozen=True)
class StackPart:
    """One expert's tensor in a stack.

    Attributes:
        name: name of the part as a tensor of its own.
        stack: name of the stacked tensor.
        expert: index along the first axis of the stack.
        first, step: its rows in the expert's matrix of the stack: first, first + step, ...
        blocks: whether the stack splits the bytes of a row into blocks of 16, an axis of its own.
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
        """Write ``value``, shaped like the result of :meth:`taken`, into the whole ``stack``."""
        place = stack[self.expert, self.first :: self.step]
        place.copy_(value.reshape(place.shape))

    def taken_shape(self, stack: Sequence[int]) -> tuple[int, int]:
        """Shape of the part as a tensor of its own, from the shape of the stack."""
        return stack[1] // self.step, stack[2] * (_BLOCK_BYTES if self.blocks else 1)

    def stack_shape(self, shape: Sequence[int], experts: int) -> tuple[int, ...]:
        """Shape of the stack of ``experts`` experts, from the shape of a part."""
        rows, width = shape
        inner = (width // _BLOCK_BYTES, _BLOCK_BYTES) if self.blocks else (width,)
        return experts, rows * self.step, *inner


def part_named(name: str) -> StackPart | None:
    """The part with the tensor name ``name``; None if it is no part's name."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    experts, number, linear, suffix = match.groups()
    fused, members = next((fused, members) for fused, members in _LINEARS.items() if linear in members)
    kind = next(kind for kind, own in _SUFFIXES.items() if own == suffix)
    return StackPart(
        name,
        f"{experts}.{fused}_{kind}",
        int(number),
        members.index(linear),
        len(members),
        kind == "blocks",
    )


def is_stack(name: str) -> bool:
    """Whether ``name`` is the name of a stack."""
    return STACKS.fullmatch(name) is not None


def stack_refusal(name: str, dtype: str, shape: Sequence[int]) -> str | None:
    """How dtype or shape differ from those of a stack called ``name``, or None."""
    match = STACKS.fullmatch(name)
    assert match is not None, "not a stack"
    blocks, parts = match[3] == "blocks", len(_LINEARS[match[2]])
    axes = 4 if blocks else 3
    whole = len(shape) == axes and all(shape) and (not blocks or shape[3] == _BLOCK_BYTES)
    if whole and dtype == "uint8" and shape[1] % parts == 0:
        return None
    wanted = "[E, 2I, ..." if parts == 2 else "[E, H, ..."
    wanted += f", {_BLOCK_BYTES}]" if blocks else "]"
    return f"{name}: expected uint8 {wanted} of {axes} axes, found {dtype} {list(shape)}"


def parts_of(name: str, experts: int) -> Iterator[StackPart]:
    """All parts of the stack ``name``, expert by expert."""
    match = STACKS.fullmatch(name)
    assert match is not None, "not a stack"
    for expert in range(experts):
        for linear in _LINEARS[match[2]]:
            part = part_named(f"{match[1]}.{expert}.{linear}.{_SUFFIXES[match[3]]}")
            assert part is not None, "the names above"
            yield part
