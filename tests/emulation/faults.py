"""Faults to plant into the kernels of products, and the report that the emulation has to make of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from emulation.faults import Planted
from marlinq.core.granularity import Granularity
from marlinq.kernels.variants.bulk import BulkConfig
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.emulation.gemm import Case
from tests.kernels.problems import int4_problem

WRONG = "the result is wrong"

# M: three rows past a tile of eight. N: half a tile past whole tiles. K: enough that every ring goes round.
_PROBLEM = int4_problem(11, 320, 1344, 64, zeros=True, bfloat16=False)
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
    problem=replace(_PROBLEM, granularity=Granularity.group(64)),
    config=WarpgroupConfig(16, 2, 1, 1, 4, 1, 2, 1, 132),
)
FUSED = replace(
    STREAM,
    problem=replace(_PROBLEM, zeros=False),
    config=WarpgroupConfig(32, 2, 1, 1, 8, 1, 2, 1, 132),
    spread="growing",
)
# Stream-K: up to six blocks share a tile.
EVEN = replace(STREAM, config=WarpgroupConfig(16, 2, 1, 1, 8, 1, 2, 1, 132, stream_k=True))


@dataclass(frozen=True)
class Fault:
    """A fault and the report that it has to cause.

    Attributes:
        case: a launch that shows the fault.
        name: the fault in words.
        planted: the fault site and its wrong text.
        reported: a regular expression of the report; :data:`WRONG` for a result that differs from float64.
    """

    case: Case
    name: str
    planted: Planted
    reported: str


def _shown_by(case: Case, *faults: tuple[str, str, str, str]) -> list[Fault]:
    """Faults that ``case`` shows; each is (name, site, wrong text, report)."""
    return [Fault(case, name, Planted(site, wrong), reported) for name, site, wrong, reported in faults]


def _dependent(case: Case) -> Case:
    """The launch of ``case`` while the stream's previous kernel still runs."""
    return replace(case, dependent=True)


_OVERWRITTEN = "overwrites what|asynchronous copy|all the phase's arrivals"
_NOT_WAITED = "asynchronous copy|without waiting for it|overwrites what"
_GROUPS = "cp.async group|asynchronous copy"
_SUMS = "ld.global.cg reads .* sums"

