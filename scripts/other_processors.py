"""Runs tests with the instructions of older processors, with one thread and with two.

``make test-processors`` and ``make test-all`` run it. With other instructions and threads, sums are rounded
in another order; a test that then fails depends on the processor.

    python scripts/other_processors.py [TESTS ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# From the fewest instructions, which every x86-64 processor has, to the most.
_LEVELS = (("default", "SSE41", ""), ("avx2", "AVX2", "avx2"), ("avx512", "AVX512_CORE", "avx512bw"))
# Tests that compare two ways of rounding, or results of training.
_TESTS = (
    "tests/operations/quantize/tuning/test_tuned_values.py::test_predictions_come_closer_to_the_originals",
    "tests/operations/quantize/tuning/test_tuned_values.py::test_a_quantised_head_stays_as_it_was",
    "tests/operations/quantize/tuning/test_tuned_values.py::test_every_format_holds_a_tuned_model",
    "tests/models/test_recognise.py",
    "tests/methods/test_gptq.py",
)


def environments(flags: set[str]) -> list[dict[str, str]]:
    """Environment variables that limit a processor with these ``flags``, from the fewest instructions to the
    most, with one thread and with two."""
    known = [(aten, onednn) for aten, onednn, flag in _LEVELS if not flag or flag in flags]
    return [
        {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "OMP_NUM_THREADS": str(1 + place % 2)}
        for place, (aten, onednn) in enumerate(known)
    ]


def processor_flags() -> set[str]:
    """Linux's names for the processor's instructions; empty on other systems."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = (line.partition(":")[2] for line in text.splitlines() if line.startswith("flags"))
    return set(next(lines, "").split())


def main(tests: list[str]) -> int:
    """Run the tests in every environment; 1 if any of them fails."""
    failed = []
    for environment in environments(processor_flags()):
        shown = " ".join(f"{key}={value}" for key, value in environment.items())
        print(f"== {shown}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode:
            failed.append(shown)
    for shown in failed:
        print(f"failed under {shown}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(_TESTS)))
