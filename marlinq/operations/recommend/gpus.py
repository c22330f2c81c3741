"""GPUs by name: published figures (``gpus.toml``), and their description for the kernels' cost models."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from marlinq.core.errors import UsageError
from marlinq.kernels.contract.device import H200, Device, GpuProperties, device_of

_FILE = Path(__file__).with_name("gpus.toml")
# An H200's bus width in bits, and the bandwidth from the driver's memory clock over the published 4.8 TB/s.
_BUS_BITS, _DRIVER_OVER_PUBLISHED = 6144, 2 * 3_201_000e3 * 6144 / 8 / 4.8e12


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU.

    Attributes:
        key: name on the command line.
        name: name that the driver gives it.
        capability: compute capability (major, minor).
        memory: bytes of device memory.
        bandwidth: bytes a second of device memory.
        half: operations a second of its tensor cores in 16 bits.
        fp8: operations a second in FP8; None where it has no FP8.
        multiprocessors: number of multiprocessors.
        clock: cycles a second at boost.
        l2: bytes of L2 cache.
        shared_bytes: largest shared memory of a block, in bytes.
        source: publication with these figures.
    """

    key: str
    name: str
    capability: tuple[int, int]
    memory: float
    bandwidth: float
    half: float
    fp8: float | None
    multiprocessors: int
    clock: float
    l2: float
    shared_bytes: int
    source: str

    def device(self) -> Device:
        """The GPU as the kernels' cost models see it: an H200 with measured figures, another GPU with its
        published peaks times the shares that an H200 reaches of its own."""
        if self.key == "h200":
            return H200
        memory_khz = self.bandwidth * _DRIVER_OVER_PUBLISHED / (2 * _BUS_BITS / 8) / 1e3
        return device_of(
            GpuProperties(
                self.name,
                self.capability,
                self.multiprocessors,
                self.shared_bytes,
                round(self.clock / 1e3),
                round(memory_khz),
                _BUS_BITS,
                round(self.l2),
            )
        )


@cache
def gpus() -> dict[str, Gpu]:
    """Every GPU of ``gpus.toml`` by key."""
    entries = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {
        key: Gpu(
            key,
            entry["name"],
            (entry["capability"][0], entry["capability"][1]),
            entry["memory"] * 1e9,
            entry["bandwidth"] * 1e12,
            entry["half"] * 1e12,
            entry["fp8"] * 1e12 if "fp8" in entry else None,
            entry["multiprocessors"],
            entry["clock_mhz"] * 1e6,
            entry["l2_mb"] * 1e6,
            entry["shared_bytes"],
            entry["source"],
        )
        for key, entry in entries.items()
    }


def find_gpu(key: str) -> Gpu:
    """The GPU of that name.

    Raises:
        UsageError: there is none.
    """
    found = gpus().get(key.strip().lower().removeprefix("rtx").strip("- "))
    if found is None:
        raise UsageError(f"--gpu {key}: not known; expected one of {', '.join(gpus())}")
    return found
