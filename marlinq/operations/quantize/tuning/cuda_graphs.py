"""Records a student's passes as CUDA graphs and replays them for every micro-batch of the same shape.

A pass of a small model is tens of thousands of small kernels, which the host launches more slowly than the
GPU runs them. A CUDA graph launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from marlinq.operations.quantize.tuning.student import Kept, Student, backward_kept

_SHARE_OF_FREE = 0.4
"""share of the GPU's free memory that a recorded pass may keep; logits and the optimiser need the rest"""


class Passes(Protocol):
    """The forward and the backward pass of a student over a micro-batch."""

    keeps_gradients: bool
    """Whether gradients are added to existing tensors, which must then stay allocated."""

    def forward(self, batch: int, hidden: Tensor) -> tuple[list[Tensor], Tensor]:
        """Does the same as :meth:`Student.forward`; the next pass overwrites the result."""

    def backward(
        self,
        batch: int,
        inputs: list[Tensor],
        gradient: Tensor,
        after_block: Callable[[], None] | None = None,
    ) -> None:
        """Does the same as :meth:`Student.backward`; ``after_block`` must be None with
        ``keeps_gradients``."""


class Direct:
    """The student's own passes, without recording."""

    keeps_gradients = False

    def __init__(self, student: Student) -> None:
        self.forward = student.forward
        self.backward = student.backward


class Recorded:
    """Passes over ``alike`` batches as two CUDA graphs, and over others as the student runs them.

    Where the GPU has room for all tensors that autograd keeps of a forward pass, the backward pass does not
    repeat the blocks. The values are the same; a step takes less time.

    Args:
        student: the student; its parameters' gradients become zeros, and must stay allocated from then on.
        alike: numbers of the batches of one shape for which blocks are called with the same arguments.
        hidden: float32 [B, T, H], input of the first block for one of these batches.
        leaves: all tensors in the student's blocks that an optimiser changes.
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
            # A first pass sets up libraries, which can't be recorded. Its gradients are zero.
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
        """Does the same as :meth:`Passes.forward`."""
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
        """Does the same as :meth:`Passes.backward`, for the batch of the last forward pass."""
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
