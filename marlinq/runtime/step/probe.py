"""The probe: compare marlinq's own forward with transformers', layer by layer, on random tokens.

Recognition is not trusted: before a model's first use, prompts of different length and a few steps go through
both forwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from marlinq.models.anatomy import (
    Anatomy,
    Attention,
    DeltaNet,
    LatentAttention,
    Mixture,
    Unrecognised,
)
from marlinq.runtime.cpu_head import HalfWeightLinear
from marlinq.runtime.operators.int4pack import Int4PackLinear
from marlinq.runtime.quant_linear import QuantLinear
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.join import JoinedLinear, JoinedSlice
from marlinq.runtime.step.probe_results import note_passed, was_passed

PROBE_LENGTHS = (11, 4)
"""Tokens of the prompts of a probe: of different length, none of one token."""
PROBE_STEPS = 3

Build = Callable[[int, int], Forward]
"""Function (batch, capacity) -> the forward to be checked."""

# Allowed relative difference behind layer i is this times eps * sqrt(i + 1). Rounding a value to a dtype
# gives an error of 0.2 eps (root mean square). In a layer about twelve values are rounded, by both forwards,
# which gives 0.2 * sqrt(24) = 1 eps, and errors of independent layers add as squares. Three times that is
# allowed. In float32 sums of products are rounded to the dtype, too, so three times as much is allowed.
# Some layers enlarge an error: attention with key biases a hundred times as large as other keys, mixers that
# multiply their own inputs. There the effect of noise of one eps a layer is measured (_effects_of_noise), and
# takes the place of eps * sqrt(i + 1) where it is larger.
_ALLOWED = 3.0
_ALLOWED_FLOAT32 = 9.0
# Factor for models with gated delta nets in float32: both forwards solve for corrections in chunks, with
# about as many roundings again.
_DELTA_NETS_FLOAT32 = 2.0

_LINEAR = (nn.Linear, Conv1D, QuantLinear, JoinedSlice, HalfWeightLinear, Int4PackLinear)

Routes = tuple[Tensor, Tensor]
"""Indices and weights of the experts that tokens chose, both [T, top]."""

# Share of chosen experts that must be the same: rounding exchanges one in hundreds, a wrong router nearly
# all.
_SAME_EXPERTS = 0.8
# Size of a router's logits that the bound on their rounding errors assumes.
_LOGIT_SIZE = 4.0

# Premises of probes that passed. Failures are not kept: they may come from broken weights of one checkpoint.
_passed: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class Difference:
    """Difference between two forwards behind one layer.

    Attributes:
        layer: index of the layer; the number of layers for the logits.
        name: full name of the block, or ``logits``.
        distance: relative distance between a token's vectors, root mean square over all tokens.
        allowed: largest distance that rounding explains.
    """

    layer: int
    name: str
    distance: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether rounding explains it; NaN never does."""
        return self.distance <= self.allowed

    def reason(self) -> str:
        """The difference in one clause."""
        return (
            f"{self.name} differs from transformers' by {self.distance:.2g}, where rounding explains "
            f"{self.allowed:.2g}"
        )


def own_forward_refusal(
    model: PreTrainedModel,
    anatomy: Anatomy | Unrecognised,
    build: Build,
    *,
    executor: str,
    capacity: int,
    kept: bool = False,
) -> str | None:
    """Why ``model`` must run through transformers' forward, or None if marlinq's own may be used.

    A comparison that passed is not repeated in this process for the same executor, architecture, config,
    dtype and device.

    Args:
        model: the model with its weights, on its device.
        anatomy: result of recognition.
        build: function that makes the forward to check.
        executor: name of that forward, as part of the key of passed comparisons.
        capacity: tokens that a sequence will hold at most.
        kept: whether a passed comparison is noted in the cache folder, for later processes
            (:mod:`marlinq.runtime.step.probe_results`).
    """
    if isinstance(anatomy, Unrecognised):
        return f"{anatomy.part}: {anatomy.reason}"
    limit = capacity_limit(model, anatomy)
    if limit is not None and capacity > limit:
        return f"positions from {limit} on are computed in another way, and {capacity} tokens are asked for"
    needed = max(PROBE_LENGTHS) + PROBE_STEPS
    if limit is not None and limit < needed:
        return f"a comparison with transformers takes {needed} positions, and there are {limit}"
    kinds = _kinds_of_modules(model)
    key = (executor, type(model), model.config.to_json_string(), model.dtype, model.device, kinds)
    if key in _passed:
        return None
    premises = (*key, anatomy)
    # Not noted for code that a checkpoint brings, which a class name does not identify.
    noted = kept and type(model).__module__.startswith("transformers.")
    if not (noted and was_passed(premises)):
        wrong = next((each for each in compare(model, anatomy, build) if not each.holds), None)
        if wrong is not None:
            return wrong.reason()
        if noted:
            note_passed(premises)
    _passed.add(key)
    return None


