"""How long ranks take to exchange something, small and large.

    torchrun --nproc-per-node 2 lab/quality/exchange_time.py [--device cpu]

Prints the time of one exchange, as the median of many: small ones as a block has dozens of, and the sums of
Llama-3-8B's Hessians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from marlinq.core.devices import rank_and_size
from marlinq.operations.quantize.ranks import Ranks, joined_ranks


def median(ranks: Ranks, what: Callable[[], object], times: int) -> float:
    """Seconds of one call on the first rank, all ranks having come together before each."""
    found = []
    for _ in range(times):
        ranks.least(0)
        start = time.perf_counter()
        what()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[times // 5 :])


def main() -> None:
    """Time each kind of exchange and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args().device
    device = torch.device(asked, rank_and_size()[0]) if asked == "cuda" else torch.device(asked)
    started = time.perf_counter()
    with joined_ranks(device) as ranks:
        ranks.meet()
        joined = time.perf_counter() - started
        everyone = range(ranks.size)
        small = torch.zeros(1, device=device)
        codes = torch.zeros(14336 * 4096, dtype=torch.uint8, device=device)
        lines = [f"joined in {joined:.2f} s"]
        for name, what in (
            ("4 bytes, by torch alone", lambda: dist.broadcast(small, 0)),
            ("4 bytes", lambda: ranks.sum(small, everyone)),
            ("a JSON value", lambda: ranks.share_json({"x": 1})),
            ("59 MB of codes", lambda: ranks.share(codes, tuple(codes.shape), torch.uint8, 0)),
        ):
            lines.append(f"{name}: {median(ranks, what, 50) * 1e3:.3f} ms")
        for k in (4096, 14336):
            hessian = torch.zeros(k, k, device=device)
            for owners in ((0,), everyone):
                seconds = median(ranks, lambda h=hessian, o=owners: ranks.sum(h, o), 10)  # type: ignore[misc]
                who = "one rank" if len(owners) == 1 else "all ranks"
                gbs = hessian.nbytes / seconds / 1e9
                lines.append(f"{k} x {k} float32 to {who}: {seconds * 1e3:.2f} ms, {gbs:.0f} GB/s")
        if ranks.first:
            print("\n".join(lines))


if __name__ == "__main__":
    main()
