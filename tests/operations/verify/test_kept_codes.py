"""Codes exchanged inside the words of a sparse layout, which hold kept codes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marlinq.core.scheme import INT4, INT8, Element
from marlinq.formats import LAYOUTS, spec_of
from marlinq.operations.verify.statistics.evidence import Evidence, find_faults
from marlinq.operations.verify.statistics.exchanged_codes import word_tile
from marlinq.operations.verify.statistics.finding import WARNING, RunSize
from marlinq.operations.verify.statistics.kept_codes import KeptCodes
from tests.kernels.sparse_problems import random_sparse
from tests.testing.faults import swap_nibbles
from tests.testing.verified_checkpoints import quantize

K, N, GROUP = 128, 128, 64
LAYOUT = LAYOUTS["marlin-24"]
RUN = RunSize(K * N, K * N // GROUP)


class Module:
    """A pruned weight with outliers, as its layout stores it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(N, K, generator=generator)
        self.weight = 0.05 * weight * (1 + 3 * torch.rand(N, K, generator=generator).pow(16))
        q = quantize(self.weight, group_size=GROUP, symmetric=True, act_order="none", seed=1, sparse=True)
        self.spec = spec_of(q)
        self.stored = LAYOUT.pack(q)

    def judged(self, words: Tensor | None = None) -> Evidence:
        stored = self.stored if words is None else {**self.stored, LAYOUT.key: words}
        return find_faults(self.weight, LAYOUT.unpack(stored, self.spec), LAYOUT, self.spec, stored, RUN)


@pytest.fixture(scope="module")
def module() -> Module:
    return Module()


def test_right_words_are_judged_and_pass(module: Module) -> None:
    evidence = module.judged()
    assert evidence.words == module.stored[LAYOUT.key].numel()
    assert not evidence.findings


def test_one_exchanged_word_is_a_warning_that_names_it(module: Module) -> None:
    words, found = module.stored[LAYOUT.key], 0
    kept = KeptCodes.of(module.weight.t(), LAYOUT.unpack(module.stored, module.spec))
    tile = word_tile(LAYOUT, INT4, K // 2, N)
    assert tile is not None
    channels = tile.split(kept.channels).reshape(words.numel(), tile.slots)
    for pick in range(100, words.numel(), words.numel() // 4):
        flat = words.flatten().clone()
        flat[pick] = swap_nibbles(flat[pick : pick + 1])[0]
        findings = module.judged(flat.reshape(words.shape)).findings
        assert not any(finding.fails for finding in findings)
        found += bool(findings)
        if findings:
            assert findings[0].expected < WARNING
            named = int(findings[0].what.split("channel ")[1].split()[0])
            assert named == int(channels[pick, 0])
    # Codes of some words hardly differ.
    assert found >= 2


def test_words_exchanged_everywhere_fail(module: Module) -> None:
    findings = module.judged(swap_nibbles(module.stored[LAYOUT.key])).findings
    what = "the whole module: the two codes of every byte are exchanged"
    assert what in [finding.what for finding in findings if finding.fails]


@pytest.mark.parametrize(("element", "slots"), [(INT4, 8), (INT8, 4)])
def test_tiles_are_those_of_kept_codes(element: Element, slots: int) -> None:
    tile = word_tile(LAYOUT, element, K // 2, N)
    assert tile is not None
    assert (tile.rows, tile.columns, tile.slots) == (16, 64, slots)


@pytest.mark.parametrize("group_size", [32, -1])
def test_kept_codes_are_a_dense_weight(group_size: int) -> None:
    q = random_sparse(K, N, group_size)
    wide = torch.randn(K, N)
    kept = KeptCodes.of(wide, q)
    dense, values = q.dequantize().t(), kept.q.dequantize().t()
    back = torch.zeros(K, N).scatter_(0, kept.channels, values)
    assert torch.equal(back, dense)
    assert torch.equal(kept.w, wide.gather(0, kept.channels))
