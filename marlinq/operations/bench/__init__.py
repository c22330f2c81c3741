"""The operations behind ``marlinq bench``: speed of products, experts, decoding and serving."""

from __future__ import annotations

from marlinq.operations.bench.decode import DecodeBench, DecodeCell, bench_decode
from marlinq.operations.bench.experts import bench_experts
from marlinq.operations.bench.kernel_bench import Cell, KernelBench
from marlinq.operations.bench.kernels import bench_kernels
from marlinq.operations.bench.serve import ServeBench, Workload, bench_serve
from marlinq.operations.bench.synthetic import SYNTHETIC, Synthetic, synthetic_model

__all__ = [
    "SYNTHETIC",
    "Cell",
    "DecodeBench",
    "DecodeCell",
    "KernelBench",
    "ServeBench",
    "Synthetic",
    "Workload",
    "bench_decode",
    "bench_experts",
    "bench_kernels",
    "bench_serve",
    "synthetic_model",
]
