"""The format of 2:4 sparse weights."""

from __future__ import annotations

import pytest
import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels import Device, Problem, batch_invariant, decide
from marlinq.kernels.contract.weight_formats import INT4, INT4_SPARSE
from marlinq.kernels.variants import warpgroup
from tests.kernels.sparse_problems import random_sparse

H200 = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)


def test_words_hold_the_codes_in_three_bits() -> None:
    codes = random_sparse(128, 192, -1).codes
    words = INT4_SPARSE.pack(codes)
    assert words.nbytes == 128 * 192 * 3 // 8
    assert INT4_SPARSE.shape(words) == (128, 192)
    assert torch.equal(INT4_SPARSE.values(words, torch.float32), codes.float())


def test_lanes_find_their_places() -> None:
    """One descriptor at a time, by the formula of ``cuda/codec/int4_sparse.cuh``."""
    codes = random_sparse(64, 128, -1, seed=3).codes
    places = INT4_SPARSE.pack(codes).reshape(2, 2, 192)[:, :, 128:].reshape(2, 2, 2, 32)
    for kt in range(2):
        for nt in range(2):
            for lane in (0, 1, 2, 3, 13, 30):
                for j in range(2):
                    word = int(places[kt, nt, j, lane])
                    for half in range(2):
                        n = 64 * nt + 16 * (2 * j + lane % 4 // 2) + lane // 4 + 8 * half
                        for four in range(4):
                            descriptor = word >> (16 * half + 4 * four) & 15
                            first, second = descriptor & 3, descriptor >> 2
                            assert first < second
                            k = 32 * kt + 16 * (lane % 2) + 4 * four
                            used = (codes[k : k + 4, n] != 8).nonzero().flatten().tolist()
                            assert set(used) <= {first, second}


def test_dense_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="spans of 4 input channels have more than 2 weights"):
        INT4_SPARSE.pack(torch.ones(32, 64, dtype=torch.uint8))


@pytest.mark.parametrize("m", [1, 16, 64, 256, 2048])
def test_a_product_is_expected_to_take_less_than_the_dense_one(m: int) -> None:
    seconds = [
        decide(Problem(m, 28672, 8192, Granularity.group(128), False, False, each), H200).seconds
        for each in (INT4_SPARSE, INT4)
    ]
    assert seconds[0] < 0.82 * seconds[1]


@pytest.mark.parametrize("m", [9, 20, 48])
def test_the_shortest_weights_have_variants(m: int) -> None:
    problem = Problem(m, 4096, 128, Granularity.channel(), False, True, INT4_SPARSE)
    short = [config for config in warpgroup.candidates(problem, H200) if config.rows < 8]
    assert short
    # Two rows of sparse words a chunk: fewer stages would be a deadlock.
    assert all(config.stages >= 3 * config.parts_k for config in short)
    with batch_invariant():
        assert decide(problem, H200).config is not None
