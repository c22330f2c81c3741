"""The cost of reading vLLM's paged cache for the attention of a decode step.

    python lab/kernels/paged_attention.py

vLLM keeps keys, and values, in pages [pages, 16 tokens, KV heads, D], and a table of each sequence's pages.
The kernel's tiles have 16 tokens too, so a tile is one page: this script changes the addresses in a copy of
``step/attend.cuh`` and times it beside the kernel on its own cache [B, KV, L, D]. Both rotate queries and
keys, append the new token and attend; results must have the same bits.

Llama-3-8B's shape, bfloat16; several layers' caches in turn, so that none is found in L2.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from marlinq.core.errors import MarlinqError
from marlinq.kernels.contract.instantiation import CUDA_SOURCES
from marlinq.kernels.driver.cuda_driver import Launch, on_device
from marlinq.kernels.launch.prepared import Prepared, bind
from marlinq.kernels.step.attend import AttentionShape, AttentionWorkspace, attend, divide
from marlinq.kernels.step.heads import HeadWork
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.timing import capture, time_in_turn

HEADS, KV_HEADS, HEAD_DIM, PAGE, LAYERS = 32, 8, 128, 16, 8
BATCHES, CONTEXTS = (1, 16, 64), (80, 128, 1024)

# Lines of step/attend.cuh and what replaces them. The table travels in the place of the sinks, which such a
# kernel does not have.
_CHANGES = {
    "const u16 *my_keys = keys + (row + u) * D + 8 * v, *my_values = values + (row + 2 * v) * D + 8 * u;": """
    const i64 pitch = (i64)given.kv_heads * D;
    const int* table = reinterpret_cast<const int*>(sinks) + sequence * (capacity / TILE);
    const auto page = [&](int tile) {
        return tile < tokens ? (i64)load_scalar(table + tile / TILE) * TILE * pitch : 0;
    };
    const u16* my_keys = keys + u * pitch + kv_head * D + 8 * v;
    const u16* my_values = values + 2 * v * pitch + kv_head * D + 8 * u;
    const i64 place_of_new = page(length / TILE * TILE) + length % TILE * pitch + kv_head * D;
""",
    "my_keys + (i64)tile * D +": "my_keys + page(tile) +",
    "my_values + (i64)tile * D +": "my_values + page(tile) +",
    "load_l2(from + 8 * h * D + 32 * c)": "load_l2(from + 8 * h * pitch + 32 * c)",
    "load_l2(from + behind * D + 64 * g)": "load_l2(from + behind * pitch + 64 * g)",
    "(is_value ? values : keys) + (row + length) * (D / 2), lane)": "(is_value ? values : keys) + "
    "place_of_new / 2, lane)",
}


def paged_header(folder: Path) -> Path:
    """A copy of ``step/attend.cuh`` that reads pages.

    Raises:
        SystemExit: the file lacks one of the lines.
    """
    text = (CUDA_SOURCES / "step/attend.cuh").read_text(encoding="utf-8")
    for line, changed in _CHANGES.items():
        if text.count(line) != 1:
            raise SystemExit(f"error: step/attend.cuh: expected one line with {line!r}")
        text = text.replace(line, changed)
    header = folder / "attend_pages.cuh"
    header.write_text(text, encoding="utf-8")
    return header


class Attention:
    """Layers of attention, each with both kinds of cache and the same content.

    Args:
        batch: sequences.
        context: tokens in the cache before the new one.
        header: copy of the kernel that reads pages.
    """

    def __init__(self, batch: int, context: int, header: Path) -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        capacity = (context // PAGE + 1) * PAGE
        pages = batch * capacity // PAGE
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.table = torch.randperm(pages, generator=draw, device="cuda").to(torch.int32)
        self.x = self._random(draw, batch, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        shape = AttentionShape(batch, HEADS, KV_HEADS, HEAD_DIM, capacity)
        division = divide(shape, torch.cuda.get_device_properties(0).multi_processor_count, clusters=True)
        self.workspace = AttentionWorkspace.of([(shape, division)], torch.device("cuda"))
        angles = torch.rand(capacity, HEAD_DIM // 2, generator=draw, device="cuda")
        work = HeadWork(table=torch.stack((angles.cos(), angles.sin()), dim=-1).contiguous())
        self.outs = [
            torch.empty(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        ]
        self.caches: list[Tensor] = []
        self.whole, self.paged = [], []
        for _ in range(LAYERS):
            cache = [self._random(draw, batch, KV_HEADS, capacity, HEAD_DIM) for _ in range(2)]
            # [B, KV, pages, 16, D] -> [B, pages, 16, KV, D], page p of the pool at place table[p].
            ordered = [each.unflatten(2, (-1, PAGE)).permute(0, 2, 3, 1, 4).flatten(0, 1) for each in cache]
            pools = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in ordered]
            for pool, each in zip(pools, ordered, strict=True):
                pool[self.table.long()] = each
            self.caches += [*cache, *pools]
            self.whole.append(
                attend(
                    self.x,
                    cache[0],
                    cache[1],
                    self.outs[0],
                    self.lengths,
                    work,
                    self.workspace,
                    scale=HEAD_DIM**-0.5,
                    division=division,
                )
            )
            self.paged.append(self._paged(self.whole[-1], pools, header))

    @staticmethod
    def _random(draw: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda").to(torch.bfloat16)

    def _paged(self, prepared: Prepared, pools: list[Tensor], header: Path) -> Prepared:
        arguments = type(prepared.arguments).from_buffer_copy(prepared.arguments)
        arguments.keys, arguments.values = (pool.data_ptr() for pool in pools)
        arguments.sinks, arguments.out = self.table.data_ptr(), self.outs[1].data_ptr()
        instantiation = replace(prepared.instantiation, header=str(header))
        return prepared._replace(instantiation=instantiation, arguments=arguments)

    def times(self) -> tuple[float, float]:
        """Seconds of a layer's launch on its own cache and on pages, launched dependently.

        Raises:
            SystemExit: results differ.
        """
        recordings = {}
        for name, prepared in (("whole", self.whole), ("paged", self.paged)):
            with on_device(0):
                launches = [bind(each, 0, dependent=True) for each in prepared]
                for launch in launches:
                    launch.start()
            recordings[name] = capture(partial(_start, launches), 10 * LAYERS)
        torch.cuda.synchronize()
        if not torch.equal(*self.outs):
            raise SystemExit("error: results on pages differ")
        found = time_in_turn(recordings, 1e-4)
        return found["whole"], found["paged"]


def _start(launches: list[Launch], number: int) -> None:
    with on_device(0):
        launches[number % len(launches)].start()


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        print("error: measured on GPUs of compute capability 9.0 and later", file=sys.stderr)
        return 1
    print(hardware_line(torch.device("cuda", 0)))
    print("batch  context   own cache   pages    ratio (us a layer)")
    with tempfile.TemporaryDirectory() as folder:
        header = paged_header(Path(folder))
        for batch in BATCHES:
            for context in CONTEXTS:
                whole, paged = Attention(batch, context, header).times()
                print(f"{batch:5d} {context:8d} {1e6 * whole:11.2f} {1e6 * paged:7.2f} {paged / whole:8.3f}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MarlinqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
