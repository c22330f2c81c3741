"""The stages of the ring that ``cuda/feed.cuh`` lays out."""

from __future__ import annotations

from marlinq.kernels.problem import Problem


def stage_bytes(problem: Problem, tile_m: int, tile_n: int, rows: int) -> int:
    """Bytes of a stage: one chunk of ``16 * rows`` channels of activations, weights, scales, zero points."""
    chunk = 16 * rows
    stage = chunk * tile_m * 2 + rows * tile_n * 8
    if problem.group:
        kinds = 2 if problem.zeros else 1
        stage += max(1, chunk // problem.group) * kinds * tile_n * 2
    return -(-stage // 1024) * 1024
