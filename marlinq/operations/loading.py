"""``marlinq.load``, which tells of too little memory as operations do."""

from __future__ import annotations

from marlinq.operations.little_memory import tells_of_little_memory
from marlinq.runtime import load as load_model

load = tells_of_little_memory("choose another device, or a checkpoint of fewer bits")(load_model)
