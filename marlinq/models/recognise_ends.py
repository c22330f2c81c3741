"""Recognises what a model computes before its first decoder block and behind its last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from marlinq.models.anatomy import LayerInputs, Norm
from marlinq.models.formulas import close, factor, tidy, tidy_root
from marlinq.models.recording import TOKENS, Call, Recording, Refusal


def outside_blocks(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """(calls before the first block, calls after the last).

    Raises:
        Refusal: there are calls between blocks.
    """
    inside = [place for place, call in enumerate(calls) if call.block >= 0]
    if not inside:
        raise Refusal("model", "no linear and no attention runs inside a decoder block")
    for call in calls[inside[0] : inside[-1]]:
        if call.block < 0:
            raise Refusal(call.name, "runs between two decoder blocks")
    return list(calls[: inside[0]]), list(calls[inside[-1] + 1 :])


class Entry:
    """The part of the model from token ids to the first block."""

    def __init__(self, calls: Sequence[Call], recording: Recording, norms: dict[str, Norm]) -> None:
        self.layer_inputs = _layer_inputs(calls, recording, norms)
        if self.layer_inputs is not None:
            inner = (getattr(self.layer_inputs, name) for name in ("embedding", "projection"))
            known = {*inner, self.layer_inputs.norm.module}
            calls = [call for call in calls if call.name not in known]
        lookups = [call for call in calls if call.kind == "embedding"]
        normalised = [call for call in calls if call.kind == "norm"]
        strange = [call for call in calls if call not in lookups and call not in normalised]
        if strange:
            raise Refusal(strange[0].name, "a linear runs before the first block")
        if not lookups or not torch.equal(lookups[0].input, recording.ids):
            raise Refusal("model", "does not look its tokens up in an embedding")
        if len(lookups) > 2 or len(normalised) > 1:
            raise Refusal((lookups[2:] or normalised[1:])[0].name, "is not expected before the first block")
        self.embedding = lookups[0].name
        self.positions: str | None = None
        self.offset = 0
        self.norm: Norm | None = None
        entered = recording.inputs[0]
        if normalised:
            self.norm = norms[normalised[0].name]
            if not torch.equal(entered, normalised[0].output):
                raise Refusal(normalised[0].name, "what follows this norm is not understood")
            entered = normalised[0].input
        if len(lookups) == 2:
            self.positions = lookups[1].name
            shift = lookups[1].input.flatten() - recording.positions
            self.offset = int(shift[0])
            if shift.numel() != TOKENS or bool((shift != self.offset).any()) or self.offset < 0:
                raise Refusal(self.positions, "is not looked up at the positions of the tokens")
            entered = entered - lookups[1].output.reshape(1, TOKENS, -1)
        scale = factor(entered, lookups[0].output) if entered.shape == lookups[0].output.shape else None
        if scale is None:
            raise Refusal(self.embedding, "what enters the first block is not a multiple of the embedding")
        self.scale = scale


def _layer_inputs(
    calls: Sequence[Call], recording: Recording, norms: Mapping[str, Norm]
) -> LayerInputs | None:
    """The vectors that blocks are called with besides hidden states, from the calls before the first block;
    None if these have another pattern."""
    first, blocks = recording.inputs[0], len(recording.inputs)
    projections = [call for call in calls if call.kind == "linear" and torch.equal(call.input, first)]
    lookups = [call for call in calls if call.kind == "embedding" and torch.equal(call.input, recording.ids)]
    given = [recording.vectors[index] for index in range(blocks)]
    if len(projections) != 1 or len(lookups) != 2 or any(len(each) != 1 for each in given):
        return None
    projected, looked_up = projections[0], lookups[1]
    vectors = torch.stack([each[0] for each in given], 2)
    shape = (1, TOKENS, blocks, -1)
    normed = next((call for call in calls if call.kind == "norm" and call.input.dim() == 4), None)
    if normed is None or normed.input.shape != vectors.shape:
        return None
    if not projected.output.numel() == looked_up.output.numel() == vectors.numel():
        return None
    projection_scale = factor(normed.input, projected.output.view(shape))
    table = looked_up.output.view(shape)
    both = torch.stack((normed.output.flatten(), table.flatten()), 1).double()
    scale, of_table = torch.linalg.lstsq(both, vectors.flatten().double()[:, None]).solution[:, 0].tolist()
    if projection_scale is None or not scale:
        return None
    scale, embedding_scale = tidy_root(scale), tidy_root(of_table / scale)
    if not close(vectors, scale * (normed.output + embedding_scale * table)):
        return None
    return LayerInputs(
        embedding=looked_up.name,
        embedding_scale=embedding_scale,
        projection=projected.name,
        projection_scale=projection_scale,
        norm=norms[normed.name],
        scale=scale,
    )


def read_exit(
    model: PreTrainedModel, calls: Sequence[Call], recording: Recording, norms: dict[str, Norm]
) -> tuple[Norm | None, str, float, float | None]:
    """(final norm, head, logit scale, soft cap)."""
    hidden = recording.outputs[len(recording.outputs) - 1]
    norm: Norm | None = None
    calls = list(calls)
    if calls and calls[0].kind == "norm":
        call = calls.pop(0)
        if not torch.equal(call.input, hidden):
            raise Refusal(call.name, "does not normalise what the last block returns")
        norm, hidden = norms[call.name], call.output
    entered = factor(calls[0].input, hidden) if len(calls) == 1 and calls[0].kind == "linear" else None
    if entered is None:
        part = calls[1].name if len(calls) > 1 else "model"
        raise Refusal(part, "behind the last block there is more than a norm and a head")
    head = calls[0]
    if entered != 1 and getattr(model.get_submodule(head.name), "bias", None) is not None:
        raise Refusal(head.name, f"its input is scaled by {entered:g}, and it has a bias")
    scale = factor(recording.logits, head.output)
    if scale is not None:
        return norm, head.name, tidy(entered * scale), None
    if entered != 1:
        raise Refusal(head.name, f"its input is scaled by {entered:g} and its logits are capped")
    numbers = {value for value in vars(model.config.get_text_config()).values() if isinstance(value, float)}
    for cap in sorted(value for value in numbers if value > 0):
        for logit_scale in sorted({1.0, *numbers} - {0.0}):
            capped = cap * torch.tanh(head.output * logit_scale / cap)
            if close(recording.logits, capped):
                return norm, head.name, logit_scale, cap
    raise Refusal(head.name, "logits are neither a multiple of the head's product nor capped by tanh")
