"""The arithmetic of gated delta nets: chunks, single tokens and padding give what the recurrence says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from marlinq.models.convolution import convolve
from marlinq.models.delta_net import Heads, delta_rule, delta_step
from marlinq.models.recognise_mixers import find_mixers


def random_heads(batch: int, tokens: int, decays: int) -> Heads:
    q, k = (torch.nn.functional.normalize(torch.randn(batch, tokens, 3, 8), dim=-1) for _ in range(2))
    rates = -torch.rand(batch, tokens, 3, decays), torch.rand(batch, tokens, 3)
    return Heads(q, k, torch.randn(batch, tokens, 3, 6), *rates)


def recurrence(heads: Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """The formula as it is written, in float64."""
    q, k, v, decay, beta = (x.double() for x in heads)
    state = state.double()
    results = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp()[..., None]
        missing = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * missing)
        results.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(results, 1), state


@pytest.mark.parametrize("decays", [1, 8], ids=["by head", "by channel"])
def test_chunks_and_tokens_are_the_recurrence(decays: int) -> None:
    torch.manual_seed(0)
    heads, start = random_heads(2, 150, decays), torch.randn(2, 3, 8, 6)
    expected, last = recurrence(heads, start)
    state = start.clone()
    # A solved chunk of 64 rounds some hundred times.
    torch.testing.assert_close(delta_rule(heads, state).double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(state.double(), last, rtol=0, atol=2e-5)
    state = start.clone()
    steps = [delta_step(Heads(*(x[:, t : t + 1] for x in heads)), state) for t in range(150)]
    torch.testing.assert_close(torch.cat(steps, 1).double(), expected, rtol=0, atol=2e-5)


def test_a_convolution_goes_on_where_it_stopped() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(1, 9, 5), torch.randn(5, 4)
    before = torch.zeros(1, 3, 5)
    whole = nn.functional.conv1d(x.transpose(1, 2), weight[:, None], padding=3, groups=5)[..., :9]
    torch.testing.assert_close(convolve(x, before, weight), whole.transpose(1, 2))
    parts = [convolve(x[:, :6], before, weight), convolve(x[:, 6:], x[:, 3:6], weight)]
    torch.testing.assert_close(torch.cat(parts, 1), convolve(x, before, weight))


class OtherMixer(nn.Module):
    """Made of the same parts as a gated delta net, which it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(32, 32, 4, groups=32, padding=3, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.qkv, self.z = nn.Linear(16, 32, bias=False), nn.Linear(16, 16, bias=False)
        self.b, self.a = nn.Linear(16, 2, bias=False), nn.Linear(16, 2, bias=False)
        self.norm, self.out = nn.RMSNorm(8), nn.Linear(16, 16, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        mixed = self.conv1d(self.qkv(hidden_states).transpose(1, 2))[..., : hidden_states.shape[1]]
        values = mixed.transpose(1, 2)[..., 16:] * self.z(hidden_states)
        rates = self.b(hidden_states) + self.a(hidden_states) + self.A_log + self.dt_bias
        return self.out((self.norm(values.unflatten(-1, (2, 8))) * rates[..., None]).flatten(-2))


def test_other_mixers_of_the_same_parts_are_not_recognised() -> None:
    assert find_mixers("block", nn.ModuleDict({"mixer": OtherMixer()})) == {}
