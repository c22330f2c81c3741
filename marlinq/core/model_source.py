"""Decide whether the name of a model is a local folder or an id on the Hugging Face Hub, without any
library."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from marlinq.core.errors import CheckpointError

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}/{_PART}")
_HUB_ID_LENGTH = 96


def local_folder(source: str | os.PathLike[str]) -> Path | None:
    """The folder that ``source`` names, or None when it can only be a Hub id.

    A path wins over a Hub id, and a path of two parts whose first part is a folder here is a mistyped path
    and not an organisation, unless the Hub's cache knows the model.

    Raises:
        CheckpointError: nothing is there and the text is no Hub id, or what is there is no folder.
    """
    folder, text = Path(source), os.fspath(source)
    try:
        if folder.is_dir():
            return folder
        if os.path.lexists(folder):
            raise CheckpointError(f"{text}: is not a folder; pass the folder of a checkpoint")
        hub_id = is_hub_id(text)
        if hub_id and (_cached(text) or not folder.parent.is_dir()):
            return None
    except OSError as error:
        raise CheckpointError(
            f"{text}: can't be read ({error.strerror or error}); mend its permissions or copy it again"
        ) from None
    except ValueError:
        raise CheckpointError(f"{text!r}: not a path") from None
    if near := _neighbours(folder):
        raise CheckpointError(f"{text}: no such folder; did you mean {' or '.join(near)}?")
    if hub_id:
        elsewhere = "for the Hub model of that name, run the command in another folder"
        raise CheckpointError(f"{text}: no such folder in {folder.parent}; {elsewhere}")
    raise CheckpointError(f"{text}: not a folder, and not a Hub id of the form organisation/name")


def is_hub_id(text: str) -> bool:
    """Whether ``text`` has the form organisation/name that the Hub allows."""
    return (
        len(text) <= _HUB_ID_LENGTH
        and _HUB_ID.fullmatch(text) is not None
        and "--" not in text
        and ".." not in text
    )


def _cached(name: str) -> bool:
    """Whether the Hub's cache holds something of the model ``name``."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def _neighbours(folder: Path) -> list[str]:
    """Existing folders beside ``folder``, which does not exist, with similar names."""
    try:
        names = [entry.name for entry in os.scandir(folder.parent) if entry.is_dir()]
    except OSError:
        return []
    return [str(folder.with_name(name)) for name in get_close_matches(folder.name, names, n=2)]
