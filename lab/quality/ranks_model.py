"""A paper model of the time to quantise large models over several GPUs.

    python lab/quality/ranks_model.py

What one GPU computes comes from rates that were measured on an H200 at the 8B shape (RATES); the rest from
what a block moves. A stage that runs beside another one counts where it is the longest. Nothing here was
measured at these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

RATES = {
    "forward": 330e12,
    "hessian": 420e12,
    "factor": 20e12,
    "rows": 20e12,
    "links": 300e9,
    "network": 40e9,
    "disk": 8e9,
    "write": 1.5e9,
}
"""Operations a second: forward passes, Hessians, factorisations, channels of a solve. Bytes a second: between
GPUs of a host, of a GPU's network adapter, of a host's disk, and of rank 0's writer, which hashes too."""
TOKENS = 128 * 2048
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
        return 2.0 * self.k**2 * self.tokens * self.count * (0.625 if self.k >= 8192 else 1.0)

    @property
    def factor(self) -> float:
        return 2 / 3 * self.k**3

    @property
    def rows(self) -> float:
        return 2.0 * self.n * self.k**2


@dataclass(frozen=True)
class Model:
    """Blocks, and the solves of each; what lies outside the blocks is left out."""

    name: str
    blocks: int
    solves: tuple[Solve, ...]


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
    ),
)


def block_seconds(model: Model, gpus: int) -> dict[str, float]:
    """Seconds of the stages of a block."""
    hosts = max(1, gpus // GPUS_OF_A_HOST)
    inside = min(gpus, GPUS_OF_A_HOST)
    work = sum(solve.weights * solve.tokens / TOKENS * TOKENS for solve in model.solves)
    hessians = sum(4.0 * solve.k**2 * solve.count for solve in model.solves)
    weights = sum(solve.weights for solve in model.solves)
    # The widest single solve is cut over all ranks, each of which factorises; many equal ones are dealt out.
    single = [solve for solve in model.solves if solve.count == 1]
    many = [solve for solve in model.solves if solve.count > 1]
    widest = max(single, key=lambda solve: solve.factor)
    dealt = sum((solve.factor + 0.0) * solve.count for solve in (*single, *many) if solve is not widest)
    rows = sum(solve.rows * solve.count for solve in model.solves)
    reduce = 0.0
    if gpus > 1:
        reduce = 2 * hessians * (inside - 1) / inside / RATES["links"]
    if hosts > 1:
        reduce += 2 * hessians / inside / RATES["network"]
    share = weights / RATES["links"] if gpus > 1 else 0.0
    if hosts > 1:
        share += weights / inside / RATES["network"]
    return {
        "forward": 4.0 * work / RATES["forward"] / gpus,
        "Hessians": sum(solve.hessian for solve in model.solves) / RATES["hessian"] / gpus,
        "factor": (widest.factor + dealt / gpus) / RATES["factor"],
        "channels": rows / RATES["rows"] / gpus,
        "exchange": reduce + share,
        "read": 2.0 * weights / RATES["disk"],
        "write": 0.53 * weights / RATES["write"],
    }


def main() -> None:
    """Print a table for the documentation."""
    print("| model | GPUs | computing and exchange, s a block | all blocks | reading | writing | bound by |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in MODELS:
        for gpus in (1, 2, 8, 64):
            parts = block_seconds(model, gpus)
            reading, writing = parts.pop("read"), parts.pop("write")
            computing = sum(parts.values())
            longest = max((computing, "computing"), (reading, "reading"), (writing, "writing"))
            split = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
            total = {name: model.blocks * value / 60 for name, value in (("r", reading), ("w", writing))}
            print(
                f"| {model.name} | {gpus} | {computing:.2f} ({split}) "
                f"| {model.blocks * longest[0] / 60:.1f} min "
                f"| {total['r']:.1f} min | {total['w']:.1f} min | {longest[1]} |"
            )


if __name__ == "__main__":
    main()
