"""Checkpoints with tensors that are computed from stored ones when they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint.header import TensorInfo
from marlinq.checkpoint.reader import Checkpoint
from marlinq.core.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DerivedCheckpoint(Checkpoint):
    """A checkpoint with other tensors than its folder stores.

    Attributes:
        base: checkpoint on disk.
        computed: functions that compute tensors, by name; all other tensors are read from ``base``.
    """

    base: Checkpoint
    computed: Mapping[str, Callable[[], Tensor]]
    # The computed tensor whose parts were read last, since its next part is likely to be read next.
    _in_parts: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        base: Checkpoint,
        tensors: dict[str, TensorInfo],
        computed: Mapping[str, Callable[[], Tensor]],
        config: dict[str, Any],
    ) -> DerivedCheckpoint:
        """``base`` with ``tensors`` instead of its own, some of them ``computed``, and with ``config``."""
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


def stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The name of the floating-point type that most bytes of unquantised weights are stored in, or None."""
    sizes: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        if name.endswith(".weight") and info.dtype in FLOATS:
            sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def dtype_contradiction(checkpoint: Checkpoint) -> str | None:
    """Message for a folder whose config names one 16-bit type and whose weights are stored in another; or
    None."""
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
