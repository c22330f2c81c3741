"""marlinq's kernels inside vLLM, as a plugin of its entry-point group ``vllm.general_plugins``.

vLLM calls :func:`register` in its front end, its engine and every worker, before a model is built. From then
on its choice of a kernel for linear layers of 4- and 8-bit integers asks
:class:`~marlinq.integrations.vllm.linear.IntegerLinearKernel` first, and 4-bit mixtures get
the experts of :mod:`marlinq.integrations.vllm.experts`; vLLM's own kernels run where those refuse.
Nothing here initialises CUDA: workers may be forked later.

``MARLINQ_VLLM`` says what is taken over: ``all`` (the default), ``linear``, ``experts``, or ``off``.
"""

from __future__ import annotations

import logging
import os

from marlinq.core.errors import MarlinqError

MODES = ("all", "linear", "experts", "off")
VARIABLE = "MARLINQ_VLLM"

# Below "vllm", whose handler and level a server has set up.
logger = logging.getLogger("vllm.plugins.marlinq")


def register() -> None:
    """Put marlinq's kernels before vLLM's own; may be called any number of times.

    Never raises: with a version of vLLM that lacks what the plugin needs, or an unknown mode, one warning
    says so and vLLM's own kernels run.
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
