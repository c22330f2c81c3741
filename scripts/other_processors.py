"""Run tests as a processor with fewer instructions would, with one thread and with two.

``make test-processors`` does, and so does ``make test-all``.

Sums are rounded in another order there. A test that passes here and fails there hangs on its processor.

    python scripts/other_processors.py [TESTS ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# In the order of their instructions: the first is what every x86-64 processor has.
_LEVELS = (("default", "SSE41", ""), ("avx2", "AVX2", "avx2"), ("avx512", "AVX512_CORE", "avx512bw"))
# Tests that compare what two ways of rounding give, or what training gained.
_TESTS = (
    "tests/operations/quantize/tuning/test_tuned_values.py::test_predictions_come_closer_to_the_originals",
    "tests/operations/quantize/tuning/test_tuned_values.py::test_a_quantised_head_stays_as_it_was",
    "tests/operations/quantize/tuning/test_tuned_values.py::test_every_format_holds_a_tuned_model",
    "tests/models/test_recognise.py",
    "tests/methods/test_gptq.py",
)


def environments(flags: set[str]) -> list[dict[str, str]]:
    """What a processor with these ``flags`` can stand in for, the plainest first, on one thread or two."""
    known = [(aten, onednn) for aten, onednn, flag in _LEVELS if not flag or flag in flags]
    return [
        {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "OMP_NUM_THREADS": str(1 + place % 2)}
        for place, (aten, onednn) in enumerate(known)
    ]


def processor_flags() -> set[str]:
    """What the processor can do, as Linux names it; empty elsewhere."""
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
