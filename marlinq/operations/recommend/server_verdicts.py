"""Verdicts of servers on a type of weights, by the rules of :mod:`marlinq.operations.inspect`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from marlinq.core.schemes import named_scheme
from marlinq.operations.inspect.eligibility import Whole, verdicts
from marlinq.operations.inspect.parallel import LinearFacts
from marlinq.operations.inspect.servers import servers
from marlinq.operations.recommend.shape import ModelShape, is_expert
from marlinq.operations.recommend.weight_types import Weights

_COUNT = re.compile(r" \(and \d+ more\)")
LAYOUT = "compressed-tensors"
"""The format that holds every scheme."""
STACKED_LAYOUT = "gpt-oss"
"""The format of experts in MXFP4 where a file holds those of a layer together."""


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
        # Those that read no compressed-tensors run quantised checkpoints alone.
        names = ["marlinq", *(server.name for server in servers() if server.loading(LAYOUT))]
        return tuple(Loader(name, True, "", "16 bits") for name in names if _is_wanted(name, wanted))
    scheme = weights.scheme
    layout = STACKED_LAYOUT if weights.experts_only else LAYOUT
    layers = {
        one.name: LinearFacts(
            layout,
            one.in_features,
            one.out_features,
            scheme.element,
            weights.granularity(one.in_features),
            not scheme.stores_zeros,
            True,
            named=named_scheme(scheme),
        )
        for one in shape.judged
        if is_expert(one) or not weights.experts_only
    }
    config = shape.config.get("text_config") or shape.config
    whole = Whole(
        layout,
        False,
        (),
        config.get("num_attention_heads"),
        config.get("num_key_value_heads"),
        shape.architecture,
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
