"""Checkpoints some of whose tensors are computed from what is stored, each when it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint.header import TensorInfo
from marlinq.checkpoint.quantization_config import without_quantization_config
from marlinq.checkpoint.quantized import QuantizedCheckpoint
from marlinq.checkpoint.reader import Checkpoint
from marlinq.core.dtypes import FLOATS, ITEM_BYTES, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

TRANSPOSED_WEIGHTS = ("gpt2", "imagegpt", "openai-gpt")
"""``model_type`` of the transformers models whose linears (``Conv1D``) store their weight as [K, N]."""


@dataclass(frozen=True)
class DerivedCheckpoint(Checkpoint):
    """A checkpoint that has other tensors than its folder.

    Attributes:
        base: checkpoint on disk.
        computed: tensors that are no stored ones, by name.
    """

    base: Checkpoint
    computed: Mapping[str, Callable[[], Tensor]]
    # The computed tensor whose parts were asked for last: they come one after the other.
    _in_parts: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        base: Checkpoint,
        tensors: dict[str, TensorInfo],
        computed: Mapping[str, Callable[[], Tensor]],
        config: dict[str, Any],
    ) -> DerivedCheckpoint:
        """``base`` with other ``tensors``, of which some are ``computed``, and another ``config``."""
        return cls(
            path=base.path,
            config=config,
            tensors=tensors,
            side_files=base.side_files,
            files=base.files,
            base=base,
            computed=computed,
        )

    def computes(self, name: str) -> bool:
        return name in self.computed

    def tensor(self, name: str) -> Tensor:
        return self.computed[name]() if name in self.computed else self.base.tensor(name)

    def part(self, name: str, index: int) -> Tensor:
        if name not in self.computed:
            return self.base.part(name, index)
        if name not in self._in_parts:
            self._in_parts.clear()
            self._in_parts[name] = self.tensor(name)
        whole = self._in_parts.get(name)
        return (self.tensor(name) if whole is None else whole)[index].clone()

    def check_unchanged(self) -> None:
        self.base.check_unchanged()

    def identity(self) -> str:
        return self.base.identity()

    def state(self) -> str:
        return self.base.state()


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


def stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The name of the floating-point type that most bytes of unquantised weights are stored in, or None."""
    sizes: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        if name.endswith(".weight") and info.dtype in FLOATS:
            sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def dtype_contradiction(checkpoint: Checkpoint) -> str | None:
    """What is said of a folder whose config names one 16-bit type and whose weights are stored in another."""
    named, stored = model_dtype(checkpoint.config), stored_dtype(checkpoint)
    if named == stored or not {named, stored} <= {"float16", "bfloat16"}:
        return None
    return f"config.json names {named}, but weights are stored in {stored}"


def model_dtype(config: Mapping[str, object]) -> str | None:
    """The name of the floating-point type that ``config.json`` gives the model, or None."""
    inner = config.get("text_config")
    for level in (config, inner if isinstance(inner, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            value = level.get(key)
            if isinstance(value, str) and value in FLOATS:
                return value
    return None
