"""Is a forward of ours the model's own? Random tokens through both, compared layer by layer.

Recognition explains every value of a recorded pass, but nothing runs on its word alone: before a model's
first use, prompts of different length and a few steps go through our forward and through transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.models.anatomy import Anatomy, Attention, DeltaNet, Mixture, Unrecognised
from marlinq.runtime.linear import QuantLinear
from marlinq.runtime.operators.int4pack import Int4PackLinear
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.join import JoinedLinear, JoinedSlice
from marlinq.runtime.step.probe_results import note_passed, was_passed

PROBE_LENGTHS = (11, 4)
"""Tokens of the prompts of a probe: of different length, none of one token."""
PROBE_STEPS = 3

Build = Callable[[int, int], Forward]
"""Makes the forward to be checked, of a batch and a capacity."""

# A value that is rounded to a dtype is wrong by 0.2 eps (root of the mean square). In a layer some twelve
# values on the way are rounded, by both sides, which makes 0.2 * sqrt(24) = 1 eps, and independent layers add
# like roots. Three times that is allowed. Only where the dtype is float32 are the sums of products rounded in
# it as well; there it is three times as much.
_ALLOWED = 3.0
_ALLOWED_FLOAT32 = 9.0
# Both sides solve for a delta net's corrections in chunks, in float32: as many roundings again.
_DELTA_NETS_FLOAT32 = 2.0

Routes = tuple[Tensor, Tensor]
"""Numbers and weights of the experts that tokens chose, both [T, top]."""

# Of a random choice far fewer agree; rounding exchanges one of hundreds.
_SAME_EXPERTS = 0.8
_LOGIT_SIZE = 4.0

# Of models that passed. Who fails may have broken weights, which says nothing about the next model.
_passed: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class Difference:
    """How far two forwards are apart behind one layer.

    Attributes:
        layer: its index; the number of layers stands for the logits.
        name: the block's full name, or ``logits``.
        found: relative distance of a token's vector, root of the mean square over all tokens.
        allowed: by rounding.
    """

    layer: int
    name: str
    found: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether rounding explains it; NaN never does."""
        return self.found <= self.allowed

    def reason(self) -> str:
        """What is off, as one clause."""
        return (
            f"{self.name} differs from transformers' by {self.found:.2g}, where rounding explains "
            f"{self.allowed:.2g}"
        )


