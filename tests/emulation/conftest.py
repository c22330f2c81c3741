"""The compiled emulation, shared by the session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from emulation.build import Builder, find_compiler


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Keeps what it compiles below ``$MARLINQ_CACHE``, if that is set, else for this session, whose processes
    share it."""
    compiler = find_compiler()
    if compiler is None or sys.platform != "linux":
        pytest.skip("the emulation of CUDA needs Linux and a C++ compiler: g++ or c++ on the path, or $CXX")
    chosen = os.environ.get("MARLINQ_CACHE")
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent
    folder = (Path(chosen) if chosen else session) / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    return Builder(folder, compiler)
