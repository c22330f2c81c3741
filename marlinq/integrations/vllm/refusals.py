"""Verdicts on vLLM's layers: whether marlinq's kernels take a layer, and one log line that says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

from marlinq.core.boundaries import reason

logger = logging.getLogger("vllm.plugins.marlinq")

NO_NVIDIA_GPU = "marlinq's kernels run on NVIDIA GPUs alone"


def verdict(refusal: Callable[[], str | None]) -> tuple[bool, str | None]:
    """vLLM's form of a verdict on a layer: whether it is taken, and the reason if it is not.

    Never raises: a layer whose check fails is refused, since an exception would end the server. vLLM mentions
    refusals only where no kernel is left, so each reason is logged here, once.

    Args:
        refusal: returns the reason for a refusal, or None.
    """
    try:
        why = refusal()
    except Exception as error:  # noqa: BLE001 - names differ between vLLM's versions
        why = reason(error)
        _log_once(logging.WARNING, why)
    else:
        if why is not None:
            _log_once(logging.INFO, why)
    return why is None, why


@cache
def _log_once(level: int, why: str) -> None:
    logger.log(level, "marlinq: %s; vLLM's kernels run such layers", why)
