"""Seconds that the imports of ``marlinq generate`` take, with and without ``marlinq.cli.lean_imports``.

    python lab/runtime/import_time.py --repeat 5

Each import is a process of its own. The two kinds take turns; the first turn fills the page cache and is not
counted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PROGRAM = """
import contextlib, time
start = time.perf_counter()
from marlinq.cli.lean_imports import lean_imports
with {context}:
    import torch
    from marlinq.runtime import generate, load
    import transformers.generation.utils
    from transformers.models.llama import modeling_llama
print(time.perf_counter() - start)
"""
KINDS = {"plain": "contextlib.nullcontext()", "lean": "lean_imports()"}


def seconds(kind: str) -> float:
    """Seconds of one import in a process of its own."""
    program = PROGRAM.format(context=KINDS[kind])
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(repeat + 1):
        for kind, measured in times.items():
            value = seconds(kind)
            if turn:
                measured.append(value)
    for kind, measured in times.items():
        print(
            f"{kind}: median {statistics.median(measured):.2f} s, {min(measured):.2f} to {max(measured):.2f}"
        )


if __name__ == "__main__":
    main()
