"""The operation behind ``marlinq doctor``: examine this machine and say which parts of marlinq it can run.

Importing this package imports neither torch nor CuPy, so that it also works where they are broken.
"""

from __future__ import annotations

from marlinq.operations.doctor.diagnosis import Diagnosis, Finding, State
from marlinq.operations.doctor.examination import examine

__all__ = ["Diagnosis", "Finding", "State", "examine"]
