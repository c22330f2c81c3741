"""The arithmetic of Mamba-2 mixers, and the variants that recognition tells apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer

from marlinq.models.mamba import Scales, Tokens, scan
from marlinq.models.recognise_mamba import prove_mamba


def random_tokens(batch: int, tokens: int) -> Tokens:
    keys, queries = (torch.randn(batch, tokens, 2, 8) for _ in range(2))
    return Tokens(torch.randn(batch, tokens, 4, 6), keys, queries, torch.rand(batch, tokens, 4))


def recurrence(tokens: Tokens, rates: Tensor, skip: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The formula as it is written, in float64."""
    values, keys, queries, steps = (x.double() for x in tokens)
    keys, queries = (x.repeat_interleave(2, 2) for x in (keys, queries))
    state, results = state.double(), []
    for t in range(values.shape[1]):
        added = steps[:, t, :, None, None] * keys[:, t, :, :, None] * values[:, t, :, None]
        state = (steps[:, t] * rates).exp()[..., None, None] * state + added
        read = torch.einsum("bhnp,bhn->bhp", state, queries[:, t])
        results.append(read + skip[:, None] * values[:, t])
    return torch.stack(results, 1), state


def test_chunks_and_tokens_are_the_recurrence() -> None:
    torch.manual_seed(0)
    tokens, start = random_tokens(2, 150), torch.randn(2, 4, 8, 6)
    rates, skip = -torch.rand(4), torch.randn(4)
    expected, last = recurrence(tokens, rates, skip, start)
    # Sums of up to 64 tokens and 8 state channels, some hundred roundings of values up to 30.
    bound = 100 * 2**-24 * float(expected.abs().max())
    state = start.clone()
    torch.testing.assert_close(scan(tokens, rates, skip, state).double(), expected, rtol=0, atol=bound)
    torch.testing.assert_close(state.double(), last, rtol=0, atol=bound)
    state = start.clone()
    steps = [scan(Tokens(*(x[:, t : t + 1] for x in tokens)), rates, skip, state) for t in range(150)]
    torch.testing.assert_close(torch.cat(steps, 1).double(), expected, rtol=0, atol=bound)
    before = state.clone()
    scan(tokens._replace(steps=torch.zeros_like(tokens.steps)), rates, skip, state)
    assert torch.equal(state, before)


_FACTORS = [0.5, 0.25, 2.0, 0.125, 1.5]


@pytest.mark.parametrize(
    ("changes", "norm", "norm_first", "limits", "scales"),
    [
        ({}, None, False, (0.0, None), Scales()),
        ({"mamba_rms_norm": True}, 32, True, (0.0, None), Scales()),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": False}, 32, False, (0.0, None), Scales()),
        ({"time_step_limit": (0.01, 0.5)}, None, False, (0.01, 0.5), Scales()),
        (
            {"ssm_in_multiplier": 0.5, "ssm_multipliers": _FACTORS, "mamba_conv_bias": False},
            *(None, False, (0.0, None)),
            Scales(*(0.5 * each for each in _FACTORS)),
        ),
    ],
)
def test_variants_are_told_apart(
    changes: dict[str, Any],
    norm: int | None,
    norm_first: bool,
    limits: tuple[float, float | None],
    scales: Scales,
) -> None:
    sizes = {"hidden_size": 32, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "vocab_size": 32}
    groups = {"mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8, "num_hidden_layers": 1}
    config = CONFIG_MAPPING["falcon_h1"](**sizes, **groups, **changes)
    mixer = FalconH1Mixer(config, 0)
    factors = torch.tensor(config.ssm_multipliers).repeat_interleave(torch.tensor([64, 64, 16, 16, 4]))
    mixer.register_buffer("mup_vector", factors[None, None])
    found = prove_mamba(mixer)
    assert found is not None
    assert (found.heads, found.head_dim, found.groups, found.state_dim) == (4, 16, 2, 8)
    assert (None if found.norm is None else found.norm.width, found.norm_first) == (norm, norm_first)
    assert (found.least_step, found.most_step) == limits
    assert found.scales == scales
    assert (found.step_bias, found.decay, found.skip) == ("dt_bias", "A_log", "D")


def test_other_results_of_the_same_parts_are_no_mixer() -> None:
    sizes = {"hidden_size": 32, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "vocab_size": 32}
    mixer = FalconH1Mixer(CONFIG_MAPPING["falcon_h1"](**sizes, mamba_chunk_size=8, num_hidden_layers=1), 0)
    mixer.register_buffer("mup_vector", torch.ones(1, 1, mixer.in_proj.out_features))
    assert prove_mamba(mixer) is not None
    mixer.out_proj = nn.Sequential(nn.Tanh(), mixer.out_proj)
    assert prove_mamba(mixer) is None
