"""Runs decoder blocks one at a time with the same arguments that the whole model would give them.

The outer forward runs once per batch with every block's ``forward`` replaced by a stub. A stub stores the
arguments of its call (masks, position embeddings) and returns its hidden states unchanged, so that the next
block is called. Afterwards block *i* runs on the real outputs of block *i - 1* with its stored arguments.
Values that blocks pass on besides the hidden states come from the same pass
(:mod:`marlinq.models.handed_on`).

Batches have no attention mask: they are padded on the right, and in causal attention no token sees tokens to
its right. Attention therefore takes its fast causal path, and no length x length mask is built.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from marlinq.core import boundaries
from marlinq.core.errors import UnsupportedError
from marlinq.models.block_calls import (
    HIDDEN,
    BlockCall,
    CallRecorder,
    StopForward,
    forwards_replaced,
    unwrapped,
)
from marlinq.models.handed_on import HandedOn, Returned, Shared
from marlinq.models.instance import ModelInstance
from marlinq.models.narrow import NarrowLinears
from marlinq.models.projection import Projection, Receive, tapped

_PLACED_BYTES = 256 << 20


class BlockReplay:
    """The stored calls of every decoder block for every batch.

    Args:
        instance: the loaded model.
        products: dtype that float32 linear layers multiply in, in :meth:`run` and :meth:`inputs`
            (:class:`~marlinq.models.narrow.NarrowLinears`); None for float32.
    """

    def __init__(self, instance: ModelInstance, products: torch.dtype | None = None) -> None:
        self._instance = instance
        self._products = products
        self._calls: list[list[BlockCall]] = []
        self._interned: dict[tuple[object, ...], Tensor] = {}
        self._placed: dict[int, Tensor] = {}
        self._placed_bytes = 0
        self._wrap: Callable[[Tensor], Any] = unwrapped
        self._handed = HandedOn(instance.device)
        self._returned = False  # a block is called with what the one before returned
        self._streams_first = False  # blocks take [streams, B, T, hidden]

    def beside(self) -> BlockReplay:
        """A replay of the same calls for another pass over the text, with values of its own that blocks pass
        on; make it after :meth:`record`."""
        other = copy(self)
        other._handed = HandedOn(self._instance.device)
        return other

    def record(
        self, batches: Iterable[Tensor], beside: Sequence[Mapping[str, Tensor] | None] = ()
    ) -> Iterator[Tensor]:
        """Runs the outer forward once per batch and stores every block's arguments.

        Args:
            batches: token ids, int64 [B, T], padded on the right.
            beside: other inputs of each batch by name, of images; None where there are none, empty if none
                has any.

        Yields:
            the inputs of block 0 for each batch, on the instance's device: [B, T, hidden], or
            [B, T, streams, hidden] in models whose blocks mix several residual streams, also where their
            blocks take [streams, B, T, hidden] (Gemma 3n).

        Raises:
            UnsupportedError: the model changes hidden states between its blocks, or blocks exchange values of
                an unknown kind.
        """
        seeing = any(each is not None for each in beside)
        with self._instance.outer(seeing=seeing) as outermost, torch.no_grad():
            wrap = None
            text = self._instance.model.get_submodule(self._instance.blueprint.replay_root_name)
            for ids, inputs in zip_longest(batches, beside):
                root = text if inputs is None else outermost
                recorder = CallRecorder(
                    self._instance, ids.shape, self._keep, wrap, adding=inputs is not None
                )
                if wrap is None:
                    first = self._instance.block(0)
                    recorder.learn_from = first.forward
                self._run_outer(root, recorder, ids, inputs)
                if wrap is None:
                    wrap = self._wrap = recorder.wrap
                    self._instance.release_block(0)
                if any(call.added is not None for call in recorder.calls):
                    again = CallRecorder(self._instance, ids.shape, self._keep, wrap, adding=True, scale=2)
                    self._run_outer(root, again, ids, inputs)
                    recorder.compare(again)
                self._calls.append(recorder.calls)
                self._returned |= recorder.markers.returned
                self._streams_first = recorder.streams_first
                yield self._outside(recorder.finished())

    def _run_outer(
        self, root: nn.Module, recorder: CallRecorder, ids: Tensor, inputs: Mapping[str, Tensor] | None
    ) -> None:
        with recorder.installed(), suppress(StopForward), boundaries.forward(self._instance.source):
            root(input_ids=ids.to(self._instance.device), use_cache=False, **self._taken(root, inputs))

    def _taken(self, root: nn.Module, inputs: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Members of ``inputs`` that the forward of ``root`` names, on the device and in its dtype."""
        named = inspect.signature(root.forward).parameters
        instance = self._instance
        return {
            key: value.to(instance.device, instance.dtype if value.is_floating_point() else value.dtype)
            for key, value in (inputs or {}).items()
            if key in named
        }

    def run(self, block: int, batch: int, hidden: Tensor) -> Tensor:
        """The output of block ``block`` for ``hidden``, both in the shape that :meth:`record` yields.

        The block's weights must be in memory. Blocks that pass values on must run in order.
        """
        narrow = nullcontext() if self._products is None else NarrowLinears(self._products)
        with torch.no_grad(), narrow:
            return self.call(block, batch, hidden, {})

    def call(self, block: int, batch: int, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The output of :meth:`run`, differentiable, with ``parameters`` (by full name) for the block's
        own."""
        hidden = self._inside(hidden)
        call = self._calls[batch][block]
        if call.added is not None:
            hidden = hidden + self._place(call.added)
        name = self._instance.blueprint.blocks[block].name
        shared: list[tuple[Shared, Any]] = []

        def argument(kept: Any) -> Any:
            if kept is HIDDEN:
                return hidden
            if isinstance(kept, Returned):
                return self._handed.returned(name, block, batch, kept)
            if isinstance(kept, Shared):
                mapping = self._handed.shared(name, batch, kept)
                shared.append((kept, mapping))
                return mapping
            return self._place(kept)

        args = _restore(call.args, argument)
        kwargs = _restore(call.kwargs, argument)
        module = self._instance.model.get_submodule(name)
        inside = {key.removeprefix(f"{name}."): tensor for key, tensor in parameters.items()}
        with boundaries.forward(self._instance.source):
            output = functional_call(module, inside, args, kwargs)
        for marker, mapping in shared:
            self._handed.keep_shared(batch, marker, mapping)
        if isinstance(output, Tensor):
            return self._outside(output)
        if self._returned:
            self._handed.keep_returned(block, batch, output[1:])
        return self._outside(output[0])

    def _inside(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, ...] as the model's blocks take them."""
        return hidden.movedim(2, 0).contiguous() if self._streams_first else hidden

    def _outside(self, hidden: Tensor) -> Tensor:
        """A block's hidden states as [B, T, ...]."""
        return hidden.movedim(0, 2) if self._streams_first else hidden

    @property
    def routed(self) -> bool:
        """Whether a block of the model has experts."""
        return self._instance.blueprint.routed

    def alike(self, batch: int, other: int) -> bool:
        """Whether every block has the same arguments for both batches, apart from hidden states."""
        return all(
            _same((a.args, a.kwargs), (b.args, b.kwargs))
            for a, b in zip(self._calls[batch], self._calls[other], strict=True)
        )

    def logits(self, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The logits for outputs of the last block, differentiable.

        Args:
            hidden: outputs of the last block for R tokens, [R, H]; R is at most the model's positions.
            parameters: full name -> parameter to use instead of the model's own. All others outside the
            blocks
                must be in memory (:meth:`ModelInstance.outer`).

        Returns:
            [R, vocabulary]
        """
        result = self._wrap(self._inside(hidden[None]))

        def stub(*args: Any, **kwargs: Any) -> Any:
            return result

        blocks = [self._instance.model.get_submodule(block.name) for block in self._instance.blueprint.blocks]
        # Ids other than padding: their values don't matter, but transformers warns of padding without a mask.
        padding = self._instance.blueprint.config.get_text_config().pad_token_id
        ids = torch.full((1, len(hidden)), int(padding == 0), device=self._instance.device)
        with forwards_replaced(blocks, [stub] * len(blocks)), boundaries.forward(self._instance.source):
            root = self._instance.blueprint.text_root_name
            inside = {name.removeprefix(f"{root}."): tensor for name, tensor in parameters.items()}
            output = functional_call(
                self._instance.model.get_submodule(root),
                inside,
                kwargs={"input_ids": ids, "use_cache": False},
            )
        logits: Tensor = output.logits[0]
        return logits

    def inputs(
        self,
        block: int,
        batch: int,
        hidden: Tensor,
        projections: Iterable[Projection],
        receive: Receive,
        *,
        done: Callable[[str], bool] | None = None,
    ) -> Tensor | None:
        """Runs a block and records the inputs of some of its projections.

        Args:
            block, batch, hidden: as in :meth:`run`.
            projections: projections to record.
            receive: called with the name and the input of each.
            done: function of a projection's name, called after each, that returns True to stop the block.

        Returns:
            the block's output; None if it was stopped.
        """

        def until_done(name: str, x: Tensor) -> None:
            receive(name, x)
            if done is not None and done(name):
                raise StopForward

        with tapped(self._instance.model, projections, until_done), suppress(StopForward):
            return self.run(block, batch, hidden)
        return None

    def after_blocks(
        self, batches: Iterable[tuple[Tensor, Tensor]], head: Projection, receive: Receive
    ) -> None:
        """Runs the modules between the last block and the output head, whose weight is not needed.

        Args:
            batches: (recorded token ids int64 [B, T], the last block's output [B, T, hidden]) of each batch.
            head: the output head.
            receive: called with the head's name and its input, [B, T, K], for each batch.

        Raises:
            UnsupportedError: the head does not see every token once.
        """
        with self._instance.outer(whole=True) as root, torch.no_grad():
            for ids, hidden in batches:
                seen = self._head_inputs(root, ids, hidden, head)
                if len(seen) != 1 or seen[0].shape[:-1] != ids.shape:
                    found = [list(x.shape) for x in seen] or "none"
                    raise UnsupportedError(
                        f"{head.name}: expected one input of {list(ids.shape)} tokens, found {found}; leave "
                        "the output head unquantised"
                    )
                receive(head.name, seen[0])

    def _head_inputs(self, root: nn.Module, ids: Tensor, hidden: Tensor, head: Projection) -> list[Tensor]:
        """The head's inputs when the last block returns ``hidden``; the head itself does not run."""
        seen: list[Tensor] = []
        result = self._wrap(self._inside(hidden))

        def stub(*args: Any, **kwargs: Any) -> Any:
            return result

        def stop(name: str, x: Tensor) -> None:
            seen.append(x)
            raise StopForward

        blocks = [self._instance.model.get_submodule(block.name) for block in self._instance.blueprint.blocks]
        with (
            forwards_replaced(blocks, [stub] * len(blocks)),
            tapped(self._instance.model, [head], stop),
            suppress(StopForward),
            boundaries.forward(self._instance.source),
        ):
            root(input_ids=ids.to(self._instance.device), use_cache=False)
        return seen

    def _place(self, kept: Tensor) -> Tensor:
        """A stored argument on the device. Small ones stay there, because a copy from the host would make
        every block wait for the one before."""
        placed = self._placed.get(id(kept))
        if placed is None:
            placed = kept.to(self._instance.device)
            if self._placed_bytes + kept.nbytes <= _PLACED_BYTES:
                self._placed[id(kept)] = placed
                self._placed_bytes += kept.nbytes
        return placed

    def _keep(self, tensor: Tensor) -> Tensor:
        """A CPU copy of a tensor, shared by equal tensors, such as masks of batches with one length."""
        copy = tensor.detach().cpu().contiguous()
        raw = copy.flatten().view(torch.uint8).numpy().tobytes()
        key = (copy.dtype, tuple(copy.shape), hashlib.blake2b(raw, digest_size=16).digest())
        if key not in self._interned:
            self._interned[key] = copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy
        return self._interned[key]


def _same(one: Any, other: Any) -> bool:
    """Whether two stored arguments are equal; equal tensors are the same object."""
    if isinstance(one, Tensor) or isinstance(other, Tensor) or one is HIDDEN:
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _restore(value: Any, argument: Callable[[Any], Any]) -> Any:
    """A stored argument with tensors and placeholders replaced by ``argument``."""
    if value is HIDDEN or isinstance(value, (Tensor, Shared, Returned)):
        return argument(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_restore(inner, argument) for inner in value)
    if isinstance(value, dict):
        return {key: _restore(inner, argument) for key, inner in value.items()}
    return value
