"""Bytes of a stage of the ring buffer (``cuda/tma/stage_layout.cuh``), and chunks in flight at once."""

from __future__ import annotations

from marlinq.kernels.contract.problem import Problem

# Bytes of weights in all rings of a multiprocessor up to which every empty stage is requested at once.
_ALL_AT_ONCE = 104 * 1024


def weight_bytes(problem: Problem, tile_n: int, rows: int) -> int:
    """Bytes of weights, scales and zero points of a chunk of ``rows`` times 16
    channels."""
    weights = tile_n * problem.format.chunk_bytes(rows)
    if problem.quant_group:
        kinds = 2 if problem.zeros else 1
        weights += max(1, 16 * rows // problem.quant_group) * kinds * tile_n * 2
    return weights


def stage_bytes(problem: Problem, tile_m: int, tile_n: int, rows: int) -> int:
    """Bytes of a stage: a chunk's activations, words, scales and zero points, rounded up to 1,024."""
    stage = 16 * rows * tile_m * 2 + weight_bytes(problem, tile_n, rows)
    return -(-stage // 1024) * 1024


def chunks_on_their_way(chunk: int, stages: int, blocks: int, most: int) -> int:
    """Chunks that a block keeps in flight.

    Fewer than ``stages`` where the ring is large: too many bytes in flight lower the achieved bandwidth
    (docs/kernels.md, "Chunks in flight").

    Args:
        chunk: bytes of a chunk's weights.
        stages: stages of the ring.
        blocks: blocks on a multiprocessor.
        most: bytes of weights to keep in flight per multiprocessor, about.
    """
    if chunk * stages * blocks <= _ALL_AT_ONCE:
        return stages
    return min(stages, max(1, round(most / blocks / chunk)))
