"""Our checkpoints, loaded by the peers on the CPU, give the logits that ``marlinq.load`` gives.

``marlinq.load`` computes in float32 with exact weights. What a peer does otherwise depends on the loader:

* ``transformers-default`` (compressed-tensors) does the same. Only the order of summation differs: a dot
  product of K terms strays by about sqrt(K) * 2**-24 of its size, ``LINEARS`` linears in sequence by less
  than ``SUMMATION`` = LINEARS * sqrt(K) * 2**-24.
* ``transformers`` (float32) rounds every weight (w - z) * s to the scales' dtype, unit roundoff u = 2**-11
  for float16 and 2**-8 for bfloat16. ``dense_logits(rounded=True)`` repeats exactly that, so the peer must
  agree with it to ``SUMMATION``. AWQ modules also multiply in float16 whatever the model's dtype, which adds
  a rounding of the input and one of the output.
* ``gptqmodel`` takes float16 models only: three roundings a linear (input, weight, output), about ten more in
  the norms, rotations, softmax, activation and additions of a block, one in the last norm.

Rounding errors are independent between weights and between operations, so relative to the logits their root
mean square is at most u * sqrt(roundings in sequence).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.operations.convert import convert
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe
from marlinq.runtime import load
from tests.interop.conftest import Answers, ask_peers, loader_of
from tests.interop.make_peer_checkpoints import INTERMEDIATE, VOCABULARY, calibration_tokens
from tests.interop.reference import dense_logits, open_quantized
from tests.interop.test_reading import CASES, peer_folder

pytestmark = pytest.mark.interop

BLOCKS = 2
LINEARS = BLOCKS * 7 + 1
SUMMATION = LINEARS * math.sqrt(INTERMEDIATE) * 2.0**-24
ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Ours:
    """One of our outputs: quantised from a base model, then converted along ``path``."""

    base: str
    recipe: dict[str, Any]
    path: tuple[str, ...] = ()
    loader: str = "transformers"


def _recipe(layout: str, group_size: int = 64, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"format": layout, "group_size": group_size, "symmetric": symmetric, **more}


SKIPPED_DOWN = (Override(r"down_proj$", skip=True),)
SKIPPED_ONE = (Override(r"layers\.0\.mlp\.down_proj$", skip=True),)
MIXED = (Override(r"layers\.1\.mlp\.down_proj$", settings={"group_size": 32}),)

OURS = {
    "gptq-sym-g64": Ours("plain", _recipe("gptq")),
    "gptq-sym-g128-bf16": Ours("bf16", _recipe("gptq", 128)),
    "gptq-sym-g32-bias": Ours("bias", _recipe("gptq", 32)),
    "gptq-sym-channel": Ours("plain", _recipe("gptq", -1)),
    "gptq-sym-no-act-order": Ours("plain", _recipe("gptq", act_order="none")),
    "gptq-asym-g64": Ours("plain", _recipe("gptq", symmetric=False)),
    "gptq-skipped-down": Ours("plain", _recipe("gptq", overrides=SKIPPED_DOWN)),
    "gptq-skipped-one": Ours("plain", _recipe("gptq", overrides=SKIPPED_ONE), loader="gptqmodel"),
    "gptq-mixed-groups": Ours("plain", _recipe("gptq", overrides=MIXED), loader="gptqmodel"),
    "gptq-by-gptqmodel": Ours("plain", _recipe("gptq"), loader="gptqmodel"),
    "gptq-v2-sym-g64": Ours("plain", _recipe("gptq-v2")),
    "gptq-v2-asym-g64": Ours("plain", _recipe("gptq-v2", symmetric=False)),
    "gptq-v2-asym-shifted": Ours("shifted", _recipe("gptq-v2", symmetric=False)),
    "gptq-v2-asym-by-gptqmodel": Ours("plain", _recipe("gptq-v2", symmetric=False), loader="gptqmodel"),
    "awq-sym-g64": Ours("plain", _recipe("awq")),
    "awq-asym-g128": Ours("plain", _recipe("awq", 128, symmetric=False)),
    "awq-asym-bias-g32": Ours("bias", _recipe("awq", 32, symmetric=False)),
    "awq-by-gptqmodel": Ours("plain", _recipe("awq", symmetric=False), loader="gptqmodel"),
    "ct-sym-g64": Ours("plain", _recipe("compressed-tensors")),
    "ct-sym-channel-bf16": Ours("bf16", _recipe("compressed-tensors", -1)),
    "ct-asym-g32": Ours("plain", _recipe("compressed-tensors", 32, symmetric=False)),
    "ct-asym-g64-bf16": Ours("bf16", _recipe("compressed-tensors", symmetric=False)),
    # With dequantize=True transformers applies one scheme to all modules; by default each has its own.
    "ct-mixed-groups": Ours(
        "plain", _recipe("compressed-tensors", overrides=MIXED), loader="transformers-default"
    ),
    "ct-skipped-one": Ours("bias", _recipe("compressed-tensors", overrides=SKIPPED_ONE)),
    "ct-default-loader": Ours("plain", _recipe("compressed-tensors"), loader="transformers-default"),
    "gptq-marlin-gptq": Ours("plain", _recipe("gptq"), ("marlin", "gptq")),
    "marlin-awq": Ours("plain", _recipe("marlin"), ("awq",)),
    "marlin-ct": Ours("plain", _recipe("marlin", 128), ("compressed-tensors",)),
    "awq-gptq-v2": Ours("plain", _recipe("awq", symmetric=False), ("gptq-v2",)),
    "ct-bf16-gptq-v2": Ours("bf16", _recipe("compressed-tensors", symmetric=False), ("gptq-v2",)),
    "gptq-v2-shifted-ct": Ours("shifted", _recipe("gptq-v2", symmetric=False), ("compressed-tensors",)),
}

REFUSED = "gptq-asym-by-gptqmodel"


@pytest.fixture(scope="session")
def our_checkpoints(peer_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every output of ``OURS`` by name."""
    root = tmp_path_factory.mktemp("ours")
    text = root / "calibration.txt"
    rows = calibration_tokens().tolist()
    text.write_text("\n\n".join(" ".join(f"t{token}" for token in row) for row in rows))
    folders, quantised = {}, dict[str, Path]()
    for name, ours in OURS.items():
        recipe = Recipe(calibration=str(text), samples=16, max_length=64).replace(**ours.recipe)
        folder = quantised.setdefault(f"{ours.base} {recipe}", root / name / "quantised")
        if not folder.exists():
            quantize(peer_root / "base" / ours.base, folder, recipe=recipe, device="cpu")
        for step, target in enumerate(ours.path):
            convert(folder, root / name / f"step{step}", target_format=target)
            folder = root / name / f"step{step}"
        folders[name] = folder
    return folders


