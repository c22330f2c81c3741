"""What a command that runs a model does first, so that it starts sooner."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marlinq.core.devices import check_device_name

UNUSED_BY_TEXT = ("sklearn", "scipy", "torchvision", "torchaudio")
"""Packages that transformers imports where they are installed, for training losses, images, sound and
assisted decoding: a thousand modules, a second on some machines."""


@contextmanager
def many_imports(without: Collection[str] = ()) -> Iterator[None]:
    """Import large libraries inside: the garbage collector, which would look at all their objects again and
    again, rests, and leaves them alone afterwards. Whoever wants to know which distribution a package is of,
    as transformers does, is not told by reading the file lists of all of them, as long as names agree.

    Args:
        without: packages that are :func:`absent` inside.
    """
    enabled = gc.isenabled()
    gc.disable()
    importlib.metadata.packages_distributions = _PackagesByName
    try:
        with absent(without):
            yield
    finally:
        importlib.metadata.packages_distributions = _packages_distributions
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def absent(packages: Collection[str]) -> Iterator[None]:
    """``packages`` that are not imported yet seem not to be installed, inside.

    Libraries remember what they found, so this is for commands, whose process ends with them.
    """
    hidden = [name for name in packages if name not in sys.modules]
    # This is how Python itself notes that an import is to fail.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def open_gpu_early(device: str) -> threading.Thread | None:
    """Let the driver open the GPU that ``device`` names, in a thread, while torch is still imported.

    The driver's context of a device is one for the whole process, so torch finds it open. Where there is no
    driver or no such GPU nothing happens, and whoever needs it says so.

    Returns:
        The thread, or None where no GPU is meant.
    """
    if check_device_name(device) == "cpu":
        return None
    index = int(device.partition(":")[2] or 0)
    thread = threading.Thread(target=_open_gpu, args=(index,), name="marlinq-open-gpu")
    thread.start()
    return thread


def _open_gpu(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    # ctypes gives up the interpreter for each call. Any error ends this; torch will meet it again.
    _ = (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(handle), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    )


def import_transformers() -> None:
    """Import transformers, which looks through the files of all its models for their names, once.

    By itself it does so twice: for its own names, and for those of its package ``models``. They are the same
    but for the package's name.
    """
    import transformers
    from transformers.utils import import_utils

    if "transformers.models" in sys.modules:
        return
    look = import_utils.define_import_structure
    folder = Path(transformers.__file__).parent / "models"

    def look_once(path: str | Path, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return look(path, prefix)
        # Found already when transformers was imported, and kept by it.
        found = look(folder, prefix="models")
        return {
            needed: {
                name.removeprefix("models."): set(names)
                for name, names in modules.items()
                if name.startswith("models.")
            }
            for needed, modules in found.items()
        }

    import_utils.define_import_structure = look_once
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = look


_packages_distributions = importlib.metadata.packages_distributions


class _PackagesByName(Mapping[str, list[str]]):
    """:func:`importlib.metadata.packages_distributions`, which reads the list of every distribution's files,
    where a package is not found under its own name first."""

    def __init__(self) -> None:
        self._all: Mapping[str, list[str]] | None = None

    def __getitem__(self, package: str) -> list[str]:
        if self._all is None:
            name = package.replace("_", "-")
            try:
                return [importlib.metadata.distribution(name).metadata["Name"]]
            except importlib.metadata.PackageNotFoundError:
                pass
        return self._whole[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    @property
    def _whole(self) -> Mapping[str, list[str]]:
        if self._all is None:
            self._all = _packages_distributions()
        return self._all
