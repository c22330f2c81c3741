"""The text that is compiled: a kernel template and the configuration that it is instantiated with.

Kernels are templates over one configuration struct (``cuda/kernels``). The text defines the struct and
instantiates the template under the name that the driver looks up. One text may hold several instantiations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CUDA_SOURCES = Path(__file__).parent.parent / "cuda"

Parameters = tuple[tuple[str, bool | int | str], ...]
"""Names and values of a configuration: numbers, enumerators (``Enumeration::NAME``), or types."""


@dataclass(frozen=True)
class Instantiation:
    """A kernel template with one configuration.

    Attributes:
        header: file that defines the template: a path below ``kernels/cuda``, or an absolute one.
        function: name of the entry in lower case; its header defines the macro
            ``INSTANTIATE_<FUNCTION>(NAME, CONFIGURATION)``.
        parameters: the members of the configuration struct.
    """

    header: str
    function: str
    parameters: Parameters

    def text(self) -> str:
        """The CUDA C++ that is compiled."""
        return unit(((self.function, self),))


def cold_read(threads: int, unroll: int) -> Instantiation:
    """A plain read of a layer's bytes (``cuda/kernels/cold_read.cuh``)."""
    return Instantiation("kernels/cold_read.cuh", "cold_read", (("THREADS", threads), ("UNROLL", unroll)))


def unit(entries: tuple[tuple[str, Instantiation], ...]) -> str:
    """One translation unit with several entries, each under a name of its own."""
    headers = dict.fromkeys(instantiation.header for _, instantiation in entries)
    lines = [f'#include "{header}"' for header in headers]
    for name, instantiation in entries:
        struct = f"Configuration_{name}"
        lines += ["", f"struct {struct} {{"]
        lines += [f"    {_member(*parameter)}" for parameter in instantiation.parameters]
        lines += ["};", f"INSTANTIATE_{instantiation.function.upper()}({name}, {struct})"]
    return "\n".join(lines) + "\n"


def _member(name: str, value: bool | int | str) -> str:
    """The C++ declaration of a configuration struct's member."""
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"static constexpr int {name} = {value};"
    enumeration, separator, _ = value.partition("::")
    return f"static constexpr {enumeration} {name} = {value};" if separator else f"typedef {value} {name};"
