"""All parts of vLLM that the plugin uses, so that only this file depends on vLLM's version.

They were read in vLLM 0.26.0, 0.32.0 and 0.33.0. Private parts are:

* ``_POSSIBLE_KERNELS`` and ``_POSSIBLE_WFP8A16_KERNELS``, the lists of linear kernels for packed integers and
  for FP8 weights with 16-bit activations. vLLM's ``register_linear_kernel`` would append, and a kernel after
  Machete is never asked on Hopper. Version 0.33 sorts classes whose name contains "marlin" or "humming".
* ``vllm.envs.environment_variables``, whose values are part of the key of compiled graphs.
* Names of the classes in :data:`EXPERT_METHODS`, which vLLM's loader compares too, and of their parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vllm
import vllm.envs
import vllm.model_executor.kernels.linear as linear_kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
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
from marlinq.core.version import CUDA_PACKAGES, __version__

__all__ = [
    "EXPERT_METHODS",
    "FP8_WEIGHTS",
    "INTEGER_WEIGHTS",
    "FP8ScaledMMLinearKernel",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "QuantizationConfig",
    "capture_sizes",
    "current_platform",
    "key_compiled_graphs",
    "max_batched_tokens",
    "missing_package",
    "own_float_kernel",
    "own_linear_kernel",
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
"""Class name -> vLLM's method for experts with packed integer weights."""

_MOST_TOKENS = 8192
"""tokens per batch, at most, without a configuration: vLLM's default on large GPUs"""


INTEGER_WEIGHTS, FP8_WEIGHTS = "_POSSIBLE_KERNELS", "_POSSIBLE_WFP8A16_KERNELS"
"""Name of vLLM's list of linear kernels for packed integers, and of that for FP8 weights with 16-bit
activations."""


def put_first(chosen: Mapping[str, type]) -> None:
    """Puts kernels first in vLLM's lists for CUDA; if a list is missing, changes none.

    Args:
        chosen: name of a list -> kernel class.

    Raises:
        UnsupportedError: this version of vLLM has a list elsewhere.
    """
    lists = {name: _kernels(name) for name in chosen}
    for name, kernel in chosen.items():
        if kernel not in lists[name]:
            lists[name].insert(0, kernel)


def _kernels(name: str) -> list[type]:
    """vLLM's list ``name`` of linear kernels for CUDA."""
    by_platform = getattr(linear_kernels, name, None)
    # The keys of the lists are members of PlatformEnum, which that module imports.
    platforms = getattr(linear_kernels, "PlatformEnum", None)
    kernels = by_platform.get(platforms.CUDA) if isinstance(by_platform, dict) and platforms else None
    if not isinstance(kernels, list):
        raise UnsupportedError(
            f"vLLM {vllm.__version__}: expected {name}[PlatformEnum.CUDA], a list, in "
            "vllm.model_executor.kernels.linear, found none"
        )
    return kernels


def own_linear_kernel(config: MPLinearLayerConfig, kernel: type) -> type[MPLinearKernel]:
    """The kernel that vLLM chooses for a layer of packed integers if ``kernel`` is not in its list.

    Raises:
        ValueError: vLLM has no kernel for the layer.
    """
    kernels = _kernels(INTEGER_WEIGHTS)
    place = kernels.index(kernel)
    del kernels[place]
    try:
        chosen: type[MPLinearKernel] = linear_kernels.choose_mp_linear_kernel(config)
    finally:
        kernels.insert(place, kernel)
    return chosen


def own_float_kernel(config: Any, kernel: type) -> Any:
    """The first class in vLLM's list for FP8 weights, other than ``kernel``, that takes a layer.

    Raises:
        UnsupportedError: none does.
    """
    for other in _kernels(FP8_WEIGHTS):
        takes: Any = other
        if other is not kernel and takes.is_supported()[0] and takes.can_implement(config)[0]:
            return takes
    raise UnsupportedError("vLLM has no other kernel for FP8 weights and 16-bit activations")


def key_compiled_graphs(mode: str) -> None:
    """Makes the plugin's mode part of the key under which vLLM stores compiled graphs on disk.

    A compiled graph names the operators that multiply, but vLLM's key does not depend on plugins. A graph
    compiled without the plugin would be run with it, on parameters that no longer exist. The key hashes all
    environment variables that vLLM knows, so one more is added.

    Args:
        mode: value of ``MARLINQ_VLLM``.

    Raises:
        UnsupportedError: this version of vLLM has its variables elsewhere.
    """
    variables = getattr(vllm.envs, "environment_variables", None)
    if not isinstance(variables, dict):
        raise UnsupportedError(
            f"vLLM {vllm.__version__}: expected environment_variables, a dict, in vllm.envs, found none"
        )
    variables["MARLINQ_VLLM"] = lambda: f"{mode}, {_sources()}, {missing_package() or 'kernels'}"


def _sources() -> str:
    """A hash of the plugin's sources, which also differs between unreleased versions."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return f"{__version__} {digest.hexdigest()[:16]}"


def missing_package() -> str | None:
    """Why kernels can't be compiled on this machine, or None; does not initialise a GPU."""
    try:
        import cupy  # noqa: F401

        import marlinq.kernels  # noqa: F401
    except (ImportError, MarlinqError) as error:
        return f"{error}; {CUDA_PACKAGES}"
    return None


def max_batched_tokens() -> int:
    """Rows of the largest product of the engine that is being built."""
    config = _current_config()
    return _MOST_TOKENS if config is None else int(config.scheduler_config.max_num_batched_tokens)


def capture_sizes() -> list[int]:
    """Numbers of rows for which the engine that is being built will capture CUDA graphs."""
    compilation = getattr(_current_config(), "compilation_config", None)
    return list(getattr(compilation, "cudagraph_capture_sizes", None) or ())


def _current_config() -> Any:
    try:
        from vllm.config import get_current_vllm_config

        return get_current_vllm_config()
    except (ImportError, AttributeError, AssertionError):
        return None
