"""The package's version, which files that it writes name."""

__version__ = "0.1.0"
