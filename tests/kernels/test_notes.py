"""A model's kernels are decided once: a note in the cache says that all of them are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.granularity import Granularity
from marlinq.core.notes import note
from marlinq.kernels import LayerShape, batch_invariant, precompile_model
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.driver import compiled_notes
from marlinq.kernels.driver.cache import entry_path
from marlinq.kernels.launch import precompile

LAYERS = [
    LayerShape(1024, 4096, Granularity.group(128), False, INT4),
    LayerShape(4096, 4096, Granularity.group(128), True, INT4),
]
MOST_ROWS = 48


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many variants each compilation was asked for; each leaves its entries in an empty cache."""
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path))
    monkeypatch.setattr(precompile, "device_numbers", lambda index: H200)
    calls: list[int] = []

    def compile_missing(architecture: str, wanted: list[Instantiation], progress: object) -> int:
        calls.append(len(wanted))
        for instantiation in wanted:
            entry = entry_path(instantiation, architecture)
            entry.parent.mkdir(parents=True, exist_ok=True)
            entry.touch()
        return len(wanted)

    monkeypatch.setattr(precompile, "compile_missing", compile_missing)
    return calls


def prepare(layers: list[LayerShape] = LAYERS, dtype: torch.dtype = torch.float16) -> int:
    return precompile_model(layers, dtype, most_rows=MOST_ROWS)


def entries(cache: Path) -> list[Path]:
    return [path for path in (cache / "kernels").iterdir() if not path.name.startswith("complete-")]


def test_a_complete_model_is_not_decided_again(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare() == asked[0] > 0

    def forbidden(*_: object) -> None:
        raise AssertionError("decided")

    monkeypatch.setattr(precompile, "decide", forbidden)
    assert prepare() == 0
    # The order of the layers, and how often one comes, change nothing.
    assert prepare([*reversed(LAYERS), *LAYERS]) == 0
    assert len(asked) == 1


def missing_entry(cache: Path) -> None:
    entries(cache)[0].unlink()


def note_of(text: str) -> Callable[[Path], None]:
    def replace(cache: Path) -> None:
        (path,) = (cache / "kernels").glob("complete-*")
        path.write_text(text)
        if text:
            # Whole, with a value that is none of this note's.
            note(path.name, json.loads(text))

    return replace


@pytest.mark.parametrize(
    "change", [missing_entry, note_of(""), note_of("{}"), note_of("[1]"), note_of('["../../x"]')]
)
def test_a_note_that_does_not_hold_is_made_anew(
    asked: list[int], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    (tmp_path.parent / "x").touch()
    prepare()
    change(tmp_path)
    assert prepare() > 0
    assert prepare() == 0
    assert len(asked) == 2


def test_layers_dtypes_modes_and_code_have_notes_of_their_own(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare()
    prepare(LAYERS[:1])
    prepare(dtype=torch.bfloat16)
    with batch_invariant():
        prepare()
    assert len(asked) == 4
    monkeypatch.setattr("marlinq.core.notes.code_digest", lambda _: "other files")
    prepare()
    monkeypatch.setattr(compiled_notes, "nvrtc_version", lambda: "other")
    prepare()
    assert len(asked) == 6


def test_a_cache_that_cannot_be_written_is_named(
    asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(precompile, "compile_missing", lambda architecture, wanted, progress: len(wanted))
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentProblem, match="set MARLINQ_CACHE to a writable folder"):
        prepare()
