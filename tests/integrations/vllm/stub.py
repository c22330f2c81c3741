"""A stand-in for the parts of vLLM that the plugin sees: names, signatures and the meaning of dimensions.

`make interop` compares it with the published package (``tests/interop/vllm_differences.py``).
"""

from __future__ import annotations

import enum
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    import pytest

VERSION = "0.26.0"


class PlatformEnum(enum.Enum):
    CUDA = enum.auto()
    CPU = enum.auto()


@dataclass
class MPLinearLayerConfig:
    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: str
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool = False


class MPLinearKernel:
    def __init__(
        self,
        c: MPLinearLayerConfig,
        w_q_param_name: str,
        w_s_param_name: str,
        w_zp_param_name: str | None = None,
        w_gidx_param_name: str | None = None,
    ) -> None:
        self.config = c
        self.w_q_name, self.w_s_name = w_q_param_name, w_s_param_name
        self.w_zp_name, self.w_gidx_name = w_zp_param_name, w_gidx_param_name


class OtherKernel(MPLinearKernel):
    """Stands for the kernels that vLLM has itself; a layer's result is 7."""

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.parameters = sorted(name for name, _ in layer.named_parameters())

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.full((*x.shape[:-1], self.config.partition_weight_shape[1]), 7, dtype=x.dtype)


class GroupShape(tuple[int, int]):
    """Rows and columns that share a scale; -1 for all."""

    def is_per_tensor(self) -> bool:
        return self == (-1, -1)

    def is_per_channel(self) -> bool:
        return self == (-1, 1)


@dataclass
class FP8ScaledMMLinearLayerConfig:
    weight_shape: tuple[int, int]
    input_dtype: torch.dtype
    group_shape: tuple[int, int]

    @property
    def weight_quant_key(self) -> Any:
        return types.SimpleNamespace(scale=types.SimpleNamespace(group_shape=GroupShape(self.group_shape)))


class FP8ScaledMMLinearKernel(ABC):
    def __init__(self, c: FP8ScaledMMLinearLayerConfig, layer_param_names: list[str]) -> None:
        self.config, self.layer_param_names = c, layer_param_names

    @abstractmethod
    def apply_scaled_mm(self, **named: Any) -> torch.Tensor: ...


class RefusingFloatKernel(FP8ScaledMMLinearKernel):
    """Stands for vLLM's kernels that a GPU or a layer is not made for."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return False, "another GPU"


class OtherFloatKernel(FP8ScaledMMLinearKernel):
    """Stands for vLLM's own kernel for FP8 weights; a layer's result is 7."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.parameters = sorted(name for name, _ in layer.named_parameters())

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.full((*x.shape[:-1], self.config.weight_shape[0]), 7, dtype=x.dtype)

    def apply_scaled_mm(self, **named: Any) -> torch.Tensor:
        raise AssertionError("vLLM calls apply_weights")


class Parameter(nn.Parameter):
    """A parameter that knows which of its dimensions is which."""

    def __new__(cls, data: torch.Tensor, **dims: int) -> Parameter:
        made = super().__new__(cls, data, requires_grad=False)
        made.dims = dims
        return made


def permute_param_layout_(param: Any, input_dim: int, output_dim: int, packed_dim: int | None = None) -> Any:
    if param.dims["input_dim"] != input_dim:
        param.data = param.data.t()
        if "packed_dim" in param.dims:
            param.dims["packed_dim"] = 1 - param.dims["packed_dim"]
    assert packed_dim is None or param.dims["packed_dim"] == packed_dim, "packed along another dimension"
    param.dims |= {"input_dim": input_dim, "output_dim": output_dim}
    return param


def replace_parameter(mod: nn.Module, name: str, new: nn.Parameter) -> None:
    delattr(mod, name)
    mod.register_parameter(name, new)


class QuantizationConfig:
    """vLLM's base of quantisation configs."""


@dataclass
class Parallel:
    dp_size: int = 1
    use_all2all_kernels: bool = False
    enable_eplb: bool = False


@dataclass
class MoeConfig:
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int
    experts_per_token: int
    in_dtype: torch.dtype = torch.float16
    has_bias: bool = False
    is_lora_enabled: bool = False
    moe_parallel_config: Parallel = field(default_factory=Parallel)


class RoutedExperts(nn.Module):
    """The layer that vLLM asks a method for."""

    def __init__(self, moe: MoeConfig, activation: str = "silu") -> None:
        super().__init__()
        self.moe_config, self.activation = moe, activation
        self.layer_name = "model.layers.0.mlp.experts"
        self.apply_router_weight_on_input = False
        self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = None
        self.expert_map: torch.Tensor | None = None


