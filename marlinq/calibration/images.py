"""Images of conversations: files beside the text, which a model's processor turns into inputs.

A message with images has a list as its content, whose parts are ``{"type": "text", "text": ...}`` and
``{"type": "image", "image": "photos/cat.jpg"}``; a file's name counts from the folder of the text.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlinq.calibration.chat import Chat, render_chat
from marlinq.calibration.sources import Unusable
from marlinq.core import boundaries
from marlinq.core.boundaries import reason
from marlinq.core.errors import EnvironmentProblem
from marlinq.core.files import read_regular

if TYPE_CHECKING:
    from torch import Tensor

_MOST_BYTES = 64 << 20
"""bytes of the largest image file that is read"""
_FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")
"""formats that are read; pillow knows more, and hands PostScript, which is a program, to Ghostscript"""
_OF_TEXT = ("input_ids", "attention_mask")
_MEDIA = ("image", "image_url", "video", "audio")
"""types of parts that are no text; parts of other types are the chat template's business"""


def holds_images(chat: Chat) -> bool:
    """Whether a part of a message is an image, a video or a sound."""
    return any(part["type"] in _MEDIA for part in _parts(chat))


def encode_with_images(
    chat: Chat, tokenizer: Any, processor: Any, source: str, *, template: str | None = None
) -> tuple[list[int], dict[str, Tensor]] | Unusable:
    """Token ids of a conversation, and the model's other inputs by name (``pixel_values`` and the like).

    Args:
        chat: conversation that :func:`holds_images`.
        tokenizer: tokenizer of the model, whose template writes the conversation.
        processor: processor of the model; transformers' protocol.
        source: spelling of the text, a file's path.
        template: as for :func:`render_chat`.

    Returns:
        the inputs, or why the conversation can't be used.

    Raises:
        CheckpointError: the chat template or the processor fails.
        EnvironmentProblem: pillow is missing.
    """
    path = Path(source.rpartition("#")[0] or source)
    if not path.is_file():
        return Unusable("holds images, which are read only beside a file of conversations")
    images = []
    for part in _parts(chat):
        if part["type"] not in _MEDIA:
            continue
        image = _open(part, path.parent)
        if isinstance(image, Unusable):
            return image
        images.append(image)
    # A template writes a place for each image and needs no names of files.
    plain = tuple(
        {**message, "content": [_without_file(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in chat.messages
    )
    text = render_chat(replace(chat, messages=plain), tokenizer, source, template=template)
    with boundaries.foreign(f"text {source}", "the processor can't read a row with images", "fix the row"):
        made: Mapping[str, Any] = processor(
            text=[text], images=images, return_tensors="pt", add_special_tokens=False
        )
    ids: list[int] = made["input_ids"][0].tolist()
    return ids, {key: value for key, value in made.items() if key not in _OF_TEXT}


def _parts(chat: Chat) -> list[dict[str, Any]]:
    contents = [message.get("content") for message in chat.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, dict) and isinstance(part.get("type"), str)]


def _without_file(part: Any) -> Any:
    return {"type": "image"} if isinstance(part, dict) and part.get("type") == "image" else part


def _open(part: Mapping[str, Any], folder: Path) -> Any:
    """The image of a part, or why there is none; never a file outside ``folder``."""
    if part["type"] != "image":
        return Unusable(f"holds a part of type {part['type']!r}; expected text and image")
    name = part.get("image", part.get("path"))
    if not isinstance(name, str):
        return Unusable("an image without a file; expected {'type': 'image', 'image': FILE}")
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return Unusable(f"image {name}: lies outside the folder of the text")
        return _decoded(path)
    except EnvironmentProblem:
        raise
    except Exception as error:  # noqa: BLE001 - names and bytes of files make the libraries raise anything
        return Unusable(f"image {name}: can't be read ({reason(error)})")


def _decoded(path: Path) -> Any:
    """The image in a file, in RGB."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise EnvironmentProblem("images in the text: pillow is not installed; pip install pillow") from None
    content = io.BytesIO(read_regular(path, _MOST_BYTES))
    # Fills the table of formats that this installation knows.
    Image.init()
    formats = [each for each in _FORMATS if each in Image.OPEN]
    try:
        return Image.open(content, formats=formats).convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(f"expected {', '.join(formats)}") from None
