"""A vLLM plugin with marlinq's kernels (entry-point group ``vllm.general_plugins``).

vLLM calls :func:`register` in its front end, its engine and every worker before a model is built. Afterwards
vLLM asks :class:`~marlinq.integrations.vllm.linear.IntegerLinearKernel` first when it chooses a kernel for a
linear layer of 4- or 8-bit integers, and experts of such integers run on
:mod:`marlinq.integrations.vllm.experts`. Where these refuse, vLLM's own kernels run. Nothing here initialises
CUDA, because workers may be forked later.

The environment variable ``MARLINQ_VLLM`` chooses the layers: ``all`` (the default), ``linear``, ``experts``,
or ``off``.
"""

from __future__ import annotations

import logging
import os

from marlinq.core.errors import MarlinqError

MODES = ("all", "linear", "experts", "off")
VARIABLE = "MARLINQ_VLLM"

# A child of the logger "vllm", whose handler and level the server sets.
logger = logging.getLogger("vllm.plugins.marlinq")


def register() -> None:
    """Puts marlinq's kernels before vLLM's own; may be called any number of times.

    Never raises: with an unsupported version of vLLM or an unknown mode, it logs a warning, and vLLM's own
    kernels run.
    """
    mode = os.environ.get(VARIABLE, MODES[0])
    if mode not in MODES:
        logger.warning(
            "marlinq: %s=%s: expected one of %s; vLLM's kernels run", VARIABLE, mode, ", ".join(MODES)
        )
        return
    if mode == "off":
        logger.info("marlinq: off by %s; vLLM's kernels run", VARIABLE)
        return
    try:
        from marlinq.integrations.vllm.experts import register_experts
        from marlinq.integrations.vllm.interface import key_compiled_graphs, put_first
        from marlinq.integrations.vllm.linear import IntegerLinearKernel

        key_compiled_graphs(mode)
        if mode in ("all", "linear"):
            put_first(IntegerLinearKernel)
        if mode in ("all", "experts"):
            register_experts()
    except (ImportError, AttributeError, TypeError, MarlinqError) as error:
        logger.warning("marlinq: %s; vLLM's kernels run", error)
