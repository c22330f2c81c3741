"""Speed of decoding with a checkpoint: prefill, steps, and the weights that a step reads."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marlinq.core import boundaries
from marlinq.core.devices import read_clock
from marlinq.core.display import Block, Shown, Table, lines
from marlinq.core.errors import UsageError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.operations.bench.hardware import hardware_line
from marlinq.runtime import Decoder, LoadedModel, StepDecision, load
from marlinq.runtime.generation import position_limit

_REPEATS = 3
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class DecodeBench(Shown):
    """How fast a checkpoint decodes, and on what.

    Attributes:
        checkpoint: the folder.
        hardware: processor and versions.
        batch: sequences decoded together.
        prompt_tokens: tokens of each prompt.
        new_tokens: steps that were timed.
        first_token_seconds: from the prompts to their first new tokens; median of three.
        step_seconds: mean time of a decode step.
        weight_bytes: weights and scales that a step reads, embedding tables aside.
        step: how steps ran, and why.
        notes: how the quantised linears were multiplied, and what else to know.
    """

    checkpoint: str
    hardware: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    step_seconds: float
    weight_bytes: int
    step: StepDecision
    notes: tuple[str, ...]

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of all sequences over the time to the first token."""
        return self.batch * self.prompt_tokens / self.first_token_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens of all sequences over the time of the steps."""
        return self.batch / self.step_seconds

    @property
    def weight_bandwidth(self) -> float:
        """Bytes of weights read a second while decoding."""
        return self.weight_bytes / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **asdict(self),
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "weight_bandwidth": self.weight_bandwidth,
        }

    def display(self) -> list[Block]:
        """The figures, what each of them means, and what they were measured on."""
        first = f"{1e3 * self.first_token_seconds:.1f} ms"
        prefill = f"from the prompt to the first new token: {self.prefill_tokens_per_second:.1f} tokens/s"
        rows = (
            ("first token", first, prefill),
            ("decode step", f"{1e3 * self.step_seconds:.3f} ms", "one more token for every sequence"),
            ("decode", f"{self.decode_tokens_per_second:.1f} tokens/s", "new tokens of all sequences"),
            ("weights", f"{self.weight_bytes / 1e9:.3f} GB", "what a step reads, embedding tables aside"),
            ("", f"{self.weight_bandwidth / 1e9:.1f} GB/s", "the same over the time of a step"),
        )
        job = f"{self.batch} x ({self.prompt_tokens} prompt + {self.new_tokens} new) tokens"
        return [
            lines(f"{self.checkpoint}: {job}"),
            Table(("", "figure", "meaning"), rows, numbers=(1,)),
            lines(f"steps: {self.step.mode}: {self.step.reason}", self.hardware, *self.notes),
        ]


def bench_decode(
    checkpoint: str | os.PathLike[str] | LoadedModel,
    *,
    batch: int = 1,
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: ReportProgress = no_progress,
) -> DecodeBench:
    """Times prefill and greedy decoding of random prompts; end tokens are decoded over.

    Args:
        checkpoint: a folder, a Hub id, or a model that is loaded already.
        batch: sequences decoded together.
        prompt_tokens: tokens of each prompt.
        new_tokens: steps to time.
        device: as in :func:`marlinq.runtime.load`; a CPU measures the CPU path, and says so.
        dtype: as in :func:`marlinq.runtime.load`.
        progress: called with (what is being done, steps done, steps in all).

    Raises:
        UsageError: a count below 1, or more tokens than the model has positions for.
        CheckpointError: the checkpoint can't be loaded.
    """
    for name, value in (("batch", batch), ("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
        if value < 1:
            raise UsageError(f"{name}: expected 1 or more, found {value}")
    loaded = (
        checkpoint
        if isinstance(checkpoint, LoadedModel)
        else load(checkpoint, device=device, dtype=dtype, progress=progress)
    )
    length = prompt_tokens + new_tokens
    limit = position_limit(loaded.model)
    if limit is not None and length > limit:
        raise UsageError(
            f"prompt + new tokens: {length}, but {loaded.path} has positions for {limit}; lower them"
        )
    prompts = _random_prompts(loaded, batch, prompt_tokens)
    with boundaries.forward(loaded.path):
        # A model that runs once runs: no boundary is timed.
        decoder = Decoder(loaded.model, batch=batch, max_length=length)
        _warm_up(decoder, prompts)
    first_token = []
    for repeat in range(_REPEATS):
        start = read_clock(loaded.device)
        tokens = decoder.prefill(prompts).argmax(-1)
        first_token.append(read_clock(loaded.device) - start)
        progress("prefill", repeat + 1, _REPEATS)
    start = read_clock(loaded.device)
    for index in range(new_tokens):
        tokens = decoder.step(tokens).argmax(-1)
        progress("decode", index + 1, new_tokens)
    seconds = read_clock(loaded.device) - start
    _, *how = loaded.report()
    if loaded.device.type == "cpu":
        how.insert(0, "no GPU was used: these are the figures of the CPU path, not of the kernel")
        if loaded.decisions:
            how.insert(
                1,
                "on a CPU quantised weights are multiplied as dense ones: a step reads as many bytes as the "
                "unquantised model's, and takes as long",
            )
    return DecodeBench(
        checkpoint=str(loaded.path),
        hardware=hardware_line(loaded.device),
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        first_token_seconds=statistics.median(first_token),
        step_seconds=seconds / new_tokens,
        weight_bytes=weight_bytes(loaded.model),
        step=decoder.decision,
        notes=tuple(how),
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers that one decode step reads; of an embedding table it reads a row."""
    tensors: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensors[tensor.data_ptr()] = tensor.nbytes
    return sum(tensors.values())


def _random_prompts(loaded: LoadedModel, batch: int, length: int) -> Tensor:
    vocabulary = loaded.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (batch, length), generator=generator).to(loaded.device)


def _warm_up(decoder: Decoder, prompts: Tensor) -> None:
    """Whatever is compiled or allocated at first use; kernels are chosen by the number of rows, so on a GPU
    the whole prompt counts."""
    ids = prompts if prompts.is_cuda else prompts[:, :_WARM_UP_TOKENS]
    decoder.step(decoder.prefill(ids).argmax(-1))
