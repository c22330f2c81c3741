"""A checkpoint's tokenizer for generation, made directly from its file, which is faster than transformers.

transformers parses ``tokenizer.json``, copies the result, and applies settings that change little or nothing;
with a vocabulary of 128,000 tokens parsing is only a third of its time. The changes that it makes are
determined once and kept: the parsed file with these changes must serialise to the same JSON as transformers'
tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from marlinq.calibration import load_tokenizer
from marlinq.core import boundaries
from marlinq.core.notes import note, note_name, noted

_THIS = Path(__file__)
_FILE = "tokenizer.json"
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_EMPTY: dict[str, object] = {
    **dict.fromkeys(("truncation", "padding", *_PARTS)),
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
# Suffixes of files that transformers may read to make a tokenizer, its config included.
_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
# Methods that encode and decode; tokenizers of classes that override one are left to transformers.
_METHODS = (
    "__call__",
    "_call_one",
    "_encode_plus",
    "_convert_encoding",
    "set_truncation_and_padding",
    "decode",
    "_decode",
)


class FileTokenizer:
    """Encodes and decodes like transformers' tokenizer of a folder.

    All other methods, such as chat templates, are those of transformers' tokenizer, which is loaded on
    demand.

    Args:
        folder: path of the checkpoint.
        content: bytes of its ``tokenizer.json``.
        changes: values that transformers uses instead of the file's, by key.
    """

    def __init__(self, folder: Path, content: bytes, changes: Mapping[str, object]) -> None:
        self.name_or_path = str(folder)
        self._folder = folder
        self._own = _parsed(content, changes)

    def __call__(self, text: Any, **options: Any) -> Any:
        if options or not isinstance(text, str):
            return self._whole(text, **options)
        return {"input_ids": self._own.encode(text).ids}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **options: Any) -> Any:
        """As transformers': the text of ``tokens``."""
        if options != {"clean_up_tokenization_spaces": False} or not isinstance(tokens, list):
            return self._whole.decode(tokens, skip_special_tokens=skip_special_tokens, **options)
        return self._own.decode(tokens, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":
            raise AttributeError(name)
        return getattr(self._whole, name)

    @cached_property
    def _whole(self) -> Any:
        return load_tokenizer(self._folder)


def tokenizer_of(folder: Path, *, trust_remote_code: bool = False, kept: bool = False) -> Any:
    """The tokenizer of a folder.

    Args:
        folder: path of the checkpoint.
        trust_remote_code: run code that the checkpoint brings.
        kept: whether a :class:`FileTokenizer` may be returned where it is known to be equivalent, and whether
            that may be noted in the cache folder (:mod:`marlinq.core.notes`).

    Raises:
        CheckpointError: the tokenizer can't be read.
    """
    path = folder / _FILE
    if trust_remote_code or not kept or not path.is_file():
        return load_tokenizer(folder, trust_remote_code=trust_remote_code)
    with boundaries.tokenizer(folder):
        # Read once: the bytes that are compared here are those that are parsed.
        content = path.read_bytes()
        others = [each for each in sorted(folder.iterdir()) if each.suffix in _SUFFIXES and each.is_file()]
        digests = [(each.name, _digest(each)) for each in others if each != path]
        versions = tokenizers.__version__, transformers.__version__
        premises = hashlib.sha256(content).hexdigest(), digests, versions, _digest(_THIS)
        name = note_name("tokenizer", premises, ())
        changes = noted(name, dict)
        if changes is not None:
            return FileTokenizer(folder, content, changes)
    loaded = load_tokenizer(folder)
    with boundaries.tokenizer(folder):
        changes = _changes(content, loaded)
    if changes is not None:
        note(name, changes)
    return loaded


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parsed(content: bytes, changes: Mapping[str, object]) -> Tokenizer:
    own = Tokenizer.from_buffer(content)
    # As transformers does for calls without truncation and padding.
    own.no_truncation()
    own.no_padding()
    if changes:
        # The library can make a part from JSON only as part of a whole tokenizer.
        made = Tokenizer.from_str(json.dumps({**_EMPTY, **changes}))
        for key in changes:
            setattr(own, key, getattr(made, key))
    return own


def _changes(content: bytes, loaded: Any) -> dict[str, object] | None:
    """The parts in which ``loaded``, transformers' tokenizer of the folder, differs from the file.

    Returns:
        None where the file with these parts is not equivalent.
    """
    kind, known = type(loaded), PreTrainedTokenizerFast
    if not isinstance(loaded, known) or not kind.__module__.startswith("transformers."):
        return None
    if any(getattr(kind, name, None) is not getattr(known, name, None) for name in _METHODS):
        return None
    if loaded.split_special_tokens:
        return None
    theirs, file = _written(loaded.backend_tokenizer), json.loads(content)
    changes = {key: theirs[key] for key in _PARTS if theirs[key] != file.get(key)}
    return changes if _written(_parsed(content, changes)) == theirs else None


def _written(tokenizer: Tokenizer) -> dict[str, object]:
    """A tokenizer as JSON values, without truncation and padding, which every call sets."""
    value = json.loads(tokenizer.to_str())
    return {key: each for key, each in value.items() if key not in ("truncation", "padding")}