def _kinds_of_modules(model: nn.Module) -> tuple[str, ...]:
    """The names of all classes of modules, in order; joined products count as what they were joined from."""
    kinds = {type(module).__name__ for module in model.modules()}
    if JoinedLinear.__name__ in kinds:
        kinds = kinds - {JoinedLinear.__name__, JoinedSlice.__name__} | {QuantLinear.__name__}
    return tuple(sorted(kinds))


def capacity_limit(model: nn.Module, anatomy: Anatomy) -> int | None:
    """Tokens of a sequence that the anatomy is right for; None for any number."""
    limits = [
        layer.attention.rotary.limit
        for layer in anatomy.layers
        if isinstance(layer.attention, Attention | LatentAttention) and layer.attention.rotary is not None
    ]
    if anatomy.positions is not None:
        table = model.get_submodule(anatomy.positions).get_parameter("weight")
        limits.append(table.shape[0] - anatomy.positions_offset)
    return min((limit for limit in limits if limit is not None), default=None)


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    anatomy: Anatomy,
    build: Build,
    *,
    lengths: Sequence[int] = PROBE_LENGTHS,
    steps: int = PROBE_STEPS,
    seed: int = 0,
) -> list[Difference]:
    """The difference behind every layer that the forward lets observe, then that of the logits.

    transformers computes each row alone, without padding and cache, with its ``eager`` attention, since its
    other implementations leave out soft caps.

    Experts of nearly equal scores change places by rounding alone, and then everything behind them differs.
    So transformers' experts are given the indices and weights that marlinq's router chose, and the routers'
    choices are compared separately (:func:`_same_routes`).

    Args:
        model: the model with its weights, on its device.
        anatomy: anatomy of the model, with the names of its blocks.
        build: function that makes the forward to check.
        lengths: tokens of the random prompts.
        steps: further random tokens.
        seed: seed of the tokens.
    """
    layers = len(anatomy.layers)
    vocabulary = model.get_submodule(anatomy.embedding).get_parameter("weight").shape[0]
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + steps)
    ids = torch.randint(vocabulary, shape, generator=generator).to(model.device)
    forward = build(len(lengths), shape[1])
    dtype = _rounded_to(model)
    eps = torch.finfo(dtype).eps
    allowed = eps * (_ALLOWED_FLOAT32 if dtype == torch.float32 else _ALLOWED)
    if dtype == torch.float32 and any(isinstance(layer.attention, DeltaNet) for layer in anatomy.layers):
        allowed *= _DELTA_NETS_FLOAT32
    ours, routing = _ours(forward, layers, ids, lengths, steps)
    squares: dict[int, list[Tensor]] = {}
    originals: list[_Row] = []
    for row, length in enumerate(lengths):
        routed = {index: (chosen[0][row], chosen[1][row]) for index, chosen in routing.items()}
        theirs, routes = _theirs(model, anatomy, ids[row : row + 1, : length + steps], length, routed)
        originals.append(_Row(ids[row : row + 1, : length + steps], length, routed, theirs))
        for index, expected_routes in routes.items():
            mlp = anatomy.layers[index].mlp
            # Exchanged experts then have different weights.
            corrected = isinstance(mlp, Mixture) and (
                mlp.router.correction is not None or mlp.router.expert_scale is not None
            )
            spread = allowed * math.sqrt(index + 1)
            if not _same_routes(routed[index], expected_routes, spread, corrected=corrected):
                squares.setdefault(index, []).append(torch.full((1,), math.inf, device=ids.device))
        for index, expected in theirs.items():
            rows = ours.get(index)
            if rows is None:
                continue
            both = rows[row].double(), expected[: len(rows[row])].double()
            squares.setdefault(index, []).append(_relative(*both).square())
    names = [*(layer.name for layer in anatomy.layers), "logits"]
    differences = [
        Difference(
            layer=index,
            name=names[index],
            distance=_mean_root(each),
            allowed=allowed * math.sqrt(index + 1 + (index == layers)),
        )
        for index, each in sorted(squares.items())
    ]
    if all(difference.holds for difference in differences):
        return differences
    effects = _effects_of_noise(model, anatomy, originals, eps)
    return [
        replace(difference, allowed=max(difference.allowed, allowed / eps * effects[difference.layer]))
        for difference in differences
    ]


