"""Checkpoints written by the peers hold, as we read them, what the peers themselves read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.interop.conftest import Answers
from tests.interop.make_peer_checkpoints import COMPRESSED_TENSORS, GPTQMODEL, LLMCOMPRESSOR
from tests.interop.reference import open_quantized

pytestmark = pytest.mark.interop

CASES = [*GPTQMODEL, *COMPRESSED_TENSORS, *LLMCOMPRESSOR]


def peer_folder(root: Path, name: str) -> Path:
    folder = root / "checkpoints" / name
    if name in LLMCOMPRESSOR and not (folder / "config.json").exists():
        pytest.skip("llm-compressor has not written its checkpoints into MARLINQ_PEER_CHECKPOINTS")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_peer_decodes_the_same_tuple(name: str, peer_root: Path, peer_answers: Answers) -> None:
    quantized = open_quantized(peer_folder(peer_root, name))
    theirs = peer_answers.tensors(name)
    decoded = {key.partition("::")[0] for key in theirs if "::" in key}
    assert decoded == set(quantized.modules)
    for module in quantized.modules:
        q = quantized.load(module)
        weight = theirs[f"{module}::weight"]
        assert torch.equal(q.codes, theirs[f"{module}::codes"]), module
        assert torch.equal(q.zeros, theirs[f"{module}::zeros"]), module
        # (w - z) * s is a product of an integer below 2**8 and a scale, exact in float32: the peer's
        # product in the scales' dtype is that value rounded once.
        assert weight.dtype == q.scales.dtype
        assert torch.equal(q.dequantize(weight.dtype), weight), module


@pytest.mark.parametrize(("v1", "v2"), [("gptq-asym-shifted-g32", "gptq-v2-asym-shifted-g32")])
def test_both_versions_of_one_run_hold_the_same_tuple(v1: str, v2: str, peer_root: Path) -> None:
    first, second = (open_quantized(peer_root / "checkpoints" / name) for name in (v1, v2))
    assert set(first.modules) == set(second.modules)
    zeros = set()
    for module in first.modules:
        q = first.load(module)
        assert q.difference(second.load(module)) is None, module
        zeros |= set(q.zeros.unique().tolist())
    assert {0, 15} <= zeros, "the shifted model must reach both ends of the zero points"


def test_act_order_is_told_from_the_stored_g_idx(peer_root: Path) -> None:
    for name, scattered in (("gptq-desc-act-g64", True), ("gptq-desc-act-static-g64", False)):
        folder = peer_root / "checkpoints" / name
        assert json.loads((folder / "config.json").read_text())["quantization_config"]["desc_act"] is True
        quantized = open_quantized(folder)
        assert any(not quantized.load(module).has_trivial_g_idx for module in quantized.modules) is scattered
