"""From a kernel's CUDA C++ to C++ for the host.

The preprocessed source stays as it is, line for line, but for what only a GPU's compiler understands: asm
statements become calls of emulated instructions, ``__shared__`` variables become references into emulated
memory, and launch attributes become constants. So wrappers, kernel bodies and everything between are under
test, and a new wrapper needs nothing here as long as its instructions are known.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from emulation.instructions import Operand, UnknownPtx, ptx_to_cpp

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_STRING_OR_PARENTHESIS = re.compile(rf"{_STRING.pattern}|[()]")
_ASM = re.compile(r"\basm\b(?:\s+volatile\b)?\s*(?=\()")
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?(?P<type>[\w ]+?)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(
    r"(?<!extern )__shared__\s+(?:__align__\s*\(\s*(?P<align>\d+)\s*\)\s*)?"
    r"(?P<type>[\w ]+?)\s+(?P<name>\w+)\s*(?P<extents>(?:\[[^\]]*\])*)\s*;"
)


def translate(source: str, kernel: str) -> str:
    """Host C++ for a preprocessed kernel source.

    Args:
        source: output of ``g++ -E`` for a ``.cu`` file, line markers included.
        kernel: the name of its ``extern "C" __global__`` function.

    Raises:
        UnknownPtx: an asm statement that the emulation does not understand, with file and line.
    """
    cluster, source = _attribute(source, "__cluster_dims__")
    bounds, source = _attribute(source, "__launch_bounds__")
    _, source = _attribute(source, "__maxnreg__")
    source = _replace_asm(source)
    source = _DYNAMIC.sub(
        lambda m: (
            f"{m['type']}* const {m['name']} = static_cast<{m['type']}*>(emulation::dynamic_shared());"
            + "\n" * m[0].count("\n")
        ),
        source,
    )
    variables = iter(range(1 << 16))
    source = _STATIC.sub(lambda m: _static_variable(m, next(variables)), source)
    if "__shared__" in source:
        raise UnknownPtx("a __shared__ declaration that the emulation does not understand")
    return (
        f'#include "instructions.h"\n{source}\n'
        f'extern "C" const unsigned emulation_cluster = {cluster.split(",")[0] or 1};\n'
        f'extern "C" const unsigned emulation_threads = {bounds.split(",")[0] or 1024};\n'
        'extern "C" const size_t* emulation_parameters() {\n'
        f"    return emulation::parameter_sizes({kernel});\n}}\n"
        'extern "C" bool emulation_launch(const emulation::Launch* parameters, void** arguments) {\n'
        f"    const auto entry = [](void** a) {{ emulation::call({kernel}, a); }};\n"
        "    return emulation::launch(*parameters, {__ehdr_start, _end}, entry, arguments);\n}\n"
    )


def _static_variable(declaration: re.Match[str], number: int) -> str:
    name = declaration["name"]
    alignment = declaration["align"] or f"alignof({name}_type)"
    return (
        f"typedef {declaration['type']} {name}_type{declaration['extents']}; "
        f"{name}_type& {name} = *static_cast<{name}_type*>("
        f"emulation::static_shared({number}, sizeof({name}_type), {alignment}));"
        + "\n"
        * declaration[0].count("\n")
    )


def _attribute(source: str, name: str) -> tuple[str, str]:
    """(arguments of ``name(...)`` as text, the source without this)."""
    found = re.search(rf"\b{name}\s*(?=\()", source)
    if not found:
        return "", source
    end = _closing(source, found.end())
    inside = source[found.end() + 1 : end]
    return inside, source[: found.start()] + "\n" * inside.count("\n") + source[end + 1 :]


def _closing(source: str, start: int) -> int:
    """The index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for found in _STRING_OR_PARENTHESIS.finditer(source, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise UnknownPtx("a parenthesis that nothing closes")


def _replace_asm(source: str) -> str:
    pieces, position = [], 0
    for number, found in enumerate(_ASM.finditer(source)):
        end = _closing(source, found.end())
        inside = source[found.end() + 1 : end]
        try:
            statement = ptx_to_cpp(*_parts(inside), number)
        except UnknownPtx as error:
            raise UnknownPtx(f"{_place(source, found.start())}: {error}") from None
        # Line breaks are kept for the compiler's messages; the semicolon behind is an empty statement.
        pieces += [source[position : found.start()], statement, "\n" * inside.count("\n")]
        position = end + 1
    return "".join([*pieces, source[position:]])


@functools.cache
def _parts(inside: str) -> tuple[str, list[Operand]]:
    """The PTX and the operands of what stands in an asm statement's parentheses; clobbers don't matter.

    Most kernels have the same statements.
    """
    sections = list(_split(inside, ":"))
    text = "".join(ast.literal_eval(string) for string in _STRING.findall(sections[0]))
    operands = []
    for section in sections[1:3]:
        for operand in filter(None, map(str.strip, _split(section, ","))):
            found = re.fullmatch(r'"([^"]*)"\s*\((.*)\)', operand, re.DOTALL)
            if not found:
                raise UnknownPtx(f"the asm operand {operand!r}")
            operands.append(Operand(found[1], " ".join(found[2].split())))
    return text, operands


def _split(text: str, separator: str) -> Iterator[str]:
    """At separators outside of strings, parentheses and brackets."""
    start = at = depth = 0
    while at < len(text):
        string = _STRING.match(text, at)
        if string:
            at = string.end()
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if text[at] == separator and depth == 0:
            yield text[start:at]
            start = at + 1
        at += 1
    yield text[start:]


def _place(source: str, position: int) -> str:
    """File and line, from the preprocessor's markers."""
    file, line = "source", 1
    for text in source[:position].split("\n"):
        marker = re.match(r'# (\d+) "([^"]*)"', text)
        if marker:
            line, file = int(marker[1]), marker[2].rsplit("/", 1)[-1]
        else:
            line += 1
    return f"{file}:{line - 1}"
