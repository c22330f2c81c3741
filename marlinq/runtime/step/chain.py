"""A step as a chain of kernels, each launched while the one before it still runs.

A layer is: residual and norm, product of q, k and v, rotation and append, attention, output product, residual
and norm, product of gate and up, activation, down product. Prompts take the same kernels with more rows, and
torch's fused attention.
"""

from __future__ import annotations

from contextlib import nullcontext
from weakref import WeakSet

import torch
from torch import Tensor, nn

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels import dependent_launches
from marlinq.models.anatomy import Anatomy
from marlinq.runtime.step.bound import BoundConvolution, BoundLayer, BoundMamba, BoundMixture
from marlinq.runtime.step.bound_forward import BoundForward
from marlinq.runtime.step.products import precompile_prompts
from marlinq.runtime.step.prompts import MOST_ROWS, read_prompts
from marlinq.runtime.step.recorded_step import RecordedStep
from marlinq.runtime.step.walk import Walk, finish

# Rows up to which products are launched dependently. Measured on an H200 with Llama-3-8B's shape: saves 9 %
# of a step at 16 rows, costs 2 % at 64.
_OVERLAPPING_ROWS = 32

# Tokens of a verification, and its time in steps: 1.34 to 1.43 measured for Llama-3-8B's shape on an H200,
# whose products have the same tiles for up to eight rows. In a mixture each row reads other experts.
_VERIFIED = 8, 1.4
_ROUTED_VERIFIED = 4, 1.6
# With delta nets, whose states are kept behind each of the tokens: measured 1.27 for Qwen3.5-27B's shape.
_STATES_VERIFIED = 4, 1.3
# Largest relative difference between the logits of a verification and of steps in a mixture. Products of more
# rows round differently, so that experts of nearly equal scores change places: 0.056 measured with random
# weights of Qwen3-30B-A3B's shape. A row with wrong positions would change logits by tens of per cent.
_ROUTED_TOLERANCE = 0.15

_prepared_for_prompts: WeakSet[nn.Module] = WeakSet()


