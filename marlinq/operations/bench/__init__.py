"""The operations behind ``marlinq bench``: speed of single products and of decoding."""

from __future__ import annotations

from marlinq.operations.bench.decode import DecodeBench, bench_decode
from marlinq.operations.bench.kernels import bench_kernels
from marlinq.operations.bench.report import Cell, KernelBench

__all__ = ["Cell", "DecodeBench", "KernelBench", "bench_decode", "bench_kernels"]
