"""Records arguments with which a model calls its decoder blocks, whose ``forward`` is a stub meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marlinq.core.errors import UnsupportedError
from marlinq.models.handed_on import Markers
from marlinq.models.instance import ModelInstance

_ONCE = "calibration takes models that run every block once, in order; --method rtn needs no text"
"""end of error messages"""


class Hidden:
    """Placeholder for the hidden states in a stored call."""


HIDDEN = Hidden()


class StopForward(BaseException):
    """Ends the model's forward at the last block. A BaseException, so that no error handler catches it."""


@dataclass(frozen=True)
class BlockCall:
    """A call of a block.

    Attributes:
        args, kwargs: arguments, with :data:`HIDDEN` for the hidden states.
        added: tensor that the model adds to the hidden states before the block; None if it adds none.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    added: Tensor | None = None


class CallRecorder:
    """The stubs for one forward of a model around its blocks, and the calls that they stored.

    Args:
        instance: the loaded model.
        shape: [B, T] of the token ids.
        keep: function that stores a tensor.
        wrap: function that wraps hidden states as a block returns them; None if it is still to be learnt
            from the first block's real output.
        adding: whether the model may add something to hidden states between blocks, as vision-language models
            add features of an image after each of the first blocks.
        scale: factor by which the first block's stub multiplies the hidden states.
    """

    def __init__(
        self,
        instance: ModelInstance,
        shape: torch.Size,
        keep: Callable[[Tensor], Tensor],
        wrap: Callable[[Tensor], Any] | None,
        *,
        adding: bool = False,
        scale: float = 1,
    ) -> None:
        self._instance, self._shape = instance, shape
        self._adding, self._scale = adding, scale
        self._keep = keep
        self._current: Tensor = torch.empty(0)
        self._initial: Tensor | None = None
        self.streams_first = False
        self.wrap: Callable[[Tensor], Any] = wrap or unwrapped
        self.learn_from: Callable[..., Any] | None = None
        self.calls: list[BlockCall] = []
        self.markers = Markers()
        # Copies by the original's id, because blocks share arguments; the original is kept alive for its id.
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        blocks = [self._instance.model.get_submodule(block.name) for block in self._instance.blueprint.blocks]
        with forwards_replaced(blocks, [self._stub(index) for index in range(len(blocks))]):
            yield

    def finished(self) -> Tensor:
        if self._initial is None or len(self.calls) != len(self._instance.blueprint.blocks):
            raise UnsupportedError(
                f"{self._instance.blueprint.blocks_name}: the model ran {len(self.calls)} of its "
                f"{len(self._instance.blueprint.blocks)} blocks on text; {_ONCE}"
            )
        return self._initial

    def _stub(self, index: int) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            name = self._instance.blueprint.blocks[index].name
            if index != len(self.calls):
                before = "blocks before it did not" if index > len(self.calls) else "it had already"
                raise UnsupportedError(f"{name}: {before} run on text; {_ONCE}")
            if index == 0:
                self._initial = self._current = _first_hidden(name, self._shape, args, kwargs)
                self.streams_first = self._current.shape[:2] != self._shape
            added = None
            if self._adding and index:
                hidden = _first_hidden(name, self._shape, args, kwargs)
                if not self._is_current(hidden):
                    added, self._current = self._keep(hidden - self._current), hidden
            seen = [value for value in (*args, *kwargs.values()) if self._is_current(value)]
            if len(seen) != 1:
                raise UnsupportedError(
                    f"{name}: expected the previous block's hidden states as they were, found them "
                    f"{'changed' if not seen else 'more than once'}; such models can't run block by block"
                )
            self.calls.append(
                BlockCall(
                    tuple(self._freeze(name, value) for value in args),
                    {key: self._freeze(f"{name}({key})", value) for key, value in kwargs.items()},
                    added,
                )
            )
            if index == 0 and self.learn_from is not None:
                self.wrap = _wrapper(name, self.learn_from(*args, **kwargs))
            if index == len(self._instance.blueprint.blocks) - 1:
                raise StopForward
            if index == 0 and self._scale != 1:
                self._current = self._current * self._scale
            output = self.wrap(self._current)
            return output if isinstance(output, Tensor) else self._marked(output)

        return stub

    def compare(self, scaled: CallRecorder) -> None:
        """Checks that the model added the same to the hidden states of ``scaled``.

        Raises:
            UnsupportedError: it did not, so it does something else than add.
        """
        assert self._initial is not None
        # Both sums were rounded, and so were their differences from what they were added to.
        most = 8 * torch.finfo(self._initial.dtype).eps * float(scaled._current.abs().max())
        for index, (call, other) in enumerate(zip(self.calls, scaled.calls, strict=True)):
            one, two = call.added, other.added
            if (one is None) != (two is None) or (
                one is not None and two is not None and not float((one - two).abs().max()) <= most
            ):
                raise UnsupportedError(
                    f"{self._instance.blueprint.blocks[index].name}: the model changes hidden states "
                    "before it by more than adding to them; calibrate on text without images"
                )

    def _marked(self, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """``output`` with marked values, which are recognised when the next block is called with them."""
        hidden, *others = output
        marks = self.markers.returns(len(others))
        known = (each is None or isinstance(each, Tensor) for each in others)
        chosen = (
            mark if is_known else each for mark, is_known, each in zip(marks, known, others, strict=True)
        )
        return (hidden, *chosen)

    def _is_current(self, value: Any) -> bool:
        """Whether ``value`` is the previous block's output, or a view of all of it."""
        return isinstance(value, Tensor) and (
            value.data_ptr() == self._current.data_ptr()
            and value.shape == self._current.shape
            and value.stride() == self._current.stride()
        )

    def _freeze(self, where: str, value: Any) -> Any:
        if self._is_current(value):
            return HIDDEN
        marker = self.markers.of(where, value)
        if marker is not None:
            return marker
        if isinstance(value, Tensor):
            if id(value) not in self._kept:
                self._kept[id(value)] = (value, self._keep(value))
            return self._kept[id(value)][1]
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(self._freeze(where, inner) for inner in value)
        if isinstance(value, dict) and value:
            return {key: self._freeze(where, inner) for key, inner in value.items()}
        raise UnsupportedError(
            f"{where}: blocks of this model exchange a {type(value).__name__}; expected tensors and plain "
            "values, so the model can't run block by block"
        )


