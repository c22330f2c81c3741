"""Which linear kernel vLLM chooses on a Hopper GPU, before and after marlinq's plugin is registered.

    python tests/interop/vllm_choice.py

Needs vLLM 0.32 or later and no GPU, which a stand-in claims to be there. Prints JSON: name of a layer -> the
two kernels' names, null where vLLM has none.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any

# Layer -> name of the weights' type, group size, whether zero points are stored.
LAYERS = {
    "4 bits, groups of 128": ("uint4b8", 128, False),
    "4 bits, groups of 32": ("uint4b8", 32, False),
    "4 bits, channels": ("uint4b8", -1, False),
    "4 bits, zero points": ("uint4", 128, True),
    "8 bits": ("uint8b128", 128, False),
    "8 bits, zero points": ("uint8", 64, True),
    "groups of 16": ("uint4b8", 16, False),
}


def main() -> None:
    import torch
    import vllm.model_executor.kernels.linear as kernels
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.scalar_type import scalar_types

    import marlinq.integrations.vllm as plugin
    from marlinq.integrations.vllm import linear

    class Hopper:
        """The platform, but for what says which GPU it is."""

        _enum = PlatformEnum.CUDA

        def __getattr__(self, name: str) -> Any:
            return getattr(current_platform, name)

        def get_device_capability(self, *_: Any) -> Any:
            return DeviceCapability(9, 0)

        def has_device_capability(self, least: Any, *_: Any) -> bool:
            return tuple(divmod(least, 10) if isinstance(least, int) else least) <= (9, 0)

        def is_device_capability(self, one: Any, *_: Any) -> bool:
            return one in (90, (9, 0))

        def is_cuda(self) -> bool:
            return True

        is_cuda_alike = is_cuda

        def is_cpu(self) -> bool:
            return False

    hopper = Hopper()
    for module in list(sys.modules.values()):
        # Asking a lazy module for the name would import others.
        if vars(module).get("current_platform") is current_platform:
            module.current_platform = hopper  # type: ignore[attr-defined]
    linear.missing_package = lambda: None  # type: ignore[assignment]
    named = {field.name for field in fields(kernels.MPLinearLayerConfig)}

    def chosen(layer: str) -> str | None:
        kind, group_size, zero_points = LAYERS[layer]
        config: dict[str, Any] = {
            "full_weight_shape": (4096, 4096),
            "partition_weight_shape": (4096, 4096),
            "weight_type": getattr(scalar_types, kind),
            "act_type": torch.bfloat16,
            "group_size": group_size,
            "zero_points": zero_points,
            "has_g_idx": False,
        }
        given = {name: value for name, value in config.items() if name in named}
        try:
            return str(kernels.choose_mp_linear_kernel(kernels.MPLinearLayerConfig(**given)).__name__)
        except ValueError:
            return None

    with set_current_vllm_config(VllmConfig()):
        before = {layer: chosen(layer) for layer in LAYERS}
        plugin.register()
        found = {layer: (before[layer], chosen(layer)) for layer in LAYERS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
