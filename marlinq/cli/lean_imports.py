"""Importing transformers without what a command that runs a language model never uses.

Measured by ``lab/runtime/import_time.py``: on a machine whose environment holds scikit-learn and
torchvision the imports of ``generate`` take 9 seconds in place of 12. Only a command does this, whose
process ends with it: a library remembers which packages seemed to be missing.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

UNUSED = ("sklearn", "scipy", "torchvision", "torchaudio")
"""Packages that transformers imports where they are installed, for losses, images and sound."""


@contextmanager
def lean_imports(hide: tuple[str, ...] = UNUSED) -> Iterator[None]:
    """Make large imports inside quicker.

    The packages of ``hide`` that are not imported yet seem not to be installed. The distribution that a
    package belongs to is looked up by the package's name, not in the file lists of all distributions.
    """
    hidden = [name for name in hide if name not in sys.modules]
    # None is how Python notes that an import is to fail.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    importlib.metadata.packages_distributions = _DistributionsByName
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = _packages_distributions
        for name in hidden:
            del sys.modules[name]


_packages_distributions = importlib.metadata.packages_distributions


class _DistributionsByName(Mapping[str, list[str]]):
    """The distributions of each package; all are read when one does not bear its package's name."""

    def __init__(self) -> None:
        self._all: Mapping[str, list[str]] | None = None

    def __getitem__(self, package: str) -> list[str]:
        if self._all is None:
            try:
                return [importlib.metadata.distribution(package.replace("_", "-")).metadata["Name"]]
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
