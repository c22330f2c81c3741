"""How messages spell a setting of a recipe: as its user wrote it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OPTIONS = {"served_by": "--for"}
"""Setting -> its option, where that is not the setting's name."""
_SWITCHES = {"symmetric": ("--sym", "--asym")}
"""Flag -> the options that make it true and false, where those are not ``--NAME`` and ``--no-NAME``."""

_in_file: ContextVar[frozenset[str] | None] = ContextVar("_in_file", default=None)
"""Keys that the recipe file of a command gives; None where no command runs."""


def option(key: str) -> str:
    """The option of the command line for a setting with values."""
    return _OPTIONS.get(key, f"--{key.replace('_', '-')}")


def switches(key: str) -> tuple[str, str]:
    """The options that make a setting true and false."""
    return _SWITCHES.get(key, (option(key), f"--no-{option(key).removeprefix('--')}"))


@contextmanager
def from_command_line(in_file: Collection[str]) -> Iterator[None]:
    """Inside, messages name options, except for the settings ``in_file`` that a recipe file gives."""
    token = _in_file.set(frozenset(in_file))
    try:
        yield
    finally:
        _in_file.reset(token)


def spelled(key: str, value: object = None) -> str:
    """The setting ``key`` in a message: its option where the command line gave it, else its key.

    Args:
        key: key of a recipe or of a method's options.
        value: its value; a flag's decides which of its two options it is.
    """
    in_file = _in_file.get()
    if in_file is None or key in in_file:
        return key
    return switches(key)[not value] if isinstance(value, bool) else option(key)


def in_command() -> bool:
    """Whether messages go to the user of a command, who may have no recipe."""
    return _in_file.get() is not None
