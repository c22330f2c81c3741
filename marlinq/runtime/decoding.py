"""One token after another through a key-value cache: eager, or as a replayed CUDA graph."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import StaticLayer

# A captured step runs the same kernels as an eager one over a longer, masked cache, so its logits differ
# by rounding only. State that was frozen at capture changes them by tens of percent.
_REPLAY_TOLERANCE = 0.03
_PROBE_TOKENS = 4
# Attention kernels want the rows of their mask aligned.
_CACHE_MULTIPLE = 64


@dataclass(frozen=True)
class StepDecision:
    """How decode steps run, and why."""

    mode: Literal["cuda-graph", "eager"]
    reason: str


class Decoder:
    """The forward passes of decoding: one :meth:`prefill`, then one :meth:`step` a token.

    On a CUDA device the step is captured once into a CUDA graph over a cache of fixed length and replayed,
    which removes the cost of launching its kernels one by one. ``decision`` says which way was taken.

    Args:
        model: a causal language model in evaluation mode.
        batch: sequences decoded together.
        max_length: tokens that a sequence will hold at most, prompt included.
        graphs: False keeps CUDA steps eager.
    """

    def __init__(
        self, model: PreTrainedModel, *, batch: int = 1, max_length: int, graphs: bool = True
    ) -> None:
        self._model = model
        self._batch = batch
        self._max_length = max_length
        self._device = model.device
        # Only the last position's logits are wanted; most models can leave out the others.
        parameters = inspect.signature(model.forward).parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = torch.zeros((batch, 1), dtype=torch.int64, device=self._device)
        self._logits: Tensor | None = None
        self._cache: Cache = DynamicCache(config=model.config)
        if self._device.type != "cuda":
            self.decision = StepDecision("eager", f"CUDA graphs need a GPU; this is {self._device.type}")
        elif not graphs:
            self.decision = StepDecision("eager", "eager steps were asked for")
        else:
            self.decision = self._try_capture()

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        """Starts over with ``ids``, int64 [batch, length]; returns the last logits [batch, vocabulary]."""
        if self._graph is None:
            self._cache = DynamicCache(config=self._model.config)
        else:
            self._cache.reset()
        return self._forward(ids)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Appends ``tokens``, int64 [batch]; returns logits [batch, vocabulary], valid until the next."""
        if self._graph is None or self._logits is None:
            return self._forward(tokens[:, None])
        self._tokens.copy_(tokens[:, None])
        self._graph.replay()
        return self._logits

    def _forward(self, ids: Tensor) -> Tensor:
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **self._last_only)
        logits: Tensor = output.logits[:, -1]
        return logits

    @torch.no_grad()
    def _try_capture(self) -> StepDecision:
        if not _attention_only(self._cache):
            return StepDecision("eager", "the model has layers without an ordinary key-value cache")
        if self._max_length < _PROBE_TOKENS:
            return StepDecision("eager", "too few tokens to be worth a capture")
        # A full-length layer serves sliding windows too: their masks hide what is too far back. The
        # library's own sliding layer counts in a Python integer, which a graph would freeze.
        length = -(-self._max_length // _CACHE_MULTIPLE) * _CACHE_MULTIPLE
        layers = [StaticLayer(max_cache_len=length) for _ in self._cache.layers]
        probe = torch.arange(_PROBE_TOKENS, device=self._device).repeat(self._batch, 1)
        expected = self._forward(probe)
        self._cache = Cache(layers=layers)
        try:
            with torch.cuda.device(self._device):
                self._capture(probe)
                replayed = self._probe(probe)
        except RuntimeError as error:
            self._graph = None
            reason = " ".join(str(error).split())[:160]
            return StepDecision("eager", f"the step could not be captured into a CUDA graph ({reason})")
        difference = float((replayed.float() - expected.float()).norm() / expected.float().norm())
        if not difference <= _REPLAY_TOLERANCE:
            self._graph = None
            return StepDecision(
                "eager", f"a captured step gave wrong logits (relative error {difference:.2g})"
            )
        return StepDecision("cuda-graph", "one captured step is replayed for each token")

    def _capture(self, probe: Tensor) -> None:
        self._forward(probe[:, :1])
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            # Whatever is compiled, loaded or allocated at first use happens here, outside the graph.
            self._forward(self._tokens)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._forward(self._tokens)
        self._graph = graph

    def _probe(self, probe: Tensor) -> Tensor:
        """The last logits of ``probe`` when all but its first two tokens go through replayed steps."""
        self.prefill(probe[:, :2])
        logits = self.step(probe[:, 2])
        for place in range(3, probe.shape[1]):
            logits = self.step(probe[:, place])
        return logits.clone()


def _attention_only(cache: Cache) -> bool:
    """True when the model's own cache holds keys and values in every layer, and nothing else."""
    kinds = {type(layer).__name__ for layer in cache.layers}
    return bool(kinds) and kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}
