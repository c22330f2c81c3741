"""Fused experts: finds the layout of transformers' two 3-D parameters and proves it by running the module.

A module of fused experts holds ``gate_up_proj`` (or ``up_proj`` without a gate) and ``down_proj`` with one
matrix per expert, in one of these layouts (E experts, H hidden channels, I intermediate channels):

    ``gate_up_proj`` [E, 2I, H]   gate rows, then up rows, or alternating (interleaved); transposed: [E, H,
    2I] ``up_proj``      [E, I, H]    transposed: [E, H, I] ``down_proj``    [E, H, I]    transposed: [E, I,
    H]

The layout is taken from the shapes and from transformers' attributes of the class, and then compared with the
module's own forward on random weights with a small I. Experts with other products, activations or weighting
are refused by name, so that gate and up can't be confused.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marlinq.core.errors import UnsupportedError
from marlinq.models.formulas import close
from marlinq.models.projection import Projection, fused_experts

Multiply = Callable[[int, int, Tensor], Tensor]
"""Function of (expert, product, x), biases included. Product 0: x [T, H] to [T, I], or with a gate to [T,
2I], gate first. Product 1: x [T, I] to [T, H]."""

FIRST, SECOND = 0, 1
"""Numbers of an expert's two products: into the intermediate channels, and out of them."""

_GATED, _PLAIN, _BACK = "gate_up_proj", "up_proj", "down_proj"
_PARTS = (("gate_proj", "up_proj"), ("down_proj",))
_PROBE_CHANNELS, _PROBE_TOKENS, _PROBE_CHOICES = 3, 5, 2
_SEED = 20_261


@dataclass(frozen=True)
class Experts:
    """The fused experts of one layer.

    Attributes:
        name: full name of the module.
        count: E.
        hidden: H, channels of the input and of the output.
        intermediate: I.
        parameters: full names of the parameters of the two products.
        biases: full names of their biases [E, 2I] and [E, H], or None.
        transposed: whether each matrix is stored [K, N].
        interleaved: whether rows of gate and up alternate.
        gated: whether the first product has a gate.
        routed: whether the forward takes hidden states [T, H], each token's experts [T, top-k] and their
            weights. Otherwise it takes every expert's weighted hidden states, concatenated: [E * T, H].
        projections: gate, up and down of expert 0, then of expert 1, ...
    """

    name: str
    count: int
    hidden: int
    intermediate: int
    parameters: tuple[str, str]
    biases: tuple[str, str] | None
    transposed: bool
    interleaved: bool
    gated: bool
    routed: bool
    projections: tuple[Projection, ...]

    @property
    def parts(self) -> int:
        """Number of matrices in the first product: 2 for gate and up, 1 for up alone."""
        return 2 if self.gated else 1

    def of(self, expert: int) -> tuple[tuple[Projection, ...], Projection]:
        """(projections of the first product, projection of the second product) of one expert."""
        members = self.projections[expert * (self.parts + 1) : (expert + 1) * (self.parts + 1)]
        return members[:-1], members[-1]

    def activation(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """The function between the products of ``module``: [T, 2I] with the gate first, or [T, I], to [T,
        I]."""
        if not self.gated:
            return module.act_fn  # type: ignore[return-value]
        own = getattr(module, "_apply_gate", None)
        if own is None:

            def gate(x: Tensor) -> Tensor:
                first, second = x.chunk(2, dim=-1)
                return module.act_fn(first) * second  # type: ignore[no-any-return, operator]

            return gate
        if not self.interleaved:
            return own  # type: ignore[no-any-return]
        return lambda x: own(torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2))


