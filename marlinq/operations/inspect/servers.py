"""Requirements of servers on a checkpoint, read from ``servers.toml``, whose header explains every field."""

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
    """Requirements on a layer that both layouts and kernels state."""

    weights: tuple[str, ...]
    group_sizes: tuple[int, ...] | None = None
    whole_groups: bool = False
    slots_n: bool = False


@dataclass(frozen=True)
class Loading(Limits):
    """Requirements that a server's loader makes of checkpoints in some layouts."""

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
    """Requirements that a kernel makes of a layer."""

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
    """Floating-point weights that a server loads from some layouts.

    Attributes:
        names: names of the layouts.
        schemes: schemes of weights and activations, as ``--scheme`` names them.
        runs: name of the server's kernel that multiplies them.
        experts: whether it also loads experts with such weights.
        whole_blocks: whether K and N must be multiples of the block's sides.
    """

    names: tuple[str, ...]
    schemes: tuple[str, ...]
    runs: str
    experts: bool = True
    whole_blocks: bool = False


@dataclass(frozen=True)
class Plain:
    """Linears that a server builds in 16 bits, whatever the checkpoint's quantisation.

    Attributes:
        families: names of the models that have them.
        read: files of the server's version where that was read.
        modules: regular expression for the end of a module's name.
        architectures: model classes it applies to; empty for all.
    """

    families: tuple[str, ...]
    read: str
    modules: str
    architectures: tuple[str, ...] = ()

    def holds(self, architecture: str, module: str) -> bool:
        """Whether ``module`` of a model of ``architecture`` is one of them."""
        fits = not self.architectures or architecture in self.architectures
        return fits and re.search(rf"(?:{self.modules})$", module) is not None


@dataclass(frozen=True)
class Vocabulary:
    """How a server pads the output head's N, the vocabulary, and splits it over GPUs.

    Attributes:
        padding: N is padded to a multiple of this.
        grows: whether N is padded to a multiple of ``padding`` times the number of GPUs where it would
            otherwise not divide.
    """

    padding: int
    grows: bool

    def padded(self, size: int, parts: int) -> int:
        """``size`` plus padding, for ``parts`` GPUs; a multiple of ``parts`` only with ``grows``."""
        whole = -(-size // self.padding) * self.padding
        if whole % parts == 0 or not self.grows:
            return whole
        multiple = self.padding * parts
        return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Server:
    """One server or library, in the version whose source was read."""

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
    whole_experts: tuple[str, ...] = ()
    plain: tuple[Plain, ...] = ()
    floats: tuple[Floats, ...] = ()
    fused_drafts: bool = False
    note: str = ""

    def loading(self, layout: str) -> Loading | None:
        """Requirements on a checkpoint in ``layout``; None when the server does not load the layout."""
        return next((each for each in self.formats if layout in each.names), None)

    def order(self) -> tuple[Kernel, ...]:
        """The kernels in the order in which the server tries them on Hopper."""
        by_name = {kernel.name: kernel for kernel in self.kernels}
        return tuple(by_name[name] for name in self.hopper)


@dataclass(frozen=True)
class Axes:
    """Last parts of layer names, by the axis that tensor parallelism splits.

    Attributes:
        row: layers whose K is split.
        column: layers whose N is split.
        kv_heads: key and value projections, which are repeated where there are more GPUs than heads.
    """

    row: frozenset[str]
    column: frozenset[str]
    kv_heads: frozenset[str]


@cache
def servers() -> tuple[Server, ...]:
    """Every server of the file."""
    return tuple(_server(entry) for entry in _read()["servers"])


def loads(server: str, layout: str) -> bool:
    """Whether the server of that name loads checkpoints in ``layout``."""
    return any(each.name == server and each.loading(layout) is not None for each in servers())


def built_plain(architecture: str, module: str) -> str | None:
    """Name and version of a server that always builds ``module`` in 16 bits; None where none does."""
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
    """The table ``tensor_parallel`` of ``servers.toml``."""
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
    """``value`` with every list in it as a tuple."""
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
