"""One line about the hardware of a measurement."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers

from marlinq.core.version import __version__


def hardware_line(device: torch.device) -> str:
    """Name of the processor, and versions of driver and libraries."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, marlinq {__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, {versions}"
    return f"{_processor()}, {torch.get_num_threads()} threads, {versions}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