def find_experts(
    name: str, module: nn.Module, rules: Sequence[Any], proved: set[tuple[object, ...]]
) -> Experts | None:
    """The description of fused experts in ``module``, or None if it has no 3-D parameter.

    Args:
        name: full name of the module.
        module: module on any device; its weights are not read.
        rules: transformers' rules from names in files to names in memory, for the names of single matrices.
        proved: classes and layouts that were proved already; this one is added.

    Raises:
        UnsupportedError: the module holds fused weights of another kind.
    """
    fused = {
        key: tuple(parameter.shape)
        for key, parameter in module.named_parameters(recurse=False)
        # Mixing vectors and one-channel convolutions are 3-D too, but have axes of length 1.
        if sum(size > 1 for size in parameter.shape) >= 3
    }
    if not fused:
        return None
    key = _GATED if _GATED in fused else _PLAIN
    found = ", ".join(f"{each} {list(shape)}" for each, shape in fused.items())
    if set(fused) != {key, _BACK}:
        raise UnsupportedError(
            f"{name}: holds weights of three axes that are neither linears nor experts called {_GATED} or "
            f"{_PLAIN} and {_BACK}: {found}; they can't be quantised yet"
        )
    gated = key == _GATED
    parts = 2 if gated else 1
    first, back = fused[key], fused[_BACK]
    layouts = {
        transposed: (first[2], first[1]) if transposed else (first[1], first[2])
        for transposed in (False, True)
    }
    # Without the attribute the shapes decide; they fit a single layout, except for square matrices without a
    # gate.
    told = getattr(module, "is_transposed", None)
    fitting = [
        transposed
        for transposed, (wide, hidden) in layouts.items()
        if back == ((first[0], wide // parts, hidden) if transposed else (first[0], hidden, wide // parts))
        and wide % parts == 0
        and told in (None, transposed)
    ]
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(f"{name}: a norm behind each expert; such experts can't be quantised yet")
    if first[0] != back[0]:
        raise UnsupportedError(
            f"{name}: {first[0]} experts in {key} and {back[0]} in {_BACK}; they can't be quantised yet"
        )
    if not fitting:
        raise UnsupportedError(
            f"{name}: fused experts {found}: expected {key} [E, {parts if gated else ''}I, H] and {_BACK} "
            "[E, H, I], or each matrix transposed; they can't be quantised yet"
        )
    transposed = fitting[0]
    wide, hidden = layouts[transposed]
    has_bias = f"{key}_bias" in module._parameters
    experts = Experts(
        name=name,
        count=first[0],
        hidden=hidden,
        intermediate=wide // parts,
        parameters=(f"{name}.{key}", f"{name}.{_BACK}"),
        biases=(f"{name}.{key}_bias", f"{name}.{_BACK}_bias") if has_bias else None,
        transposed=transposed,
        interleaved=gated and not getattr(module, "is_concatenated", True),
        gated=gated,
        routed=len(_arguments(module)) >= 3,
        projections=_projections(
            name,
            {key: first, _BACK: back},
            rules,
            transposed=transposed,
            interleaved=gated and not getattr(module, "is_concatenated", True),
            bias=has_bias,
        ),
    )
    kind = (type(module), first, transposed, experts.interleaved)
    if kind not in proved:
        reason = _contradiction(experts, module)
        if reason is not None:
            raise UnsupportedError(f"{name}: fused experts {found}: {reason}; they can't be quantised yet")
        proved.add(kind)
    return experts


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _projections(
    name: str, shapes: dict[str, tuple[int, ...]], rules: Sequence[Any], **layout: bool
) -> tuple[Projection, ...]:
    """All matrices, expert by expert."""
    usual = dict(zip((_GATED, _BACK), _PARTS, strict=True)) | {_PLAIN: ("up_proj",)}
    if name.rpartition(".")[0].endswith("block_sparse_moe"):
        # Names that loaders use for such experts where the files have none.
        usual = {_GATED: ("w1", "w3"), _PLAIN: ("w3",), _BACK: ("w2",)}
    by_parameter = [
        fused_experts(f"{name}.{key}", shape, _part_names(rules, f"{name}.{key}") or usual[key], **layout)
        for key, shape in shapes.items()
    ]
    count = next(iter(shapes.values()))[0]
    each = [len(sources) // count for sources in by_parameter]
    return tuple(
        projection
        for expert in range(count)
        for sources, size in zip(by_parameter, each, strict=True)
        for projection in sources[expert * size : (expert + 1) * size]
    )


def _part_names(rules: Sequence[Any], parameter: str) -> tuple[str, ...] | None:
    """Names, by transformers' rules, of a fused parameter's parts in files with one tensor per expert."""
    for rule in rules:
        targets = [target.replace("\\", "") for target in rule.target_patterns]
        if len(targets) != 1 or not parameter.endswith(targets[0].strip("^$")):
            continue
        sources = [re.search(r"experts\\?\.\*\\?\.(\w+)\\?\.weight$", text) for text in rule.source_patterns]
        steps = [
            (type(step).__name__, getattr(step, "dim", None)) for step in getattr(rule, "operations", [])
        ]
        if all(sources) and steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            return tuple(source[1] for source in sources if source is not None)
    return None


def run_experts(
    experts: Experts,
    activate: Callable[[Tensor], Tensor],
    multiply: Multiply,
    hidden: Tensor,
    index: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Computes the experts' forward, one expert after the other, in the order of their numbers.

    Args:
        experts: the layout.
        activate: function between the products, from :meth:`Experts.activation`.
        multiply: the products.
        hidden: [T, H], or [E * T, H] if not ``routed``.
        index, weights: [T, top-k] if ``routed``; an index of E or more chooses no expert.

    Returns:
        [T, H] summed over each token's experts, in the dtype of ``hidden``; [E * T, H] if not ``routed``.
    """
    if index is None or weights is None:
        batched = hidden.view(experts.count, -1, experts.hidden)
        outputs = [
            multiply(expert, SECOND, activate(multiply(expert, FIRST, x))) for expert, x in enumerate(batched)
        ]
        return torch.stack(outputs).view(-1, experts.hidden)
    total = torch.zeros_like(hidden)
    for expert, tokens, slots in chosen(experts.count, index):
        x = activate(multiply(expert, FIRST, hidden[tokens]))
        y = multiply(expert, SECOND, x) * weights[tokens, slots, None]
        total.index_add_(0, tokens, y.to(total.dtype))
    return total


def chosen(count: int, index: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, its tokens, their slots) for each expert that ``index`` [T, top-k] chooses, in order."""
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    # tolist() waits for the device, the only place here that does.
    counts = torch.bincount(flat, minlength=count).tolist()
    start = 0
    for expert, size in enumerate(counts[:count]):
        if size:
            places = order[start : start + size]
            yield expert, places // index.shape[-1], places % index.shape[-1]
        start += size


def dense_products(experts: Experts, module: nn.Module) -> Multiply:
    """The products of the module's own parameters."""
    first, second = (module.get_parameter(name.rpartition(".")[2]) for name in experts.parameters)
    biases = [
        None if experts.biases is None else module.get_parameter(name.rpartition(".")[2])
        for name in experts.biases or ("", "")
    ]

    def multiply(expert: int, product: int, x: Tensor) -> Tensor:
        weight = (first, second)[product][expert]
        bias = biases[product]
        y = nn.functional.linear(
            x, weight.t() if experts.transposed else weight, None if bias is None else bias[expert]
        )
        if product == FIRST and experts.interleaved:
            y = torch.cat((y[..., 0::2], y[..., 1::2]), dim=-1)
        return y

    return multiply


class Reached(BaseException):
    """Ends a block's forward once the experts' inputs are known. A BaseException, so that no error handler
    catches it."""


@dataclass(frozen=True)
class ExpertTokens:
    """The input of a layer's experts.

    Attributes:
        hidden: [T, H], or [E, T, H] if the layer is not ``routed``, with zeros for the experts that a token
            did not choose.
        index: each token's experts, [T, top-k]; None if not ``routed``.
    """

    hidden: Tensor
    index: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.hidden.nbytes + (0 if self.index is None else self.index.nbytes)

    @classmethod
    def joined(cls, parts: Sequence[ExpertTokens]) -> ExpertTokens:
        """The tokens of all ``parts``, in order."""
        if len(parts) == 1:
            return parts[0]
        index = [part.index for part in parts if part.index is not None]
        return cls(torch.cat([part.hidden for part in parts], dim=-2), torch.cat(index) if index else None)


@contextmanager
def tapped_layer(
    model: nn.Module, experts: Experts, receive: Callable[[ExpertTokens], None]
) -> Iterator[None]:
    """Inside, a run of the experts' layer calls ``receive`` with their input and ends with :class:`Reached`.

    Args:
        model: module from which the experts' names start.
        experts: experts of one layer.
        receive: called with the input, once per forward.
    """
    module = model.get_submodule(experts.name)

    def inputs(hidden: Tensor, index: Tensor | None = None, *rest: Any, **more: Any) -> Tensor:
        receive(
            ExpertTokens(hidden if experts.routed else hidden.view(experts.count, -1, experts.hidden), index)
        )
        raise Reached

    with forward_replaced(module, inputs):
        yield


_ROWS = 1 << 15
"""rows that an expert multiplies at a time, to keep its intermediate results small"""


def expert_inputs(
    model: nn.Module,
    experts: Experts,
    given: ExpertTokens,
    wanted: Collection[int],
    *,
    all_tokens: bool = False,
) -> Iterator[tuple[int, int, Tensor]]:
    """The inputs of both products of the ``wanted`` experts.

    Args:
        model: module from which the experts' names start; the experts' weights must be in memory.
        experts: experts of one layer.
        given: input of the layer.
        wanted: numbers of the experts.
        all_tokens: whether each expert gets every token of the layer and not only those that chose it. Where
            tokens come weighted (not ``routed``), they keep the weight of the experts that they chose.

    Yields:
        (expert, product, x [T, K]) with the expert's tokens in order, possibly in several parts. An expert
        without tokens is left out.
    """
    module = model.get_submodule(experts.name)
    activate, multiply = experts.activation(module), dense_products(experts, module)
    for expert, rows in _tokens(experts, given, wanted, all_tokens):
        for x in torch.split(rows, _ROWS):
            yield expert, FIRST, x
            yield expert, SECOND, activate(multiply(expert, FIRST, x))


def _tokens(
    experts: Experts, given: ExpertTokens, wanted: Collection[int], all_tokens: bool
) -> Iterator[tuple[int, Tensor]]:
    hidden, index = given.hidden, given.index
    if index is None:
        if all_tokens:
            # Sums each token over the experts; it is zero for those that it did not choose.
            whole = hidden.sum(dim=0)
            yield from ((expert, whole) for expert in wanted)
            return
        for expert in wanted:
            x = hidden[expert]
            rows = x[(x != 0).any(dim=-1)]
            if rows.shape[0]:
                yield expert, rows
        return
    if all_tokens:
        yield from ((expert, hidden) for expert in wanted)
        return
    for expert, tokens, _ in chosen(experts.count, index):
        if expert in wanted:
            yield expert, hidden[tokens]


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``forward`` replaces the module's own."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _contradiction(experts: Experts, module: nn.Module) -> str | None:
    """How the module's forward differs from :func:`run_experts` on random weights, or None if it does not."""
    # Sets device and dtype, because transformers builds models with other defaults.
    with torch.device("cpu"):
        return _tried(experts, module)


def _tried(experts: Experts, module: nn.Module) -> str | None:
    small = copy.copy(module)
    generator = torch.Generator().manual_seed(_SEED)
    small._parameters = {}
    for key, parameter in module.named_parameters(recurse=False):
        shape = tuple(_shrunk(experts, key, tuple(parameter.shape)))
        value = 0.5 * _normal(shape, generator)
        small._parameters[key] = nn.Parameter(value, requires_grad=False)
    tokens = _PROBE_TOKENS
    choices = min(_PROBE_CHOICES, experts.count)
    rows = tokens if experts.routed else experts.count * tokens
    hidden = _normal((rows, experts.hidden), generator) * experts.hidden**-0.5
    arguments: tuple[Tensor, ...] = (hidden,)
    if experts.routed:
        draws = _uniform((tokens, experts.count), generator)
        index = draws.topk(choices, dim=-1).indices
        arguments = (hidden, index, _uniform((tokens, choices), generator))
    activate = experts.activation(small)
    try:
        with torch.no_grad(), _eager(small):
            theirs = small(*arguments)
            ours = run_experts(experts, activate, dense_products(experts, small), *arguments)
            gate_first = not experts.gated or _gate_is_first(activate, generator)
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError) as error:
        return f"their forward can't be followed ({' '.join(str(error).split())[:120]})"
    if not isinstance(theirs, Tensor) or not close(theirs.view(-1, experts.hidden), ours):
        return "their forward computes something else than products, an activation and a weighted sum"
    return None if gate_first else "the activation is not applied to the first part"


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float32)


def _shrunk(experts: Experts, key: str, shape: tuple[int, ...]) -> Iterator[int]:
    """``shape`` with few intermediate channels; E and H stay."""
    # By the axis' position, because H may equal I.
    first = not key.startswith(_BACK)
    bias = key.endswith("_bias")
    wide = experts.parts * _PROBE_CHANNELS
    for axis, size in enumerate(shape):
        if axis == 0 or (bias and not first):
            yield size
        elif bias:
            yield wide
        else:
            outer = (axis == 1) != experts.transposed
            yield (wide if outer else size) if first else (size if outer else _PROBE_CHANNELS)


@contextmanager
def _eager(module: nn.Module) -> Iterator[None]:
    """Inside, the class's own forward runs, not an optimised implementation of transformers."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "_experts_implementation"):
        yield
        return
    before = config._experts_implementation
    config._experts_implementation = "eager"
    try:
        yield
    finally:
        config._experts_implementation = before


def _gate_is_first(activate: Callable[[Tensor], Tensor], generator: torch.Generator) -> bool:
    """Whether the first half is the gate: the result is affine (or odd, with a cap) in the other half
    only."""
    size = (_PROBE_TOKENS, _PROBE_CHANNELS)
    gate, up, one, other = (0.7 * _normal(size, generator) for _ in range(4))

    def run(first: Tensor, second: Tensor) -> Tensor:
        return activate(torch.cat((first, second), dim=-1))

    def affine(middle: Tensor, ends: tuple[Tensor, Tensor]) -> bool:
        return close(2 * middle, ends[0] + ends[1])

    second = affine(run(gate, (one + other) / 2), (run(gate, one), run(gate, other))) or close(
        run(gate, -up), -run(gate, up)
    )
    first = affine(run((one + other) / 2, up), (run(one, up), run(other, up))) or close(
        run(-gate, up), -run(gate, up)
    )
    return second and not first
