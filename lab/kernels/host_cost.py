"""Host time of the W4A16 product and of routed experts: calls, the first call of a process, and compiling.

    python lab/kernels/host_cost.py

* Calls: microseconds from one call to the next without waiting for the GPU, which is faster on the small
  product that is used; medians over batches of calls. The indented rows are parts of the one above them:
  an operator with the same signature that does nothing, our code without torch's dispatcher around it, and
  of that the memory of the result, a prepared call with the addresses given, and of this the driver's part
  with the stream.
* Starts: fresh processes, first with an empty cache of compiled kernels, then with the kernel in it.
* Compiling: one variant of every kernel, and all that a Llama-3-8B needs for 1 to 64 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from marlinq.core.errors import MarlinqError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4 as INT4_CODES
from marlinq.core.scheme import Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.kernels import (
    Device,
    Problem,
    compile_kernel,
    decide,
    dependent_launches,
    forced_kernel,
    precompile,
)
from marlinq.kernels.choose.decision import available
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.driver.compiler import nvrtc_version
from marlinq.kernels.driver.cuda_driver import empty_strided
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.experts import ExpertWeights, StoredExperts, routed_experts
from marlinq.kernels.launch.call import prepare
from marlinq.kernels.ops.operators import OPERATORS, w4a16_gemm
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.shapes import MODELS
from marlinq.runtime import QuantLinear, marlin_operand

_FIRST_PRODUCT = Path(__file__).with_name("first_product.py")
_CALLS, _BATCHES = 200, 41
_STARTS = 5
_ROWS = range(1, 65)


def microseconds(call: Callable[[], object]) -> dict[str, float]:
    """Median and least time of a call over batches, each short enough for the GPU's queue."""
    for _ in range(_CALLS):
        call()
    torch.cuda.synchronize()
    batches = []
    for _ in range(_BATCHES):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        batches.append(1e6 * (time.perf_counter() - start) / _CALLS)
        torch.cuda.synchronize()
    return {"median_us": statistics.median(batches), "least_us": min(batches)}


