"""Notes of passed probes in the cache folder (:mod:`marlinq.core.notes`), so that a later start does not
repeat them.

The key of a note has all that a comparison depends on, except the weights: this package's files, the versions
of torch, transformers and NVRTC, the GPU, and the caller's premises. Failures are not noted.
"""

from __future__ import annotations

import torch
import transformers

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.notes import note, note_name, noted
from marlinq.kernels.driver.compiler import nvrtc_version


def was_passed(premises: object) -> bool:
    """Whether a probe with these ``premises``, compared by ``repr``, has been noted."""
    return noted(_name(premises), bool) is True


def note_passed(premises: object) -> None:
    """Write the note; does nothing where the folder can't be written, since the next process can probe
    again."""
    note(_name(premises), True)


def _name(premises: object) -> str:
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    versions = torch.__version__, transformers.__version__, _nvrtc()
    return note_name("probe", (premises, gpu, versions), ("kernels", "models", "runtime"))


def _nvrtc() -> object:
    try:
        return nvrtc_version()
    except EnvironmentProblem:
        return None
