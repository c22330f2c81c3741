"""Finds modules of a decoder block that are not quantised because of their role.

Roles are found by a module's structure, never by the name of a model. Routers are never quantised. Other
small modules stay in 16 bits unless an override names them, because servers always build them in 16 bits
(``operations/inspect/servers.toml`` lists the cases that no rule on shapes covers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from marlinq.models.linears import is_linear, linear_shape

_LEAST_K, _LEAST_N = 32, 8
"""least K (the smallest group) and N (codes in a 32-bit word) of a linear that is quantised by default"""


def routers(block: nn.Module, experts: Mapping[str, int], hidden: int) -> dict[str, str]:
    """Name inside the block -> reason, for modules that choose experts or weigh a shared expert.

    A router reads hidden states and makes none: it is the module beside the experts, or beside their parent,
    with a matrix of one row per expert (or more, for experts that do nothing) and none of ``hidden`` rows.
    The whole module stays unquantised.

    Args:
        block: a decoder block.
        experts: name inside the block of a module with experts -> their number.
        hidden: channels of the residual stream.
    """
    names: dict[str, str] = {}
    for name, count in experts.items():
        level = name
        while level:
            level = level.rpartition(".")[0]
            beside = {
                f"{level}.{child}" if level else child: module
                for child, module in block.get_submodule(level).named_children()
            }
            chosen = {
                each: module
                for each, module in beside.items()
                if not f"{name}.".startswith(f"{each}.") and _chooses(module, count, hidden)
            }
            for each, module in chosen.items():
                for inner in _with_matrices(module):
                    names[f"{each}.{inner}" if inner else each] = f"router of {count} experts"
            for each, module in beside.items():
                if each not in chosen and is_linear(module) and linear_shape(module)[1] == 1:
                    names[each] = "gate of the shared expert"
            if chosen:
                break
    return names


def usually_kept(block: nn.Module, hidden: int) -> dict[str, str]:
    """Name inside the block -> reason, for linears that stay in 16 bits unless an override names them.

    Args:
        block: a decoder block.
        hidden: channels of the residual stream.
    """
    reasons: dict[str, str] = {}
    for owner_name, owner in block.named_modules():
        heads = set(_head_counts(owner))
        scans = any(
            key == "A_log" and value.dim() == 2 for key, value in owner.named_parameters(recurse=False)
        )
        for child, module in owner.named_children():
            if not is_linear(module):
                continue
            k, n = linear_shape(module)
            name = f"{owner_name}.{child}" if owner_name else child
            if k < _LEAST_K or n < _LEAST_N:
                reasons[name] = f"too small to gain by it: K = {k}, N = {n}"
            elif n in heads or n / 2 in heads:
                reasons[name] = f"makes {n} numbers, one or two a head: servers build it in 16 bits"
            elif scans and hidden not in (k, n):
                reasons[name] = "makes the parameters of a state-space scan: servers build it in 16 bits"
    return reasons


def _chooses(module: nn.Module, count: int, hidden: int) -> bool:
    rows = [shape[0] for shape in _matrices(module)]
    return hidden not in rows and any(count <= n <= 2 * count for n in rows)


def _matrices(module: nn.Module) -> Iterator[tuple[int, int]]:
    """(N, K) of every matrix in ``module``."""
    for inner in module.modules():
        if is_linear(inner):
            k, n = linear_shape(inner)
            yield n, k
        else:
            for parameter in inner.parameters(recurse=False):
                if parameter.dim() == 2 and min(parameter.shape) > 1:
                    yield parameter.shape[0], parameter.shape[1]


def _with_matrices(module: nn.Module) -> Iterator[str]:
    for name, inner in module.named_modules():
        if any(parameter.dim() >= 2 for parameter in inner.parameters(recurse=False)):
            yield name


def _head_counts(owner: nn.Module) -> Iterator[int]:
    """Numbers of heads of a module: of its attributes, of its linears, of its decay."""
    for key, value in vars(owner).items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            words = key.split("_")
            if "heads" in words or key in ("n_head", "num_head"):
                yield value
    size = getattr(owner, "head_dim", None)
    if isinstance(size, int) and size > 1:
        rows = [linear_shape(module)[1] for module in owner.children() if is_linear(module)]
        yield from (n // size for n in rows if n % size == 0 and n > size)
    for module in owner.children():
        yield from (value.numel() for key, value in module.named_parameters(recurse=False) if key == "A_log")
    own = [
        value.numel()
        for key, value in owner.named_parameters(recurse=False)
        if key in ("A_log", "dt_bias") and max(value.shape) == value.numel()
    ]
    if own:
        # Where decays differ by channel, only their biases do.
        yield min(own)