FAULTS = [
    *_shown_by(
        TWO_BLOCKS,
        ("a wrong zero point", "difference_base", "0x64016401u", WRONG),
    ),
    *_shown_by(
        STREAM,
        ("another row's zero point", "zero_of_row", "widen_half<E, 1>(zeros.pair[q])", WRONG),
        ("kinds of codes exchanged", "fragments_by_kind", "x[0][0][0], x[0][0][1]", WRONG),
        ("fragments of one row", "piece_of_codes", "lane / 8", WRONG),
        ("past an array's end", "words_of_pair", "words[row + 2].of[q]", "out of an array's bounds"),
        ("sums read too early", "block_sums_met", ";", "without waiting for it|may still be reading"),
        (
            "columns past N",
            "stream_columns",
            "n0 / 64 + wn",
            "out of bounds of global memory: .* (words|scales|zeros)",
        ),
        (
            "groups past K",
            "stream_groups",
            "first_group + index / 8 / KINDS",
            "out of bounds of global memory: .* (scales|zeros)",
        ),
        (
            "more shared memory than asked for",
            "stream_sums",
            "reinterpret_cast<float*>(shared) + 65536",
            "out of bounds of shared memory",
        ),
        ("scales never fetched", "stream_scales_once", "true", WRONG),
        ("a group of copies too few waited for", "stream_copies_waited", "STAGES - 1", _GROUPS),
        ("a stage read by one's neighbours", "stream_neighbours_met", ";", f"overwrites what|{_GROUPS}"),
        (
            "a warp that parts",
            "stream_activations",
            "if (lane == 5) __syncwarp(); load_activations(fragments, ring + activations, i, lane);",
            "while other lanes of its warp execute",
        ),
        ("misaligned vectors", "scales_of_lane", "2 * (lane / 4)", "not aligned"),
    ),
    *_shown_by(
        _dependent(STREAM),
        ("activations before the wait", "stream_waits", "", "touches x without waiting"),
    ),
    *_shown_by(
        ALONE,
        ("a stage overwritten by one's own neighbours", "stream_warp_met", ";", f"overwrites what|{_GROUPS}"),
    ),
    *_shown_by(
        DIGITS,
        ("a digit that counts another power", "digit_power", "7 * (lane % 4)", WRONG),
        ("columns of a register exchanged", "digit_columns", "0x4140", WRONG),
        ("the upper channels as large as the lower", "upper_channels", "0", WRONG),
        ("the remainder of rounding left out", "digits_lacking", "false", WRONG),
        ("another group's activations", "digits_of_group", "lane % 4", WRONG),
        ("digits read before they are there", "digits_stored", "", "without waiting for it"),
        ("digits overwritten while they are read", "digits_free", "", "may still be reading"),
    ),
    *_shown_by(
        CLUSTERED,
        ("another block's sums read too early", "pulled_sums_met", "", "shared::cluster reads what"),
        ("a block that leaves too early", "pulled_sums_read", "", "which has ended"),
        (
            "sums handed over without an order",
            "pulled_sums_met",
            "cluster_arrive_relaxed(); cluster_wait();",
            "shared::cluster reads what",
        ),
    ),
    *_shown_by(
        UNBIASED,
        (
            "columns of the next row",
            "columns_of_result",
            "!WHOLE_WARPS || four < fours",
            "out of bounds of global memory: .* out|a second time",
        ),
    ),
    *_shown_by(
        BULK,
        ("a barrier asked only once", "barrier_asked_again", '""', _NOT_WAITED),
        (
            "a ring that is not aligned",
            "ring_alignment",
            "shared_address(memory) + 128",
            f"leaves its bytes|out of bounds|{WRONG}",
        ),
        ("an initialisation without its fence", "ring_fence", "", "no fence has made visible"),
        ("an empty stage not waited for", "producer_waits_for_stage", "", _OVERWRITTEN),
        (
            "more bytes expected than copied",
            "expected_bytes",
            "bytes + 16",
            "deadlock.*mbarrier.* bytes that no copy will bring",
        ),
        (
            "fewer bytes expected than copied",
            "expected_bytes",
            "bytes - 16",
            r"deadlock.*mbarrier.* -\d+ bytes",
        ),
        (
            "a whole copy not expected",
            "expected_bytes",
            "bytes - Layout::SLAB_BYTES",
            "fewer bytes were expected|overwrites what|deadlock",
        ),
        (
            "a whole tile of rows copied where fewer are left",
            "activation_map",
            "&activations.tile",
            r"deadlock.*mbarrier.* -\d+ bytes|overwrites what",
        ),
        (
            "a whole tile of rows expected where fewer are left",
            "rows_not_copied",
            "0",
            "deadlock.*mbarrier.* bytes that no copy will bring",
        ),
        ("a slab in another's place", "activation_slab", "at", "overwrites what|asynchronous copy"),
        ("zero points instead of scales", "scale_map", "&maps.zeros", WRONG),
        ("a full stage not waited for", "bulk_waits_for_stage", "", _NOT_WAITED),
        ("a lane that speaks for its warp unasked", "bulk_stage_read", "", "overwrites what thread"),
        (
            "an initialisation not waited for",
            "bulk_barriers_made",
            "",
            "no mbarrier was initialised|waiting for the initialisation",
        ),
        ("sums not waited for", "pushed_sums_met", ";", "without waiting for it|still be reading"),
        ("rows past M", "pushed_rows", "", "out of bounds of global memory: .* out|a second time"),
        (
            "columns past N",
            "pushed_columns",
            "slot >= slots || 8 * c >= rows_m",
            "out of bounds of global memory|a second time",
        ),
        ("sums not transposed", "pushed_transposed", "E::narrow(sum[i][2 * h], sum[i][2 * h + 1])", WRONG),
    ),
    *_shown_by(
        _dependent(BULK),
        ("activations before the wait", "producer_waits", "", "touches x without waiting"),
    ),
    *_shown_by(
        SPLIT,
        ("rows past M", "rows_of_result", "TileM", "out of bounds of global memory: .* out"),
        ("a wrong byte permutation", "low_pair", '"mov.b32 %0, {h, l};"', WRONG),
        ("halves exchanged", "half_order", '"f"(low), "f"(high)', WRONG),
        (
            "an arrival too many expected",
            "stage_arrivals",
            "WARPGROUPS_N * 4 + 1",
            "deadlock.*mbarrier.* 1 of 5 arrivals",
        ),
        (
            "an arrival too few expected",
            "stage_arrivals",
            "WARPGROUPS_N * 4 - 1",
            f"{_OVERWRITTEN}|deadlock",
        ),
        (
            "more registers than the block has",
            "consumer_registers",
            "registers_grow<208>();",
            "deadlock.*registers a thread",
        ),
        (
            "a stage given back too early",
            "row_done",
            "if (i == 0 && chunk != entered) release(last); matrix_wait<1>();",
            "overwrites what",
        ),
        (
            "an operand overwritten in flight",
            "operand_registers",
            "a[(i + 1) % 2][q]",
            "operand A of a wgmma was overwritten",
        ),
        (
            "sums changed in flight",
            "row_done",
            "sums[0][0] += 1.f; matrix_wait<1>(); if (i == 0 && chunk != entered) release(last);",
            "accumulator of a wgmma was written",
        ),
        ("no fence before the products", "product_fence", "", "without a wgmma.fence"),
        (
            "an operand written behind the fence",
            "product_fence",
            "matrix_fence(); a[i % 2][0][0] ^= 1;",
            "written after wgmma.fence",
        ),
        (
            "a warp with fewer products",
            "warps_multiply",
            "if (threadIdx.x / 32 != 1) matrix_multiply_half<COLUMNS, ADD>(d, a, b);",
            "different products",
        ),
    ),
    *_shown_by(
        PUSHED,
        (
            "sums sent before the owner has begun",
            "bulk_owner_begun",
            "",
            "without waiting for the initialisation",
        ),
        (
            "sums of other blocks not waited for",
            "pushed_sums_arrived",
            ";",
            "asynchronous copy|without waiting for it",
        ),
        (
            "fewer sums expected than sent",
            "pushed_bytes",
            "Parts * slots * SLOT_BYTES - 16",
            "deadlock.*mbarrier.* bytes|fewer bytes were expected",
        ),
        (
            "an acquire of the block alone",
            "pushed_sums_arrived",
            "barrier_wait(arrived, 0);",
            "takes .acquire.cluster",
        ),
        (
            "sums sent to another's place",
            "pushed_slot",
            "column_block",
            f"overwrites|bounds|asynchronous copy|{WRONG}",
        ),
    ),
    *_shown_by(
        SENT,
        (
            "sums sent before the owner has begun",
            "warpgroup_owner_begun",
            "",
            "without waiting for the initialisation",
        ),
        ("another block's parts", "warpgroup_part", "part", f"overwrites|a second time|{WRONG}"),
    ),
    *_shown_by(
        SHARED_STAGES,
        (
            "stages that change their part",
            "bulk_stages",
            "",
            f"{_OVERWRITTEN}|without waiting|deadlock",
        ),
    ),
    *_shown_by(
        APART,
        ("results that nobody announces", "warpgroup_staged", ";", "deadlock"),
        ("results that are never out", "warpgroup_drained", ";", "deadlock"),
        (
            "results stored before they are there",
            "warpgroup_waits_for_staged",
            "",
            "without waiting for it|all the phase's arrivals|deadlock",
        ),
        (
            "results over others that are still stored",
            "warpgroup_waits_for_drained",
            "",
            "without waiting for it|may still be reading|overwrites what|all the phase's arrivals",
        ),
        ("a last tile that everybody leaves to others", "warpgroup_last_tile", "true", WRONG),
        ("another warpgroup's columns", "warpgroup_columns", "at.n0", "a second time"),
    ),
    *_shown_by(
        SCALED_SUMS,
        ("products added to the group before", "group_begins", "multiply_warpgroup<TILE_M, true>", WRONG),
        (
            "sums scaled in flight",
            "group_done",
            "add_scaled<E>(sums, group_sums, scale); matrix_wait<0>(); release(now);",
            WRONG,
        ),
        (
            "a lane that gives a chunk back unasked",
            "group_done",
            "matrix_wait<0>(); if (lane == 0) now.release(); add_scaled<E>(sums, group_sums, scale);",
            "overwrites what thread",
        ),
    ),
    *_shown_by(
        FUSED,
        ("scales that outgrow the type unseen", "scales_fit", "", WRONG),
        ("sums that keep their normalizers", "sums_rescaled", "", WRONG),
        (
            "a stage given back twice",
            "row_done",
            "matrix_wait<1>(); if (i == 0 && chunk != part) release(last);",
            "overwrites what|arrivals|deadlock",
        ),
        (
            "scales of the group before",
            "scales_ahead",
            "SCALING == Scaling::FUSED ? 3 : 1",
            f"without waiting|asynchronous copy|overwrites what|{WRONG}",
        ),
        ("a shift of other channels' scales", "shift_of_channels", "broadcast<0>(factors.shift)", WRONG),
        ("normalizers of one column for both", "upper_normalizer", "low", WRONG),
    ),
    *_shown_by(
        EVEN,
        ("sums of another block not waited for", "fixup_waits_for_flag", "", _SUMS),
        (
            "sums announced without a release",
            "fixup_announces",
            "store_relaxed(flags + blockIdx.x, 1);",
            f"{_SUMS}, which thread .* without waiting for it",
        ),
        ("sums announced before they are there", "fixup_sums_left", "", _SUMS),
        ("a flag left set", "fixup_clears_flag", "", "flags are left set"),
        ("sums never announced", "fixup_announces", "", "deadlock.* wait for flag"),
        (
            "a block that waits for a higher one",
            "fixup_block",
            "flags + (2 * (int)blockIdx.x - --block)",
            f"deadlock.* wait for flag|out of bounds|{_SUMS}",
        ),
        (
            "only the next lower block waited for",
            "fixup_blocks",
            "if (int block = blockIdx.x; work.lacks_begin(block))",
            _SUMS,
        ),
        ("a lane that announces what others have not stored", "sums_left", "", _SUMS),
        ("a message not waited for", "sums_there", "", _SUMS),
        (
            "a wait that acquires nothing",
            "flag_acquired",
            '"ld.relaxed.gpu.global.u32 %0, [%1];"',
            f"{_SUMS}, which thread .* without waiting for it",
        ),
        (
            "sums by the read-only path",
            "sums_through_l2",
            '"ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"',
            "through the read-only path",
        ),
    ),
    *_shown_by(
        _dependent(EVEN),
        (
            "a flag touched before the wait for the previous kernel",
            "fixup_waits",
            "",
            "touches flags without waiting for the previous kernel",
        ),
    ),
    *_shown_by(
        PERSISTENT,
        (
            "a lane that gives a stage back unasked",
            "row_done",
            "matrix_wait<1>(); if (i == 0 && chunk != entered && lane == 0) last.release();",
            "overwrites what thread",
        ),
        (
            "a lane that gives a tile's last stage back unasked",
            "last_stage_released",
            "if (lane == 0) last.release();",
            "overwrites what thread",
        ),
        (
            "matrices not transposed",
            "matrices_transposed",
            '"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"',
            WRONG,
        ),
        ("an empty stage not waited for", "producer_waits_for_stage", "", _OVERWRITTEN),
        (
            "a parity that never changes",
            "ring_parity",
            "stage -= STAGES",
            f"deadlock|without waiting|{_OVERWRITTEN}",
        ),
        (
            "scratch memory reused too early",
            "scratch_halves",
            "scratch",
            "overwrites what thread|without waiting for it",
        ),
    ),
]
