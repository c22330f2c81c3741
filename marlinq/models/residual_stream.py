"""Finds the projections that write to the residual stream of a decoder block.

In most blocks the output projections of attention and of the MLP add to a hidden state h, the residual
stream: h + W x. The sum is the input of a norm, or the output of the block. A projection whose output is
scaled, normed or gated before the addition, as in Gemma 2, does not write to the stream in this sense.

Modules are not known by name. One run of a block is recorded, and a projection writes to the stream if the
input of a later module, or the block's output, is the sum of the projection's output and an earlier module's
input, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marlinq.models.projection import Projection

_ROWS = 64
"""tokens on which a sum is checked in all channels, so many that it can't hold by chance"""


@dataclass(frozen=True)
class _Seen:
    name: str
    value: Tensor


class StreamFinder:
    """Records one run of a block to find the projections that write to its residual stream.

    Args:
        model: module from which names start.
        block: name of the block.
        projections: projections of the block; those that are no modules are left out.
    """

    def __init__(self, model: nn.Module, block: str, projections: Iterable[Projection]) -> None:
        self._model, self._block = model, block
        self._projections = [each for each in projections if each.whole]
        # Inputs of modules, in the order of calls; and for each projection its output and the number of
        # inputs recorded before it.
        self._got: list[_Seen] = []
        self._made: dict[str, tuple[int, Tensor]] = {}

    @contextmanager
    def watching(self, hidden: Tensor) -> Iterator[None]:
        """Inside, run the block on ``hidden`` [B, T, H] to record it."""
        self._got, self._made = [_Seen(self._block, hidden)], {}
        inside = tuple(f"{projection.module}." for projection in self._projections)
        with ExitStack() as stack:
            for name, module in self._model.get_submodule(self._block).named_modules(prefix=self._block):
                if not any(each.startswith(f"{name}.") for each in inside):
                    stack.callback(module.register_forward_pre_hook(self._gets(name, hidden)).remove)
            for projection in self._projections:
                if projection.out_features == hidden.shape[-1]:
                    module = self._model.get_submodule(projection.module)
                    stack.callback(module.register_forward_hook(self._makes(projection.name)).remove)
            yield

    def found(self, output: Tensor) -> tuple[dict[str, str], dict[str, Tensor]]:
        """The projections that write to the residual stream.

        Args:
            output: output of the block, [B, T, H].

        Returns:
            name of each such projection -> module whose input is the stream after it (the block itself if it
            is the block's output); and name of this module -> that stream.
        """
        got = [*self._got, _Seen(self._block, output)]
        names = [seen.name for seen in got[1:]]
        places: dict[str, str] = {}
        streams: dict[str, Tensor] = {}
        for projection, (count, made) in self._made.items():
            before = [_rows(seen.value) for seen in got[:count]]
            for seen in got[count:]:
                # A module that is called twice is left out, since its calls can't be told apart later.
                if names.count(seen.name) == 1 and _adds_up(before, made, _rows(seen.value)):
                    places[projection], streams[seen.name] = seen.name, seen.value
                    break
        return places, streams

    def _gets(self, name: str, hidden: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            first = args[0] if args else None
            if isinstance(first, Tensor) and _fits(first, hidden):
                self._got.append(_Seen(name, first))

        return before

    def _makes(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and _fits(output, self._got[0].value):
                # A copy, because the sum may be computed in place.
                self._made[name] = (len(self._got), _rows(output).clone())

        return after


@contextmanager
def streams_at(
    model: nn.Module, modules: Iterable[str], receive: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Inside, ``receive`` is called with the name and the input of each of ``modules`` whenever it runs."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            receive(name, args[0])

        return before

    with ExitStack() as stack:
        for name in modules:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(hook(name)).remove)
        yield


def _fits(x: Tensor, hidden: Tensor) -> bool:
    """Whether ``x`` has as many tokens and channels as ``hidden``; some models flatten the tokens."""
    return x.dim() > 1 and x.shape[-1] == hidden.shape[-1] and x.numel() == hidden.numel()


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])[:_ROWS]


def _adds_up(before: Sequence[Tensor], made: Tensor, after: Tensor) -> bool:
    """Whether ``after`` is the sum of ``made``, which must not be zero, and one of ``before``."""
    if not bool(made.any()):
        return False
    step = max(torch.finfo(each.dtype).eps for each in (made, after))
    y, total = made.to(torch.float32), after.to(torch.float32)
    for each in before:
        h = each.to(torch.float32)
        # The sum is rounded once, or twice if it is computed in a wider dtype: half a step each.
        if bool(((h + y - total).abs() <= step * (h.abs() + y.abs())).all()):
            return True
    return False
