"""Where other libraries work on what a checkpoint holds: whatever they raise becomes one line of ours.

A config, tokenizer or template that is nonsense ends in any exception there is: validation errors,
assertions, divisions by zero, recursion, template errors, a panic of a Rust extension. None of them is a bug
of marlinq or tells a user which file to mend. Each boundary names the file. The exception stays as the cause.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from marlinq.core.errors import CheckpointError, EnvironmentProblem, MarlinqError

_LONGEST_REASON = 300
# An honest template takes milliseconds.
_TEMPLATE_SECONDS = 5.0
# The panic of a Rust extension derives from BaseException; this is the only way to tell it.
_RUST_PANIC = "pyo3_runtime"
# A device that fails says nothing about a file.
_DEVICE_ERRORS = ("AcceleratorError", "CUDARuntimeError", "CUDADriverError")
# torch has no class of its own for a host without memory.
_HOST_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def reason(error: BaseException) -> str:
    """An exception in one short line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."


@contextmanager
def foreign(subject: str, problem: str, advice: str) -> Iterator[None]:
    """Turn whatever a library raises inside into ``subject: problem (its reason); advice``.

    Our own errors pass, as do interrupts, exits and failures of a device.

    Raises:
        CheckpointError: the library raised something.
        EnvironmentProblem: the device's memory did not suffice.
    """
    try:
        yield
    except MarlinqError:
        raise
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
    """Around making what only decorates an output: the output is whole without it.

    Warns:
        UserWarning: it could not be made: ``problem (the reason); advice``.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, hours of work are not thrown away for it
        why = str(error) if isinstance(error, MarlinqError) else reason(error)
        warnings.warn(f"{problem} ({why}); {advice}", stacklevel=4)


def model_config(folder: str | os.PathLike[str], model_type: object) -> AbstractContextManager[None]:
    """Around building a model, or anything else that transformers derives from ``config.json``."""
    return foreign(
        f"{os.fspath(folder)}/config.json",
        f"transformers can't build a causal language model of type {model_type!r} from it",
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


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Interrupt Python code inside after so much time of the processor. Only the main thread can do this; in
    another one there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def chat_template(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Around rendering a chat template, which is a program and may never end."""
    problem = "the chat template can't be rendered"
    with (
        foreign(os.fspath(folder), problem, "mend it, or continue plain text"),
        _limited(_TEMPLATE_SECONDS),
    ):
        yield


def forward(folder: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Around running a model that was built from a folder's config."""
    return foreign(
        os.fspath(folder), "the model can't be run", "config.json and the tensors describe no working model"
    )
