"""How long it takes from a typed command to the first token, and what the time goes into.

    python lab/runtime/random_checkpoint.py /dev/shm/marlin --format marlin
    python lab/runtime/load_time.py /dev/shm/marlin --repeat 2

Every measurement is a process of its own, with the checkpoint in the page cache: the command ``marlinq
generate`` from its start to the first byte of text, and a Python program that reports the stages of a load,
the first token, a second call, and peak memory. The first command compiles what the kernel cache lacks; it is
not reported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "The quick brown fox jumps over the lazy dog"


def first_text(folder: Path, device: str) -> tuple[float, float]:
    """Seconds from the start of the command to its first text, and to its end."""
    command = [sys.executable, "-m", "marlinq", "generate", str(folder), "--prompt", PROMPT]
    command += ["--max-new-tokens", "16", "--greedy", "--device", device]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return first, time.perf_counter() - start


def inside(folder: Path, device: str) -> dict[str, object]:
    """Import, load and generate in this process."""
    started = time.perf_counter()
    from marlinq.core.startup import open_gpu_early

    open_gpu_early(device)
    import torch

    torch_seconds = time.perf_counter() - started
    from marlinq.checkpoint import lock_ring_early

    lock_ring_early(device)
    from marlinq.runtime import generate, load

    imported = time.perf_counter() - started
    loaded = load(folder, device=device, only_decodes=True)
    ready = time.perf_counter() - started
    calls = []
    for _ in range(3):
        start = time.perf_counter()
        generation = generate(loaded, PROMPT, max_new_tokens=2)
        calls.append((time.perf_counter() - start, generation.prefill_seconds))
    on_gpu = loaded.device.type == "cuda"
    return {
        "import torch": torch_seconds,
        "imports": imported,
        "load": ready - imported,
        "stages": loaded.timings.stages,
        "read": [loaded.timings.read_bytes, loaded.timings.read_seconds],
        "generate, then its prefill": calls,
        "peak host MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "GPU MB allocated, peak allocated, peak reserved": [
            read(loaded.device) / 2**20
            for read in (
                torch.cuda.memory_allocated,
                torch.cuda.max_memory_allocated,
                torch.cuda.max_memory_reserved,
            )
        ]
        if on_gpu
        else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(inside(arguments.folder[0], arguments.device)))
        return 0
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    warm = False
    for folder in arguments.folder:
        if not warm:
            first, _ = first_text(folder, arguments.device)
            warm = True
            print(f"{folder}: first text in {first:.2f} s with whatever had to be compiled", flush=True)
        times = [first_text(folder, arguments.device) for _ in range(arguments.repeat)]
        firsts = [first for first, _ in times]
        print(
            f"{folder}: typed to first text {statistics.median(firsts):.2f} s "
            f"({', '.join(f'{first:.2f}' for first in firsts)}), to the end "
            f"{statistics.median(last for _, last in times):.2f} s",
            flush=True,
        )
        command = [sys.executable, __file__, str(folder), "--inside", "--device", arguments.device]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
