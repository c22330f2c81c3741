"""Imports transformers without packages that a language model never uses.

Where scikit-learn and torchvision are installed, the imports of ``generate`` take 9 seconds instead of 12
(``lab/runtime/import_time.py``). Only the command line does this, never the library, because libraries
remember for the whole process which packages were missing.
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
    """Inside, large imports are faster.

    Packages of ``hide`` that are not imported yet seem not to be installed. A package's distribution is
    looked up by the package's name, not in the file lists of all distributions.
    """
    hidden = [name for name in hide if name not in sys.modules]
    # None in sys.modules makes an import fail.
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
    """Package -> its distributions. All file lists are read only if no distribution has the package's
    name."""

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
