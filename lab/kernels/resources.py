"""Write a table of the registers and shared memory of every variant that decisions choose.

    python -m lab.kernels.resources build/kernel-resources.md

Compiling needs NVRTC but no GPU, so the table covers every architecture. Registers belong to the version of
NVRTC that the page names. A variant that spills, has arrays in memory or serialised products is an error.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from marlinq.core.granularity import Granularity
from marlinq.kernels.choose.decision import available, decide
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.demands import forced_kernel
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import GROUP_SIZES, Problem
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.driver.compiler import ARCHITECTURES, CompiledKernel, compile_kernel, nvrtc_version
from marlinq.kernels.variants import KERNELS

DEVICES = {
    "sm_80": Device("sm_80", 108, 166_912),
    "sm_86": Device("sm_86", 84, 101_376),
    "sm_89": Device("sm_89", 142, 101_376),
    "sm_90a": Device("sm_90a", 132, 232_448),
    "sm_100a": Device("sm_100a", 148, 232_448),
    "sm_103a": Device("sm_103a", 148, 232_448),
    "sm_120a": Device("sm_120a", 170, 101_376),
    "sm_121a": Device("sm_121a", 48, 101_376),
}
"""A GPU of every architecture: multiprocessors, and bytes of shared memory that a block may have."""
# Architectures compiled with all group sizes: the oldest, and the one that all kernels run on. The others are
# compiled with the smallest and the largest.
_ALL_GROUPS = ("sm_80", "sm_90a")
# Rows M by kernel: one for every tile height, a single row, and large batches of the warpgroup kernel.
_BATCHES: Mapping[str, tuple[int, ...]] = {
    "stream": (1, 8, 9, 17, 33),
    "bulk": (1, 9),
    "warpgroup": (8, 32, 48, 64, 100, 128, 1000, 4096),
}
_SIZE = 4096
# ptxas advisories C75xx say that wgmma instructions are serialised.
_SERIALISED = re.compile(r"\bC75\d\d\b")
# Bytes of stack at most: for 12.x, NVRTC 13.0 calls a function for a TMA copy and passes an operand on the
# stack.
_STACK_MOST = 8
# Parameters that are shown in columns of their own.
_OF_THE_PROBLEM = ("Codec", "PAIR_ACTIVATION", "QUANT_GROUP", "ZEROS", "SHARED_BYTES")
_COLUMNS = ("batch", "groups", "shared", "float16", "bfloat16", "spills")
_PREFACE = """\
# Kernel resources

Reported by ptxas, NVRTC {version}.

Variants that decisions choose for one layer, K = N = {size}. Upper-case columns are members of the
configuration struct, explained in the kernel's header comment. Columns zeros, batch and groups: the problems
that a variant is chosen for. Columns float16 and bfloat16: registers of a thread. Column shared: KiB of
dynamic shared memory of a block. Column spills: bytes. Ranges cover the groups of a row. Architectures with
equal values share a row.
"""


@dataclass(frozen=True)
class Variant:
    """A variant that a decision chooses on an architecture, and the batches that it is chosen for."""

    architecture: str
    kernel: str
    problem: Problem
    config: Configuration
    batches: tuple[int, ...]

    @property
    def parameters(self) -> dict[str, str]:
        """The compile-time parameters that the problem leaves open."""
        parameters = self.config.instantiation(self.problem).parameters
        return {name: _shown(value) for name, value in parameters if name not in _OF_THE_PROBLEM}

    def compile(self) -> CompiledKernel:
        """The variant for its architecture."""
        return compile_kernel(self.config.instantiation(self.problem), self.architecture)


def variants(architecture: str) -> list[Variant]:
    """The variants chosen on a GPU of ``architecture`` for one layer, 4096 x 4096, with every feature."""
    device = DEVICES[architecture]
    groups = GROUP_SIZES if architecture in _ALL_GROUPS else (GROUP_SIZES[0], GROUP_SIZES[-1])
    found: dict[Instantiation, Variant] = {}
    for kernel in available(device):
        for m, group, zeros, bfloat16 in itertools.product(
            _BATCHES[kernel], groups, (False, True), (False, True)
        ):
            problem = Problem(m, _SIZE, _SIZE, Granularity.from_group_size(group), zeros, bfloat16, INT4)
            with forced_kernel(kernel):
                config = decide(problem, device).config
            if config is None:
                raise ValueError(f"{kernel} has no variant to compile for {problem}")
            key = config.instantiation(problem)
            earlier = found[key].batches if key in found else ()
            found[key] = Variant(architecture, kernel, problem, config, (*earlier, m))
    return list(found.values())


Measured = tuple[Variant, CompiledKernel]
"""A variant, and its compiled kernel with the assembler's report."""


