"""Everything of vLLM that the plugin uses, in one file: what a new version can break.

Read in the wheels of vLLM 0.26.0 and 0.33.0. One name is private, ``_POSSIBLE_KERNELS``: vLLM's
``register_linear_kernel`` appends, and behind Machete a kernel is never asked on Hopper. A class whose name
contains "marlin" or "humming" is moved by version 0.33's order of priority.
"""

from __future__ import annotations

from typing import Any

import vllm
import vllm.model_executor.kernels.linear as linear_kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from marlinq.core.errors import UnsupportedError

__all__ = [
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "current_platform",
    "max_batched_tokens",
    "permute_param_layout_",
    "put_first",
    "replace_parameter",
    "scalar_types",
]

# What max_batched_tokens is without a configuration: vLLM's default on large GPUs.
_MOST_TOKENS = 8192


def put_first(kernel: type) -> None:
    """Make ``kernel`` the first that is asked for a linear layer with packed integer weights on CUDA.

    Raises:
        UnsupportedError: this version of vLLM keeps its list of kernels elsewhere; the message says where it
            was expected.
    """
    by_platform = getattr(linear_kernels, "_POSSIBLE_KERNELS", None)
    # Its keys are the members of vLLM's PlatformEnum, which is imported under this name there.
    platforms = getattr(linear_kernels, "PlatformEnum", None)
    kernels = by_platform.get(platforms.CUDA) if isinstance(by_platform, dict) and platforms else None
    if not isinstance(kernels, list):
        raise UnsupportedError(
            f"vLLM {vllm.__version__}: expected _POSSIBLE_KERNELS[PlatformEnum.CUDA], a list, in "
            "vllm.model_executor.kernels.linear, found none"
        )
    if kernel not in kernels:
        kernels.insert(0, kernel)


def max_batched_tokens() -> int:
    """Rows of the largest product that the engine now being built will ask for."""
    try:
        from vllm.config import get_current_vllm_config

        config: Any = get_current_vllm_config()
        return int(config.scheduler_config.max_num_batched_tokens)
    except (ImportError, AttributeError, AssertionError, TypeError):
        return _MOST_TOKENS
