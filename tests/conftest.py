"""What all tests share: where the markers ``gpu`` and ``timed`` run, and threads that fit small machines."""

from __future__ import annotations

import gc
import os

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Every core has a test process of its own; more threads of arithmetic would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    elif int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        for item in marked:
            if item.get_closest_marker("timed"):
                item.add_marker(pytest.mark.skip(reason="times a GPU that other tests use; run: -m timed"))


def pytest_collection_finish() -> None:
    """What is there by now stays to the end, and is much: the garbage collector need not look through it."""
    gc.collect()
    gc.freeze()
