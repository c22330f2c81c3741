"""What this machine offers, and which parts of marlinq it can run: the operation behind ``marlinq doctor``.

Nothing here imports torch or CuPy when it is imported: a broken installation must not break its diagnosis.
"""

from __future__ import annotations

from marlinq.operations.doctor.diagnosis import Capability, Diagnosis, Finding, State
from marlinq.operations.doctor.examination import examine

__all__ = ["Capability", "Diagnosis", "Finding", "State", "examine"]