@contextmanager
def forwards_replaced(blocks: list[nn.Module], stubs: list[Callable[..., Any]]) -> Iterator[None]:
    """Inside, every block's ``forward`` is replaced by its stub."""
    replaced = [block.__dict__.get("forward") for block in blocks]
    for block, stub in zip(blocks, stubs, strict=True):
        block.forward = stub
    try:
        yield
    finally:
        for block, forward in zip(blocks, replaced, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def _first_hidden(name: str, shape: torch.Size, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if (
        not isinstance(hidden, Tensor)
        or not hidden.is_floating_point()
        or shape not in (hidden.shape[:2], hidden.shape[1:-1])
    ):
        found = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise UnsupportedError(
            f"{name}: expected hidden states of {list(shape)} tokens as its first argument, found {found}; "
            "such models can't run block by block"
        )
    return hidden


def _wrapper(name: str, output: Any) -> Callable[[Tensor], Any]:
    """Function that wraps hidden states as a block returns them, learnt from the first block's real
    output."""
    if isinstance(output, Tensor):
        return lambda hidden: hidden
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        rest = tuple(output[1:])
        return lambda hidden: (hidden, *rest)
    raise UnsupportedError(
        f"{name}: returns {type(output).__name__}; expected hidden states, or a tuple that starts with them"
    )


def unwrapped(hidden: Tensor) -> Any:
    return hidden
