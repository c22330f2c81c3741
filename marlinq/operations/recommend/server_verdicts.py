"""Verdicts of servers on a type of weights, by the rules of :mod:`marlinq.operations.inspect`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from marlinq.core.schemes import named_scheme
from marlinq.operations.inspect.eligibility import Whole, verdicts
from marlinq.operations.inspect.parallel import LinearFacts
from marlinq.operations.inspect.servers import servers
from marlinq.operations.recommend.shape import ModelShape
from marlinq.operations.recommend.weight_types import Weights

_COUNT = re.compile(r" \(and \d+ more\)")
LAYOUT = "compressed-tensors"
"""The format that holds every scheme."""


@dataclass(frozen=True)
class Loader:
    """A server's verdict on a type of weights.

    Attributes:
        server: name of the server.
        loads: whether it loads them; None where that is not known.
        kernel: kernel that runs most kinds of layers on Hopper; empty where it is not known.
        reason: why it does not load them, or other requirements.
    """

    server: str
    loads: bool | None
    kernel: str
    reason: str


def loaders(shape: ModelShape, weights: Weights, wanted: Collection[str]) -> tuple[Loader, ...]:
    """The verdicts of the servers named in ``wanted``, or of all servers if it is empty."""
    if weights.scheme is None:
        names = ["marlinq", *(server.name for server in servers())]
        return tuple(Loader(name, True, "", "16 bits") for name in names if _is_wanted(name, wanted))
    scheme = weights.scheme
    layers = {
        one.name: LinearFacts(
            LAYOUT,
            one.in_features,
            one.out_features,
            scheme.element,
            weights.granularity(one.in_features),
            not scheme.stores_zeros,
            True,
            named=named_scheme(scheme),
        )
        for one in shape.judged
    }
    config = shape.config.get("text_config") or shape.config
    named = shape.config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else ""
    whole = Whole(
        LAYOUT,
        False,
        (),
        config.get("num_attention_heads"),
        config.get("num_key_value_heads"),
        str(architecture),
        shape.tied,
        says_head=False,
    )
    return tuple(
        Loader(
            verdict.server,
            None if verdict.reason.startswith("not judged") else verdict.loads,
            verdict.first[0][0] if verdict.first else "",
            # The numbers of other layers are not those of the model: of equal layers one is judged.
            _COUNT.sub("", verdict.reason),
        )
        for verdict in verdicts(layers, whole)
        if _is_wanted(verdict.server, wanted)
    )


def _is_wanted(name: str, wanted: Collection[str]) -> bool:
    return not wanted or name.lower() in {each.lower() for each in wanted}


def known_servers() -> tuple[str, ...]:
    """Names that ``--servers`` takes."""
    return ("marlinq", *(server.name.lower() for server in servers()))
