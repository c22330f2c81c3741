"""The compiled emulation, kept between sessions."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from emulation.build import Builder, find_compiler

_KEPT_SECONDS = 14 * 24 * 3600
"""Seconds since its last use, or its last build, after which a compiled kernel is deleted."""


@pytest.fixture(scope="session")
def builder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Keeps what it compiles, keyed by content, for all processes of this session and for later ones: below
    ``$MARLINQ_CACHE``, if that is set, else in pytest's cache; without one, for this session."""
    compiler = find_compiler()
    if compiler is None or sys.platform != "linux":
        pytest.skip("the emulation of CUDA needs Linux and a C++ compiler: g++ or c++ on the path, or $CXX")
    chosen = os.environ.get("MARLINQ_CACHE")
    cache = getattr(request.config, "cache", None)
    if chosen is not None:
        folder = Path(chosen) / "emulation"
    elif cache is not None:
        folder = cache.mkdir("emulation")
    else:
        session = tmp_path_factory.getbasetemp()
        folder = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    _delete_unused(folder)
    return Builder(folder, compiler)


def _delete_unused(folder: Path) -> None:
    for path in folder.iterdir():
        try:
            times = path.stat()
        except FileNotFoundError:
            continue  # deleted by another process
        if max(times.st_atime, times.st_mtime) > time.time() - _KEPT_SECONDS:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # of a compilation that was stopped
        else:
            path.unlink(missing_ok=True)
