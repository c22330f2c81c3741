"""The stages of the ring (``cuda/tma/stage_layout.cuh``), and how many of them are in flight at once."""

from __future__ import annotations

from marlinq.kernels.contract.problem import Problem

# A ring with no more weights than this, over all blocks of a multiprocessor, is asked for as it empties.
_ALL_AT_ONCE = 104 * 1024


def weight_bytes(problem: Problem, tile_n: int, rows: int) -> int:
    """Bytes of weights, scales and zero points of a chunk of ``rows`` stored rows."""
    weights = rows * tile_n * problem.format.row_bytes
    if problem.quant_group:
        kinds = 2 if problem.zeros else 1
        weights += max(1, 16 * rows // problem.quant_group) * kinds * tile_n * 2
    return weights


def stage_bytes(problem: Problem, tile_m: int, tile_n: int, rows: int) -> int:
    """Bytes of a stage: one chunk of activations, weights, scales, zero points."""
    stage = 16 * rows * tile_m * 2 + weight_bytes(problem, tile_n, rows)
    return -(-stage // 1024) * 1024


def chunks_on_their_way(chunk: int, stages: int, blocks: int, most: int) -> int:
    """Chunks that a block asks for before the first of them has arrived.

    Where the ring is large, fewer than it holds: memory that is asked for more than it needs to be busy
    gives less (docs/kernels.md, "Chunks in flight").

    Args:
        chunk: bytes of a chunk's weights.
        stages: stages of the ring.
        blocks: blocks on a multiprocessor.
        most: bytes of weights on their way to a multiprocessor, about.
    """
    if chunk * stages * blocks <= _ALL_AT_ONCE:
        return stages
    return min(stages, max(1, round(most / blocks / chunk)))
