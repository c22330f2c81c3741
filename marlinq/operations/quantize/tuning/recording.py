"""A student's passes recorded once and played for every micro-batch that is alike.

A pass of a small model is tens of thousands of small kernels. The host takes longer to launch them than the
GPU to run them, unless it launches them all at once, as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from marlinq.operations.quantize.tuning.student import Kept, Student, backward_kept

# Of the memory that is free when a pass is recorded, what it may keep; logits and the optimiser come later.
_SHARE_OF_FREE = 0.4


class Passes(Protocol):
    """The forward and the backward pass of a student over a micro-batch."""

    keeps_gradients: bool
    """Gradients are added to the tensors that are there, which have to stay."""

    def forward(self, batch: int, hidden: Tensor) -> tuple[list[Tensor], Tensor]:
        """As :meth:`Student.forward`; what is returned stands until the next pass."""

    def backward(
        self,
        batch: int,
        inputs: list[Tensor],
        gradient: Tensor,
        after_block: Callable[[], None] | None = None,
    ) -> None:
        """As :meth:`Student.backward`; without ``after_block`` where gradients stay."""


class Direct:
    """The student's own passes."""

    keeps_gradients = False

    def __init__(self, student: Student) -> None:
        self.forward = student.forward
        self.backward = student.backward


class Recorded:
    """Passes over ``alike`` batches as two CUDA graphs, all others as the student runs them.

    Where the GPU has room for all that autograd keeps of a forward pass, the backward pass runs no block
    again: the values are the same, a step takes less time.

    Args:
        student: its parameters' gradients are replaced by zeros, and have to stay where they are then.
        alike: batches of one shape, which blocks are called with the same arguments for.
        hidden: float32 [B, T, H], what enters the first block for one of them.
        leaves: all that an optimiser changes in the student's blocks.
    """

    keeps_gradients = True

    def __init__(
        self, student: Student, alike: Sequence[int], hidden: Tensor, leaves: Sequence[Tensor]
    ) -> None:
        self._student = student
        self._alike = frozenset(alike)
        batch = alike[0]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        self._entering = hidden.clone()
        self._gradient = torch.zeros_like(hidden)
        side = torch.cuda.Stream(hidden.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(hidden.device))
        with torch.cuda.stream(side):
            # Libraries set themselves up at their first call, which can't be recorded. The gradients it adds
            # are zero.
            inputs, _ = student.forward(batch, self._entering)
            student.backward(batch, inputs, self._gradient)
        torch.cuda.current_stream(hidden.device).wait_stream(side)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        keeps = _fits(student.kept_bytes(batch, hidden), hidden.device)
        kept: list[Kept] = []
        self._inputs: list[Tensor] = []
        with torch.cuda.graph(self._forward):
            if keeps:
                kept, self._leaving = student.forward_kept(batch, self._entering)
            else:
                self._inputs, self._leaving = student.forward(batch, self._entering)
        with torch.cuda.graph(self._backward, pool=self._forward.pool()):
            if keeps:
                backward_kept(kept, self._gradient)
            else:
                student.backward(batch, list(self._inputs), self._gradient)

    def forward(self, batch: int, hidden: Tensor) -> tuple[list[Tensor], Tensor]:
        """As :meth:`Passes.forward`."""
        if batch not in self._alike:
            return self._student.forward(batch, hidden)
        self._entering.copy_(hidden)
        self._forward.replay()
        return self._inputs, self._leaving

    def backward(
        self,
        batch: int,
        inputs: list[Tensor],
        gradient: Tensor,
        after_block: Callable[[], None] | None = None,
    ) -> None:
        """As :meth:`Passes.backward`; of a batch that was just run forward."""
        if after_block is not None:
            raise ValueError("a recorded pass can't be interrupted between two blocks")
        if batch not in self._alike:
            self._student.backward(batch, inputs, gradient)
            return
        self._gradient.copy_(gradient)
        self._backward.replay()


def _fits(nbytes: int, device: torch.device) -> bool:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return nbytes <= _SHARE_OF_FREE * free
