"""Plants damage into the files of a checkpoint's copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marlinq.checkpoint import MANIFEST, Checkpoint
from marlinq.core.errors import MarlinqError
from marlinq.operations.verify import verify

INDEX = "model.safetensors.index.json"
SCALES = {
    "gptq": "scales",
    "gptq-v2": "scales",
    "awq": "scales",
    "marlin": "s",
    "compressed-tensors": "weight_scale",
}
WORDS = {
    "gptq": "qweight",
    "gptq-v2": "qweight",
    "awq": "qweight",
    "marlin": "B",
    "compressed-tensors": "weight_packed",
}
ZEROS = {"gptq": "qzeros", "gptq-v2": "qzeros", "awq": "qzeros", "compressed-tensors": "weight_zero_point"}


def copy(source: Path, out: Path, *, manifest: bool) -> Path:
    """A copy of a checkpoint, with or without its manifest."""
    shutil.copytree(source, out)
    if not manifest:
        (out / MANIFEST).unlink()
    return out


def planted(source: Path, out: Path, plant: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a checkpoint of one shard whose tensors ``plant`` damages; without the manifest, whose hashes
    would find anything."""
    shutil.copytree(source, out)
    (out / MANIFEST).unlink(missing_ok=True)
    tensors = load_file(out / "model.safetensors")
    plant(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def passes(folder: Path, original: Path) -> bool:
    """Whether verify finds nothing; a folder that can't be read is found faulty too."""
    try:
        return verify(folder, against=original, device="cpu", progress=False).ok
    except MarlinqError:
        return False


def shard_of(folder: Path, name: str) -> Path:
    if not (folder / INDEX).exists():
        return folder / "model.safetensors"
    home: str = json.loads((folder / INDEX).read_text())["weight_map"][name]
    return folder / home


def change(folder: Path, name: str, edit: Callable[[Tensor], Tensor]) -> None:
    """Replaces a stored tensor by ``edit`` of it."""
    shard = shard_of(folder, name)
    tensors = load_file(shard)
    tensors[name] = edit(tensors[name]).contiguous()
    save_file(tensors, shard, metadata={"format": "pt"})


@contextmanager
def flipped(path: Path, place: int) -> Iterator[None]:
    """Inside, one bit of the file's byte at ``place`` is flipped."""

    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    flip()
    try:
        yield
    finally:
        flip()


def one_up(scales: Tensor) -> Tensor:
    """Adds 1 to the last of the scales that are stored as exponents."""
    flat = scales.flatten().clone()
    flat[-1] += 1
    return flat.reshape(scales.shape)


def swap_nibbles(words: Tensor) -> Tensor:
    """Exchanges the two codes of every byte."""
    octets = words.contiguous().reshape(-1).view(torch.uint8)
    return ((octets << 4) | (octets >> 4)).view(words.dtype).reshape(words.shape)


def swap_nibbles_of_one_word(words: Tensor) -> Tensor:
    """Exchanges the two codes of every byte in one word: the one where this makes the median difference."""
    flat = words.reshape(-1).clone()
    octets = flat.view(torch.uint8).reshape(-1, 4)
    apart = ((octets >> 4).int() - (octets & 15).int()).square().sum(dim=1)
    index = int(apart.argsort(stable=True)[len(apart) // 2])
    flat[index] = swap_nibbles(flat[index : index + 1])[0]
    return flat.reshape(words.shape)


def transpose_scales(scales: Tensor) -> Tensor:
    """The data of the transposed matrix in the original shape."""
    return scales.t().contiguous().reshape(scales.shape)


def flip_bit(bit: int) -> Callable[[Tensor], Tensor]:
    """Flips one bit of the scale in the middle of the tensor."""

    def edit(scales: Tensor) -> Tensor:
        words = scales.contiguous().reshape(-1).view(torch.int16).clone()
        words[len(words) // 2] ^= 1 << bit if bit < 15 else -(1 << 15)
        return words.view(scales.dtype).reshape(scales.shape)

    return edit


def move_a_code(folder: Path, module: str, layout: str) -> None:
    """Flips the highest bit of one code, which moves it by eight steps."""

    def edit(words: Tensor) -> Tensor:
        words.reshape(-1)[words.numel() // 2] ^= 8
        return words

    change(folder, f"{module}.{WORDS[layout]}", edit)


def enlarge_a_scale(factor: float) -> Callable[[Tensor], Tensor]:
    """Multiplies the scale of the third group of output channel 0 by ``factor``, in any layout; there must be
    fewer groups than output channels."""

    def edit(scales: Tensor) -> Tensor:
        scales[(2, 0) if scales.shape[0] < scales.shape[1] else (0, 2)] *= factor
        return scales

    return edit


def put_other(folder: Path, name: str, other: str) -> None:
    """Overwrites the tensor ``name`` by ``other``, which has the same shape."""
    found = Checkpoint.open(folder).tensor(other)
    change(folder, name, lambda _: found)


def shift_zeros(by: int) -> Callable[[Tensor], Tensor]:
    """Adds ``by`` to every stored zero point, modulo 16."""

    def edit(words: Tensor) -> Tensor:
        octets = words.contiguous().reshape(-1).view(torch.uint8)
        low, high = (octets & 15) + by & 15, (octets >> 4) + by & 15
        return (low | high << 4).view(words.dtype).reshape(words.shape)

    return edit


def swap_two_channels(g_idx: Tensor) -> Tensor:
    """Exchanges the groups of the first channel and of a channel in another group."""
    other = int((g_idx != g_idx[0]).nonzero()[-1])
    changed = g_idx.clone()
    changed[0], changed[other] = g_idx[other], g_idx[0]
    return changed


def remove_tensor(folder: Path, name: str, *, from_index: bool = True) -> None:
    """Removes a tensor from its shard and, by default, from the index."""
    shard = shard_of(folder, name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    if from_index:
        index = json.loads((folder / INDEX).read_text())
        del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))


def duplicate_tensor(folder: Path, name: str) -> None:
    """Stores a tensor in a second shard too."""
    shard = shard_of(folder, name)
    other = next(path for path in sorted(folder.glob("*.safetensors")) if path != shard)
    tensors = load_file(other)
    tensors[name] = load_file(shard)[name]
    save_file(tensors, other, metadata={"format": "pt"})


def truncate_shard(folder: Path) -> None:
    """Cuts the last 16 bytes off the last shard."""
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-16])


def unquantize(folder: Path, module: str, weight: Tensor) -> None:
    """Replaces a module's quantised tensors by a plain weight without telling the config."""
    index = json.loads((folder / INDEX).read_text())
    names = [name for name in index["weight_map"] if name.startswith(f"{module}.")]
    home = shard_of(folder, names[0])
    for name in names:
        shard = shard_of(folder, name)
        tensors = load_file(shard)
        del tensors[name]
        if shard == home:
            tensors[f"{module}.weight"] = weight
        save_file(tensors, shard, metadata={"format": "pt"})
        del index["weight_map"][name]
    index["weight_map"][f"{module}.weight"] = home.name
    (folder / INDEX).write_text(json.dumps(index))


def header_bytes(path: Path) -> int:
    """Offset of a shard's data in bytes."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def add_tensor(folder: Path, name: str, tensor: Tensor) -> None:
    """Adds a tensor, listed in the index."""
    shard = min(folder.glob("*.safetensors"))
    save_file({**load_file(shard), name: tensor}, shard, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = shard.name
    (folder / INDEX).write_text(json.dumps(index))
