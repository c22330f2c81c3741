"""Context managers around calls of other libraries, which turn their exceptions into a one-line error.

A malformed config, tokenizer or template can make a library raise any exception: a validation error, an
assertion, a division by zero, a recursion error, a template error, a panic of a Rust extension. None of them
is a bug of marlinq, and none tells a user which file to mend. So each context manager names the file; the
exception is kept as the cause.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from marlinq.core.confined import Confined, confined
from marlinq.core.errors import CheckpointError, EnvironmentProblem, MarlinqError

_LONGEST_REASON = 300
# Module of the class of a Rust extension's panics, which derive from BaseException and can't be imported.
_RUST_PANIC = "pyo3_runtime"
# Classes of errors of a device, which say nothing about a file.
_DEVICE_ERRORS = ("AcceleratorError", "CUDARuntimeError", "CUDADriverError")
# First words of torch's RuntimeError when the host has too little memory; torch has no subclass for it.
_HOST_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def reason(error: BaseException) -> str:
    """An exception in one short line; marlinq's own errors need no name of their class."""
    text = " ".join(str(error).split())
    if isinstance(error, MarlinqError):
        return text
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."


@contextmanager
def foreign(subject: str, problem: str, advice: str) -> Iterator[None]:
    """Turn exceptions that a library raises inside into ``subject: problem (its reason); advice``.

    marlinq's own errors pass, as do interrupts, exits and failures of a device.

    Raises:
        CheckpointError: the library raised something.
        EnvironmentProblem: the device's memory did not suffice, or a package is missing.
    """
    try:
        yield
    except MarlinqError:
        raise
    except ImportError as error:
        # transformers and code of checkpoints import what a model needs when it is built.
        raise EnvironmentProblem(
            f"{subject}: needs a package that is not installed ({reason(error)}); install it"
        ) from error
    except Exception as error:
        name = type(error).__name__
        if name in _DEVICE_ERRORS:
            raise
        if name == "OutOfMemoryError" or _HOST_ALLOCATOR in str(error):
            raise EnvironmentProblem(
                f"{subject}: the device has too little memory ({reason(error)}); use another --device, or "
                "ask for fewer tokens at once"
            ) from error
        raise CheckpointError(f"{subject}: {problem} ({reason(error)}); {advice}") from error
    except BaseException as error:
        if type(error).__module__ != _RUST_PANIC:
            raise
        raise CheckpointError(f"{subject}: {problem} ({reason(error)}); {advice}") from error


@contextmanager
def decoration(problem: str, advice: str) -> Iterator[None]:
    """Turn exceptions inside into a warning, where an optional part of an output is made.

    Warns:
        UserWarning: the part could not be made: ``problem (the reason); advice``.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, hours of work are not thrown away for it
        warnings.warn(f"{problem} ({reason(error)}); {advice}", stacklevel=4)


def model_config(folder: str | os.PathLike[str], model_type: object) -> AbstractContextManager[None]:
    """Around building a model, or anything else that transformers derives from ``config.json``."""
    return foreign(
        f"{os.fspath(folder)}/config.json",
        f"transformers can't build a language model of type {model_type!r} from it",
        "restore the file",
    )


def generation_config(folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Around reading ``generation_config.json``."""
    return foreign(
        f"{os.fspath(folder)}/generation_config.json", "transformers can't read it", "restore or remove it"
    )


def tokenizer(source: object) -> AbstractContextManager[None]:
    """Around loading a tokenizer and around every use of it; ``source`` is its folder, or the tokenizer."""
    return foreign(str(getattr(source, "name_or_path", source)), "no usable tokenizer", "restore its files")


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, subject: str, advice: str, **options: bool
) -> str:
    """A conversation as the chat template of ``tokenizer`` writes it, special tokens included.

    The template is a program of the checkpoint: :mod:`marlinq.core.confined` bounds its time and memory.

    Args:
        tokenizer: tokenizer of the model.
        messages: messages of ``role`` and ``content``, with whatever else the template may ask for.
        subject: beginning of error messages: the folder, or the file of the conversation.
        advice: end of error messages.
        options: options of ``apply_chat_template``.

    Raises:
        CheckpointError: the template fails, or takes too much time or memory.
    """
    # Imported here and not in each process that renders.
    import jinja2.sandbox  # noqa: F401

    try:
        return confined(lambda: tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Confined as error:
        why = " ".join(str(error).split())[:_LONGEST_REASON]
        raise CheckpointError(f"{subject}: the chat template can't be rendered ({why}); {advice}") from error


def forward(folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Around running a model that was built from a folder's config."""
    return foreign(
        os.fspath(folder),
        "the model can't be run on text alone",
        "it takes more than text, or config.json and the tensors describe no working model",
    )
