"""Read a quantised checkpoint as one with dense weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from marlinq.checkpoint.derived import DerivedCheckpoint, model_dtype
from marlinq.checkpoint.header import TensorInfo
from marlinq.checkpoint.quantization_config import without_quantization_config
from marlinq.checkpoint.quantized import QuantizedCheckpoint
from marlinq.checkpoint.reader import Checkpoint
from marlinq.core.dtypes import ITEM_BYTES, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

TRANSPOSED_WEIGHTS = ("gpt2", "imagegpt", "openai-gpt")
"""``model_type`` of the transformers models whose linears (``Conv1D``) store their weight as [K, N]."""


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with a dense weight, in the model's dtype, for every quantised linear.

    Each weight is dequantised when it is read. A checkpoint that is not quantised is returned as it is.

    Raises:
        CheckpointError, UnsupportedError: as :meth:`QuantizedCheckpoint.of`.
    """
    view = QuantizedCheckpoint.of(checkpoint)
    if view is None:
        return checkpoint
    return _dense(view)


def _dense(view: QuantizedCheckpoint) -> DerivedCheckpoint:
    checkpoint = view.checkpoint
    dtype = model_dtype(checkpoint.config) or "bfloat16"
    transposed = checkpoint.config.get("model_type") in TRANSPOSED_WEIGHTS
    carried = set(view.passthrough)
    codes = {view.codes_name(module): module for module in view.modules}
    tensors: dict[str, TensorInfo] = {}
    computed: dict[str, Callable[[], Tensor]] = {}

    def weight_of(module: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            weight = view.load(module).dequantize(torch_dtype(dtype))
            return weight.t().contiguous() if transposed else weight

        return read

    for name, info in checkpoint.tensors.items():
        if name in carried:
            tensors[name] = info
        elif (module := codes.get(name)) is not None:
            spec = view.modules[module]
            shape = spec.shape if transposed else spec.shape[::-1]
            weight = f"{module}.weight"
            nbytes = prod(shape) * ITEM_BYTES[dtype]
            tensors[weight] = replace(info, name=weight, dtype=dtype, shape=shape, nbytes=nbytes)
            computed[weight] = weight_of(module)
    return DerivedCheckpoint.of(checkpoint, tensors, computed, without_quantization_config(checkpoint.config))
