"""Seeded damage to a checkpoint folder: each function changes something and says in a few words what."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

INDEX = "model.safetensors.index.json"
MARKER = "EXECUTED"
"""A file of this name beside the folder shows that code of the folder was run."""

Mutation = Callable[[Random, Path], str]

_DEEP: list[Any] = []
for _ in range(500):
    _DEEP = [_DEEP]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    7,
    1 << 31,
    1 << 63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "auto",
    "float16",
    "x\nverified\x1b[2J",
    "\ud800",
    "a" * 100_000,
    [],
    {},
    [0],
    ["\n"],
    {"": 0},
    _DEEP,
    "../../secret",
    "/etc/passwd",
    "(?:a{1000}){1000}",
    "(?:[a-z.]|.)+[0-9]",
    "-:(",
    "llama",
    "gpt2",
    "mixtral",
    "t5",
    "no-such-model",
    "gptq",
    "awq",
]


def odd_value(rng: Random, *more: Any) -> Any:
    """One of :data:`VALUES` and ``more``, in memory of its own: what is made of it changes no later case."""
    chosen = rng.choice((*VALUES, *more))
    return json.loads(json.dumps(chosen)) if isinstance(chosen, list | dict) else chosen


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += _paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:20]):
            found += _paths(item, (*path, index))
    return found


def mutate_json(rng: Random, value: Any) -> str:
    """One place of a JSON value removed, replaced, renamed or copied."""
    paths = _paths(value)
    if not paths:
        return "nothing to change"
    *outer, last = rng.choice(paths)
    holder = value
    for key in outer:
        holder = holder[key]
    where = ".".join(map(str, (*outer, last)))[:80]
    kind = rng.choice(("remove", "replace", "replace", "replace", "rename", "copy"))
    if kind == "remove":
        del holder[last]
    elif kind == "replace":
        number = isinstance(holder[last], int) and rng.random() < 0.5
        holder[last] = holder[last] * rng.choice((0, -1, 2, 1 << 20)) if number else odd_value(rng)
    elif isinstance(holder, dict):
        name = rng.choice(("x.perm", "a\nb", "\ud800", "", "lm_head.weight", str(last) + ".g_idx", "\x1b[2J"))
        holder[name] = holder.pop(last) if kind == "rename" else holder[last]
    else:
        holder.append(holder[last])
    return f"{kind} {where}"


def mutate_bytes(rng: Random, data: bytes) -> tuple[bytes, str]:
    """Bits flipped, or a stretch overwritten, cut out or put in."""
    if not data:
        return b"x", "one byte"
    place = rng.randrange(len(data))
    length = min(rng.choice((1, 1, 4, 64)), len(data) - place)
    kind = rng.choice(("flip", "flip", "zero", "noise", "cut", "insert", "truncate", "extend"))
    noise = rng.randbytes(length)
    if kind == "flip":
        flipped = data[place] ^ (1 << rng.randrange(8))
        data = data[:place] + bytes([flipped]) + data[place + 1 :]
    elif kind in ("zero", "noise"):
        data = data[:place] + (bytes(length) if kind == "zero" else noise) + data[place + length :]
    elif kind == "cut":
        data = data[:place] + data[place + length :]
    elif kind == "insert":
        data = data[:place] + noise + data[place:]
    elif kind == "truncate":
        data = data[:place]
    else:
        data += noise
    return data, f"{kind} at {place}"


def _shard(rng: Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _split(path: Path) -> tuple[bytes, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def header(rng: Random, folder: Path) -> str:
    """The header of a shard, as JSON or as bytes."""
    path = _shard(rng, folder)
    text, data = _split(path)
    length = None
    if rng.random() < 0.6:
        value = json.loads(text)
        what = mutate_json(rng, value)
        text = _dump(value)
    elif rng.random() < 0.8:
        text, what = mutate_bytes(rng, text)
    else:
        length = rng.choice((0, 1, len(text) - 1, len(text) + 1, 1 << 40, (1 << 64) - 1))
        what = f"length {length}"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return f"header {what}"


def index(rng: Random, folder: Path) -> str:
    """The index, or which shards there are."""
    path = folder / INDEX
    if not path.exists():
        value: Any = {"weight_map": {"a": "model.safetensors"}}
        what = "a foreign one"
    else:
        value = json.loads(path.read_text())
        what = mutate_json(rng, value)
    kind = rng.choice(("json", "json", "bytes", "lost shard"))
    text = _dump(value)
    if kind == "bytes":
        text, what = mutate_bytes(rng, text)
    path.write_bytes(text)
    if kind == "lost shard":
        _shard(rng, folder).unlink()
        what = kind
    return f"index {what}"


def config(rng: Random, folder: Path) -> str:
    """config.json, quantize_config.json or the manifest."""
    names = [
        name for name in ("config.json", "quantize_config.json", "marlinq.json") if (folder / name).exists()
    ]
    path = folder / rng.choice(["config.json", "config.json", *names])
    if rng.random() < 0.85:
        value = json.loads(path.read_text())
        what = mutate_json(rng, value)
        path.write_bytes(_dump(value))
    else:
        data, what = mutate_bytes(rng, path.read_bytes())
        path.write_bytes(data)
    return f"{path.name} {what}"


def tensors(rng: Random, folder: Path) -> str:
    """The bytes of the tensors: one byte changed to another, so that a value differs."""
    path = _shard(rng, folder)
    text, data = _split(path)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 8))):
        place = rng.randrange(len(changed))
        changed[place] ^= rng.randrange(1, 256)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(changed))
    return "tensors changed" if bytes(changed) != data else "tensors unchanged"


def tokenizer(rng: Random, folder: Path) -> str:
    """The tokenizer, its template, or the generation config."""
    kind = rng.choice(
        (
            "tokenizer.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        )
    )
    path = folder / kind
    if kind == "chat_template.jinja":
        path.write_text(
            rng.choice(
                (
                    "{{ 1 / 0 }}",
                    "{% for",
                    "{{ messages[9].x.y }}",
                    "{{ raise_exception('a\nb') }}",
                    "{{ ''.__class__ }}",
                    "{{ messages }}\x1b[2J",
                    "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3,
                    "{% for m in messages %}{{ m.content }}{% endfor %}",
                    "",
                )
            )
        )
        return "template"
    value = json.loads(path.read_text()) if path.exists() else {"eos_token_id": 2, "temperature": 0.5}
    what = mutate_json(rng, value)
    text = _dump(value)
    if rng.random() < 0.2:
        text, what = mutate_bytes(rng, text)
    path.write_bytes(text)
    return f"{kind} {what}"


def place(rng: Random, folder: Path) -> str:
    """Files that are no files: links, pipes, pickles, code, odd names."""
    kind = rng.choice(
        ("link out", "pipe", "dangling link", "loop", "pickle", "code", "odd name", "folder", "no permission")
    )
    name = rng.choice(
        ("config.json", "tokenizer.json", "model.safetensors", "vocab.txt", "marlinq.json", "notes\n\x1b.txt")
    )
    path = folder / name
    body = f"import pathlib\npathlib.Path({str(folder.parent / MARKER)!r}).touch()\n"
    if kind in ("link out", "pipe", "dangling link", "loop", "folder"):
        path.unlink(missing_ok=True)
    if kind == "link out":
        (folder.parent / "secret").write_text("secret")
        path.symlink_to(folder.parent / "secret")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(folder / "nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pickle":
        (folder / "pytorch_model.bin").write_bytes(
            b"\x80\x04cos\nsystem\n(S'touch " + str(folder.parent / MARKER).encode() + b"'\ntR."
        )
        _shard(rng, folder).unlink()
    elif kind == "code":
        value = json.loads((folder / "config.json").read_text())
        value["auto_map"] = {
            "AutoConfig": "evil.C",
            "AutoModelForCausalLM": "evil.M",
            "AutoTokenizer": "evil.T",
        }
        value["model_type"] = rng.choice((value["model_type"], "own"))
        (folder / "config.json").write_text(json.dumps(value))
        (folder / "evil.py").write_text(body)
    elif kind == "odd name":
        (folder / "a\nverified\x1b[2J.txt").write_text("x")
    elif kind == "no permission" and path.exists():
        path.chmod(0)
    return f"{kind} {name!r}"


MUTATIONS: dict[str, Mutation] = {
    "header": header,
    "index": index,
    "config": config,
    "tensors": tensors,
    "tokenizer": tokenizer,
    "place": place,
}
"""Changes before a command starts; crash and race happen while it runs."""
