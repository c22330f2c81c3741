"""Every checkpoint of the peers to every layout: the same tuples bit for bit, or the right refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from marlinq.core.errors import ConversionRefused
from marlinq.operations.convert import convert
from tests.interop.make_peer_checkpoints import COMPRESSED_TENSORS, GPTQMODEL, LLMCOMPRESSOR
from tests.interop.reference import open_quantized
from tests.interop.test_reading import peer_folder
from tests.testing.layouts import INTEGERS

pytestmark = pytest.mark.interop

CASES = GPTQMODEL | COMPRESSED_TENSORS | LLMCOMPRESSOR


def source_format(name: str) -> str:
    prefix = name.split("-", maxsplit=1)[0]
    if prefix == "gptq":
        return "gptq-v2" if name.startswith("gptq-v2") else "gptq"
    return {"awq": "awq", "ct": "compressed-tensors", "llmc": "compressed-tensors"}[prefix]


def lossless_obstacles(name: str, target: str) -> list[str]:
    """Words of messages, with one of which this conversion must be refused; empty where it must be made."""
    base, options = CASES[name]
    symmetric = options.get("sym", options.get("symmetric", True))
    obstacles = []
    if options.get("bits", 4) == 8 and target in ("awq", "marlin"):
        obstacles.append("int8 weights")
    if options.get("desc_act") and not options.get("static_groups") and not target.startswith("gptq"):
        obstacles.append("g_idx")
    if not symmetric and target == "marlin":
        obstacles.append("zero point")
    if base == "shifted" and not symmetric and target == "gptq":
        obstacles.append("zero point of 0")
    if "dynamic" in options and target == "awq":
        obstacles.append("group size")
    return obstacles


PAIRS = [(name, target) for name in CASES for target in INTEGERS if target != source_format(name)]


def assert_same_model(first: Path, second: Path) -> None:
    one, other = open_quantized(first), open_quantized(second)
    assert set(one.modules) == set(other.modules)
    for module in one.modules:
        assert one.load(module).difference(other.load(module)) is None, module
    assert set(one.passthrough) == set(other.passthrough)
    for name in one.passthrough:
        mine, theirs = one.checkpoint.tensor(name), other.checkpoint.tensor(name)
        assert mine.dtype == theirs.dtype
        assert mine.equal(theirs), name


def convert_or_be_refused(source: Path, out: Path, target: str, obstacles: list[str]) -> bool:
    """Convert; with ``obstacles``, see the conversion refused for one of them. True when it was made."""
    if obstacles:
        with pytest.raises(ConversionRefused) as refusal:
            convert(source, out, target_format=target)
        assert any(words in str(refusal.value) for words in obstacles)
        assert not out.exists()
        return False
    assert convert(source, out, target_format=target).skipped == {}
    return True


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_conversion_is_lossless_or_refused(name: str, target: str, peer_root: Path, tmp_path: Path) -> None:
    source, there, back = peer_folder(peer_root, name), tmp_path / "there", tmp_path / "back"
    if not convert_or_be_refused(source, there, target, lossless_obstacles(name, target)):
        return
    assert_same_model(source, there)
    home = source_format(name)
    # GPTQModel's own v1 files hold zero points of 0, which we read but, being ambiguous, never write.
    if convert_or_be_refused(there, back, home, lossless_obstacles(name, home)):
        assert_same_model(source, back)
