"""The operation behind ``marlinq bench``: speed of decoding."""

from __future__ import annotations

from marlinq.benchmarks.decode import DecodeBench, bench_decode

__all__ = ["DecodeBench", "bench_decode"]
