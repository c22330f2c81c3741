"""Seconds of a load by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class LoadTimings:
    """Seconds of a load, stage by stage.

    Attributes:
        stages: seconds of the loading thread by stage, in order of first use; repeated stages add up.
        read_bytes: bytes of the tensors that were read.
        read_seconds: seconds from the beginning of the first read to the end of the last, by other threads.
    """

    stages: dict[str, float] = field(default_factory=dict)
    read_bytes: int = 0
    read_seconds: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.stages.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to the stage ``name``; not to be nested."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - start

    def lines(self) -> list[str]:
        """Lines of text with the times."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.stages.items())
        rate = self.read_bytes / self.read_seconds / 1e9 if self.read_seconds else 0.0
        read = f"{self.read_bytes / 1e9:.2f} GB were read and copied in {self.read_seconds:.2f} s"
        return [
            f"loaded in {self.total:.2f} s: {parts}",
            f"meanwhile {read}, {rate:.1f} GB/s",
        ]
