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
from marlinq.runtime.step.forward import DraftForward
from marlinq.runtime.step.functions import linear_of, norm_of
from marlinq.runtime.step.prompts import MOST_ROWS, read_prompts
from marlinq.runtime.step.recorded_step import RecordedStep
from marlinq.runtime.step.walk import Walk, finish

_BEYOND = 64
"""Places in the cache beyond a text's tokens: :data:`MOST_TOGETHER`, rounded up as capacities are."""


class ChainDraft(BoundForward, DraftForward):
    """Computes a draft head on a GPU.

    Its cache takes pairs of a token and a hidden state: those of a prompt as prompts are read, later ones by
    a step of up to :data:`MOST_TOGETHER` neighbouring tokens. Steps are replayed CUDA graphs, where
    ``graphs`` are wanted and can be captured.

    Args:
        layer: a draft head that :func:`marlinq.runtime.step.bound.chain_refusal` does not refuse.
        capacity: L, tokens that the cache can hold.
        graphs: whether steps are captured.
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
        graphs: bool = True,
        progress: ReportProgress = no_progress,
    ) -> None:
        # A step appends all its rows to the cache, also those that only fill it up.
        super().__init__(layer.model, layer.anatomy, batch=1, capacity=capacity + _BEYOND)
        self.reason = "drafts of the model's own head"
        self.known, self.cost = 0, layer.share
        self._tokens, self._scale = self.embedding, layer.anatomy.embedding_scale
        self._project = linear_of(layer.model, layer.projection)
        self._token_norm = norm_of(layer.model, layer.token_norm, self.dtype)
        self._hidden_norm = norm_of(layer.model, layer.hidden_norm, self.dtype)
        self.anatomy = replace(layer.anatomy, embedding_scale=1.0)
        with self.on_device(), dependent_launches():
            together = self.neighbours(MOST_TOGETHER)
            self._run = _Rows(together, self.lengths, self._inputs, progress)
            self._step = _Rows(self, None, self._inputs, progress)
            if graphs and self.lengths.is_cuda:
                self._capture()

    def _capture(self) -> None:
        try:
            for rows in (self._run, self._step):
                rows.capture()
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:160]
            self.reason = f"drafts could not be captured into a CUDA graph ({reason})"

    def begin(self) -> None:
        self.known = 0

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], hidden: Tensor, most: int) -> list[int]:
        with self.on_device():
            given = torch.tensor(tokens, device=hidden.device)
            if not self.known and len(tokens) > MOST_TOGETHER:
                token, behind = self._read(given, hidden)
                self.known = len(tokens)
            else:
                for start in range(0, len(tokens), MOST_TOGETHER):
                    part = slice(start, start + MOST_TOGETHER)
                    self.lengths.fill_(self.known)
                    token, behind = self._run.start(given[part], hidden[part])
                    self.known += len(given[part])
            drafted = [token.clone()]
            self.lengths.fill_(self.known)
            while len(drafted) < most:
                token, behind = self._step.start(token, behind)
                drafted.append(token.clone())
            found: list[int] = torch.cat(drafted).tolist()
        return found

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Inputs of the block, [T, hidden]."""
        assert self._token_norm is not None
        assert self._hidden_norm is not None
        x = F.embedding(tokens, self._tokens)
        if self._scale != 1:
            x = x * self._scale
        return self._project(torch.cat((self._token_norm(x), self._hidden_norm(hidden)), -1))

    def _read(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Append the pairs of a text to the empty cache."""
        table = self.embedding
        self.embedding = self._inputs(tokens, hidden)
        rows = torch.arange(len(tokens), device=tokens.device)
        self.lengths.zero_()
        x, pending = read_prompts(self, rows[None], slice(0, 1), [len(tokens)], MOST_ROWS)
        _, normed = Walk(self, rows[:1], slice(0, 1), 1).add(x, pending, self.final_norm)
        self.embedding = table
        return finish(self.head.run(normed), self.anatomy).argmax(-1), normed

    # Abstract in the base class. A head is never decoded as a model: draft() calls _read and captured graphs.

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        raise NotImplementedError("a draft head reads pairs of tokens and hidden states")

    def step(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("a draft head reads pairs of tokens and hidden states")


class _Rows:
    """A recorded step of a draft head for some pairs of tokens and hidden states.

    Args:
        forward: the head's forward for so many rows.
        start: number of tokens in the cache, int32 [1], from which the lengths of neighbouring rows are
            computed; None for a single row, whose own length counts.
        inputs: function from tokens and hidden states to the block's inputs.
        progress: called after each kernel that is compiled.
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
        self._recorded = RecordedStep(forward, progress)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: tuple[Tensor, Tensor] | None = None

    def start(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Append pairs; returns the most likely token behind the last, int64 [1], and the head's hidden state
        there, [1, hidden], in memory that the next call overwrites.

        Args:
            tokens: int64 [T], as many as rows at most.
            hidden: [T, hidden].
        """
        count = len(tokens)
        # Further rows repeat the last pair; what they leave in the cache is overwritten before it is read.
        self._tokens[:count].copy_(tokens)
        self._hidden[:count].copy_(hidden)
        if count < len(self._tokens):
            self._tokens[count:] = tokens[-1]
            self._hidden[count:] = hidden[-1]
            self._last.fill_(count - 1)
        elif count > 1:
            self._last.fill_(count - 1)
        if self._graph is None or self._results is None:
            return self._computed()
        self._graph.replay()
        return self._results

    def capture(self) -> None:
        """Capture the step into a CUDA graph."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Run once outside the graph: kernels are loaded, and memory allocated, at first use.
            self._computed()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self._computed()
        self._graph, self._results = graph, results

    def _computed(self) -> tuple[Tensor, Tensor]:
        self._made.copy_(self._inputs(self._tokens, self._hidden))
        if self._starts is not None:
            start, lengths, places = self._starts
            torch.add(start, places, out=lengths)
        logits = self._recorded.start(self._places)
        row = logits.index_select(0, self._last)
        return row.argmax(-1), self._recorded.normed.index_select(0, self._last)
