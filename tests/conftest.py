"""Shared by all tests: where the markers ``gpu`` and ``timed`` run, and threads that fit small machines."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Every core has a test process of its own; more threads of arithmetic would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_WITHOUT_GPU = "tests_without_gpu"
"""Name under which a worker of xdist tells the first process how many tests need a GPU that is not there."""


class WithoutGPU:
    """Leaves out the tests that need a GPU where there is none, and says once how many those are.

    A thousand skipped tests would hide what runs. Tests that are run alone are skipped, with the reason.
    """

    def __init__(self) -> None:
        self.count = 0

    def leave_out(self, config: pytest.Config, items: list[pytest.Item], marked: list[pytest.Item]) -> None:
        """Take ``marked`` out of ``items``, unless nothing would be left."""
        if len(marked) == len(items):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
            return
        left_out = set(marked)
        items[:] = [item for item in items if item not in left_out]
        self.count = len(marked)
        config.hook.pytest_deselected(items=marked)
        if hasattr(config, "workeroutput"):
            config.workeroutput[_WITHOUT_GPU] = self.count

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # Every worker collects all tests; one that was stopped has no output.
        self.count = max(self.count, getattr(node, "workeroutput", {}).get(_WITHOUT_GPU, 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.count:
            terminalreporter.write_line(f"{self.count} tests need an NVIDIA GPU and were left out")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(WithoutGPU(), _WITHOUT_GPU)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names a value of bytes by its argument: compressed ones hold the second in which they were made.

    The processes of xdist must all collect the same names.
    """
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        without: Any = config.pluginmanager.get_plugin(_WITHOUT_GPU)
        without.leave_out(config, items, marked)
    elif int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        for item in marked:
            if item.get_closest_marker("timed"):
                item.add_marker(pytest.mark.skip(reason="times a GPU that other tests use; run: -m timed"))


def pytest_collection_finish() -> None:
    """Keeps the many objects that exist by now, which stay to the end, out of garbage collection."""
    gc.collect()
    gc.freeze()
