"""Starting sooner changes nothing that can be seen afterwards."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from marlinq.core import startup
from marlinq.core.errors import UsageError
from marlinq.core.startup import many_imports, open_gpu_early
from tests.testing import forks


def imported(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_the_collector_rests_and_works_again() -> None:
    assert gc.isenabled()
    with many_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()


def test_packages_are_hidden_inside_and_there_again_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_package.py").touch()
    (tmp_path / "used_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert imported("used_package")
    with many_imports(without=("large_package", "used_package", "absent_package")):
        assert importlib.util.find_spec("large_package") is None
        assert not imported("large_package")
        # What is imported already stays.
        assert imported("used_package")
    assert imported("large_package")
    assert importlib.util.find_spec("absent_package") is None
    for name in ("large_package", "used_package"):
        del sys.modules[name]
    gc.unfreeze()


class Driver:
    """Counts the calls of the CUDA driver."""

    def __init__(self, result: int) -> None:
        self.calls: list[str] = []
        self._result = result

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return self._result

        return call


@pytest.mark.parametrize(
    ("result", "calls"), [(0, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), (100, ["cuInit"])]
)
def test_the_driver_opens_the_gpu(result: int, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(result)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = open_gpu_early("cuda:1")
    assert thread is not None
    thread.join()
    assert driver.calls == calls


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(startup.ctypes, "CDLL", absent)
    thread = open_gpu_early("auto")
    assert thread is not None
    thread.join()
    assert open_gpu_early("cpu") is None
    with pytest.raises(UsageError):
        open_gpu_early("abacus")


def test_a_package_of_its_distributions_name_is_found_without_reading_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = importlib.metadata.packages_distributions()
    read: list[int] = []

    def counted() -> Mapping[str, list[str]]:
        read.append(1)
        return every

    monkeypatch.setattr(startup, "_packages_distributions", counted)
    with many_imports():
        found = importlib.metadata.packages_distributions()
        assert found["torch"] == every["torch"] == ["torch"]
        assert found.get("huggingface_hub") == every["huggingface_hub"]
        assert not read
        # PyYAML's package has another name.
        assert found["yaml"] == every["yaml"]
        assert found.get("no_such_package", []) == []
        assert dict(found) == dict(every)
        assert read == [1]
    assert importlib.metadata.packages_distributions is counted
    gc.unfreeze()


def test_transformers_finds_the_names_of_its_models_with_one_look() -> None:
    code = """
import pathlib, transformers
from transformers.utils import import_utils
from marlinq.core.startup import import_transformers
look = import_utils.define_import_structure
given = []
class Lazy(import_utils._LazyModule):
    def __init__(self, name, file, structure, **rest):
        given.append((name, {key: dict(value) for key, value in structure.items()}))
        super().__init__(name, file, structure, **rest)
transformers.utils._LazyModule = Lazy
misses = look.cache_info().misses
import_transformers()
assert look.cache_info().misses == misses
assert import_utils.define_import_structure is look
transformers.utils._LazyModule = import_utils._LazyModule
(name, found), = given
folder = pathlib.Path(transformers.__file__).parent / "models"
assert name == "transformers.models" and found == look(str(folder / "__init__.py"))
from transformers.models.llama import LlamaConfig
import_transformers()
"""
    done = forks.run(code, modules=forks.TORCH)
    assert done.returncode == 0, done.stderr