@dataclass(frozen=True)
class _Row:
    """One row through transformers' forward.

    Attributes:
        ids: token ids [1, tokens].
        length: number of tokens of the prompt.
        routed: index of a routed layer -> the experts that its tokens are given.
        outputs: index of a layer -> its output [tokens, hidden]; logits under the number of layers.
    """

    ids: Tensor
    length: int
    routed: Mapping[int, Routes]
    outputs: Mapping[int, Tensor]


def _effects_of_noise(
    model: PreTrainedModel, anatomy: Anatomy, rows: Sequence[_Row], noise: float
) -> dict[int, float]:
    """Measures how far noise moves transformers' hidden states.

    Args:
        model: the model with its weights.
        anatomy: anatomy of the model.
        rows: transformers' results without noise.
        noise: relative size of the noise in a layer, root mean square; each linear module's output gets its
            part of it.

    Returns:
        Index of a layer -> relative distance, root mean square over all tokens; logits under the number of
        layers.
    """
    modules = sum(isinstance(module, _LINEAR) for module in model.modules())
    part = noise * math.sqrt(len(anatomy.layers) / max(1, modules))
    squares: dict[int, list[Tensor]] = {}
    for row in rows:
        noisy, _ = _theirs(model, anatomy, row.ids, row.length, row.routed, part)
        for index, expected in row.outputs.items():
            both = noisy[index].double(), expected.double()
            squares.setdefault(index, []).append(_relative(*both).square())
    return {index: _mean_root(each) for index, each in squares.items()}


def _mean_root(squares: Sequence[Tensor]) -> float:
    return float(torch.cat([each.double() for each in squares]).mean().sqrt())


def _rounded_to(model: PreTrainedModel) -> torch.dtype:
    """The coarsest dtype that values are rounded to; packed products of a CPU round to BF16 in any model."""
    packed = any(isinstance(module, Int4PackLinear) for module in model.modules())
    return torch.bfloat16 if packed else model.dtype


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    """Relative distance of each token's vectors, of [T, width]."""
    norms = torch.linalg.vector_norm(expected, dim=-1).clamp_min(1e-30)
    distances: Tensor = torch.linalg.vector_norm(found - expected, dim=-1)
    relative: Tensor = distances / norms
    return relative


def _same_routes(ours: Routes, theirs: Routes, allowed: float, *, corrected: bool) -> bool:
    """Whether two routers agree, apart from experts that rounding exchanges.

    Exchanged experts are few and have nearly equal weights, so the sorted weights agree whichever was chosen.
    The error of a logit is its relative error times its size, hence ``_LOGIT_SIZE``.

    With a correction or scales of experts, exchanged experts may have different weights. Then only tokens
    with the same experts are compared; without any such token the routers count as different.
    """
    (index, weights), (other_index, other_weights) = ours, theirs
    shared = (index[:, :, None] == other_index[:, None]).any(-1)
    same = shared.float().mean()
    falling = [each.float().sort(-1, descending=True).values for each in (weights, other_weights)]
    if corrected:
        falling = [each[shared.all(-1)] for each in falling]
    # NaN, which fails the comparison, if there is no token.
    distance = float(_relative(falling[0], falling[1]).square().mean().sqrt())
    return float(same) >= _SAME_EXPERTS and distance <= _LOGIT_SIZE * allowed


