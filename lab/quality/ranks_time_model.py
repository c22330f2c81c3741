"""A paper model of the time to quantise large models over several GPUs.

    python lab/quality/ranks_time_model.py

What a GPU computes in a second was measured on an H200 at the 8B shape
(docs/lab-notes/quantise-time.md); what network and disks carry is assumed. Reading and writing run
beside the computing, so the longest of the three counts. Nothing here was measured at the sizes it is about.

Runs anywhere; its rates are an H200's, CUDA 13.0, torch 2.11.0.
"""

from __future__ import annotations

from dataclasses import dataclass

RATES = {
    "forward": 478e12,
    "hessian": 650e12,
    "factor": 59e12,
    "rows": 33e12,
    "links": 300e9,
    "network": 40e9,
    "disk": 5e9,
    "write": 0.9e9,
}
"""Measured operations a second of forward passes (with everything besides products), Hessians, factorisations
and channels of a solve; measured bytes a second between two GPUs of a host and of rank 0's writer with its
hashing; assumed bytes a second of a GPU's network adapter and of a host's disk."""
SOLVE_SECONDS = 0.012
"""measured seconds per solve besides these operations"""
TOKENS = 128 * 2048
COMPARED = 49_152 / TOKENS
"""share of tokens that the original model runs too"""
GPUS_OF_A_HOST = 8


@dataclass(frozen=True)
class Solve:
    """N output channels that share an input of K; ``count`` such solves see ``tokens`` each."""

    n: int
    k: int
    tokens: float = TOKENS
    count: int = 1

    @property
    def weights(self) -> float:
        return self.n * self.k * self.count

    @property
    def hessian(self) -> float:
        above_the_diagonal = 9 / 16 if self.k >= 8192 else 5 / 8 if self.k >= 4096 else 1.0
        drift = COMPARED * min(self.n, self.k) * self.k
        return 2.0 * (above_the_diagonal * self.k**2 + drift) * self.tokens * self.count

    @property
    def factor(self) -> float:
        return 2 / 3 * self.k**3

    @property
    def rows(self) -> float:
        return 2.0 * self.n * self.k**2

    @property
    def seconds(self) -> float:
        """Seconds of one solve."""
        # Experts are solved together where their weights and Hessians are small.
        together = max(1, 2**30 // (16 * self.n * self.k + 12 * self.k**2)) if self.count > 1 else 1
        return SOLVE_SECONDS / together + self.factor / RATES["factor"] + self.rows / RATES["rows"]


@dataclass(frozen=True)
class Model:
    """Number of blocks and solves of each block; modules outside the blocks are left out.

    Attributes:
        late: whether the last solve waits for the others.
    """

    name: str
    blocks: int
    solves: tuple[Solve, ...]
    late: bool = True


def _routed(n: int, k: int) -> Solve:
    """A solve of each of 256 experts, 8 of which see each token."""
    return Solve(n, k, TOKENS * 8 / 256, 256)


MODELS = (
    Model(
        "8B (Llama-3-8B)",
        32,
        (Solve(6144, 4096), Solve(4096, 4096), Solve(28672, 4096), Solve(4096, 14336)),
    ),
    Model(
        "70B (Llama-3-70B)",
        80,
        (Solve(10240, 8192), Solve(8192, 8192), Solve(57344, 8192), Solve(8192, 28672)),
    ),
    Model(
        "670B mixture (DeepSeek-V3's shape)",
        58,
        (
            Solve(2112, 7168),
            Solve(24576, 1536),
            Solve(32768, 512),
            Solve(7168, 16384),
            Solve(4096, 7168),
            Solve(7168, 2048),
            _routed(4096, 7168),
            _routed(7168, 2048),
        ),
        late=False,
    ),
)


def block_seconds(model: Model, gpus: int) -> dict[str, float]:
    """Seconds of the stages of a block; reading and writing run beside the others."""
    hosts = max(1, gpus // GPUS_OF_A_HOST)
    inside = min(gpus, GPUS_OF_A_HOST)
    weights = sum(solve.weights for solve in model.solves)
    # With drift correction, which is bounded by a norm over the whole weight, ranks solve whole modules: the
    # longest first, each by the rank with the least work.
    first = model.solves[:-1] if model.late else model.solves
    loads = [0.0] * gpus
    for seconds in sorted((each.seconds for each in first for _ in range(each.count)), reverse=True):
        loads[loads.index(min(loads))] += seconds
    solving = max(loads) + (model.solves[-1].seconds if model.late else 0.0)
    exchange = 0.0
    if gpus > 1:
        hessians = sum(4.0 * solve.k**2 * solve.count for solve in model.solves)
        # A sum over all ranks moves everything twice; codes go out once, a byte each.
        moved = 2 * hessians + weights
        exchange = moved * (inside - 1) / inside / RATES["links"]
        if hosts > 1:
            exchange += moved / inside / RATES["network"]
    # Two passes over all tokens, and two over those that are compared, the original's and one before the last
    # solve: two operations a weight and token each.
    forward = sum(4.0 * (1 + COMPARED) * solve.weights * solve.tokens for solve in model.solves)
    return {
        "forward": forward / RATES["forward"] / gpus,
        "Hessians": sum(solve.hessian for solve in model.solves) / RATES["hessian"] / gpus,
        "solve": solving,
        "exchange": exchange,
        "read": 2.0 * weights / RATES["disk"],
        "write": 0.53 * weights / RATES["write"],
    }


def main() -> None:
    """Print a table for the documentation."""
    print("| model | GPUs | a block | forward | Hessians | solve | exchange | all blocks | bound by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in MODELS:
        for gpus in (1, 2, 8, 64):
            parts = block_seconds(model, gpus)
            reading, writing = parts.pop("read"), parts.pop("write")
            computing = sum(parts.values())
            longest, bound = max((computing, "computing"), (reading, "reading"), (writing, "writing"))
            shown = " | ".join(f"{value:.2f} s" for value in parts.values())
            total = model.blocks * longest
            time = f"{total:.0f} s" if total < 120 else f"{total / 60:.1f} min"
            print(f"| {model.name} | {gpus} | {longest:.2f} s | {shown} | {time} | {bound} |")


if __name__ == "__main__":
    main()
