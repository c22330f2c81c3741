"""The PTX instructions that the emulation knows: which C++ function stands for which opcode.

A new instruction is a line here and a function of its operands, in the order of its text, in
``machine/instructions.h``. Chapters are those of the PTX ISA.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

_ELEMENT = r"(?P<element>f16|bf16)"
_ELEMENTS = {"f16": "HALF", "bf16": "BFLOAT16"}

# Patterns match whole opcodes; {element} and {columns} come from their groups.
_TABLE = {
    # Data Movement and Conversion
    r"ld\.global\.nc(\.L1::no_allocate)?\.v4\.u32": "load_constant_v4",
    r"ld\.global\.nc\.u16": "load_constant_u16",
    r"ld\.global\.cg\.v4\.u32": "load_l2_v4",
    r"ld\.global\.cg\.u32": "load_l2_word",
    r"ld\.acquire\.gpu\.global\.u32": "load_flag<true>",
    r"ld\.relaxed\.gpu\.global\.u32": "load_flag<false>",
    r"st\.global\.v4\.u32": "store_global<4>",
    r"st\.global\.v2\.u32": "store_global<2>",
    r"ld\.relaxed\.gpu\.global\.b32": "load_message",
    r"ld\.relaxed\.gpu\.global\.v2\.b32": "load_messages<2>",
    r"ld\.relaxed\.gpu\.global\.v4\.b32": "load_messages<4>",
    r"st\.relaxed\.gpu\.global\.b32": "store_message",
    r"st\.relaxed\.gpu\.global\.v4\.b32": "store_messages",
    r"prefetch\.tensormap": "prefetch_map",
    r"trap": "trap",
    r"st\.release\.gpu\.global\.u32": "store_flag<true>",
    r"st\.relaxed\.gpu\.global\.u32": "store_flag<false>",
    r"atom\.add\.acq_rel\.gpu\.global\.u32": "add_flag",
    r"ld\.shared\.v4\.u32": "load_shared_v4",
    r"st\.shared\.v4\.u32": "store_shared_v4",
    r"st\.shared\.u32": "store_shared_word",
    r"ld\.shared::cluster\.v4\.f32": "load_cluster_v4",
    r"mapa\.shared::cluster\.u32": "map_cluster_address",
    r"cvt\.u16\.u32": "truncate_to_u16",
    rf"cvt\.f32\.{_ELEMENT}": "widen<emulation::Element::{element}>",
    rf"cvt\.rn\.{_ELEMENT}x2\.f32": "narrow_pair<emulation::Element::{element}>",
    r"cvt\.rn\.satfinite\.e4m3x2\.f32": "narrow_pair_to_e4m3",
    r"cvt\.rni\.s32\.f32": "round_to_int",
    r"ex2\.approx\.ftz\.f32": "approximate_exp2",
    r"lg2\.approx\.ftz\.f32": "approximate_log2",
    r"rcp\.approx\.ftz\.f32": "approximate_reciprocal",
    r"rsqrt\.approx\.ftz\.f32": "approximate_reciprocal_root",
    r"prmt\.b32": "permute_bytes",
    r"mov\.b32": "move_halves",
    # ... Asynchronous copy
    r"cp\.async\.cg\.shared\.global": "copy_async",
    r"cp\.async\.commit_group": "copy_async_commit",
    r"cp\.async\.wait_group": "copy_async_wait",
    r"cp\.async\.bulk\.tensor\.2d\.shared::cluster\.global\.mbarrier::complete_tx::bytes": "copy_tensor_2d",
    r"cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\.mbarrier::complete_tx::bytes\.L2::cache_hint": (
        "copy_tensor_3d"
    ),
    r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.v4\.b32": "store_async_v4",
    # Comparison and Selection, Logic and Shift, Half-Precision Floating-Point
    r"selp\.u32": "select",
    r"setp\.eq\.u32": "equal",
    r"lop3\.b32": "combine_bits",
    rf"add\.{_ELEMENT}x2": "add_pairs<emulation::Element::{element}>",
    rf"sub\.{_ELEMENT}x2": "subtract_pairs<emulation::Element::{element}>",
    rf"mul\.{_ELEMENT}x2": "multiply_pairs<emulation::Element::{element}>",
    rf"fma\.rn\.{_ELEMENT}x2": "multiply_add_pairs<emulation::Element::{element}>",
    # Floating Point
    r"mul\.rn\.f32": "multiply_floats",
    # Integer Arithmetic
    r"dp4a\.s32\.s32": "dot_bytes",
    r"vabsdiff4\.u32\.u32\.u32": "byte_distances",
    r"popc\.b32": "count_bits",
    # Parallel Synchronization and Communication
    r"mbarrier\.init\.shared::cta\.b64": "barrier_init",
    r"fence\.mbarrier_init\.release\.cluster": "barrier_init_fence",
    r"mbarrier\.arrive\.shared::cta\.b64": "barrier_arrive",
    r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64": "barrier_arrive_expect",
    r"mbarrier\.try_wait\.parity\.shared::cta\.b64": "barrier_try_wait<false>",
    r"mbarrier\.try_wait\.parity\.acquire\.cluster\.shared::cta\.b64": "barrier_try_wait<true>",
    r"bar\.sync": "block_barrier",
    r"barrier\.cluster\.arrive\.release\.aligned": "cluster_arrive",
    r"barrier\.cluster\.arrive\.relaxed\.aligned": "cluster_arrive_relaxed",
    r"barrier\.cluster\.wait\.acquire\.aligned": "cluster_wait",
    r"redux\.sync\.max\.u32": "largest_of_warp",
    r"match\.any\.sync\.b32": "lanes_with_same",
    r"redux\.sync\.add\.u32": "sum_of_warp",
    r"elect\.sync": "elect",
    r"griddepcontrol\.launch_dependents": "launch_dependents",
    r"griddepcontrol\.wait": "wait_for_previous_kernel",
    # Miscellaneous
    r"setmaxnreg\.inc\.sync\.aligned\.u32": "registers_grow",
    r"setmaxnreg\.dec\.sync\.aligned\.u32": "registers_shrink",
    # Warp-Level Matrix
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16": "load_matrices<false>",
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16": "load_matrices<true>",
    r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16": "store_matrices<false>",
    r"stmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16": "store_matrices<true>",
    r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16": "transpose_matrix",
    rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{_ELEMENT}\.(?P=element)\.f32": (
        "multiply_fragments<emulation::Element::{element}>"
    ),
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.u8\.s8\.s32": "multiply_byte_fragments",
    rf"mma\.sp::ordered_metadata\.sync\.aligned\.m16n8k32\.row\.col\.f32\.{_ELEMENT}\.(?P=element)\.f32": (
        "multiply_sparse_fragments<emulation::Element::{element}>"
    ),
    # Asynchronous Warpgroup-Level Matrix
    r"wgmma\.fence\.sync\.aligned": "matrix_fence",
    r"wgmma\.commit_group\.sync\.aligned": "matrix_commit",
    r"wgmma\.wait_group\.sync\.aligned": "matrix_wait",
    rf"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k16\.f32\.{_ELEMENT}\.(?P=element)": (
        "multiply_warpgroup<{columns}, emulation::Element::{element}>"
    ),
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k32\.f32\.e4m3\.e4m3": (
        "multiply_warpgroup_e4m3<{columns}>"
    ),
    rf"wgmma\.mma_async\.sp\.sync\.aligned\.m64n(?P<columns>\d+)k32\.f32\.{_ELEMENT}\.(?P=element)": (
        "multiply_warpgroup_sparse<{columns}, emulation::Element::{element}>"
    ),
}

# Names in a block of PTX, and operands of an asm statement by their constraints.
_REGISTERS = {
    "pred": "bool",
    "b16": "emulation::u16",
    "b32": "emulation::u32",
    "b64": "emulation::u64",
    "f32": "float",
}
_CONSTRAINTS = {"r": "emulation::u32", "l": "emulation::u64", "h": "emulation::u16", "f": "float"}


class UnknownPtx(Exception):
    """PTX that the emulation does not understand; the message quotes it."""


@functools.cache
def function_of(opcode: str) -> str:
    """The C++ function that stands for ``opcode``.

    Raises:
        UnknownPtx: the opcode is not in the table.
    """
    for pattern, function in _TABLE.items():
        found = re.fullmatch(pattern, opcode)
        if found:
            groups = {name: _ELEMENTS.get(value, value) for name, value in found.groupdict().items()}
            return "emulation::" + function.format(**groups)
    raise UnknownPtx(f"the emulation lacks {opcode!r}; add it to emulation/instructions.py")


@dataclass(frozen=True)
class Operand:
    """An operand of an asm statement: its constraint, ``=`` and ``+`` included, and its C++ expression."""

    constraint: str
    expression: str

    def to_cpp(self) -> str:
        """The expression with its direction and type.

        Raises:
            UnknownPtx: the constraint is none of r, l, h, f and n.
        """
        kind = self.constraint.lstrip("=+")
        if kind == "n":
            return f"({self.expression})"
        if kind not in _CONSTRAINTS:
            raise UnknownPtx(f"the constraint {self.constraint!r} of an asm operand")
        direction = "output" if self.constraint != kind else "input"
        return f"emulation::{direction}<{_CONSTRAINTS[kind]}>({self.expression})"


def ptx_to_cpp(text: str, operands: list[Operand], unique: int) -> str:
    """The C++ statements, on one line, for the PTX ``text`` of an asm statement.

    Labels get the suffix ``unique``, because a C++ label belongs to a function and not to a block.

    Raises:
        UnknownPtx: something that the emulation does not understand.
    """
    text = text.strip()
    if text.startswith("{"):
        if not text.endswith("}"):
            raise UnknownPtx(f"an asm block without its end: {text!r}")
        text = text[1:-1]
    statements = []
    for statement in filter(None, map(str.strip, text.split(";"))):
        while label := re.match(r"(\w+)\s*:\s*", statement):
            statements.append(f"{label[1]}_{unique}:")
            statement = statement[label.end() :]
        statements.append(_statement(statement, operands, unique))
    return "{ " + " ".join(statements) + " }"


def _statement(text: str, operands: list[Operand], unique: int) -> str:
    declaration = re.fullmatch(r"\.reg\s+\.(\w+)\s+(\w+)", text)
    if declaration:
        if declaration[1] not in _REGISTERS:
            raise UnknownPtx(f"a register of type {declaration[1]!r}")
        return f"{_REGISTERS[declaration[1]]} {declaration[2]};"
    found = re.fullmatch(r"(?:@(!?)(\w+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
    if not found:
        raise UnknownPtx(f"the statement {text!r}")
    negation, predicate, opcode, rest = found.groups()
    condition = f"if ({negation}{predicate}) " if predicate else ""
    if opcode in ("bra", "bra.uni"):
        return f"{condition}goto {rest}_{unique};"
    return f"{condition}{function_of(opcode)}({', '.join(_arguments(rest, operands))});"


def _arguments(text: str, operands: list[Operand]) -> list[str]:
    """``[%0, {%1, %2}], 16`` to three C++ arguments: brackets only say that something is an address."""
    arguments = []
    for part in _split(text):
        if part.startswith("["):
            arguments += _arguments(part[1:-1], operands)
        elif part.startswith("{"):
            arguments.append(f"emulation::group({', '.join(_arguments(part[1:-1], operands))})")
        elif re.fullmatch(r"%\d+", part):
            arguments.append(operands[int(part[1:])].to_cpp())
        elif part == "_":
            arguments.append("emulation::Sink()")
        elif sink := re.fullmatch(r"_\|(\w+)", part):
            arguments.append(sink[1])
        elif re.fullmatch(r"\w+", part):
            arguments.append(part)
        else:
            raise UnknownPtx(f"the operand {part!r}")
    return arguments


def _split(text: str) -> list[str]:
    """At the commas outside of brackets and braces."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
