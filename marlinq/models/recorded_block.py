"""The recorded calls of one decoder block, which are explained one part after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marlinq.models.anatomy import Groups, Norm, Router
from marlinq.models.recognise_attention import RotaryModules
from marlinq.models.recognise_experts import RoutedExperts
from marlinq.models.recognise_mixers import Mixer
from marlinq.models.recording import AttentionCall, Call, Recording, Refusal


@dataclass(frozen=True)
class KnownParts:
    """What is known of a model's parts before a recording connects them.

    Attributes:
        model: model that was recorded.
        blocks: full names of the decoder blocks, in the order they run in.
        norms: full name -> norm.
        rotary: buffers with rotary frequencies.
        experts: full name -> module of routed experts.
        mixers: full name -> recurrent mixer.
        groups: groups of experts that routers choose first, or None.
        routers: full name of a module of experts -> routers that explain its calls in every recording so far;
            updated by each further recording.
    """

    model: PreTrainedModel
    blocks: tuple[str, ...]
    norms: Mapping[str, Norm]
    rotary: RotaryModules
    experts: Mapping[str, RoutedExperts]
    mixers: Mapping[str, Mixer]
    groups: Groups | None
    routers: dict[str, set[Router]]


class RecordedBlock:
    """The calls of one decoder block and the connections between them.

    Attributes:
        name: full name of the block.
        known: parts of the model.
        calls: all calls of the block, in the order they ran in.
        unexplained: those whose part in the block is not understood yet.
        earlier: calls of attention in the blocks before.
        corrections: full name -> random values of the model's small parameters and buffers.
        vectors: tensors besides hidden states that the block was called with.
        entered, left: hidden states before and behind the block, the latter without ``stream_scale``.
        stream_scale: full name of the buffer that multiplies the block's result, or None.
    """

    def __init__(self, known: KnownParts, recording: Recording, index: int, *, takes_vectors: bool) -> None:
        self.name = known.blocks[index]
        self.known = known
        self.calls = [call for call in recording.calls if call.block == index]
        self.unexplained = list(self.calls)
        attending = [each for each in recording.calls if isinstance(each, AttentionCall)]
        self.earlier = [each for each in attending if each.block < index]
        self.corrections = recording.corrections
        self.vectors = recording.vectors[index] if takes_vectors else []
        self.entered, left = recording.inputs[index], recording.outputs[index]
        scales = [each for each in self.corrections if each.rpartition(".")[0] == self.name]
        self.stream_scale = scales[0] if len(scales) == 1 else None
        self.left = left if self.stream_scale is None else left / self.corrections[self.stream_scale]

    def explain(self, *calls: Call) -> None:
        """Notes that the part of ``calls`` in the block is understood."""
        for call in calls:
            self.unexplained.remove(call)

    def linears(self) -> list[Call]:
        """Unexplained calls of linears."""
        return [call for call in self.unexplained if call.kind == "linear"]

    def enters(self, reads: Tensor) -> bool:
        """Whether ``reads`` is what enters the block, which some blocks cast to the dtype of a norm's weight.

        The recording adds in float32 what a model of that dtype has rounded already."""
        narrow = (self.entered.to(dtype).to(reads.dtype) for dtype in (torch.bfloat16, torch.float16))
        return torch.equal(reads, self.entered) or any(torch.equal(reads, each) for each in narrow)

    def post_norm(self, x: Tensor) -> tuple[Tensor, Norm | None]:
        """(result, norm) of the norm that reads ``x``, which is explained with it; ``x`` and None without."""
        for call in self.unexplained:
            if call.kind == "norm" and torch.equal(call.input, x):
                self.explain(call)
                return call.output, self.known.norms[call.name]
        return x, None

    def source(self, x: Tensor, reader: str, shared: Norm | None = None) -> tuple[Norm | None, Tensor]:
        """(norm that computed ``x``, the norm's input), or (None, ``x``)."""
        for call in self.calls:
            if call.kind == "norm" and torch.equal(call.output, x):
                if call in self.unexplained:
                    self.explain(call)
                elif shared is None or shared.module != call.name:
                    raise Refusal(reader, f"reads {call.name}, which has another part in the block")
                return self.known.norms[call.name], call.input
        return None, x
