"""Recognises the MLP of a recorded block: two or three linears and the activation between them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from marlinq.models.anatomy import MLP, Slices
from marlinq.models.formulas import ACTIVATIONS, close
from marlinq.models.recorded_block import RecordedBlock
from marlinq.models.recording import Refusal


def _numbers(values: object) -> Iterator[float]:
    """All numbers of a config that may be factors: neither whole nor near zero."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _numbers(value)
    elif isinstance(values, float) and not values.is_integer() and 1e-3 < abs(values) < 1e3:
        yield values


def read_mlp(block: RecordedBlock) -> tuple[MLP, Tensor, Tensor]:
    """The MLP that all unexplained linears of ``block`` make: (MLP, its input, its output).

    Raises:
        Refusal: they make no known MLP.
    """
    linears = block.linears()
    if not 2 <= len(linears) <= 3:
        part = linears[3].name if len(linears) > 3 else block.name
        raise Refusal(part, f"expected an MLP of two or three linears, found {len(linears)}")
    *inputs, down = linears
    for call in inputs:
        if not torch.equal(call.input, inputs[0].input):
            raise Refusal(call.name, f"does not read what {inputs[0].name} reads")
    block.explain(*linears)
    width = down.input.shape[-1]
    outputs = [call.output for call in inputs]
    names = [call.name for call in inputs]
    candidates: list[tuple[list[str], list[Tensor]]]
    if len(inputs) == 2:
        candidates = [(names, outputs), (names[::-1], outputs[::-1])]
    elif outputs[0].shape[-1] == 2 * width:
        candidates = [(names, list(torch.split(outputs[0], width, -1)))]
    else:
        candidates = [(names, outputs)]
    scales = (1.0, *_numbers(block.known.model.config.get_text_config().to_dict()))
    for scale, (activation, function), (modules, parts) in product(scales, ACTIVATIONS.items(), candidates):
        activated = function(scale * parts[0])
        if len(parts) == 2:
            activated = activated * parts[1]
        if activated.shape == down.input.shape and close(down.input, activated):
            slices = Slices(tuple(modules), (width,) * len(parts))
            mlp = MLP(slices, len(parts) == 2, down.name, activation, scale)
            return mlp, inputs[0].input, down.output
    raise Refusal(down.name, f"reads no known activation of {' and '.join(names)}")
