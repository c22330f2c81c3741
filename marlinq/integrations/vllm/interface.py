"""Everything of vLLM that the plugin uses, in one file: what a new version can break.

Read in the wheels of vLLM 0.26.0 and 0.32.0, for linear layers 0.33.0 too. Private are:

* ``_POSSIBLE_KERNELS``: vLLM's ``register_linear_kernel`` appends, and behind Machete a kernel is never asked
  on Hopper. A class whose name contains "marlin" or "humming" is moved by version 0.33's order of priority.
* ``vllm.envs.environment_variables``, whose values are part of the key of compiled graphs.
* The names of the classes in :data:`EXPERT_METHODS`, which vLLM's own loader compares too, and those of the
  parameters that they make.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import vllm
import vllm.envs
import vllm.model_executor.kernels.linear as linear_kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers.quantization import (
    get_quantization_config as quantization_config_class,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from marlinq.core.errors import MarlinqError, UnsupportedError
from marlinq.core.version import __version__

__all__ = [
    "EXPERT_METHODS",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "QuantizationConfig",
    "capture_sizes",
    "current_platform",
    "key_compiled_graphs",
    "max_batched_tokens",
    "missing_package",
    "permute_param_layout_",
    "put_first",
    "quantization_config_class",
    "register_quantization_config",
    "replace_parameter",
    "scalar_types",
]

EXPERT_METHODS = (
    "AutoGPTQMoEMethod",
    "AutoAWQMoEMethod",
    "CompressedTensorsWNA16MarlinMoEMethod",
    "CompressedTensorsWNA16MoEMethod",
)
"""vLLM's methods for experts with packed integer weights, by the name of their class."""

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


def key_compiled_graphs(mode: str) -> None:
    """Make what is taken over part of the key under which vLLM keeps compiled graphs on disk.

    A graph names the operators that multiply, and vLLM's key says nothing of plugins: without this, a graph
    compiled without the plugin would be run with it, on parameters that are no longer there. The key hashes
    every environment variable that vLLM knows, so it gets to know one more.

    Args:
        mode: value of ``MARLINQ_VLLM``.

    Raises:
        UnsupportedError: this version of vLLM keeps its variables elsewhere.
    """
    variables = getattr(vllm.envs, "environment_variables", None)
    if not isinstance(variables, dict):
        raise UnsupportedError(
            f"vLLM {vllm.__version__}: expected environment_variables, a dict, in vllm.envs, found none"
        )
    variables["MARLINQ_VLLM"] = lambda: f"{mode}, {_sources()}, {missing_package() or 'kernels'}"


def _sources() -> str:
    """What tells versions of the plugin apart, those between releases too."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return f"{__version__} {digest.hexdigest()[:16]}"


def missing_package() -> str | None:
    """What keeps the kernels from being compiled here, or None; asks for no GPU."""
    try:
        import cupy  # noqa: F401

        import marlinq.kernels  # noqa: F401
    except (ImportError, MarlinqError) as error:
        return f"{error}; install marlinq[cuda13], or marlinq[cuda12] for CUDA 12"
    return None


def max_batched_tokens() -> int:
    """Rows of the largest product that the engine now being built will ask for."""
    config = _current_config()
    return _MOST_TOKENS if config is None else int(config.scheduler_config.max_num_batched_tokens)


def capture_sizes() -> list[int]:
    """Rows of the batches for which that engine will capture CUDA graphs."""
    compilation = getattr(_current_config(), "compilation_config", None)
    return list(getattr(compilation, "cudagraph_capture_sizes", None) or ())


def _current_config() -> Any:
    try:
        from vllm.config import get_current_vllm_config

        return get_current_vllm_config()
    except (ImportError, AttributeError, AssertionError):
        return None
