"""Rows with images: files beside the text, a model's processor, and what is refused row by row."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import marlinq
from lab.models.families import Family, random_model
from marlinq.calibration import Document, documents_hash, images, make_batches, read_documents
from marlinq.core.errors import UnsupportedError, UsageError
from tests.testing.runnable_folders import save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '#' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)
WORDS = "a cat on a mat, seen from the left"


class Processor:
    """Writes ``places`` times ``token`` for each ``#`` of a text, as processors do for an image's pieces."""

    image_processor = object()

    def __init__(self, tokenizer: Any, token: int, places: int, size: int) -> None:
        self.tokenizer, self.token, self.places, self.size = tokenizer, token, places, size

    def __call__(
        self, text: list[str], images: list[Tensor], return_tensors: str, add_special_tokens: bool
    ) -> dict[str, Tensor]:
        parts = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in text[0].split("#")]
        ids = list(parts[0])
        for part in parts[1:]:
            ids += [self.token] * self.places + part
        pixels = torch.stack([image.expand(3, self.size, self.size) for image in images])
        row = torch.tensor([ids])
        return {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "pixel_values": pixels,
            "unused": row,
        }


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image files hold one number, the brightness."""
    monkeypatch.setattr(images, "_decoded", lambda path: torch.tensor(float(path.read_text())))


def message(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


TEXT = {"type": "text", "text": WORDS}


def save_rows(folder: Path, *rows: dict[str, Any]) -> str:
    for number in range(3):
        (folder / f"{number}.png").write_text(f"{number / 2}")
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def read(source: str, *, places: int = 9) -> list[Document]:
    tokenizer = save_tokenizer(Path(source).parent / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    return read_documents(
        source,
        tokenizer=lambda: tokenizer,
        samples=8,
        max_length=60,
        seed=0,
        vocabulary=300,
        processor=lambda: Processor(tokenizer, 299, places, 4),
    )


def test_images_of_a_row_are_inputs_beside_its_tokens(tmp_path: Path, opened: None) -> None:
    source = save_rows(tmp_path, message(image("0.png"), TEXT), message(image("1.png"), TEXT))
    with pytest.warns(UserWarning, match="fewer than the 8 asked for"):
        documents = read(source)
    # The same words under two images are two documents.
    assert len(documents) == 2
    for document in documents:
        assert document.tokens.count(299) == 9
        assert document.beside is not None
        assert document.beside.keys() == {"pixel_values", "unused"}
    first, second = documents
    assert documents_hash([first]) != documents_hash([second])
    alone = Document(first.tokens)
    batches = make_batches([alone, *documents, alone], token_budget=1000)
    assert [batch.ids.shape[0] for batch in batches] == [1, 1, 2]
    assert [batch.beside is None for batch in batches] == [False, False, True]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (image("../0.png"), "lies outside the folder of the text"),
        ({"type": "image", "url": "https://example.org/cat.png"}, "an image without a file"),
        ({"type": "video", "video": "cat.mp4"}, "holds a part of type 'video'"),
        (image("\0.png"), "can't be read (ValueError: "),
        (image("missing.png"), "missing.png: can't be read"),
    ],
)
def test_rows_whose_images_cannot_be_read_are_skipped(
    tmp_path: Path, opened: None, part: dict[str, str], says: str
) -> None:
    source = save_rows(tmp_path, message(image("0.png"), TEXT), message(part, TEXT))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert len(read(source)) == 1
    skipped = next(str(each.message) for each in warned if "1 of 2 rows were skipped" in str(each.message))
    assert says in skipped


@pytest.mark.parametrize("error", [SyntaxError("broken PNG"), RuntimeError("no frame"), OSError("cut")])
def test_a_damaged_image_costs_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def decoded(path: Path) -> Tensor:
        if path.name == "1.png":
            raise error
        return torch.ones(())

    monkeypatch.setattr(images, "_decoded", decoded)
    source = save_rows(tmp_path, message(image("0.png"), TEXT), message(image("1.png"), TEXT))
    with (
        pytest.warns(UserWarning, match="fewer than the 8"),
        pytest.warns(UserWarning, match=rf"row 2: image 1.png: can't be read \({type(error).__name__}: "),
    ):
        assert len(read(source)) == 1


def test_pillow_is_not_asked_to_run_postscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Image:
        OPEN: ClassVar[dict[str, None]] = {}

        @classmethod
        def init(cls) -> None:
            cls.OPEN |= dict.fromkeys(("EPS", "JPEG", "PNG"))

        @classmethod
        def open(cls, content: io.BytesIO, formats: list[str]) -> type[Image]:
            asked.append(formats)
            return cls

        @staticmethod
        def convert(mode: str) -> Tensor:
            return torch.ones(())

    pillow = ModuleType("PIL")
    monkeypatch.setattr(pillow, "Image", Image, raising=False)
    monkeypatch.setattr(pillow, "UnidentifiedImageError", OSError, raising=False)
    monkeypatch.setitem(sys.modules, "PIL", pillow)
    with pytest.warns(UserWarning, match="fewer than the 8"):
        read(save_rows(tmp_path, message(image("0.png"), TEXT)))
    assert asked == [["JPEG", "PNG"]]


def test_a_model_that_reads_no_images_skips_their_rows(tmp_path: Path) -> None:
    words = {"messages": [{"role": "user", "content": [TEXT, {"type": "thinking", "text": "hm"}]}]}
    source = save_rows(tmp_path, message(image("0.png"), TEXT), message(image("1.png"), TEXT), words)
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    asked: list[int] = []

    def none() -> Any:
        asked.append(1)
        raise UnsupportedError("model: has no processor")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        documents = read_documents(
            source,
            tokenizer=lambda: tokenizer,
            samples=8,
            max_length=60,
            seed=0,
            vocabulary=300,
            processor=none,
        )
    assert [document.beside for document in documents] == [None]
    assert asked == [1]
    assert any("2 of 3 rows were skipped" in str(each.message) for each in warned)


def test_a_row_with_images_is_never_cut(tmp_path: Path, opened: None) -> None:
    source = save_rows(tmp_path, message(image("0.png"), TEXT))
    with pytest.raises(UsageError, match="tokens with its images, more than --max-length 60"):
        read(source, places=50)


def test_a_wrapper_is_calibrated_on_images(
    tmp_path: Path, opened: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(Family("llava", "LlavaForConditionalGeneration", wrapper=True))
    source, vision = tmp_path / "model", model.config.vision_config
    model.save_pretrained(source)
    tokenizer = save_tokenizer(source)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(source)
    places = (vision.image_size // vision.patch_size) ** 2
    processor = Processor(tokenizer, model.config.image_token_id, places, vision.image_size)
    reads = "marlinq.operations.quantize.calibration_text.own_processor"
    monkeypatch.setattr(reads, lambda folder, trust_remote_code: processor)
    text = save_rows(tmp_path, message(image("0.png"), TEXT))
    recipe = marlinq.Recipe(method="imatrix", group_size=32, samples=1, max_length=80, calibration=(text,))
    report = marlinq.quantize(source, tmp_path / "out", recipe=recipe, device="cpu", progress=False)
    assert report.calibration is not None
    assert report.calibration["tokens"] > places
    assert report.modules
