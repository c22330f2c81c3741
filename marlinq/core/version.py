"""The package's version, which is recorded in the files that it writes."""

__version__ = "0.1.0"


def install_command(extra: str) -> str:
    """The command that installs an extra, for messages. It runs in a clone: no package index has marlinq."""
    return f'pip install ".[{extra}]" in a clone of marlinq'


CUDA_PACKAGES = f"{install_command('cuda13')}, or .[cuda12] where the driver runs CUDA 12"
"""Commands that install CuPy and its companions, for messages where the driver's version is not known."""
