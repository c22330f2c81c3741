"""Time that ordinary instructions cost the tensor cores of compute capability 9.0, and the reverse.

    python lab/kernels/tensor_overlap.py

First one warpgroup multiplies (wgmma, operand A in registers) while two others execute one kind of
instruction. Then all warpgroups run the warpgroup kernel's loop without its copies: load words, turn them
into operands in four ways, multiply; the figures are cycles for 64 columns of 16 channels.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.raw_kernel import INT32, POINTER, RawKernel
from marlinq.operations.bench.hardware import hardware_line

_HEADER = str(Path(__file__).with_suffix(".cuh").resolve())
_KINDS = ("add.f16x2", "prmt", "setp", "fma.f32")
_MIXES = ("copies", "masks and shifts (7)", "dequantise (9)", "dequantise and scale (13)")
_INSTRUCTIONS = 32  # of a turn
_PRODUCTS, _ROWS = 2, 8
_TURNS = 400


def instantiation(loop: int, warpgroups: int, tile: int, kind: int, mix: int) -> Instantiation:
    """The kernel with one configuration; see its header comment."""
    parameters = (("LOOP", loop), ("WARPGROUPS", warpgroups), ("TILE", tile), ("KIND", kind), ("MIX", mix))
    return Instantiation(_HEADER, "tensor_overlap", parameters)


class _Loop:
    """One variant of the kernel."""

    def __init__(self, device: torch.device, loop: int, groups: int, tile: int, kind: int, mix: int) -> None:
        self._kernel = RawKernel(instantiation(loop, groups, tile, kind, mix), device)
        self._groups = groups
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._cycles = torch.zeros(groups, dtype=torch.int64, device=device)
        self._sink = torch.zeros(self._blocks * 128 * groups, dtype=torch.int32, device=device)

    def cycles(self, multiplied: int, executed: int) -> list[int]:
        """Cycles of every warpgroup, for that many turns of products and of other instructions."""
        for _ in range(2):
            self._kernel.launch(
                self._blocks,
                128 * self._groups,
                (
                    (int(multiplied > 0), INT32),
                    (multiplied, INT32),
                    (executed, INT32),
                    (self._cycles.data_ptr(), POINTER),
                    (self._sink.data_ptr(), POINTER),
                    (0, ctypes.c_uint),
                ),
            )
        return [int(count) for count in self._cycles.tolist()]


def beside(device: torch.device, tile: int) -> None:
    """Products beside other instructions."""
    for kind, name in enumerate(_KINDS):
        loop = _Loop(device, 0, 3, tile, kind, 0)
        alone = loop.cycles(_TURNS, 0)[0]
        rate = max(loop.cycles(0, _TURNS)[1:]) / _TURNS
        # Long enough to outlast the products, so that what is lost is lost while they run.
        executed = int(5 * alone / rate)
        products, *rest = loop.cycles(_TURNS, executed)
        others = max(rest)
        left = 1 - (others - rate * executed) / min(products, others)
        print(
            f"{name:12} {2 * _INSTRUCTIONS / rate:5.2f} a cycle and scheduler alone; beside products of "
            f"{tile} columns: products take {products / alone:4.2f} times as long, "
            f"instructions go on at {left:4.2f} of their rate",
            flush=True,
        )


def loops(device: torch.device, tiles: tuple[int, ...], groups: int) -> None:
    """The kernel's loop with less and less to do."""
    for mix, name in enumerate(_MIXES):
        figures = []
        for tile in tiles:
            cycles = max(_Loop(device, 1, groups, tile, 0, mix).cycles(_TURNS, 0))
            figures.append(f"{cycles / _TURNS / _ROWS / (_PRODUCTS * groups):6.1f}")
        print(f"{groups} warpgroups, {name:26}", *figures, flush=True)


def main() -> None:
    """Print both tables."""
    device = torch.device("cuda", 0)
    print(hardware_line(device))
    beside(device, 64)
    tiles = (16, 32, 48, 64, 96, 128)
    print("cycles a row at", *tiles, "columns")
    loops(device, tiles, 2)


if __name__ == "__main__":
    main()