def own_forward_refusal(
    model: PreTrainedModel,
    found: Anatomy | Unrecognised,
    build: Build,
    *,
    executor: str,
    capacity: int,
    kept: bool = False,
) -> str | None:
    """Why ``model`` runs through transformers' forward instead of ours, or None when ours may be used.

    A comparison that succeeds is not made again in this process for the same executor, architecture, config,
    dtype and device.

    Args:
        model: with its weights, on its device.
        found: result of recognition.
        build: makes the forward in question.
        executor: its name, for the record of comparisons.
        capacity: tokens that a sequence will hold at most.
        kept: agreement is noted in the cache of kernels, and holds for later processes
            (:mod:`marlinq.runtime.step.probe_results`).
    """
    if isinstance(found, Unrecognised):
        return f"{found.part}: {found.reason}"
    limit = capacity_limit(model, found)
    if limit is not None and capacity > limit:
        return f"positions from {limit} on are computed in another way, and {capacity} tokens are asked for"
    needed = max(PROBE_LENGTHS) + PROBE_STEPS
    if limit is not None and limit < needed:
        return f"a comparison with transformers takes {needed} positions, and there are {limit}"
    kinds = _kinds_of_modules(model)
    key = (executor, type(model), model.config.to_json_string(), model.dtype, model.device, kinds)
    if key in _passed:
        return None
    premises = (*key, found)
    # What code a checkpoint brings, its name does not tell.
    noted = kept and type(model).__module__.startswith("transformers.")
    if not (noted and was_passed(premises)):
        wrong = next((each for each in compare(model, found, build) if not each.holds), None)
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
    attention = [layer.attention for layer in anatomy.layers if isinstance(layer.attention, Attention)]
    limits = [each.rotary.limit for each in attention if each.rotary is not None]
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
    """The distance behind every layer that the forward lets observe, then that of the logits.

    Transformers computes each row on its own, without padding and without a cache, with its ``eager``
    attention: the others leave out soft caps.

    Experts whose scores are nearly equal change places by rounding alone, after which everything behind
    them differs. So transformers' experts get the numbers and weights that ours chose, and its own choice is
    compared with them (:func:`_same_routes`).

    Args:
        model: with its weights, on its device.
        anatomy: names its blocks.
        build: makes the forward in question; it gets random prompts of ``lengths`` and ``steps`` tokens more.
        lengths, steps, seed: as above.
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
    for row, length in enumerate(lengths):
        routed = {index: (found[0][row], found[1][row]) for index, found in routing.items()}
        theirs, routes = _theirs(model, anatomy, ids[row : row + 1, : length + steps], length, routed)
        for index, expected_routes in routes.items():
            mlp = anatomy.layers[index].mlp
            corrected = isinstance(mlp, Mixture) and mlp.router.correction is not None
            spread = allowed * math.sqrt(index + 1)
            if not _same_routes(routed[index], expected_routes, spread, corrected=corrected):
                squares.setdefault(index, []).append(torch.full((1,), math.inf, device=ids.device))
        for index, expected in theirs.items():
            found = ours.get(index)
            if found is None:
                continue
            both = found[row].double(), expected[: len(found[row])].double()
            squares.setdefault(index, []).append(_relative(*both).square())
    names = [*(layer.name for layer in anatomy.layers), "logits"]
    return [
        Difference(
            layer=index,
            name=names[index],
            found=float(torch.cat([each.double() for each in found]).mean().sqrt()),
            allowed=allowed * math.sqrt(index + 1 + (index == layers)),
        )
        for index, found in sorted(squares.items())
    ]


def _rounded_to(model: PreTrainedModel) -> torch.dtype:
    """The coarsest dtype that values are rounded to: a CPU's packed products round to BF16 in any model."""
    packed = any(isinstance(module, Int4PackLinear) for module in model.modules())
    return torch.bfloat16 if packed else model.dtype


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    """Of each token [T, width]."""
    norms = torch.linalg.vector_norm(expected, dim=-1).clamp_min(1e-30)
    distances: Tensor = torch.linalg.vector_norm(found - expected, dim=-1)
    relative: Tensor = distances / norms
    return relative


def _same_routes(ours: Routes, theirs: Routes, allowed: float, *, corrected: bool) -> bool:
    """Whether two routers agree but for experts that rounding exchanges.

    Those have nearly equal weights, so weights in falling order agree however the choice fell; and they are
    few. A logit is as far off as what it is a product of, times its own size.

    Where a correction takes part in the choice, experts that rounding exchanges may have any weights. Then
    the weights of tokens whose experts are all the same are compared; without such a token the routers
    differ.
    """
    (index, weights), (other_index, other_weights) = ours, theirs
    shared = (index[:, :, None] == other_index[:, None]).any(-1)
    same = shared.float().mean()
    falling = [each.float().sort(-1, descending=True).values for each in (weights, other_weights)]
    if corrected:
        falling = [each[shared.all(-1)] for each in falling]
    # Of no token at all it is NaN, which is not below anything.
    distance = float(_relative(falling[0], falling[1]).square().mean().sqrt())
    return float(same) >= _SAME_EXPERTS and distance <= _LOGIT_SIZE * allowed


def _ours(
    forward: Forward, layers: int, ids: Tensor, lengths: Sequence[int], steps: int
) -> tuple[dict[int, list[Tensor]], dict[int, tuple[list[Tensor], list[Tensor]]]]:
    """Index of a layer -> for each row its hidden states [tokens, hidden]; behind the layers the logits of
    all steps. And of routed layers: for each row the experts' numbers and weights [tokens, top].

    Without experts the last step is made as it decodes, so its hidden states are missing: a forward may take
    other kernels for a step that nobody observes. With experts transformers has to be told all choices."""
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
    model: PreTrainedModel, anatomy: Anatomy, ids: Tensor, length: int, routed: Mapping[int, Routes]
) -> tuple[dict[int, Tensor], dict[int, Routes]]:
    """The same of one row [1, tokens] from transformers, whose experts get what ``routed`` says."""
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
    """The model computes attention as its own code spells it out."""
    owners = [module.config for module in model.modules() if hasattr(module, "config")]
    before = {id(config): (config, config._attn_implementation) for config in owners}
    try:
        for config, _ in before.values():
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before.values():
            config._attn_implementation = implementation
