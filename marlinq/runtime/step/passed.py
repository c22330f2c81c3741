"""Notes beside the kernels' cache of the probes that were passed, so that a start does not repeat them.

A note is named for everything that the comparison rests on but the weights: this package's files, the
versions of torch, transformers and NVRTC, the GPU, and what the caller adds. Only agreement is noted.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import transformers

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.kept import read_note, write_note
from marlinq.kernels.driver.compiler import nvrtc_version
from marlinq.kernels.driver.notes import code_digest

_PACKAGE = Path(__file__).parents[2]
_ROOMS = ("kernels", "models", "runtime")


def was_passed(premises: object) -> bool:
    """Whether a probe with these ``premises``, whose ``repr`` tells them apart, has been noted."""
    return read_note(_note(premises)) is not None


def note_passed(premises: object) -> None:
    """Leave the note; nothing where the folder can't be written, since the next process can probe again."""
    write_note(_note(premises), b"")


def _note(premises: object) -> str:
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    versions = torch.__version__, transformers.__version__, _nvrtc()
    code = [code_digest(_PACKAGE / room) for room in _ROOMS]
    key = hashlib.sha256(repr((premises, gpu, versions, code)).encode()).hexdigest()
    return f"probe-{key[:32]}"


def _nvrtc() -> object:
    try:
        return nvrtc_version()
    except EnvironmentProblem:
        return None
