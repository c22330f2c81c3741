"""Conversations: reads a dataset's messages and renders them with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marlinq.core import boundaries
from marlinq.core.errors import UnsupportedError

_ROLES = {"human": "user", "gpt": "assistant"}
"""Role in ShareGPT's ``from`` -> role in chat templates; other roles have the same name in both."""


@dataclass(frozen=True)
class Chat:
    """A conversation: messages with ``role``, ``content`` and further keys for the template."""

    messages: tuple[dict[str, Any], ...]


def read_chat(cell: Sequence[Any]) -> Chat | None:
    """The conversation in a table's cell, with keys role and content, or from and value; None for others."""
    messages = [_message(item) for item in cell]
    return None if None in messages else Chat(tuple(message for message in messages if message is not None))


def _message(item: Any) -> dict[str, Any] | None:
    if not isinstance(item, dict):
        return None
    # Tables fill missing keys with None, but templates test whether a key exists.
    message = {key: value for key, value in item.items() if value is not None}
    if isinstance(message.get("from"), str) and "value" in message:
        speaker = message.pop("from")
        message |= {"role": _ROLES.get(speaker, speaker), "content": message.pop("value")}
    return message if isinstance(message.get("role"), str) else None


def render_chat(chat: Chat, tokenizer: Any, source: str, *, template: str | None = None) -> str:
    """The conversation as text with special tokens, rendered by the model's chat template.

    Args:
        chat: the messages.
        tokenizer: tokenizer of the model; transformers runs its template in a sandbox.
        source: name of the text, for messages.
        template: name of the file that the template is from, for messages; None for the model's own.

    Raises:
        UnsupportedError: the tokenizer has no chat template.
        CheckpointError: the template fails, or takes too much time or memory.
    """
    if not chat.messages:
        return ""
    if not getattr(tokenizer, "chat_template", None):
        raise UnsupportedError(
            f"text {source}: holds chat messages, but the model's tokenizer has no chat template; name a "
            "column of text as #COLUMN, or add the template to the model"
        )
    return boundaries.rendered(
        tokenizer,
        chat.messages,
        subject=f"text {source}" if template is None else f"text {source}, {template}",
        advice="correct the template, or name a column of text as #COLUMN",
    )