def _ours(
    forward: Forward, layers: int, ids: Tensor, lengths: Sequence[int], steps: int
) -> tuple[dict[int, list[Tensor]], dict[int, tuple[list[Tensor], list[Tensor]]]]:
    """Hidden states and routes of marlinq's forward.

    Returns:
        Hidden states [tokens, hidden] of each row, by index of the layer; logits of all steps under the
        number of layers. And of routed layers the experts' indices and weights [tokens, top] of each row.

    Without experts the last step is not observed, and its hidden states are missing, so that it uses the
    kernels of ordinary decoding. With experts all steps are observed, since transformers' experts are given
    every choice.
    """
    rows = range(len(lengths))
    seen: dict[int, list[list[Tensor]]] = {}
    chosen: dict[int, tuple[list[list[Tensor]], list[list[Tensor]]]] = {}

    def observe(valid: Sequence[int]) -> Callable[[int, Tensor], None]:
        def keep(index: int, x: Tensor) -> None:
            for row in rows:
                seen.setdefault(index, [[] for _ in rows])[row].append(x[row, : valid[row]].clone())

        def keep_routing(index: int, numbers: Tensor, weights: Tensor) -> None:
            kept = chosen.setdefault(index, ([[] for _ in rows], [[] for _ in rows]))
            for place, value in enumerate((numbers, weights)):
                for row in rows:
                    kept[place][row].append(value[row, : valid[row]].clone())

        forward.observe_routing = keep_routing
        return keep

    forward.observe = observe(lengths)
    prompts = ids[:, : max(lengths)]
    logits = [forward.prefill(prompts, torch.tensor(lengths, dtype=torch.int32)).clone()]
    forward.observe = observe([1] * len(lengths))
    for step in range(steps):
        if step == steps - 1 and not chosen:
            forward.observe = None
        places = torch.tensor([length + step for length in lengths], device=ids.device)
        logits.append(forward.step(ids.gather(1, places[:, None])[:, 0]).clone())
    forward.observe = forward.observe_routing = None
    result = {index: [torch.cat(parts) for parts in by_row] for index, by_row in seen.items()}
    result[layers] = [torch.stack([each[row] for each in logits]) for row in rows]
    routing = {
        index: ([torch.cat(parts) for parts in numbers], [torch.cat(parts) for parts in weights])
        for index, (numbers, weights) in chosen.items()
    }
    return result, routing


def _theirs(
    model: PreTrainedModel,
    anatomy: Anatomy,
    ids: Tensor,
    length: int,
    routed: Mapping[int, Routes],
    noise: float = 0.0,
) -> tuple[dict[int, Tensor], dict[int, Routes]]:
    """Hidden states and routes of one row [1, tokens] from transformers, whose experts get the routes
    ``routed``; with relative noise on the outputs of linear modules if that is not 0."""
    seen: dict[int, Tensor] = {}
    routes: dict[int, Routes] = {}

    def reroute(index: int) -> Callable[..., Any]:
        def give(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            hidden, numbers, weights = args
            routes[index] = numbers.clone(), weights.clone()
            ours = routed[index]
            return hidden, ours[0].to(numbers.dtype), ours[1].to(weights.dtype)

        return give

    def hook(index: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            seen[index] = (output if isinstance(output, Tensor) else output[0])[0].clone()

        return keep

    handles = [
        model.get_submodule(layer.name).register_forward_hook(hook(index))
        for index, layer in enumerate(anatomy.layers)
    ]
    if noise:
        generator = torch.Generator().manual_seed(0)

        def disturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            factors = 1 + noise * torch.randn(output.shape, generator=generator)
            return (output.float() * factors.to(output.device)).to(output.dtype)

        handles += [
            module.register_forward_hook(disturb) for module in model.modules() if isinstance(module, _LINEAR)
        ]
    handles += [
        model.get_submodule(layer.mlp.experts).register_forward_pre_hook(reroute(index))
        for index, layer in enumerate(anatomy.layers)
        if isinstance(layer.mlp, Mixture) and index in routed
    ]
    try:
        with eager_attention(model):
            logits = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return {**seen, len(anatomy.layers): logits[length - 1 :]}, routes


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use the model's ``eager`` attention inside."""
    owners = [module.config for module in model.modules() if hasattr(module, "config")]
    before = {id(config): (config, config._attn_implementation) for config in owners}
    try:
        for config, _ in before.values():
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before.values():
            config._attn_implementation = implementation