def quant_linear(k: int, n: int, device: torch.device) -> QuantLinear:
    """A layer in groups of 32 with every weight 0."""
    scheme = Scheme(INT4_CODES, Granularity.group(32), "midpoint")
    codes = torch.full((k, n), 8, dtype=torch.uint8)
    weight = QuantizedWeight.from_codes(scheme, codes, scales=torch.ones(k // 32, n))
    return QuantLinear(marlin_operand(weight.to(device), torch.float16))


def calls(device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds a call, by form."""
    k = n = 64
    x = torch.randn(1, k, dtype=torch.float16, device=device)
    batched = x.view(1, 1, k)
    words = torch.zeros(k // 16, 2 * n, dtype=torch.int32, device=device)
    scales = torch.ones(k // 32, n, dtype=torch.float16, device=device)
    bias = torch.zeros(n, dtype=torch.float16, device=device)
    dense = torch.zeros(k, n, dtype=torch.float16, device=device)
    out = torch.empty(1, n, dtype=torch.float16, device=device)
    order = torch.arange(k, dtype=torch.int32, device=device)
    gemm = torch.ops.marlinq.w4a16_gemm
    schema = str(gemm.default._schema).partition("w4a16_gemm")[2]
    library = torch.library.Library("marlinq_host_cost", "DEF")
    library.define(f"nothing{schema}")
    library.impl("nothing", lambda *operands: out, x.device.type.upper())
    nothing, below = torch.ops.marlinq_host_cost.nothing, OPERATORS[INT4.name].cuda
    linear = quant_linear(k, n, device)
    prepared = prepare(ProductTensors(x, linear.operand, None, out))
    launch = prepared.launches.take()
    addresses = x.data_ptr(), out.data_ptr()

    def operator() -> object:
        return gemm(x, words, scales, None, None, 32, n)

    found = {
        "operator": microseconds(operator),
        "  the dispatcher": microseconds(lambda: nothing(x, words, scales, None, None, 32, n)),
        "  below the dispatcher": microseconds(lambda: below(x, words, scales, None, None, 32, n)),
        "    the result's memory": microseconds(lambda: empty_strided((1, n), (n, 1), torch.float16)),
        "    a prepared call": microseconds(lambda: prepared.start(*addresses)),
        "      the driver": microseconds(launch.start),
        "operator, its overload named": microseconds(
            lambda: gemm.default(x, words, scales, None, None, 32, n)
        ),
        "operator, bias": microseconds(lambda: gemm(x, words, scales, None, bias, 32, n)),
        "operator, 3-D x": microseconds(lambda: gemm(batched, words, scales, None, None, 32, n)),
        "operator, 60 of 64 columns": microseconds(lambda: gemm(x, words, scales, None, None, 32, 60)),
        "operator, activation order": microseconds(lambda: gemm(x, words, scales, None, None, 32, n, order)),
    }
    with torch.no_grad():
        found["w4a16_gemm, no gradients"] = microseconds(
            lambda: w4a16_gemm(x, words, scales, None, None, 32, n)
        )
    with dependent_launches():
        found["operator, dependent launch"] = microseconds(operator)
    with torch.no_grad():
        found["QuantLinear"] = microseconds(lambda: linear(x))
    with torch.no_grad():
        found |= experts_calls(device)
    found["torch.empty"] = microseconds(lambda: torch.empty((1, n), dtype=torch.float16, device=device))
    found["torch.mm, output given"] = microseconds(lambda: torch.mm(x, dense, out=out))
    return found


def experts_calls(device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds a call of a layer of eight small experts, for numbers of rows that take two to five
    launches."""
    experts, size, top = 8, 64, 2
    products = [
        StoredExperts(
            INT4,
            Granularity.group(32),
            torch.zeros(experts, size // 16, 2 * n, dtype=torch.int32, device=device),
            torch.ones(experts, size // 32, n, dtype=torch.float16, device=device),
        )
        for n in (2 * size, size)
    ]
    weights, found = ExpertWeights(*products), {}
    for rows in (1, 16, 256, 2048):
        x = torch.zeros(rows, size, dtype=torch.float16, device=device)
        ids = torch.arange(rows * top, dtype=torch.int32, device=device).remainder(experts).view(rows, top)
        factors = torch.ones(rows, top, device=device)
        found[f"routed_experts, {rows} rows"] = microseconds(
            partial(routed_experts, x, ids, factors, weights)
        )
    return found


def starts(folder: str) -> dict[str, dict[str, float]]:
    """Seconds of the steps to a process's first product, without and with its kernel in the cache."""
    environment = {**os.environ, "MARLINQ_CACHE": folder}
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, str(_FIRST_PRODUCT)],
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
        )
        for _ in range(1 + _STARTS)
    ]
    cold, *warm = runs
    return {
        "empty cache": cold,
        "kernel in the cache": {name: statistics.median(run[name] for run in warm) for name in cold},
    }


def compiling(index: int) -> dict[str, dict[str, float]]:
    """Seconds to compile one variant of every kernel, and everything that a model needs."""
    numbers: Device = device_numbers(index)
    nvrtc_version()  # loads NVRTC
    found = {}
    for kernel in available(numbers):
        problem = Problem(16, 4096, 4096, Granularity.group(128), zeros=False, bfloat16=False, format=INT4)
        with forced_kernel(kernel):
            config = decide(problem, numbers).config
        if config is not None:
            start = time.perf_counter()
            compile_kernel(config.instantiation(problem), numbers.architecture)
            found[f"one variant of {kernel}"] = {"variants": 1, "seconds": time.perf_counter() - start}
    problems = [
        Problem(m, layer.n, layer.k, Granularity.group(128), zeros=False, bfloat16=False, format=INT4)
        for layer in MODELS["llama-3-8b"].layers("llama-3-8b")
        for m in _ROWS
    ]
    start = time.perf_counter()
    compiled = precompile(problems, index)
    name = f"llama-3-8b, M in {_ROWS.start}..{_ROWS[-1]}, {os.cpu_count()} cores"
    found[name] = {"variants": compiled, "seconds": time.perf_counter() - start}
    return found


def measure(device: torch.device) -> dict[str, Any]:
    """All of it; the cache of compiled kernels is a new folder meanwhile."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as another:
        os.environ["MARLINQ_CACHE"] = folder
        found: dict[str, Any] = {"hardware": hardware_line(device), "nvrtc": nvrtc_version()}
        found["compiling"] = compiling(device.index)
        found["calls"] = calls(device)
        found["starts"] = starts(another)
    return found


def show(found: dict[str, Any]) -> None:
    """The tables."""
    print(f"{found['hardware']}, NVRTC {found['nvrtc']}")
    print("\na call                              median us   least us")
    for name, row in found["calls"].items():
        print(f"{name:34s} {row['median_us']:10.2f} {row['least_us']:10.2f}")
    print("\nto the first product, ms            empty cache  kernel in the cache")
    cold, warm = found["starts"].values()
    for name in cold:
        print(f"{name:34s} {1e3 * cold[name]:12.1f} {1e3 * warm[name]:20.1f}")
    print("\ncompiling                                 variants    seconds")
    for name, row in found["compiling"].items():
        print(f"{name:40s} {row['variants']:9d} {row['seconds']:10.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the host's cost is measured with a GPU", file=sys.stderr)
        return 1
    found = measure(torch.device("cuda", torch.cuda.current_device()))
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MarlinqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