class FusedMoEMethodBase(ABC):
    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor: ...


class ExpertsMethod(FusedMoEMethodBase):
    """Common part of vLLM's methods for experts; ``ran`` says that vLLM's own way was taken."""

    ran = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.ran = True

    def get_fused_moe_quant_config(self, layer: nn.Module) -> str:
        return "vLLM's"

    def apply(self, layer: nn.Module, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return torch.full_like(x, 7)


class AutoGPTQMoEMethod(ExpertsMethod):
    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config


class AutoAWQMoEMethod(AutoGPTQMoEMethod):
    pass


class CompressedTensorsWNA16MarlinMoEMethod(ExpertsMethod):
    """Version 0.26's; version 0.32's stores output channels first and has no "Marlin" in its name."""

    def __init__(self, quant_config: Any) -> None:
        self.weight_quant = self
        self.num_bits, self.group_size = quant_config.weight_bits, quant_config.group_size
        self.strategy = "channel" if self.group_size == -1 else "group"
        self.actorder = "group" if quant_config.desc_act else None


class CompressedTensorsWNA16MoEMethod(CompressedTensorsWNA16MarlinMoEMethod):
    pass


class BuiltConfig(QuantizationConfig):
    """vLLM's config of a format; ``method`` is what it gives experts."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.weight_bits, self.group_size = config.get("bits", 4), config.get("group_size", 32)
        self.desc_act = config.get("desc_act", False)
        self.method = config["method"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BuiltConfig:
        return cls(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return self.method(self) if isinstance(layer, RoutedExperts) else OtherKernel


MODULES = (
    "vllm",
    "vllm.config",
    "vllm.envs",
    "vllm.model_executor",
    "vllm.model_executor.kernels",
    "vllm.model_executor.kernels.linear",
    "vllm.model_executor.kernels.linear.mixed_precision",
    "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel",
    "vllm.model_executor.kernels.linear.scaled_mm",
    "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel",
    "vllm.model_executor.layers",
    "vllm.model_executor.layers.quantization",
    "vllm.model_executor.layers.quantization.base_config",
    "vllm.model_executor.layers.quantization.utils",
    "vllm.model_executor.parameter",
    "vllm.platforms",
    "vllm.scalar_type",
)


def contents(*, cuda: bool = True) -> dict[str, dict[str, Any]]:
    """Name of a module -> what it holds; modules that hold nothing are left out."""
    possible = {PlatformEnum.CUDA: [OtherKernel], PlatformEnum.CPU: [OtherKernel]}
    registered: dict[str, type] = {}
    return {
        "vllm": {"__version__": VERSION},
        "vllm.envs": {"environment_variables": {"VLLM_PORT": lambda: None}},
        "vllm.model_executor.kernels.linear": {
            "PlatformEnum": PlatformEnum,
            "_POSSIBLE_KERNELS": possible,
            "_POSSIBLE_WFP8A16_KERNELS": {PlatformEnum.CUDA: [RefusingFloatKernel, OtherFloatKernel]},
            "choose_mp_linear_kernel": lambda config: next(
                kernel for kernel in possible[PlatformEnum.CUDA] if kernel.can_implement(config)[0]
            ),
        },
        "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel": {
            "MPLinearKernel": MPLinearKernel,
            "MPLinearLayerConfig": MPLinearLayerConfig,
        },
        "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel": {
            "FP8ScaledMMLinearKernel": FP8ScaledMMLinearKernel
        },
        "vllm.model_executor.layers.quantization": {
            "registered": registered,
            "register_quantization_config": lambda quantization: (
                lambda config: registered.setdefault(quantization, config)
            ),
            "get_quantization_config": lambda quantization: BuiltConfig,
        },
        "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
        "vllm.model_executor.layers.quantization.utils": {"replace_parameter": replace_parameter},
        "vllm.model_executor.parameter": {"permute_param_layout_": permute_param_layout_},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cuda=lambda: cuda)},
        "vllm.scalar_type": {
            "scalar_types": types.SimpleNamespace(
                uint4="uint4", uint8="uint8", uint4b8="uint4b8", uint8b128="uint8b128"
            )
        },
    }


def install(monkeypatch: pytest.MonkeyPatch, *, cuda: bool = True) -> types.ModuleType:
    """Make the stub importable as ``vllm``; returns the module that holds the list of kernels."""
    modules = {name: types.ModuleType(name) for name in MODULES}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, module)
    for name in [name for name in sys.modules if name.startswith("marlinq.integrations.vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, held in contents(cuda=cuda).items():
        vars(modules[name]).update(held)
    return modules["vllm.model_executor.kernels.linear"]
