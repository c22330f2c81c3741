"""Faults to plant into the kernels' sources, and what the emulation has to say of each."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from marlinq.kernels import Problem
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup import WarpgroupConfig
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
EVEN = replace(STREAM, config=WarpgroupConfig(16, 2, 1, 1, 8, 1, 2, 1, 132, stream_k=True))


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
        "codec/int4_differences.cuh",
        [
            ("a wrong zero point", "add(first, 0x64006400u)", "add(first, 0x64016401u)", WRONG),
        ],
    ),
    *_in(
        STREAM,
        "mma/quant_group_sums.cuh",
        [
            ("another row's zero point", "widen_half<E, 0>(zeros", "widen_half<E, 1>(zeros", WRONG),
            ("kinds of codes exchanged", "x[0][kind][0], x[0][kind][1]", "x[0][0][0], x[0][0][1]", WRONG),
            ("fragments of one row", "lane / 8 % 2 * 2 + lane / 16", "lane / 8", WRONG),
            (
                "past an array's end",
                "Codec::codes(words[row][q],",
                "Codec::codes(words[row][q + 1],",
                "out of an array's bounds",
            ),
        ],
    ),
    *_in(
        STREAM,
        "reduce/dsmem_pull.cuh",
        [
            (
                "sums read too early",
                "} else {\n        meet();",
                "} else {\n        ;",
                "without waiting for it|may still be reading",
            ),
        ],
    ),
    *_in(
        STREAM,
        "kernels/stream.cuh",
        [
            (
                "columns past N",
                "min(n0 / 64 + wn, N / 64 - 1)",
                "n0 / 64 + wn",
                "out of bounds of global memory: .* (words|scales|zeros)",
            ),
            (
                "groups past K",
                "min(first_group + index / 8 / KINDS, last_group)",
                "first_group + index / 8 / KINDS",
                "out of bounds of global memory: .* (scales|zeros)",
            ),
            (
                "more shared memory than asked for",
                "float* buffer = reinterpret_cast<float*>(shared);",
                "float* buffer = reinterpret_cast<float*>(shared) + 65536;",
                "out of bounds of shared memory",
            ),
            ("scales never fetched", "QUANT_GROUP == 0 && step > 0) return", "true) return", WRONG),
            (
                "a group of copies too few waited for",
                "copy_async_wait<STAGES - 2>",
                "copy_async_wait<STAGES - 1>",
                "cp.async group|asynchronous copy",
            ),
            (
                "a stage read by one's neighbours",
                "else\n                barrier_sync(1 + wk, 32 * WARPS_N);",
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
        "kernels/stream.cuh",
        [
            (
                "a stage overwritten by one's own neighbours",
                "if (WARPS_N == 1)\n                __syncwarp();",
                "if (WARPS_N == 1)\n                ;",
                "overwrites what|reads what cp.async group|asynchronous copy",
            ),
        ],
    ),
    *_in(
        DIGITS,
        "mma/integer_digits.cuh",
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
            ("another group's activations", "quant_group * QuantGroupRows * 4 + lane % 4", "lane % 4", WRONG),
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
        "reduce/dsmem_pull.cuh",
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
        "reduce/dsmem_pull.cuh",
        [
            (
                "columns of the next row",
                "const bool mine = n < columns && (",
                "const bool mine = (",
                "out of bounds of global memory: .* out|a second time",
            ),
        ],
    ),
    *_in(
        BULK,
        "ptx/barrier.cuh",
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
        "reduce/dsmem_pull.cuh",
        [
            ("rows past M", "min(TileM, M - m0)", "TileM", "out of bounds of global memory: .* out"),
        ],
    ),
    *_in(
        STREAM,
        "scale/stored_order.cuh",
        [
            ("misaligned vectors", "tile + 8 * (lane / 4));", "tile + 2 * (lane / 4));", "not aligned"),
        ],
    ),
    *_in(
        BULK,
        "tma/ring.cuh",
        [
            (
                "a ring that is not aligned",
                "(shared_address(memory) + 1023) / 1024 * 1024",
                "shared_address(memory) + 128",
                f"leaves its bytes|out of bounds|{WRONG}",
            ),
            ("an initialisation without its fence", "barrier_init_fence();", "", "no fence has made visible"),
        ],
    ),
    *_in(
        BULK,
        "tma/producer.cuh",
        [
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
                "barrier_expect(barrier, bytes - Layout::SLAB_BYTES);",
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
            ("activations before the wait", "wait_for_previous_kernel();", "", "touches x without waiting"),
            (
                "a slab in another's place",
                "at + slab * Layout::SLAB_BYTES",
                "at",
                "overwrites what|asynchronous copy",
            ),
            ("zero points instead of scales", "SCALES_AT, &maps.scales", "SCALES_AT, &maps.zeros", WRONG),
        ],
    ),
    *_in(
        BULK,
        "kernels/bulk.cuh",
        [
            (
                "a full stage not waited for",
                "ring.wait_full();",
                "",
                "asynchronous copy|without waiting for it|overwrites what",
            ),
            (
                "a lane that speaks for its warp unasked",
                "__syncwarp();\n            if (lane == 0) ring.release();",
                "if (lane == 0) ring.release();",
                "overwrites what thread",
            ),
            (
                "an initialisation not waited for",
                "__syncthreads();\n        // Relaxed",
                "// Relaxed",
                "no mbarrier was initialised|waiting for the initialisation",
            ),
        ],
    ),
    *_in(
        BULK,
        "reduce/dsmem_push.cuh",
        [
            (
                "sums not waited for",
                "barrier_sync(1, Warps * 32);",
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
        "kernels/bulk.cuh",
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
        "reduce/dsmem_push.cuh",
        [
            (
                "sums of other blocks not waited for",
                "barrier_wait_cluster(arrived, 0);",
                ";",
                "asynchronous copy|without waiting for it",
            ),
            (
                "fewer sums expected than sent",
                "Parts * slots * SLOT_BYTES",
                "Parts * slots * SLOT_BYTES - 16",
                "deadlock.*mbarrier.* bytes|fewer bytes were expected",
            ),
            (
                "an acquire of the block alone",
                "barrier_wait_cluster(arrived, 0);",
                "barrier_wait(arrived, 0);",
                "takes .acquire.cluster",
            ),
            (
                "sums sent to another's place",
                "column_block / Cluster) * SLOT_BYTES",
                "column_block) * SLOT_BYTES",
                f"overwrites|bounds|asynchronous copy|{WRONG}",
            ),
        ],
    ),
    *_in(
        SENT,
        "kernels/warpgroup.cuh",
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
        "kernels/bulk.cuh",
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
        "kernels/warpgroup.cuh",
        [
            ("results that nobody announces", "barrier_arrive(staged(warpgroup));", ";", "deadlock"),
            ("results that are never out", "barrier_arrive(drained(g));", ";", "deadlock"),
            (
                "results stored before they are there",
                "barrier_wait(staged(g), parity);",
                "",
                "without waiting for it|all the phase's arrivals|deadlock",
            ),
            (
                "results over others that are still stored",
                "barrier_wait(drained(warpgroup), drained_parity ^= 1);",
                "",
                "without waiting for it|may still be reading|overwrites what|all the phase's arrivals",
            ),
            (
                "a last tile that everybody leaves to others",
                "if (!work.last()) {",
                "if (true) {",
                WRONG,
            ),
            ("another warpgroup's columns", "at.n0 + g * Shape::WARPGROUP_COLUMNS", "at.n0", "a second time"),
        ],
    ),
    *_in(
        SPLIT,
        "element/pair.cuh",
        [
            ("a wrong byte permutation", "mov.b32 %0, {l, l}", "mov.b32 %0, {h, l}", WRONG),
        ],
    ),
    *_in(
        SPLIT,
        "element/half.cuh",
        [
            ("halves exchanged", '"f"(high), "f"(low)', '"f"(low), "f"(high)', WRONG),
        ],
    ),
    *_in(
        SPLIT,
        "kernels/warpgroup.cuh",
        [
            (
                "an arrival too many expected",
                "WARPGROUPS_N * 4);",
                "WARPGROUPS_N * 4 + 1);",
                "deadlock.*mbarrier.* 1 of 5 arrivals",
            ),
            (
                "an arrival too few expected",
                "WARPGROUPS_N * 4);",
                "WARPGROUPS_N * 4 - 1);",
                "all the phase's arrivals|overwrites what|asynchronous copy|deadlock",
            ),
            (
                "more registers than the block has",
                "if constexpr (Shape::CONSUMER_REGISTERS > 0) registers_grow<Shape::CONSUMER_REGISTERS>();",
                "registers_grow<208>();",
                "deadlock.*registers a thread",
            ),
        ],
    ),
    *_in(
        SPLIT,
        "mma/warpgroup_loop.cuh",
        [
            (
                "a stage given back too early",
                "matrix_wait<1>();\n                    if (!SCALED_GROUPS && i == 0...;",
                "if (i == 0 && chunk != entered) release(last);\n matrix_wait<1>();",
                "overwrites what",
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
                "matrix_multiply_half<COLUMNS, ADD>(d, a, b);",
                "if (threadIdx.x / 32 != 1) matrix_multiply_half<COLUMNS, ADD>(d, a, b);",
                "different products",
            ),
        ],
    ),
    *_in(
        SCALED_SUMS,
        "mma/warpgroup_loop.cuh",
        [
            (
                "products added to the group before",
                "multiply_warpgroup<TILE_M, false>",
                "multiply_warpgroup<TILE_M, true>",
                WRONG,
            ),
            (
                "sums scaled in flight",
                "matrix_wait<0>();\n                    settle(target);...add_scaled<E>(...);",
                "add_scaled<E>(sums, group_sums, scale);\n matrix_wait<0>();\n release(now);",
                WRONG,
            ),
            (
                "a lane that gives a chunk back unasked",
                "release(now);",
                "if (lane == 0) now.release();",
                "overwrites what thread",
            ),
        ],
    ),
    *_in(
        FUSED,
        "mma/warpgroup_loop.cuh",
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
                "SCALING == Scaling::FUSED ? 2 : 1",
                "SCALING == Scaling::FUSED ? 3 : 1",
                f"without waiting|asynchronous copy|overwrites what|{WRONG}",
            ),
        ],
    ),
    *_in(
        FUSED,
        "codec/int4_scaled.cuh",
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
        "reduce/stream_k_fixup.cuh",
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
                "sums announced before they are there",
                "barrier_wait(all_left, 0);",
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
        "kernels/warpgroup.cuh",
        [
            (
                "a lane that announces what others have not stored",
                "__syncwarp();\n                            if (lane == 0) barrier_arrive(all_left)",
                "if (lane == 0) barrier_arrive(all_left)",
                "ld.global.cg reads .* sums",
            ),
            (
                "a message not waited for",
                "barrier_wait(all_there, 0);",
                "",
                "ld.global.cg reads .* sums",
            ),
        ],
    ),
    *_in(
        EVEN,
        "ptx/flags.cuh",
        [
            (
                "a wait that acquires nothing",
                "ld.acquire.gpu",
                "ld.relaxed.gpu",
                "ld.global.cg reads .* sums, which thread .* without waiting for it",
            ),
        ],
    ),
    *_in(
        EVEN,
        "ptx/memory.cuh",
        [
            ("sums by the read-only path", "ld.global.cg", "ld.global.nc", "through the read-only path"),
        ],
    ),
    Fault(
        replace(EVEN, dependent=True),
        "reduce/stream_k_fixup.cuh",
        "a flag touched before the wait for the previous kernel",
        "if (dependent) wait_for_previous_kernel();\n    for (; work",
        "for (; work",
        "touches flags without waiting for the previous kernel",
    ),
    *_in(
        PERSISTENT,
        "mma/warpgroup_loop.cuh",
        [
            (
                "a lane that gives a stage back unasked",
                "chunk != entered) release(last);",
                "chunk != entered && lane == 0) last.release();",
                "overwrites what thread",
            ),
            (
                "a lane that gives a tile's last stage back unasked",
                "settle(sums);\n                release(last);",
                "settle(sums);\n                if (lane == 0) last.release();",
                "overwrites what thread",
            ),
        ],
    ),
    *_in(
        PERSISTENT,
        "ptx/matrix.cuh",
        [
            (
                "matrices not transposed",
                "stmatrix.sync.aligned.m8n8.x4.trans",
                "stmatrix.sync.aligned.m8n8.x4",
                WRONG,
            ),
        ],
    ),
    *_in(
        PERSISTENT,
        "tma/producer.cuh",
        [
            (
                "an empty stage not waited for",
                "ring.wait_empty();",
                "",
                "overwrites what|asynchronous copy|all the phase's arrivals",
            ),
        ],
    ),
    *_in(
        PERSISTENT,
        "tma/ring.cuh",
        [
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
        "epilogue/transposed_store.cuh",
        [
            (
                "scratch memory reused too early",
                "scratch + turn % 2 * HALF_BYTES",
                "scratch",
                "overwrites what thread|without waiting for it",
            ),
        ],
    ),
]
