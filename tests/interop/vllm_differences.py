"""What the published vLLM and the stub of the plugin's tests disagree on; runs in vLLM's environment.

    python tests/interop/vllm_differences.py

Prints a JSON list of sentences, empty where a plugin that works with the stub finds the same names in vLLM.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import types
from collections.abc import Callable, Iterator
from typing import Any

from tests.integrations.vllm import stub

# Module of vLLM -> its class, and the stub's class with the attributes and methods that the plugin uses.
CLASSES: dict[str, tuple[str, type]] = {
    "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel": (
        "MPLinearKernel",
        stub.OtherKernel,
    ),
    "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel": (
        "FP8ScaledMMLinearKernel",
        stub.OtherFloatKernel,
    ),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": (
        "FusedMoEMethodBase",
        stub.FusedMoEMethodBase,
    ),
    "vllm.model_executor.layers.quantization.auto_gptq": ("AutoGPTQMoEMethod", stub.ExpertsMethod),
    "vllm.model_executor.layers.quantization.auto_awq": ("AutoAWQMoEMethod", stub.ExpertsMethod),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe."
    "compressed_tensors_moe_wna16": ("CompressedTensorsWNA16MoEMethod", stub.ExpertsMethod),
}
# Dataclasses and properties that the plugin reads, by the module and name that vLLM gives them.
FIELDS: dict[tuple[str, str], type] = {
    ("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig"): stub.MoeConfig,
    ("vllm.model_executor.layers.fused_moe.config", "FusedMoEParallelConfig"): stub.Parallel,
}
# Names of the stub alone: what it has registered, and vLLM's own version.
_STUB_ALONE = ("registered", "__version__")
# Fields that some versions have: vLLM 0.26 passes activation order.
_SOME_VERSIONS = ("has_g_idx", "w_gidx_param_name")


def differences() -> Iterator[str]:
    """Sentences, each on one name."""
    for module, held in stub.contents().items():
        real = importlib.import_module(module)
        for name, value in held.items():
            if name not in _STUB_ALONE:
                yield from compared(f"{module}.{name}", getattr(real, name, None), value)
    for module, (name, value) in CLASSES.items():
        real = importlib.import_module(module)
        yield from compared(f"{module}.{name}", getattr(real, name, None), value)
    for (module, name), value in FIELDS.items():
        real = importlib.import_module(module)
        yield from compared(f"{module}.{name}", getattr(real, name, None), value)
    yield from _unfinished()


def compared(path: str, real: Any, value: Any) -> Iterator[str]:
    """Differences of a member of vLLM from the stub's."""
    if real is None:
        yield f"{path} is gone"
    elif isinstance(value, (dict, list)):
        if not isinstance(real, type(value)):
            yield f"{path} is a {type(real).__name__}, not a {type(value).__name__}"
    elif isinstance(value, types.SimpleNamespace):
        yield from (f"{path} has no {name}" for name in vars(value) if not hasattr(real, name))
    elif isinstance(value, type):
        yield from _compared_classes(path, real, value)
    elif callable(value):
        yield from _compared_calls(path, real, value)


def _compared_classes(path: str, real: type, value: type) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        there = {*getattr(real, "__dataclass_fields__", {}), *dir(real), *_SOME_VERSIONS}
        names = [field.name for field in dataclasses.fields(value)]
        yield from (f"{path} has no field {name}" for name in names if name not in there)
        return
    for name in {name for each in value.__mro__[:-1] for name in vars(each)}:
        method = inspect.getattr_static(value, name)
        function = getattr(method, "__func__", method)
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            found = inspect.getattr_static(real, name, None)
            if found is None:
                yield f"{path} has no method {name}"
            else:
                found = getattr(found, "__func__", found)
                yield from _compared_calls(f"{path}.{name}", found, function)


def _compared_calls(path: str, real: Callable[..., Any], value: Callable[..., Any]) -> Iterator[str]:
    """Differences in names and order of parameters; vLLM may have more that are optional."""
    wanted = [
        each for each in inspect.signature(value).parameters.values() if each.name not in _SOME_VERSIONS
    ]
    there = list(inspect.signature(real).parameters.values())
    if any(each.kind is each.VAR_POSITIONAL or each.kind is each.VAR_KEYWORD for each in (*wanted, *there)):
        named = [each.name for each in wanted if each.kind is each.POSITIONAL_OR_KEYWORD]
        found = [each.name for each in there if each.kind is each.POSITIONAL_OR_KEYWORD][: len(named)]
        named = named[: len(found)]
    else:
        named = [each.name for each in wanted]
        found = [each.name for each in there if each.default is each.empty or each.name in named]
    if named != found:
        yield f"{path} takes {', '.join(found)}, not {', '.join(named)}"


def _unfinished() -> Iterator[str]:
    """Abstract methods of vLLM's base classes that the plugin's classes do not define."""
    from marlinq.integrations.vllm.experts import MixtureConfig
    from marlinq.integrations.vllm.float_linear import FloatWeightKernel
    from marlinq.integrations.vllm.linear import IntegerLinearKernel

    for kernel in (IntegerLinearKernel, FloatWeightKernel, MixtureConfig):
        missing: frozenset[str] = getattr(kernel, "__abstractmethods__", frozenset())
        yield from (f"vLLM's base of {kernel.__name__} asks for {name}" for name in sorted(missing))


if __name__ == "__main__":
    print(json.dumps(list(differences())))
