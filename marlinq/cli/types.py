"""Types of options and arguments, which check every value before an operation is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from marlinq.core.errors import CheckpointError
from marlinq.core.model_source import local_folder
from marlinq.core.settings import AUTO, NONE, Automatic, Choice, Kind, Unset, parse_bytes
from marlinq.formats import FORMATS

_FORMAT_SPELLINGS = {
    "gptq-v1": "gptq",
    "awq-gemm": "awq",
    "pack-quantized": "compressed-tensors",
}
_PAIR = re.compile(r"(?P<source>.+?)-to-(?P<target>.+)")


def suggestion(word: str, choices: Iterable[str]) -> str:
    """`` (did you mean X?)`` if one of ``choices`` is similar to ``word``, else an empty text."""
    near = get_close_matches(word, list(choices), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def names(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """click callback of an option that may be repeated: the names of its comma-separated lists.

    Raises:
        click.BadParameter: a list holds no name.
    """
    found = tuple(name.strip() for part in value for name in part.split(",") if name.strip())
    if value and not found:
        raise click.BadParameter(f"expected names, found {','.join(value)!r}", ctx, param)
    return found


class OneOf(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """One of a few words, in upper or lower case and with ``_`` or ``-``; a typing error gets a suggestion.

    Args:
        choices: the words, or a registry of them.
        spellings: other spelling -> word.
        others: further words that are not in ``choices``.
    """

    name = "choice"

    def __init__(
        self, choices: Collection[str], spellings: Mapping[str, str] | None = None, *others: str
    ) -> None:
        self._registered, self._others = choices, others
        self.spellings = dict(spellings or {})

    @property
    def choices(self) -> tuple[str, ...]:
        """Every word, read anew each time because a registry may grow."""
        return (*self._registered, *self._others)

    def find(self, value: str) -> str | None:
        """The word for the spelling ``value``, or None."""
        word = value.strip().lower().replace("_", "-")
        word = self.spellings.get(word, word)
        return word if word in self.choices else None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        choice = self.find(str(value))
        if choice is None:
            near = suggestion(str(value).lower(), (*self.choices, *self.spellings))
            self.fail(f"expected one of {', '.join(self.choices)}, found {value!r}{near}", param, ctx)
        return choice

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(self.choices)}]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return _completions(self.choices, incomplete)


def _completions(words: Iterable[object], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in map(str, words) if word.startswith(incomplete)]


FORMAT = OneOf(FORMATS, _FORMAT_SPELLINGS)
"""Name of a registered format."""
TARGET = OneOf(FORMATS, _FORMAT_SPELLINGS, "dense")
"""Target of a conversion: a format, or ``dense``."""


class SettingType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """A setting of a recipe or a method, parsed by its kind."""

    name = "setting"

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        where = param.opts[0] if param is not None else "setting"
        if not isinstance(value, str):
            self.kind.check(where, value)
            return value
        if isinstance(self.kind, Choice):
            words = {str(choice): choice for choice in self.kind.values}
            word = value.strip().lower().replace("_", "-")
            if word not in words:
                near = suggestion(word, words)
                self.fail(f"expected one of {', '.join(words)}, found {value!r}{near}", param, ctx)
            return words[word]
        return self.kind.parse(where, value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        if isinstance(self.kind, Choice):
            return f"[{'|'.join(map(str, self.kind.values))}]"
        if isinstance(self.kind, Automatic):
            return f"[{SettingType(self.kind.kind).get_metavar(param, ctx)}|auto]"
        if isinstance(self.kind, Unset):
            return f"[{SettingType(self.kind.kind).get_metavar(param, ctx)}|none]"
        names = {
            "WholeNumber": "N",
            "Fraction": "FRACTION",
            "Share": "SHARE",
            "ProperShare": "SHARE",
            "Bits": "BITS",
            "Bytes": "SIZE",
        }
        return names.get(type(self.kind).__name__, "TEXT")

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        kind, words = self.kind, []
        if isinstance(kind, (Automatic, Unset)):
            kind, words = kind.kind, [AUTO if isinstance(kind, Automatic) else NONE]
        return _completions([*words, *(kind.values if isinstance(kind, Choice) else ())], incomplete)


_EMPTY = "found an empty text, as a variable that is not set leaves; name a folder"
"""For Path it is the current folder, which nobody means by it."""


class Source(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """A checkpoint: an existing folder with a config.json, or a Hub id; returned as the given text."""

    name = "checkpoint"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value):
            self.fail(f"{_EMPTY} or a Hub id", param, ctx)
        folder = local_folder(str(value))
        if folder is not None and os.access(folder, os.X_OK) and not os.path.lexists(folder / "config.json"):
            hint = "pass the folder of a Hugging Face checkpoint"
            if folder.name.endswith(".partial"):
                hint = "it is the unfinished output of a run; repeat that run to continue it"
            elif (folder / "adapter_config.json").exists():
                hint = "it is an adapter; merge it into its model (PEFT's merge_and_unload) and save that"
            raise CheckpointError(f"{folder}: holds no config.json; {hint}")
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


class TextSource(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """A source of text in the syntax of :class:`marlinq.calibration.sources.Source`, or ``self``."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text != "self":
            from marlinq.calibration.sources import Source

            Source.parse(text, split="train")
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [*_completions(["self"], incomplete), CompletionItem(incomplete, type="file")]


class CalibrationSource(TextSource):
    """A :class:`TextSource`, optionally followed by ``=WEIGHT``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from marlinq.calibration.mixture import read_part

        super().convert(read_part(str(value)).source, param, ctx)
        return str(value)


class Pair(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """``SOURCE-to-TARGET``: the names of two formats."""

    name = "pair"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        match = _PAIR.fullmatch(str(value).strip().lower().replace("_", "-"))
        if match is None:
            names = ", ".join(FORMATS)
            self.fail(f"expected SOURCE-to-TARGET with two of {names}; found {value!r}", param, ctx)
        return FORMAT.convert(match["source"], param, ctx), FORMAT.convert(match["target"], param, ctx)


class Size(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """A number of bytes such as 5GB or 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        size = parse_bytes(str(value))
        if size is None:
            self.fail(f"expected a size such as 5GB or 512MiB, found {value!r}", param, ctx)
        return size


class OutputFile(click.Path):
    """A file that a command writes when its work is done: its folder has to be there beforehand."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("expected the path of a file, found ''", param, ctx)
        folder = Path(value).absolute().parent
        if not folder.is_dir():
            self.fail(f"{folder}: no such folder; make it, or choose another", param, ctx)
        if not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"{folder}: no file can be made there; choose another folder", param, ctx)
        return super().convert(value, param, ctx)


class Folder(click.Path):
    """A folder, which is not looked at while the command line is parsed."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail(_EMPTY, param, ctx)
        return super().convert(value, param, ctx)


SOURCE = Source()
TEXT = TextSource()
CALIBRATION = CalibrationSource()
PAIR = Pair()
OUTPUT_FILE = OutputFile()
FOLDER = Folder()
