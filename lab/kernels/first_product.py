"""Time the first product of a process, step by step; ``lab/kernels/host_cost.py`` starts it several times.

Prints a JSON object of seconds. Whether the kernel is compiled or comes from the cache is up to the folder
that MARLINQ_CACHE names.
"""

from __future__ import annotations

import itertools
import json
import time


def main() -> None:
    marks = [("start", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    import torch

    mark("import torch")
    k = n = 4096
    x = torch.randn(1, k, dtype=torch.float16, device="cuda")
    words = torch.randint(-(2**31), 2**31, (k // 16, 2 * n), dtype=torch.int32, device="cuda")
    scales = torch.rand(k // 128, n, device="cuda").half()
    torch.cuda.synchronize()
    mark("CUDA context and operands")
    import cupy  # noqa: F401

    mark("import cupy")
    from marlinq.kernels import w4a16_gemm

    mark("import marlinq.kernels")
    w4a16_gemm(x, words, scales, None, None, 128, n)
    torch.cuda.synchronize()
    mark("first product")
    w4a16_gemm(x, words, scales, None, None, 128, n)
    torch.cuda.synchronize()
    mark("second product")
    print(json.dumps({name: at - before for (_, before), (name, at) in itertools.pairwise(marks)}))


if __name__ == "__main__":
    main()