def compile_all(chosen: Iterable[Variant]) -> list[Measured]:
    """Every variant compiled, by as many threads as there are cores."""
    listed = list(chosen)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(zip(listed, pool.map(Variant.compile, listed), strict=True))


def trouble(variant: Variant, compiled: CompiledKernel) -> str | None:
    """The fault of a compiled variant, or None: spilled registers, arrays in memory (a loop that was not
    unrolled, for example), or serialised wgmma instructions."""
    if compiled.spill_bytes or compiled.stack_bytes > _STACK_MOST or _SERIALISED.search(compiled.log):
        instantiation = variant.config.instantiation(variant.problem)
        return (
            f"{variant.architecture} {instantiation.function} {dict(instantiation.parameters)}: "
            f"{compiled.spill_bytes} bytes spilled, {compiled.stack_bytes} of stack; {compiled.log.strip()}"
        )
    return None


def page(measured: Iterable[Measured]) -> str:
    """The table of all kernels as a Markdown page."""
    listed = list(measured)
    parts = [_PREFACE.format(version=nvrtc_version(), size=_SIZE)]
    for kernel in KERNELS:
        table = _table([(variant, compiled) for variant, compiled in listed if variant.kernel == kernel])
        parts.append(f"## {kernel}\n\n{table}")
    return "\n".join(parts)


def _table(measured: list[Measured]) -> str:
    """A row for every set of parameters, with and without zero points; architectures that agree share it."""
    rows: dict[tuple[str, ...], list[Measured]] = defaultdict(list)
    for variant, compiled in measured:
        zeros = "yes" if variant.problem.zeros else "no"
        rows[variant.architecture, *variant.parameters.values(), zeros].append((variant, compiled))
    shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (architecture, *parameters), members in rows.items():
        shared[*parameters, *_cells(members)].append(architecture)
    head = ("architectures", *measured[0][0].parameters, "zeros", *_COLUMNS)
    lines = [head, ("---",) * len(head)]
    lines += [(" ".join(architectures), *cells) for cells, architectures in shared.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(members: list[Measured]) -> tuple[str, ...]:
    """The columns that follow the parameters."""
    batches = sorted({m for variant, _ in members for m in variant.batches})
    groups = sorted({variant.problem.granularity.group_size for variant, _ in members}, key=GROUP_SIZES.index)
    shared = [variant.config.shared_bytes(variant.problem) / 1024 for variant, _ in members]
    registers = {
        element: [c.registers for variant, c in members if variant.problem.bfloat16 == element]
        for element in (False, True)
    }
    return (
        " ".join(map(str, batches)),
        " ".join(map(str, groups)),
        _span(shared),
        _span(registers[False]),
        _span(registers[True]),
        str(max(compiled.spill_bytes for _, compiled in members)),
    )


def _shown(value: bool | int | str) -> str:
    """A parameter in the table."""
    return str(int(value)) if isinstance(value, int) else value.rpartition("::")[2]


def _span(values: list[int] | list[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def main(path: Path) -> None:
    """Write the table to PATH."""
    measured = compile_all(variant for architecture in ARCHITECTURES for variant in variants(architecture))
    wrong = [found for variant, compiled in measured if (found := trouble(variant, compiled))]
    if wrong:
        raise click.ClickException("\n".join(wrong))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