@pytest.fixture(scope="session")
def our_answers(
    our_checkpoints: dict[str, Path], tokens: Tensor, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """The peers' reading of our outputs."""
    jobs = {name: (path, OURS[name].loader) for name, path in our_checkpoints.items()}
    jobs[REFUSED] = (our_checkpoints["gptq-asym-g64"], "gptqmodel")
    return ask_peers(tmp_path_factory.mktemp("our-answers"), tokens, jobs)


def our_logits(folder: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return load(folder, device="cpu", dtype="float32").model(tokens).logits


def relative_rms(difference: Tensor, of: Tensor) -> float:
    return float(difference.norm() / of.norm())


def roundings_of(loader: str, layout: str) -> int:
    """Roundings to the scales' dtype in sequence that the peer makes and we don't."""
    if loader == "transformers-default":
        return 0
    if loader == "gptqmodel":
        return 3 * LINEARS + 10 * BLOCKS + 1
    return 3 * LINEARS if layout == "awq" else LINEARS


def assert_close(folder: Path, loader: str, ours: Tensor, peer: Tensor, tokens: Tensor) -> float:
    """Our logits against the peer's for one checkpoint; the bound on their relative RMS difference."""
    quantized = open_quantized(folder)
    (scale_dtype,) = {spec.scale_dtype for spec in quantized.modules.values()}
    assert relative_rms(ours - dense_logits(folder, tokens, rounded=False), ours) <= SUMMATION
    roundings = roundings_of(loader, quantized.format.name)
    if roundings == LINEARS:
        assert relative_rms(peer - dense_logits(folder, tokens, rounded=True), peer) <= SUMMATION
    bound = ROUNDOFF[scale_dtype] * math.sqrt(roundings) + SUMMATION
    assert relative_rms(peer - ours, ours) <= bound
    return bound


def _compared(ours: Tensor, peer: Tensor, bound: float) -> str:
    return (
        f"relative RMS {relative_rms(peer - ours, ours):.1e} (bound {bound:.1e}), max |difference| "
        f"{float((peer - ours).abs().max()):.1e} of max |logit| {float(ours.abs().max()):.2f}"
    )


@pytest.mark.parametrize("name", OURS)
def test_peers_load_our_checkpoints(
    name: str, our_checkpoints: dict[str, Path], our_answers: Answers, tokens: Tensor, table: list[str]
) -> None:
    folder = our_checkpoints[name]
    ours, theirs = our_logits(folder, tokens), our_answers.tensors(name)
    peer = theirs["logits"]
    assert peer.shape == (*tokens.shape, VOCABULARY)
    quantized = open_quantized(folder)
    assert {key.partition("::")[0] for key in theirs if "::" in key} == set(quantized.modules)
    for module in quantized.modules:
        q = quantized.load(module)
        weight = theirs[f"{module}::weight"]
        assert torch.equal(q.dequantize(weight.dtype), weight), module
    bound = assert_close(folder, OURS[name].loader, ours, peer, tokens)
    table.append(f"{name:28} {quantized.format.name} by {OURS[name].loader}, {_compared(ours, peer, bound)}")


def test_gptqmodel_refuses_asymmetric_v1_of_others(our_answers: Answers) -> None:
    # Its own loader can't know how others stored the zeros; the same tuple as v2 loads (above).
    error = our_answers.error(REFUSED)
    assert error is not None
    assert "sym=False" in error


@pytest.mark.parametrize("name", CASES)
def test_we_run_what_the_peers_wrote(
    name: str, peer_root: Path, peer_answers: Answers, tokens: Tensor, table: list[str]
) -> None:
    folder = peer_folder(peer_root, name)
    ours, peer = our_logits(folder, tokens), peer_answers.tensors(name)["logits"]
    bound = assert_close(folder, loader_of(folder), ours, peer, tokens)
    table.append(f"{name:28} written by a peer, {_compared(ours, peer, bound)}")
