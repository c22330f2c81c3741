"""A vLLM plugin with marlinq's kernels (entry-point group ``vllm.general_plugins``).

vLLM calls :func:`register` in its front end, its engine and every worker before a model is built. Afterwards
vLLM asks :class:`~marlinq.integrations.vllm.linear.IntegerLinearKernel` first when it chooses a kernel for a
linear layer of 4- or 8-bit integers, :class:`~marlinq.integrations.vllm.float_linear.FloatWeightKernel` for
one of FP8 weights and 16-bit activations, and experts of such integers run on
:mod:`marlinq.integrations.vllm.experts`. Where these refuse, vLLM's own kernels run. Nothing here initialises
CUDA, because workers may be forked later.

The environment variable ``MARLINQ_VLLM`` chooses the layers: ``all`` (the default), ``linear``, ``experts``,
or ``off``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from marlinq.core.boundaries import reason
from marlinq.core.errors import MarlinqError

MODES = ("all", "linear", "experts", "off")
VARIABLE = "MARLINQ_VLLM"
VERSIONS = "0.26 to 0.33"
"""oldest and newest version of vLLM in which the names that the plugin uses were read"""

# A child of the logger "vllm", whose handler and level the server sets.
logger = logging.getLogger("vllm.plugins.marlinq")


def register() -> None:
    """Puts marlinq's kernels before vLLM's own; may be called any number of times.

    Never raises: with an unknown mode, or where a step fails with this version of vLLM, it logs a warning,
    and vLLM's own kernels run those layers.
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
    if not _succeeds("linear layers and experts", lambda: _key_compiled_graphs(mode)):
        return
    if mode in ("all", "linear"):
        _succeeds("linear layers", _take_linear_layers)
    if mode in ("all", "experts"):
        _succeeds("experts", _take_experts)


def _succeeds(layers: str, step: Callable[[], None]) -> bool:
    """Whether ``step`` raises nothing; otherwise a warning says that vLLM keeps these layers."""
    try:
        step()
    except MarlinqError as error:
        why = reason(error)
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises would end the server
        version = getattr(sys.modules.get("vllm"), "__version__", "of an unknown version")
        why = f"vLLM {version}, where {VERSIONS} is known: {reason(error)}"
    else:
        return True
    logger.warning("marlinq: %s; vLLM's kernels run %s", why, layers)
    return False


def _key_compiled_graphs(mode: str) -> None:
    from marlinq.integrations.vllm.interface import key_compiled_graphs

    key_compiled_graphs(mode)


def _take_linear_layers() -> None:
    from marlinq.integrations.vllm.float_linear import FloatWeightKernel
    from marlinq.integrations.vllm.interface import FP8_WEIGHTS, INTEGER_WEIGHTS, put_first
    from marlinq.integrations.vllm.linear import IntegerLinearKernel

    put_first({INTEGER_WEIGHTS: IntegerLinearKernel, FP8_WEIGHTS: FloatWeightKernel})


def _take_experts() -> None:
    from marlinq.integrations.vllm.experts import register_experts

    register_experts()