class ChainForward(BoundForward):
    """Computes ``anatomy`` on a GPU by kernels that overlap with their neighbours.

    Projections that share an input are joined in ``model``. A step's launches are prepared at construction,
    and its kernels compiled.

    Args:
        model: module tree that holds the anatomy's names, all on one GPU.
        anatomy: not refused by :func:`marlinq.runtime.step.bound.chain_refusal`.
        batch, capacity: B and L.
        most_rows: rows of prompts that go through a product at a time, at most.
        keeps_hidden: whether :attr:`hidden_states` are kept.
        progress: called after each kernel that is compiled.

    Raises:
        ValueError: the anatomy is refused.
        EnvironmentProblem: a kernel does not compile.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        *,
        batch: int,
        capacity: int,
        most_rows: int = MOST_ROWS,
        keeps_hidden: bool = False,
        progress: ReportProgress = no_progress,
    ) -> None:
        super().__init__(model, anatomy, batch=batch, capacity=capacity)
        if keeps_hidden:
            shape = (capacity, self.hidden)
            self.hidden_states = torch.zeros(shape, dtype=self.dtype, device=self.device())
        self.most_rows = most_rows
        if model not in _prepared_for_prompts and self.lengths.is_cuda:
            # Joined products have shapes that the model was not compiled for when it was loaded.
            products = [product for layer in self.layers for product in layer.products]
            precompile_prompts(products, self.dtype, self.device_index, most_rows, progress)
            _prepared_for_prompts.add(model)
        overlapping = dependent_launches() if batch <= _OVERLAPPING_ROWS else nullcontext()
        with self.on_device(), overlapping:
            self.recorded = RecordedStep(self, progress)
        self.reason = f"{len(self.recorded.starts)} dependent launches a step"
        self._progress = progress
        self._verification: RecordedStep | None = None
        self._states_verified: Tensor | None = None
        if batch == 1 and not any(_one_at_a_time(layer) for layer in self.layers):
            routed = any(isinstance(layer.mlp, BoundMixture) for layer in self.layers)
            own = _STATES_VERIFIED if self.states.numel() else _VERIFIED
            self.most_verified, self.verification_cost = _ROUTED_VERIFIED if routed else own
            if routed:
                self.verification_tolerance = _ROUTED_TOLERANCE
        if self.multiplied_apart:
            self.reason += f"; multiplied apart: {'; '.join(self.multiplied_apart)}"

    def use(self, recorded: RecordedStep, reason: str) -> None:
        """Use ``recorded`` for all further steps; ``reason`` replaces the forward's reason."""
        self.recorded = recorded
        self.reason = reason

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """As in :class:`~marlinq.runtime.step.forward.Forward`.

        Raises:
            ValueError: ``ids`` is of another batch or longer than the capacity, a length is not 1..T, or an
                id is not of the vocabulary.
        """
        counts = self.check_prompts(ids, lengths)
        batch, width = ids.shape
        # Checked here: the kernel that embeds tokens does not check ids.
        lowest, highest = (int(each) for each in ids.aminmax())
        if lowest < 0 or highest >= self.embedding.shape[0]:
            raise ValueError(f"ids {lowest}..{highest}: expected 0..{self.embedding.shape[0] - 1}")
        self.lengths.zero_()
        each = max(1, self.most_rows // width)
        logits = []
        with self.on_device():
            for begin in range(0, batch, each):
                part = slice(begin, min(begin + each, batch))
                x, pending = read_prompts(self, ids[part].contiguous(), part, counts[part], self.most_rows)
                few = Walk(self, ids[part, 0].contiguous(), part, 1)
                _, normed = few.add(x, pending, self.final_norm)
                logits.append(finish(self.head.run(normed), self.anatomy))
            self.lengths.copy_(lengths)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.no_grad()
    def verify(self, tokens: Tensor) -> Tensor:
        """As in :class:`~marlinq.runtime.step.forward.Forward`, for exactly ``most_verified`` tokens. The
        first call prepares launches and compiles kernels.

        Raises:
            ValueError: another number of tokens.
        """
        if not self.most_verified or len(tokens) != self.most_verified:
            raise ValueError(f"{len(tokens)} tokens: expected {self.most_verified}")
        with self.on_device():
            if self._verification is None:
                neighbours = self.neighbours(len(tokens))
                self._states_verified = neighbours.states_behind
                self._places = torch.arange(len(tokens), dtype=torch.int32, device=self.device())
                self._lengths_of_rows = neighbours.lengths
                with dependent_launches():
                    self._verification = RecordedStep(neighbours, self._progress)
            torch.add(self.lengths, self._places, out=self._lengths_of_rows)
            return self._verification.start(tokens)

    @torch.no_grad()
    def accept(self, length: int) -> None:
        """As in :class:`~marlinq.runtime.step.forward.Forward`."""
        if self._states_verified is not None and self.states.numel():
            last = length - 1 - self.lengths.long()
            torch.index_select(self._states_verified, 0, last, out=self.states[None])
        self.keep(length)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """As in :class:`~marlinq.runtime.step.forward.Forward`; ``tokens`` is contiguous."""
        with self.on_device():
            if self.observe is not None:
                walk = Walk(self, tokens, slice(0, self.batch), 1)
                x, pending = walk.layers()
                _, normed = walk.add(x, pending, self.final_norm, self.lengths, self.hidden_states)
                return finish(self.head.run(normed), self.anatomy)
            return self.recorded.start(tokens)


def _one_at_a_time(layer: BoundLayer) -> bool:
    """Whether a layer takes one token of a row at a time.

    Queries or keys are normalised over all heads, which attention supports only for single rows, or a mixer
    has replaced its state, which can't return to an earlier token.
    """
    wide = any(norm is not None and norm.wide for norm in (layer.heads.query_norm, layer.heads.key_norm))
    return wide or isinstance(layer.mixer, BoundMamba | BoundConvolution) or layer.beside is not None
