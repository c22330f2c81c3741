"""What a norm magnifies roundings by, of numbers that cancel or don't."""

from __future__ import annotations

import math

import pytest
import torch

from marlinq.models.mamba import Mamba, Tokens
from marlinq.models.parts import Norm, Slices
from marlinq.runtime.step import mamba
from tests.runtime.step.magnification import magnification, magnified_by_norms

MIXER = Mamba(
    inputs=Slices(("in",), (4, 4, 1, 1, 1)),
    convolution="convolution",
    taps=2,
    decay="decay",
    step_bias="bias",
    skip="skip",
    norm=Norm("norm", "rms", 0.0, width=4),
    norm_first=False,
    output="out",
    heads=1,
    head_dim=4,
    groups=1,
    state_dim=1,
)


@pytest.mark.parametrize(("skip", "expected"), [(1.0, 1.0), (-0.9, math.sqrt(1 + 0.9**2) / 0.1)])
def test_terms_that_cancel_are_magnified(skip: float, expected: float) -> None:
    ones = torch.ones(2, 1, 1, 4)
    tokens = Tokens(ones, ones[..., :1], ones[..., :1], ones[..., 0])
    with magnified_by_norms() as factors:
        # C S is 1 and D x is `skip`.
        mixed = mamba.scan(tokens, torch.zeros(1), torch.tensor([skip]), torch.zeros(2, 1, 1, 4))
        mamba.gated(MIXER, mixed, ones[:, :, 0], torch.ones(4))
    assert magnification(factors) == pytest.approx(expected, rel=1e-5)
    assert magnification([]) == 1.0
