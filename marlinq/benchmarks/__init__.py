"""The operations behind ``marlinq bench``: speed of single products and of decoding."""

from __future__ import annotations

from marlinq.benchmarks.decode import DecodeBench, bench_decode
from marlinq.benchmarks.kernels import bench_kernels
from marlinq.benchmarks.report import Cell, KernelBench

__all__ = ["Cell", "DecodeBench", "KernelBench", "bench_decode", "bench_kernels"]
