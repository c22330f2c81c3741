"""Where the time of GPTQ's solves goes, in Llama-3-8B's shapes, and of the Hessians before them.

    python lab/quality/solve_time.py [--device cuda] [--shrink 1] [--strip 512 --strip 1024 ...] [--profile]

Random weights; inputs whose channels go together and are of different sizes; a drift as the default corrects
it. Every part is timed alone, the device waited for: the least of several runs. ``--shrink``, up to 16,
divides all shapes, to try this script on a CPU. ``--strip`` divides the drift with strips of other widths as
well, ``--profile`` lists the kernels of the widest solve.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from marlinq.core.scheme import Scheme
from marlinq.methods import factor as factors
from marlinq.methods import gptq
from marlinq.methods import hessian as hessians
from marlinq.methods.drift import PairedHessian, make_up_for_drift
from marlinq.methods.rtn import round_to_nearest

T = TypeVar("T")

LAYERS = (
    ("q, k, v", 4096, (4096, 1024, 1024), False),
    ("o", 4096, (4096,), True),
    ("gate, up", 4096, (14336, 14336), False),
    ("down", 14336, (4096,), True),
)
"""Name, K, N of each weight, and whether it writes to the residual stream."""
ROWS, CALLS = 8192, 6


class Clock:
    """Times calls on a device.

    Args:
        device: waited for before and after each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], T], times: int = 3) -> tuple[float, T]:
        """Milliseconds of the fastest of some calls, and what the last returned."""
        found = []
        for _ in range(times):
            self._wait()
            start = time.perf_counter()
            result = work()
            self._wait()
            found.append(1e3 * (time.perf_counter() - start))
        return min(found), result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def statistics(k: int, n: int, rows: int, device: torch.device, *, to_stream: bool) -> PairedHessian:
    """A Hessian of full rank, and a drift."""
    found = PairedHessian(k, device=device, name="layer")
    if to_stream:
        found.write_to_stream(n)
    mixing = torch.randn(k, k // 4, device=device, dtype=torch.bfloat16) / (k // 4) ** 0.5
    sizes = torch.rand(k, device=device, dtype=torch.bfloat16).exp()
    for _ in range(CALLS):
        inner = torch.randn(rows, k // 4, device=device, dtype=torch.bfloat16)
        x = inner @ mixing.t() * sizes
        x += 0.1 * torch.randn_like(x)
        if to_stream:
            stream = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
            found.add_stream(x, stream, stream + 0.05 * torch.randn_like(stream))
        else:
            found.add_pair(x, x + 0.05 * torch.randn_like(x))
    return found


def parts_of(
    name: str, k: int, widths: tuple[int, ...], to_stream: bool, options: argparse.Namespace
) -> None:
    """Times a solve and its parts, and prints them."""
    device, clock = torch.device(options.device), Clock(torch.device(options.device))
    scheme, settings = Scheme(), gptq.GPTQOptions()
    g = scheme.group_size
    weights = [torch.randn(n, k, device=device) * 0.02 for n in widths]
    found = statistics(k, widths[0], max(256, ROWS // options.shrink), device, to_stream=to_stream)
    names = ["layer"] * len(widths)

    def solve() -> object:
        return gptq.GPTQ().solve(weights, found, scheme, settings, names=names)

    times: dict[str, float] = {}
    times["the solve"], _ = clock(solve, 4)
    times["Hessian"], hessian = clock(lambda: found.hessian(settings.shrinkage))
    order = factors.channel_order(hessian, g, settings.act_order)
    times["factorise"], factor = clock(lambda: factors.factorise(hessian, order, settings.damp))
    times["limits"], _ = clock(
        lambda: [
            float((each - round_to_nearest(each, scheme, name=name).dequantize()).norm()) for each in weights
        ]
    )
    drift = found.drift()
    assert drift is not None
    limits = [1e9] * len(widths)
    times["correct"], _ = clock(
        lambda: make_up_for_drift(weights, factor, drift, share=0.25, limits=limits, of_stream=to_stream)
    )
    right = drift.t()
    times["of it divide"], divided = clock(lambda: factor.divide(right))
    exact = torch.linalg.solve_triangular(factor.root, right[order], upper=True)
    exact = torch.linalg.solve_triangular(factor.root.mT, exact, upper=False)[torch.argsort(order)]
    off = float((divided - exact).norm() / exact.norm())
    for strip in options.strips:
        factors._STRIP = strip
        times[f"divide by {strip}"], _ = clock(lambda: factor.divide(right))
    wide = torch.cat([each.t() for each in weights], dim=1).contiguous()
    times["norms"], _ = clock(lambda: gptq._norms(wide, hessian, factor))
    times["prepare the panels"], columns = clock(lambda: gptq._solver(factor, g, scheme, settings, device))
    ordered = wide[order]
    times["the panels"], _ = clock(lambda: columns(ordered))
    half = ordered[:, : ordered.shape[1] // 2].contiguous()
    times["the panels of half the outputs"], _ = clock(lambda: columns(half))
    shown = ", ".join(f"{part} {took:.1f}" for part, took in times.items())
    print(f"{name}, K {k}, N {sum(widths)}, ms: {shown}; the division is off by {off:.1e}", flush=True)
    if options.profile and k == max(layer[1] for layer in LAYERS):
        with profile(activities=[ProfilerActivity.CUDA]) as told:
            solve()
        for event in sorted(told.key_averages(), key=lambda event: -event.device_time_total)[:16]:
            print(f"  {event.device_time_total / 1e3:8.2f} ms {event.count:5d} {event.key[:90]}")


def hessian_panels(device: torch.device, shrink: int) -> None:
    """Times the sums of Hessians in several numbers of panels, and prints them."""
    clock = Clock(device)
    for k in (4096, 8192, 14336):
        x = torch.randn(ROWS // shrink, k // shrink, device=device, dtype=torch.bfloat16)
        total = torch.zeros(k // shrink, k // shrink, device=device)
        shown = []
        for count in (1, 2, 4, 8):
            hessians._PANELS, hessians._WIDE, hessians._LEAST = count, 0, 1

            def add(total: Tensor = total, x: Tensor = x) -> None:
                for _ in range(8):
                    hessians.add_products(total, x, x, 0.9, 0.1, upper=True)

            shown.append(f"{count}: {clock(add, 5)[0] / 8:.3f}")
        print(f"a Hessian of {k // shrink} channels, {len(x)} rows, ms by panels: {', '.join(shown)}")


def main() -> None:
    """Time all layers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--strip", dest="strips", type=int, action="append", default=[])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name, k, widths, to_stream in LAYERS:
        parts_of(name, k // options.shrink, tuple(n // options.shrink for n in widths), to_stream, options)
    hessian_panels(torch.device(options.device), options.shrink)


if __name__ == "__main__":
    main()
