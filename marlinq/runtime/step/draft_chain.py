"""The forward of a draft head on a GPU, through the kernels of a decode step.

torch computes the input of the head's block, a projection of a normed embedding and a normed hidden state. It
is put where a step expects its embedding table, so that the block runs as any layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels import dependent_launches
from marlinq.runtime.draft_layer import DraftLayer
from marlinq.runtime.step.bound_forward import MOST_TOGETHER, BoundForward
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.forward import DraftForward
from marlinq.runtime.step.functions import linear_of, norm_of
from marlinq.runtime.step.recorded_step import RecordedStep

_TORCH_LAUNCHES = 12
"""Launches of torch for a drafted token: its pair, the block's input, and the choice from the logits."""
_LAUNCH, _BANDWIDTH = 3.2e-6, 3.5e12
"""Seconds that a launch takes besides reading weights, and bytes a second that products of one row read.
Measured on an H200: 1.09 ms for 332 launches of SmolLM2, 1.43 ms for Llama-3-8B's shape in INT4 (4.65 GB)."""
_BEYOND = 64
"""Places in the cache beyond a text's tokens: :data:`MOST_TOGETHER`, rounded up as capacities are."""


class ChainDraft(BoundForward, DraftForward):
    """Computes a draft head on a GPU.

    Its cache takes pairs of a token and a hidden state, by a step of up to :data:`MOST_TOGETHER` neighbouring
    tokens. Such a step and all steps of a draft are one replayed CUDA graph for each number of drafted
    tokens, where ``graphs`` are wanted and can be captured.

    Args:
        layer: a draft head that :func:`marlinq.runtime.step.bound.chain_refusal` does not refuse.
        capacity: L, tokens that the cache can hold.
        most: tokens of a draft at most.
        graphs: whether drafts are captured.
        progress: called after each kernel that is compiled.

    Raises:
        ValueError: the head is refused.
        EnvironmentProblem: a kernel does not compile.
    """

    def __init__(
        self,
        layer: DraftLayer,
        *,
        capacity: int,
        most: int = MOST_TOGETHER - 1,
        graphs: bool = True,
        progress: ReportProgress = no_progress,
    ) -> None:
        # A step appends all its rows to the cache, also those that only fill it up.
        super().__init__(layer.model, layer.anatomy, batch=1, capacity=capacity + _BEYOND)
        self.reason = "drafts of the model's own head"
        self.known, self.cost = 0, layer.nbytes / layer.model_nbytes
        self._count = 0
        self._tokens, self._scale = self.embedding, layer.anatomy.embedding_scale
        self._project = linear_of(layer.model, layer.projection)
        self._token_norm = norm_of(layer.model, layer.token_norm, self.dtype)
        self._hidden_norm = norm_of(layer.model, layer.hidden_norm, self.dtype)
        self.anatomy = replace(layer.anatomy, embedding_scale=1.0)
        self._drafted = torch.zeros(most, dtype=torch.int64, device=self.lengths.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        with self.on_device(), dependent_launches():
            self._pairs = _Rows(self.neighbours(MOST_TOGETHER), self.lengths, self._inputs, progress)
            self._step = _Rows(self, None, self._inputs, progress)
            if graphs and self.lengths.is_cuda:
                self._capture(most)

    def _capture(self, most: int) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        pool = None
        try:
            with torch.cuda.stream(side):
                # Run once outside the graphs: kernels are loaded, and memory allocated, at first use.
                self._compute(min(most, 2))
            torch.cuda.current_stream().wait_stream(side)
            for count in range(most + 1):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._compute(count)
                self._graphs[count] = graph
                # One at a time is replayed, so all may use the same memory.
                pool = graph.pool()
        except RuntimeError as error:
            self._graphs.clear()
            reason = " ".join(str(error).split())[:160]
            self.reason = f"drafts could not be captured into a CUDA graph ({reason})"

    @property
    def launches(self) -> int:
        """Launches of a drafted token."""
        return self._step.launches

    def begin(self) -> None:
        self.known = 0

    @torch.no_grad()
    def start(self, tokens: Sequence[int], hidden: Tensor, most: int) -> None:
        with self.on_device():
            given = torch.tensor(tokens, device=hidden.device)
            for start in range(0, len(tokens), MOST_TOGETHER):
                part = slice(start, start + MOST_TOGETHER)
                self.lengths.fill_(self.known + start)
                self._pairs.give(given[part], hidden[part])
                count = most if start + MOST_TOGETHER >= len(tokens) else 0
                if count in self._graphs:
                    self._graphs[count].replay()
                else:
                    self._compute(count)
            self.known += len(tokens)
            self._count = most

    def drafted(self) -> list[int]:
        tokens: list[int] = self._drafted[: self._count].tolist()
        return tokens

    def _compute(self, count: int) -> None:
        """Append the pairs that were given, and draft ``count`` tokens behind them."""
        if not count:
            self._pairs.append()
            return
        token, behind = self._pairs.start()
        self._drafted[:1].copy_(token)
        if count > 1:
            self.lengths.add_(self._pairs.count)
        for place in range(1, count):
            self._step.give(token, behind)
            token, behind = self._step.start()
            self._drafted[place : place + 1].copy_(token)

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Inputs of the block, [T, hidden]."""
        assert self._token_norm is not None
        assert self._hidden_norm is not None
        x = F.embedding(tokens, self._tokens)
        if self._scale != 1:
            x = x * self._scale
        return self._project(torch.cat((self._token_norm(x), self._hidden_norm(hidden)), -1))

    # Abstract in the base class. A head is never decoded as a model: start() computes it.

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        raise NotImplementedError("a draft head reads pairs of tokens and hidden states")

    def step(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("a draft head reads pairs of tokens and hidden states")


def draft_cost(layer: DraftLayer, head: ChainDraft, model: ChainForward) -> float:
    """Time of one more drafted token, in steps of the model, as an H200 takes them. An estimate rather than a
    measurement, so that the same text is drafted the same way every time."""

    def seconds(launches: int, nbytes: float) -> float:
        return launches * _LAUNCH + nbytes / _BANDWIDTH

    # Layers in one launch take about as long as a launch each besides reading their weights.
    launches = max(len(model.recorded.starts), len(model.layers))
    return seconds(head.launches, layer.nbytes) / seconds(launches, layer.model_nbytes)


class _Rows:
    """A recorded step of a draft head for some pairs of tokens and hidden states.

    Args:
        forward: the head's forward for so many rows.
        start: number of tokens in the cache, int32 [1], from which the lengths of neighbouring rows are
            computed; None for a single row, whose own length counts.
        inputs: function from tokens and hidden states to the block's inputs.
        progress: called after each kernel that is compiled.

    Attributes:
        count: number of pairs that were given, int32 [1].
    """

    def __init__(
        self,
        forward: BoundForward,
        start: Tensor | None,
        inputs: Callable[[Tensor, Tensor], Tensor],
        progress: ReportProgress,
    ) -> None:
        rows, device = forward.batch, forward.lengths.device
        self._inputs = inputs
        # The step gathers its rows from here.
        forward.embedding = torch.zeros((rows, forward.hidden), dtype=forward.dtype, device=device)
        self._made = forward.embedding
        self._places = torch.arange(rows, device=device)
        self._starts = None if start is None else (start, forward.lengths, self._places.int())
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros((rows, forward.hidden), dtype=forward.dtype, device=device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self.count = torch.ones(1, dtype=torch.int32, device=device)
        self._recorded = RecordedStep(forward, progress)

    def give(self, tokens: Tensor, hidden: Tensor) -> None:
        """Set the pairs of the next :meth:`start`.

        Args:
            tokens: int64 [T], as many as rows at most.
            hidden: [T, hidden].
        """
        count, rows = len(tokens), len(self._tokens)
        # Further rows repeat the last pair; what they leave in the cache is overwritten before it is read.
        self._tokens[:count].copy_(tokens)
        self._hidden[:count].copy_(hidden)
        if count < rows:
            self._tokens[count:] = tokens[-1]
            self._hidden[count:] = hidden[-1]
        if rows > 1:
            self._last.fill_(count - 1)
            self.count.fill_(count)

    @property
    def launches(self) -> int:
        """Launches of :meth:`start`."""
        return len(self._recorded.starts) + _TORCH_LAUNCHES

    def append(self) -> None:
        """Append the pairs."""
        self._prepare()
        self._recorded.start_without_logits(self._places)

    def start(self) -> tuple[Tensor, Tensor]:
        """Append the pairs; returns the most likely token behind the last, int64 [1], and the head's hidden
        state there, [1, hidden]."""
        self._prepare()
        logits = self._recorded.start(self._places)
        row = logits.index_select(0, self._last)
        return row.argmax(-1), self._recorded.normed.index_select(0, self._last)

    def _prepare(self) -> None:
        self._made.copy_(self._inputs(self._tokens, self._hidden))
        if self._starts is not None:
            start, lengths, places = self._starts
            torch.add(start, places, out=lengths)
