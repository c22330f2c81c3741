"""Damaged and hostile folders: each gives one line that names the file, and nothing outside is read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.checkpoint.quantization_config import read_quantization_config
from marlinq.core import patterns
from marlinq.core.errors import CheckpointError, MarlinqError, UnsupportedError

Harm = Callable[[Path], None]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An ordinary checkpoint in one file."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int8)}, path / SINGLE)
    return path


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with any header; bytes are taken as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(shape: list[Any], begin: Any, end: Any, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def harmed(header: Any, data: bytes = b"", length: int | None = None) -> Harm:
    return lambda folder: raw(folder / SINGLE, header, data, length)


def indexed(weight_map: Any) -> Harm:
    def harm(folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return harm


def sharded(folder: Path) -> None:
    (folder / SINGLE).unlink()
    save_file({"a": torch.zeros(2)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "two.safetensors")


def outside_link(name: str) -> Harm:
    def harm(folder: Path) -> None:
        secret = folder.parent / "secret"
        secret.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)

    return harm


def piped(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return harm


def socketed(name: str) -> Harm:
    def harm(folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
            server.bind(name)

    return harm


def looping_link(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(folder / "other")
    (folder / "other").symlink_to(folder / SINGLE)


def truncated(folder: Path) -> None:
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:-1])


def longer(folder: Path) -> None:
    with (folder / SINGLE).open("ab") as file:
        file.write(b"x")


def pickled(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def duplicated(folder: Path) -> None:
    sharded(folder)
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, folder / "two.safetensors")
    indexed({"a": "one.safetensors", "b": "two.safetensors"})(folder)


def missing_tensor(folder: Path) -> None:
    sharded(folder)
    indexed({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})(folder)


def missing_shard(folder: Path) -> None:
    sharded(folder)
    indexed({"a": "one.safetensors", "b": "three.safetensors"})(folder)


def unlisted(folder: Path) -> None:
    sharded(folder)
    save_file({"b": torch.zeros(2), "c": torch.zeros(1)}, folder / "two.safetensors")
    indexed({"a": "one.safetensors", "b": "two.safetensors"})(folder)


def stale_single(folder: Path) -> None:
    single = (folder / SINGLE).read_bytes()
    sharded(folder)
    indexed({"a": "one.safetensors", "b": "two.safetensors"})(folder)
    (folder / SINGLE).write_bytes(single)


def adapted(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))


def config(text: str | bytes) -> Harm:
    def harm(folder: Path) -> None:
        (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())

    return harm


DEEP = b"[" * 200_000 + b"]" * 200_000
HOSTILE: dict[str, tuple[Harm, str]] = {
    "empty file": (lambda folder: (folder / SINGLE).write_bytes(b""), "too short"),
    "header beyond the file": (harmed({"a": entry([1], 0, 1)}, b"x", length=1 << 40), "header claims"),
    "header of 2**64 - 1 bytes": (harmed({}, length=(1 << 64) - 1), "header claims"),
    "header one byte too long": (harmed({}, length=3), "header claims"),
    "header no JSON": (harmed(b"{nonsense"), "not valid JSON"),
    "header not UTF-8": (harmed(b'{"\xff": 1}'), "not valid JSON"),
    "header a list": (harmed([]), "not a JSON object"),
    "header nested deep": (harmed(DEEP), "not valid JSON"),
    "key twice": (harmed(b'{"a": {}, "a": {}}'), "stands twice"),
    "entry no object": (harmed({"a": 3}), "exactly dtype, shape and data_offsets"),
    "entry with more keys": (
        harmed({"a": {**entry([1], 0, 1), "code": "x"}}, b"x"),
        "exactly dtype, shape and data_offsets",
    ),
    "unknown dtype": (harmed({"a": entry([1], 0, 1, "OBJECT")}, b"x"), "unknown dtype"),
    "dtype no string": (harmed({"a": {**entry([1], 0, 1), "dtype": ["U8"]}}, b"x"), "unknown dtype"),
    "negative dimension": (harmed({"a": entry([-1], 0, 1)}, b"x"), "malformed shape"),
    "fractional dimension": (harmed({"a": entry([1.0], 0, 1)}, b"x"), "malformed shape"),
    "boolean dimension": (harmed({"a": entry([True], 0, 1)}, b"x"), "malformed shape"),
    "hundred dimensions": (harmed({"a": entry([1] * 100, 0, 1)}, b"x"), "malformed shape"),
    "shape of 2**120 elements": (harmed({"a": entry([1 << 60, 1 << 60], 0, 1)}, b"x"), "malformed shape"),
    "shape that wraps at 2**64": (harmed({"a": entry([1 << 33, 1 << 31], 0, 0)}), "malformed shape"),
    "empty shape beyond 64 bits": (harmed({"a": entry([1 << 60, 1 << 60, 0], 0, 0)}), "malformed shape"),
    "shape of more than the file": (harmed({"a": entry([3], 0, 1)}, b"x"), "takes 3 bytes"),
    "dimension of minus zero": (
        harmed(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        "malformed shape",
    ),
    "header in UTF-16": (harmed('{"a": 1}'.encode("utf-16")), "not valid JSON"),
    "header with half a surrogate pair as bytes": (harmed(b'{"a\xed\xa0\x80": 1}'), "not valid JSON"),
    "header with a byte order mark": (harmed(b"\xef\xbb\xbf{}"), "not valid JSON"),
    "header with NaN": (harmed(b'{"__metadata__": NaN}'), "not valid JSON"),
    "header metadata no object": (harmed({"__metadata__": 3}), "object of strings"),
    "header metadata not of strings": (harmed({"__metadata__": {"a": 3}}), "object of strings"),
    "header metadata with half a pair": (harmed({"__metadata__": {"a": "\ud800"}}), "surrogate pair"),
    "name with half a surrogate pair": (harmed({"\ud800": entry([1], 0, 1)}, b"x"), "printable"),
    "name with a line break": (harmed({"a\nb": entry([1], 0, 1)}, b"x"), "printable"),
    "name with an escape code": (harmed({"\x1b[2J": entry([1], 0, 1)}, b"x"), "printable"),
    "name written from right to left": (harmed({"a\u202eb": entry([1], 0, 1)}, b"x"), "printable"),
    "name of a million characters": (harmed({"a" * 1_000_000: entry([1], 0, 1)}, b"x"), "printable"),
    "end before begin": (harmed({"a": entry([1], 1, 0)}, b"x"), "malformed data_offsets"),
    "three offsets": (
        harmed({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"xx"),
        "malformed data_offsets",
    ),
    "overlap": (harmed({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"xxx"), "overlaps"),
    "same bytes twice": (harmed({"a": entry([2], 0, 2), "b": entry([2], 0, 2)}, b"xx"), "overlaps"),
    "hole": (harmed({"a": entry([1], 0, 1), "b": entry([1], 2, 3)}, b"xxx"), "leaves a hole"),
    "hole at the start": (harmed({"a": entry([1], 1, 2)}, b"xx"), "leaves a hole"),
    "truncated": (truncated, "truncated"),
    "trailing data": (longer, "trailing data"),
    "pickle only": (pickled, "pickled weights are never loaded"),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), "no safetensors file"),
    "shards without an index": (sharded, "no model.safetensors.index.json"),
    "tensor in two shards": (duplicated, "stored twice"),
    "tensor listed but not stored": (missing_tensor, "listed in model.safetensors.index.json but not stored"),
    "shard missing": (missing_shard, "missing"),
    "tensor stored but not listed": (unlisted, "does not list it"),
    "index to the parent": (indexed({"a": "../secret.safetensors"}), "not a plain file name"),
    "index to an absolute path": (indexed({"a": "/etc/secret.safetensors"}), "not a plain file name"),
    "index with a backslash": (indexed({"a": "..\\secret.safetensors"}), "not a plain file name"),
    "index with a NUL": (indexed({"a": "secret\0.safetensors"}), "not a plain file name"),
    "index to half a surrogate pair": (indexed({"a": "\ud800.safetensors"}), "not a plain file name"),
    "index to a pickle": (indexed({"a": "model.bin"}), "not to a safetensors file"),
    "index to a number": (indexed({"a": 7}), "not to a safetensors file"),
    "index a list": (indexed(["a"]), "non-empty weight_map"),
    "index empty": (indexed({}), "non-empty weight_map"),
    # transformers would take other weights than marlinq and the servers.
    "weights beside other weights' index": (stale_single, "remove what is stale"),
    "other weights named": (
        config('{"model_type": "llama", "transformers_weights": "other.safetensors"}'),
        "transformers_weights names other weights than model.safetensors",
    ),
    "an adapter beside the weights": (adapted, "merge it into the weights"),
    "weights linked out": (outside_link(SINGLE), "symbolic link that leads out"),
    "config linked out": (outside_link("config.json"), "symbolic link that leads out"),
    "tokenizer linked out": (outside_link("tokenizer.json"), "symbolic link that leads out"),
    "links in a circle": (looping_link, "model.safetensors"),
    "weights a named pipe": (piped(SINGLE), "model.safetensors: a named pipe, expected a regular file"),
    "config a named pipe": (piped("config.json"), "config.json: a named pipe, expected a regular file"),
    "index a named pipe": (piped(INDEX), "index.json: a named pipe, expected a regular file"),
    "tokenizer a named pipe": (piped("tokenizer.json"), "tokenizer.json: a named pipe"),
    "tokenizer a socket": (socketed("tokenizer.json"), "tokenizer.json: a socket"),
    "config missing": (lambda folder: (folder / "config.json").unlink(), "missing"),
    "config no JSON": (config("{"), "not valid JSON"),
    "config a list": (config("[]"), "expected a JSON object"),
    "config nested deep": (config(DEEP), "not valid JSON"),
    "config with a key twice": (config('{"a": 1, "a": 2}'), "stands twice"),
    "config with a number of many digits": (config('{"a": ' + "9" * 10_000 + "}"), "not valid JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_are_refused_in_one_line(folder: Path, name: str) -> None:
    harm, says = HOSTILE[name]
    Checkpoint.open(folder)
    harm(folder)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    assert len(message) < 1000


def test_weights_may_be_named_and_the_index_may_name_one_file(folder: Path) -> None:
    indexed({"a": SINGLE, "b": SINGLE})(folder)
    for named in (INDEX, SINGLE):
        config(json.dumps({"model_type": "llama", "transformers_weights": named}))(folder)
        assert Checkpoint.open(folder).shards == [SINGLE]
    (folder / INDEX).unlink()
    config(json.dumps({"model_type": "llama", "transformers_weights": SINGLE}))(folder)
    assert Checkpoint.open(folder).shards == [SINGLE]


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.layers.2.eh_proj.weight"])
def test_a_draft_head_may_be_in_a_file_beside_the_weights(folder: Path, name: str) -> None:
    save_file({name: torch.ones(2, 2)}, folder / "model_extra_tensors.safetensors")
    indexed({"a": SINGLE, "b": SINGLE, name: "model_extra_tensors.safetensors"})(folder)
    config(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))(folder)
    assert name in Checkpoint.open(folder).tensors
    config(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))(folder)
    if not name.startswith("mtp"):
        with pytest.raises(CheckpointError, match="remove what is stale"):
            Checkpoint.open(folder)


def test_the_fixture_itself_reads_back(folder: Path) -> None:
    opened = Checkpoint.open(folder)
    assert torch.equal(opened.tensor("a"), torch.arange(6.0).reshape(2, 3))
    with pytest.raises(CheckpointError, match="no tensor named c"):
        opened.tensor("c")


def test_accepted_headers_are_accepted_by_safetensors_too(folder: Path) -> None:
    for header in (
        {"a": entry([2, 3], 0, 6), "__metadata__": {"format": "pt", "ä": "日本"}},
        {"é/日": entry([0, 5], 0, 0), "b": entry([], 0, 1)},
        {},
    ):
        raw(
            folder / SINGLE,
            header,
            b"x" * max((e["data_offsets"][1] for n, e in header.items() if n[0] != "_"), default=0),
        )
        opened = Checkpoint.open(folder)
        with safe_open(folder / SINGLE, framework="pt") as theirs:
            assert sorted(opened.tensors) == sorted(theirs.keys())


def test_a_shard_that_shrinks_after_opening_is_noticed(folder: Path) -> None:
    opened = Checkpoint.open(folder)
    truncated(folder)
    last = max(opened.tensors.values(), key=lambda info: info.offset)
    with pytest.raises(CheckpointError, match="truncated|changed while it was read"):
        opened.tensor(last.name)


def test_the_hub_cache_may_link_to_its_blobs(folder: Path) -> None:
    repository = folder.parent / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert set(Checkpoint.open(snapshot).tensors) == {"a", "b"}


def test_no_folder_and_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder, and not a Hub id"):
        Checkpoint.open(tmp_path / "nowhere")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": GROUP}}


def ct_weights(**changes: Any) -> dict[str, Any]:
    return {**CT, "config_groups": {"g": {**GROUP, "weights": {**WEIGHTS, **changes}}}}


WRONG_CONFIGS: dict[str, tuple[Any, type[MarlinqError], str]] = {
    "no object": ("gptq", CheckpointError, "expected an object"),
    "a list": ([GPTQ], CheckpointError, "expected an object"),
    "unknown method": ({**GPTQ, "quant_method": "bitnet"}, UnsupportedError, "quant_method 'bitnet'"),
    "method a list": ({**GPTQ, "quant_method": ["gptq"]}, UnsupportedError, "quant_method"),
    "bits a string": ({**GPTQ, "bits": "4"}, CheckpointError, "bits: expected an integer"),
    "bits a boolean": ({**GPTQ, "bits": True}, CheckpointError, "bits: expected an integer"),
    "bits missing": (
        {"quant_method": "gptq", "group_size": 32},
        CheckpointError,
        "bits: expected an integer",
    ),
    "three bits": ({**GPTQ, "bits": 3}, UnsupportedError, "3 bits"),
    "group size of zero": ({**GPTQ, "group_size": 0}, CheckpointError, "group_size"),
    "group size of -2": ({**GPTQ, "group_size": -2}, CheckpointError, "group_size"),
    "group size enormous": ({**GPTQ, "group_size": 1 << 60}, CheckpointError, "group_size"),
    "sym a number": ({**GPTQ, "sym": 1}, CheckpointError, "sym: expected true or false"),
    "unknown layout": (
        {**GPTQ, "checkpoint_format": "gptq_p"},
        UnsupportedError,
        "checkpoint_format 'gptq_p'",
    ),
    "layout an object": (
        {**GPTQ, "checkpoint_format": {}, "format": ["x"]},
        UnsupportedError,
        "checkpoint_format",
    ),
    "dynamic a list": ({**GPTQ, "dynamic": ["x"]}, CheckpointError, "dynamic: expected an object"),
    "dynamic a bad pattern": ({**GPTQ, "dynamic": {"-:(": {}}}, CheckpointError, "not a regular expression"),
    "dynamic a huge pattern": ({**GPTQ, "dynamic": {"-:" + "a" * 20_000: {}}}, CheckpointError, "20000 char"),
    "dynamic a pattern that unrolls": (
        {**GPTQ, "dynamic": {"-:(?:a{1000}){1000}": {}}},
        CheckpointError,
        "copies",
    ),
    "dynamic rule a number": ({**GPTQ, "dynamic": {"+:x": 3}}, CheckpointError, "dynamic rule"),
    "AWQ GEMV": ({**AWQ, "version": "gemv"}, UnsupportedError, "AWQ version 'gemv'"),
    "AWQ eight bits": ({**AWQ, "bits": 8}, UnsupportedError, "8 bits"),
    "AWQ skips a string": (
        {**AWQ, "modules_to_not_convert": "lm_head"},
        CheckpointError,
        "list of module names",
    ),
    "CT without groups": ({**CT, "config_groups": {}}, CheckpointError, "config_groups"),
    "CT group a number": ({**CT, "config_groups": {"g": 3}}, CheckpointError, "config_groups.g"),
    "CT FP8": (
        ct_weights(type="float"),
        UnsupportedError,
        "format 'pack-quantized' is not supported for fp4_e2m1",
    ),
    "CT per tensor": (ct_weights(strategy="tensor"), CheckpointError, "no quantised tensor ends in"),
    "CT six bits": (ct_weights(num_bits=6), UnsupportedError, "6 bits"),
    "CT weights a list": (
        {**CT, "config_groups": {"g": {**GROUP, "weights": [1]}}},
        CheckpointError,
        "weights",
    ),
    "CT other format": ({**CT, "format": "int-quantized"}, UnsupportedError, "format 'int-quantized'"),
    "CT activations": (
        {**CT, "config_groups": {"g": {**GROUP, "input_activations": {"num_bits": 8}}}},
        UnsupportedError,
        "activations",
    ),
    "CT sparsity": ({**CT, "sparsity_config": {"format": "sparse-24"}}, UnsupportedError, "sparsity_config"),
    "CT KV cache": ({**CT, "kv_cache_scheme": {"num_bits": 8}}, UnsupportedError, "kv_cache_scheme"),
    "CT bad target": (
        {**CT, "config_groups": {"g": {**GROUP, "targets": ["re:["]}}},
        CheckpointError,
        "not a regular expression",
    ),
    "nothing quantised": (GPTQ, CheckpointError, "no quantised tensor ends in .qweight"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_wrong_quantization_configs_are_named(folder: Path, name: str) -> None:
    raw_config, kind, says = WRONG_CONFIGS[name]
    (folder / "config.json").write_text(json.dumps({"quantization_config": raw_config}))
    with pytest.raises(kind) as caught:
        QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def module_tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor | None] = {
        "m.qweight": torch.zeros(8, 64, dtype=torch.int32),
        "m.qzeros": torch.zeros(2, 8, dtype=torch.int32),
        "m.scales": torch.zeros(2, 64, dtype=torch.float16),
        "m.g_idx": torch.arange(64, dtype=torch.int32) // 32,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return {name: value for name, value in tensors.items() if value is not None}


def open_and_load(folder: Path) -> None:
    opened = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert opened is not None
    opened.load("m")


WRONG_MODULES: dict[str, tuple[dict[str, Any], type[MarlinqError], str]] = {
    "stacked experts": (
        {"e__qweight": torch.zeros(2, 8, 64, dtype=torch.int32)},
        UnsupportedError,
        "e.qweight: expected two dimensions",
    ),
    "experts under other names": (
        {"e__gate_up_packed": torch.zeros(2, 8, 64, dtype=torch.int32)},
        UnsupportedError,
        "e.gate_up_packed",
    ),
    "codes without scales": ({"m__scales": None}, CheckpointError, "m.scales is missing"),
    "scales without codes": ({"n__scales": torch.zeros(2, 64)}, CheckpointError, "n.scales"),
    "empty": ({"m__qweight": torch.zeros(0, 64, dtype=torch.int32)}, CheckpointError, "empty"),
    "a tensor called like a suffix": (
        {"qweight": torch.zeros(8, 64, dtype=torch.int32)},
        CheckpointError,
        "tensor qweight",
    ),
    "zeros missing": ({"m__qzeros": None}, CheckpointError, "m: qzeros: expected"),
    "zeros of another shape": (
        {"m__qzeros": torch.zeros(2, 7, dtype=torch.int32)},
        CheckpointError,
        "m: qzeros: expected",
    ),
    "scales of another group size": (
        {"m__scales": torch.zeros(4, 64, dtype=torch.float16)},
        CheckpointError,
        "m: scales: expected",
    ),
    "g_idx out of range": (
        {"m__g_idx": torch.full((64,), 2, dtype=torch.int32)},
        CheckpointError,
        "m: g_idx: expected values in 0..1",
    ),
    "scales of integers": (
        {"m__scales": torch.zeros(2, 64, dtype=torch.int16)},
        CheckpointError,
        "m: scales: expected float",
    ),
}


@pytest.mark.parametrize("name", WRONG_MODULES)
def test_wrong_modules_are_named(folder: Path, name: str) -> None:
    changes, kind, says = WRONG_MODULES[name]
    (folder / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    save_file(module_tensors(**changes), folder / SINGLE)
    with pytest.raises(kind) as caught:
        open_and_load(folder)
    assert says in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", SINGLE])
def test_a_file_that_may_not_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path, *args, **kwargs)

    # Read permissions don't bind root, under whom the tests may run.
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=rf"{name}: can't be read \(Permission denied\)"):
        Checkpoint.open(folder)


def test_a_name_too_long_for_the_system_is_no_folder() -> None:
    with pytest.raises(CheckpointError, match="File name too long"):
        Checkpoint.open("a" * 300)


def test_side_files_and_what_is_left_out(folder: Path) -> None:
    for name in ("tokenizer.json", "modeling_x.py", "chat_template.jinja", ".gitattributes", "model.gguf"):
        (folder / name).write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "vocab.txt").write_text("x")
    (folder / "quantize_config.json").write_text("{}")
    opened = Checkpoint.open(folder)
    assert opened.side_files == ["chat_template.jinja", "modeling_x.py", "sub/vocab.txt", "tokenizer.json"]
    assert opened.left_out == ["model.gguf"]


def test_a_pattern_that_backtracks_forever_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.05)
    (tmp_path / "config.json").write_text("{}")
    hostile = {**GPTQ, "dynamic": {r"-:(?:[a-z.]|.)+[0-9]": {}}}
    found = read_quantization_config(tmp_path, {"quantization_config": hostile})
    assert found is not None
    with pytest.raises(CheckpointError, match=r"config.json.*takes too long to match 'model"):
        found.rules.outcome("model.decoder.blocks.attention.projection.query" * 3)
