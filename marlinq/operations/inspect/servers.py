"""What servers ask of a checkpoint, read from ``servers.toml``, which explains the fields."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("servers.toml")


@dataclass(frozen=True)
class Limits:
    """What layouts and kernels ask of a layer alike."""

    weights: tuple[str, ...]
    group_sizes: tuple[int, ...] | None = None
    whole_groups: bool = False
    slots_n: bool = False


@dataclass(frozen=True)
class Loading(Limits):
    """Which checkpoints of some layouts a server loads."""

    names: tuple[str, ...] = ()
    act_order: str = "refused"
    zero_writer: str | None = None
    rules: bool = True
    lm_head: bool = True
    experts: bool = True
    expert_group_sizes: tuple[int, ...] | None = None
    full_vocabulary: bool = False


@dataclass(frozen=True)
class Kernel(Limits):
    """Which layers a kernel takes."""

    name: str = ""
    formats: tuple[str, ...] | None = None
    channelwise: bool = True
    k_multiple: int = 1
    n_multiple: int = 1
    activations: str | None = None
    optional: str | None = None
    asks: str = ""


@dataclass(frozen=True)
class Floats:
    """Which weights in floating point a server loads from some layouts.

    Attributes:
        names: layouts.
        schemes: schemes of weights and inputs, by the names of ``--scheme``.
        runs: name of the server's kernel that multiplies them.
        experts: it loads experts of such weights, too.
        whole_blocks: K and N must be multiples of the block's sides.
    """

    names: tuple[str, ...]
    schemes: tuple[str, ...]
    runs: str
    experts: bool = True
    whole_blocks: bool = False


@dataclass(frozen=True)
class Plain:
    """Linears that a server builds without looking at the quantisation.

    Attributes:
        modules: a pattern that ends a module's name.
        architectures: classes that it is true of; empty for all.
    """

    modules: str
    architectures: tuple[str, ...] = ()

    def holds(self, architecture: str, module: str) -> bool:
        """Whether ``module`` of a model of ``architecture`` is one of them."""
        fits = not self.architectures or architecture in self.architectures
        return fits and re.search(rf"(?:{self.modules})$", module) is not None


@dataclass(frozen=True)
class Vocabulary:
    """How a server splits the output head's N over GPUs."""

    padding: int
    grows: bool

    def padded(self, size: int, parts: int) -> int:
        """``size`` output channels and the padding, for ``parts`` GPUs; it may not divide."""
        whole = -(-size // self.padding) * self.padding
        if whole % parts == 0 or not self.grows:
            return whole
        multiple = self.padding * parts
        return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Server:
    """One server or library, of the version that was read."""

    name: str
    version: str
    read: str
    hopper: tuple[str, ...]
    parallel: bool
    formats: tuple[Loading, ...]
    kernels: tuple[Kernel, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    vocabulary: Vocabulary | None = None
    asks_head: bool = False
    ties: bool = False
    plain_heads: tuple[str, ...] = ()
    plain: tuple[Plain, ...] = ()
    floats: tuple[Floats, ...] = ()
    fused_drafts: bool = False
    note: str = ""

    def loading(self, layout: str) -> Loading | None:
        """What it asks of a checkpoint in ``layout``, or None when it does not load the layout."""
        return next((each for each in self.formats if layout in each.names), None)

    def order(self) -> tuple[Kernel, ...]:
        """The kernels as they are tried on Hopper."""
        by_name = {kernel.name: kernel for kernel in self.kernels}
        return tuple(by_name[name] for name in self.hopper)


@dataclass(frozen=True)
class Axes:
    """By the last part of a layer's name, which axis tensor parallelism splits."""

    row: frozenset[str]
    column: frozenset[str]
    kv_heads: frozenset[str]


@cache
def servers() -> tuple[Server, ...]:
    """Every server of the file."""
    return tuple(_server(entry) for entry in _read()["servers"])


def built_plain(architecture: str, module: str) -> str | None:
    """Which server builds a linear in 16 bits whatever a checkpoint says, with its version; None for none."""
    return next(
        (
            f"{server.name} {server.version}"
            for server in servers()
            if any(each.holds(architecture, module) for each in server.plain)
        ),
        None,
    )


@cache
def axes() -> Axes:
    """The file's ``tensor_parallel``."""
    return Axes(**{name: frozenset(values) for name, values in _read()["tensor_parallel"].items()})


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def _server(entry: Mapping[str, Any]) -> Server:
    values = _frozen(entry)
    formats = tuple(Loading(**loading) for loading in values.pop("formats"))
    kernels = tuple(Kernel(**kernel) for kernel in values.pop("kernels", ()))
    plain = tuple(Plain(**each) for each in values.pop("plain", ()))
    floats = tuple(Floats(**each) for each in values.pop("floats", ()))
    vocabulary = values.pop("vocabulary", None)
    return Server(
        **values,
        formats=formats,
        kernels=kernels,
        plain=plain,
        floats=floats,
        vocabulary=None if vocabulary is None else Vocabulary(**vocabulary),
    )


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
