"""Faults to plant into the kernels' sources, and what the emulation has to say of each."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from marlinq.kernels import Problem
from marlinq.kernels.decide.bulk import BulkConfig
from marlinq.kernels.decide.stream import StreamConfig
from marlinq.kernels.decide.warpgroup import WarpgroupConfig
from tests.emulation.gemm import SOURCES, Case

WRONG = "the result is wrong"

# Three rows past a tile of eight, half a tile of columns past N, chunks enough for every ring to go round.
_PROBLEM = Problem(11, 320, 1344, 64, zeros=True, bfloat16=False)
STREAM = Case(_PROBLEM, StreamConfig(2, 2, 1, 8, True, 1, 3, 1), x_padding=8)
CLUSTERED = replace(STREAM, config=replace(STREAM.config, cluster=2))
ALONE = replace(STREAM, config=StreamConfig(1, 2, 1, 8, True, 1, 3, 1))
DIGITS = replace(
    STREAM,
    problem=replace(_PROBLEM, m=1),
    config=StreamConfig(1, 4, 1, 8, True, 1, 3, 1, digits=True),
    bias=False,
    loud=True,
)
UNBIASED = replace(STREAM, bias=False)
TWO_BLOCKS = replace(STREAM, config=replace(STREAM.config, blocks_m=2))
BULK = replace(STREAM, config=BulkConfig(2, 2, 1, 8, 1, 4, 1))
PUSHED = replace(STREAM, config=BulkConfig(1, 2, 1, 8, 2, 4, 1))
SHARED_STAGES = replace(STREAM, config=BulkConfig(1, 4, 1, 4, 1, 5, 1))
SPLIT = replace(STREAM, config=WarpgroupConfig(16, 2, 1, 2, 8, 1, 4, 1, 132))
SENT = replace(STREAM, config=WarpgroupConfig(16, 2, 1, 1, 8, 2, 4, 1, 132))
APART = replace(STREAM, config=WarpgroupConfig(16, 2, 2, 1, 8, 1, 3, 1, 1))
PERSISTENT = replace(STREAM, config=WarpgroupConfig(16, 4, 1, 1, 8, 1, 2, 1, 1))
SCALED_SUMS = replace(
    STREAM,
    problem=replace(_PROBLEM, group_size=64),
    config=WarpgroupConfig(16, 2, 1, 1, 4, 1, 2, 1, 132),
)
FUSED = replace(
    STREAM,
    problem=replace(_PROBLEM, zeros=False),
    config=WarpgroupConfig(32, 2, 1, 1, 8, 1, 2, 1, 132),
    spread="growing",
)
# Up to six blocks have chunks of a tile.
EVEN = replace(STREAM, config=WarpgroupConfig(16, 2, 1, 1, 8, 1, 2, 1, 132, even=True))


@dataclass(frozen=True)
class Fault:
    """A fault and what has to be said of it.

    Attributes:
        case: a launch that shows it; faults in the wait for the previous kernel, of a dependent launch.
        file: the source that it is planted in.
        name: what is wrong.
        old: text of the source; "..." stands for any text.
        new: what replaces its first occurrence.
        reported: a pattern of the report; :data:`WRONG` for a result that differs from float64.
    """

    case: Case
    file: str
    name: str
    old: str
    new: str
    reported: str

    def plant(self, folder: Path) -> None:
        """Copy the sources to ``folder`` and put the fault in.

        Raises:
            LookupError: the source has changed; the same fault should be planted in what it says now.
        """
        shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
        path = folder / self.file
        pattern = re.escape(self.old).replace(re.escape("..."), ".*?")
        text = path.read_text(encoding="utf-8")
        found = re.search(pattern, text, re.DOTALL)
        if not found:
            raise LookupError(f"{self.file} no longer has {self.old!r}; plant the fault in what replaced it")
        path.write_text(text[: found.start()] + self.new + text[found.end() :], encoding="utf-8")


def _in(case: Case, file: str, faults: list[tuple[str, str, str, str]]) -> list[Fault]:
    return [
        Fault(replace(case, dependent="wait_for_previous" in old), file, name, old, new, reported)
        for name, old, new, reported in faults
    ]


FAULTS = [
    *_in(
        TWO_BLOCKS,
        "element.cuh",
        [
            ("a wrong zero point", "add(first, 0x64006400u)", "add(first, 0x64016401u)", WRONG),
        ],
    ),
    *_in(
        STREAM,
        "sums.cuh",
        [
            ("another row's zero point", "widen_half<E, 0>(zeros", "widen_half<E, 1>(zeros", WRONG),
            ("kinds of codes exchanged", "x[0][kind][0], x[0][kind][1]", "x[0][0][0], x[0][0][1]", WRONG),
            ("fragments of one row", "lane / 8 % 2 * 2 + lane / 16", "lane / 8", WRONG),
            (
                "past an array's end",
                "E::codes(words[row][q],",
                "E::codes(words[row][q + 1],",
                "out of an array's bounds",
            ),
        ],
    ),
    *_in(
        STREAM,
        "reduction.cuh",
        [
            (
                "sums read too early",
                "#endif\n        meet();",
                "#endif\n        ;",
                "without waiting for it|may still be reading",
            ),
        ],
    ),
    *_in(
        STREAM,
        "w4a16_stream.cu",
        [
            (
                "columns past N",
                "min(n0 / 64 + wn, N / 64 - 1)",
                "n0 / 64 + wn",
                "out of bounds of global memory: .* (words|scales|zeros)",
            ),
            (
                "groups past K",
                "min(base_group + index / 8 / KINDS, last_group)",
                "base_group + index / 8 / KINDS",
                "out of bounds of global memory: .* (scales|zeros)",
            ),
            (
                "more shared memory than asked for",
                "PITCH = TILE_N + 4",
                "PITCH = TILE_N + 4096",
                "out of bounds of shared memory",
            ),
            ("misaligned vectors", "base + 8 * (lane / 4));", "base + 2 * (lane / 4));", "not aligned"),
            ("scales never fetched", "GROUP == 0 && step > 0) return", "true) return", WRONG),
            (
                "a group of copies too few waited for",
                "copy_async_wait<STAGES - 2>",
                "copy_async_wait<STAGES - 1>",
                "cp.async group|asynchronous copy",
            ),
            (
                "a stage read by one's neighbours",
                "else\n            barrier_sync(1 + wk, 32 * WARPS_N);",
                "",
                "overwrites what|reads what cp.async group|asynchronous copy",
            ),
            ("activations before the wait", "wait_for_previous_kernel();", "", "touches x without waiting"),
            (
                "a warp that parts",
                "load_activations(fragments, ring + activations, i, lane);",
                "if (lane == 5) __syncwarp();\n load_activations(fragments, ring + activations, i, lane);",
                "while other lanes of its warp execute",
            ),
        ],
    ),
    *_in(
        ALONE,
        "w4a16_stream.cu",
        [
            (
                "a stage overwritten by one's own neighbours",
                "if (WARPS_N == 1)\n            __syncwarp();",
                "if (WARPS_N == 1)\n            ;",
                "overwrites what|reads what cp.async group|asynchronous copy",
            ),
        ],
    ),
    *_in(
        DIGITS,
        "digits.cuh",
        [
            ("a digit that counts another power", "8 * (lane % 4)) << 23", "7 * (lane % 4)) << 23", WRONG),
            ("columns of a register exchanged", "lane / 4 % 2 ? 0x1404 : 0x4140", "0x4140", WRONG),
            ("the upper channels as large as the lower", "i < 2 ? 0 : 4", "0", WRONG),
            (
                "what rounding leaves left out",
                "while (__any_sync(0xffffffffu, lacks))",
                "while (false)",
                WRONG,
            ),
            ("another group's activations", "group * GroupRows * 4 + lane % 4", "lane % 4", WRONG),
            (
                "digits read before they are there",
                "mine[32 * d] = words[d];\n        __syncwarp();",
                "mine[32 * d] = words[d];",
                "without waiting for it",
            ),
            (
                "digits overwritten while they are read",
                "__syncwarp();  // the chunk",
                "// the chunk",
                "may still be reading",
            ),
        ],
    ),
    *_in(
        CLUSTERED,
        "reduction.cuh",
        [
            (
                "another block's sums read too early",
                "cluster_arrive();\n        cluster_wait();\n    } else",
                "} else",
                "shared::cluster reads what",
            ),
            (
                "a block that leaves too early",
                "cluster_arrive_relaxed();\n        cluster_wait();",
                "",
                "which has ended",
            ),
            (
                "sums handed over without an order",
                "cluster_arrive();",
                "cluster_arrive_relaxed();",
                "shared::cluster reads what",
            ),
        ],
    ),
    *_in(
        UNBIASED,
        "reduction.cuh",
        [
            (
                "columns of the next row",
                "if (n < columns)",
                "if (true)",
                "out of bounds of global memory: .* out|a second time",
            ),
        ],
    ),
    *_in(
        BULK,
        "hopper.cuh",
        [
            (
                "a barrier asked only once",
                'parity.shared::cta.b64 done, [%0], %1;\\n"\n        "@!done bra again;\\n"',
                'parity.shared::cta.b64 done, [%0], %1;\\n"',
                "asynchronous copy|without waiting for it|overwrites what",
            ),
        ],
    ),
    *_in(
        SPLIT,
        "reduction.cuh",
        [
            ("rows past M", "min(TileM, M - m0)", "TileM", "out of bounds of global memory: .* out"),
        ],
    ),
    *_in(
        BULK,
        "feed.cuh",
        [
            (
                "a ring that is not aligned",
                "(shared_address(memory) + 1023) / 1024 * 1024",
                "shared_address(memory) + 128",
                f"leaves its bytes|out of bounds|{WRONG}",
            ),
            (
                "an empty stage not waited for",
                "ring.wait_empty();",
                "",
                "overwrites what|asynchronous copy|all the phase's arrivals",
            ),
            (
                "more bytes expected than copied",
                "barrier_expect(barrier, bytes);",
                "barrier_expect(barrier, bytes + 16);",
                "deadlock.*mbarrier.* bytes that no copy will bring",
            ),
            (
                "fewer bytes expected than copied",
                "barrier_expect(barrier, bytes);",
                "barrier_expect(barrier, bytes - 16);",
                r"deadlock.*mbarrier.* -\d+ bytes",
            ),
            (
                "a whole copy not expected",
                "barrier_expect(barrier, bytes);",
                "barrier_expect(barrier, bytes - SLAB_BYTES);",
                "fewer bytes were expected|overwrites what|deadlock",
            ),
            (
                "a whole tile of rows copied where fewer are left",
                "m0 > 0 && M - m0 < TILE_M ? &activations.rest : &activations.tile",
                "&activations.tile",
                r"deadlock.*mbarrier.* -\d+ bytes|overwrites what",
            ),
            (
                "a whole tile of rows expected where fewer are left",
                "max(TILE_M - (M - m0), 0)",
                "0",
                "deadlock.*mbarrier.* bytes that no copy will bring",
            ),
            ("an initialisation without its fence", "barrier_init_fence();", "", "no fence has made visible"),
            ("activations before the wait", "wait_for_previous_kernel();", "", "touches x without waiting"),
            (
                "a slab in another's place",
                "at + slab * SLAB_BYTES",
                "at",
                "overwrites what|asynchronous copy",
            ),
            ("zero points instead of scales", "SCALES_AT, &maps.scales", "SCALES_AT, &maps.zeros", WRONG),
        ],
    ),
    *_in(
        BULK,
        "w4a16_bulk.cu",
        [
            (
                "a full stage not waited for",
                "ring.wait_full();",
                "",
                "asynchronous copy|without waiting for it|overwrites what",
            ),
            (
                "a lane that speaks for its warp unasked",
                "__syncwarp();\n        if (lane == 0) ring.release();",
                "if (lane == 0) ring.release();",
                "overwrites what thread",
            ),
            (
                "an initialisation not waited for",
                "    __syncthreads();\n    // Others",
                "    // Others",
                "no mbarrier was initialised|waiting for the initialisation",
            ),
        ],
    ),
    *_in(
        BULK,
        "received.cuh",
        [
            (
                "sums not waited for",
                "barrier_sync(1, WARPS * 32);",
                ";",
                "without waiting for it|still be reading",
            ),
            ("rows past M", "if (m < rows_m)", "", "out of bounds of global memory: .* out|a second time"),
            ("columns past N", " || n >= columns", "", "out of bounds of global memory|a second time"),
            (
                "sums not transposed",
                "transpose_matrix(E::narrow(...));",
                "E::narrow(sum[i][2 * h], sum[i][2 * h + 1]);",
                WRONG,
            ),
        ],
    ),
    *_in(
        PUSHED,
        "w4a16_bulk.cu",
        [
            (
                "sums sent before the owner has begun",
                "if (CLUSTER > 1) cluster_wait();",
                "",
                "without waiting for the initialisation",
            ),
        ],
    ),
    *_in(
        PUSHED,
        "received.cuh",
        [
            (
                "sums of other blocks not waited for",
                "barrier_wait_cluster(all_there, 0);",
                ";",
                "asynchronous copy|without waiting for it",
            ),
            (
                "fewer sums expected than sent",
                "PARTS * slots * SLOT_BYTES",
                "PARTS * slots * SLOT_BYTES - 16",
                "deadlock.*mbarrier.* bytes|fewer bytes were expected",
            ),
            (
                "an acquire of the block alone",
                "barrier_wait_cluster(all_there, 0);",
                "barrier_wait(all_there, 0);",
                "takes .acquire.cluster",
            ),
            (
                "sums sent to another's place",
                "column_block / CLUSTER) * SLOT_BYTES",
                "column_block) * SLOT_BYTES",
                f"overwrites|bounds|asynchronous copy|{WRONG}",
            ),
        ],
    ),
    *_in(
        SENT,
        "w4a16_wgmma.cu",
        [
            (
                "sums sent before the owner has begun",
                "cluster_wait();",
                "",
                "without waiting for the initialisation",
            ),
            (
                "another block's parts",
                "rank * PARTS_K + part",
                "part",
                f"overwrites|a second time|{WRONG}",
            ),
        ],
    ),
    *_in(
        SHARED_STAGES,
        "w4a16_bulk.cu",
        [
            (
                "stages that change their part",
                "static_assert(STAGES % WARPS_K == 0...;",
                "",
                "all the phase's arrivals|overwrites what|asynchronous copy|without waiting|deadlock",
            ),
        ],
    ),
    *_in(
        APART,
        "w4a16_wgmma.cu",
        [
            ("results that nobody announces", "barrier_arrive(staged(group));", ";", "deadlock"),
            ("results that are never out", "barrier_arrive(drained(g));", ";", "deadlock"),
            (
                "results stored before they are there",
                "barrier_wait(staged(g), parity);",
                "",
                "without waiting for it|all the phase's arrivals|deadlock",
            ),
            (
                "results over others that are still stored",
                "barrier_wait(drained(group), drained_parity ^= 1);",
                "",
                "without waiting for it|may still be reading|overwrites what|all the phase's arrivals",
            ),
            (
                "a last tile that everybody leaves to others",
                "if (!work.last()) {",
                "if (true) {",
                WRONG,
            ),
            ("another group's columns", "its.n0 + g * GROUP_COLUMNS", "its.n0", "a second time"),
        ],
    ),
    *_in(
        SPLIT,
        "element.cuh",
        [
            ("a wrong byte permutation", "mov.b32 %0, {l, l}", "mov.b32 %0, {h, l}", WRONG),
            ("halves exchanged", '"f"(high), "f"(low)', '"f"(low), "f"(high)', WRONG),
        ],
    ),
    *_in(
        SPLIT,
        "w4a16_wgmma.cu",
        [
            (
                "a stage given back too early",
                "matrix_wait<1>();\n                        if (!SCALED_GROUPS && i == 0...}",
                "if (i == 0 && chunk != entered && lane == 0) last.release();\n matrix_wait<1>();",
                "overwrites what",
            ),
            (
                "an arrival too many expected",
                "GROUPS_N * 4);",
                "GROUPS_N * 4 + 1);",
                "deadlock.*mbarrier.* 1 of 5 arrivals",
            ),
            (
                "an arrival too few expected",
                "GROUPS_N * 4);",
                "GROUPS_N * 4 - 1);",
                "all the phase's arrivals|overwrites what|asynchronous copy|deadlock",
            ),
            (
                "an operand overwritten in flight",
                "u32 (&fragment)[4] = a[i % 2][q];",
                "u32 (&fragment)[4] = a[(i + 1) % 2][q];",
                "operand A of a wgmma was overwritten",
            ),
            (
                "sums changed in flight",
                "matrix_wait<1>();",
                "sums[0][0] += 1.f;\n matrix_wait<1>();",
                "accumulator of a wgmma was written",
            ),
            ("no fence before the products", "matrix_fence();", "", "without a wgmma.fence"),
            (
                "an operand written behind the fence",
                "matrix_fence();",
                "matrix_fence();\n a[i % 2][0][0] ^= 1;",
                "written after wgmma.fence",
            ),
            (
                "a warp with fewer products",
                "matrix_multiply_half<TILE_M, ADD>(d, a, b);",
                "if (threadIdx.x / 32 != 1) matrix_multiply_half<TILE_M, ADD>(d, a, b);",
                "different products",
            ),
            (
                "more registers than the block has",
                "if constexpr (GROWN > 0) registers_grow<GROWN>();",
                "registers_grow<208>();",
                "deadlock.*registers a thread",
            ),
        ],
    ),
    *_in(
        SCALED_SUMS,
        "w4a16_wgmma.cu",
        [
            (
                "products added to the group before",
                "Matrix::multiply<false>",
                "Matrix::multiply<true>",
                WRONG,
            ),
            (
                "sums scaled in flight",
                "matrix_wait<0>();\n                        settle(target);...add_scaled(...);",
                "add_scaled(sums, group_sums, scale);\n matrix_wait<0>();\n if (lane == 0) now.release();",
                WRONG,
            ),
        ],
    ),
    *_in(
        FUSED,
        "w4a16_wgmma.cu",
        [
            ("scales that outgrow the type unseen", "fits = !__any_sync(0xffffffffu, outgrown);", "", WRONG),
            ("sums that keep their normalizers", "multiply_by(sums, ratios);", "", WRONG),
            (
                "a stage given back twice",
                "chunk != entered",
                "chunk != part",
                "overwrites what|arrivals|deadlock",
            ),
            (
                "scales of the group before",
                "SCALING == FUSED ? 2 : 1",
                "SCALING == FUSED ? 3 : 1",
                f"without waiting|asynchronous copy|overwrites what|{WRONG}",
            ),
        ],
    ),
    *_in(
        FUSED,
        "element.cuh",
        [
            (
                "a shift of other channels' scales",
                "broadcast<1>(factors.shift)",
                "broadcast<0>(factors.shift)",
                WRONG,
            ),
            ("normalizers of one column for both", "min(known >> 16, high)", "low", WRONG),
        ],
    ),
    *_in(
        EVEN,
        "w4a16_wgmma.cu",
        [
            (
                "sums of another block not waited for",
                "while (load_acquire(flag) == 0) continue;",
                "",
                "ld.global.cg reads .* sums",
            ),
            (
                "sums announced without a release",
                "store_release(flags + blockIdx.x, 1)",
                "store_relaxed(flags + blockIdx.x, 1)",
                "ld.global.cg reads .* sums, which thread .* without waiting for it",
            ),
            (
                "a lane that announces what others have not stored",
                "__syncwarp();\n                        if (lane == 0) barrier_arrive(all_left)",
                "if (lane == 0) barrier_arrive(all_left)",
                "ld.global.cg reads .* sums",
            ),
            (
                "sums announced before they are there",
                "barrier_wait(all_left, 0);",
                "",
                "ld.global.cg reads .* sums",
            ),
            (
                "a message not waited for",
                "barrier_wait(all_there, 0);",
                "",
                "ld.global.cg reads .* sums",
            ),
            ("a flag left set", "store_relaxed(flag, 0);", "", "flags are left set"),
            (
                "sums never announced",
                "store_release(flags + blockIdx.x, 1);",
                "",
                "deadlock.* wait for flag",
            ),
            (
                "a block that waits for a higher one",
                "u32* flag = flags + --block;",
                "u32* flag = flags + (2 * (int)blockIdx.x - --block);",
                "deadlock.* wait for flag|out of bounds|ld.global.cg reads .* sums",
            ),
            (
                "only the next lower block waited for",
                "for (int block = blockIdx.x; work.lacks_begin(block);)",
                "if (int block = blockIdx.x; work.lacks_begin(block))",
                "ld.global.cg reads .* sums",
            ),
        ],
    ),
    *_in(
        EVEN,
        "ptx.cuh",
        [
            (
                "a wait that acquires nothing",
                "ld.acquire.gpu",
                "ld.relaxed.gpu",
                "ld.global.cg reads .* sums, which thread .* without waiting for it",
            ),
            ("sums by the read-only path", "ld.global.cg", "ld.global.nc", "through the read-only path"),
        ],
    ),
    Fault(
        replace(EVEN, dependent=True),
        "w4a16_wgmma.cu",
        "a flag touched before the wait for the previous kernel",
        "if (dependent) wait_for_previous_kernel();\n    for (; work",
        "for (; work",
        "touches flags without waiting for the previous kernel",
    ),
    *_in(
        PERSISTENT,
        "hopper.cuh",
        [
            ("matrices not transposed", "x4.trans.shared", "x4.shared", WRONG),
        ],
    ),
    *_in(
        PERSISTENT,
        "feed.cuh",
        [
            (
                "an empty stage not waited for",
                "ring.wait_empty();",
                "",
                "overwrites what|asynchronous copy|all the phase's arrivals",
            ),
            (
                "a parity that never changes",
                "stage -= STAGES, parity ^= 1",
                "stage -= STAGES",
                "deadlock|overwrites|asynchronous copy|without waiting|all the phase's arrivals",
            ),
        ],
    ),
    *_in(
        PERSISTENT,
        "w4a16_wgmma.cu",
        [
            (
                "scratch memory reused too early",
                "scratch + turn % 2 * (NARROW_BYTES / 2)",
                "scratch",
                "overwrites what thread|without waiting for it",
            ),
        ],
    ),
]
