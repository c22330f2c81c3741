"""The launches of a routed layer: kernels, sizes and parameters.

A :class:`Step` depends on sizes alone. The addresses of weights, activations and memory are written into its
parameters for every call, so that layers of the same sizes share their launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.contract.arguments import TENSOR_MAP_BYTES
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.tensor_maps import sorted_rows_map, weight_maps
from marlinq.kernels.experts.configurations import (
    DirectConfig,
    DirectDecision,
    ExpertsDecision,
    ExpertsShape,
    GroupedConfig,
)
from marlinq.kernels.experts.experts_decision import at_least
from marlinq.kernels.experts.stored_experts import ExpertWeights, StoredExperts
from marlinq.kernels.experts.workspace import ROUTE_THREADS, ExpertsWorkspace, most_tiles
from marlinq.kernels.launch.prepared import VECTOR, address

_SUM_THREADS = 64
# Largest grid of the kernel that gathers rows: two blocks a multiprocessor of an H200.
_PLACE_BLOCKS = 264


class _RouteArguments(ctypes.Structure):
    """Parameters of ``cuda/experts/route.cuh``."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("ids", "map", "x", "counts", "records", "tiles", "places", "gathered")
        ),
        *((name, ctypes.c_int) for name in ("m", "top", "hidden", "experts", "map_size", "shares")),
        ("x_stride", ctypes.c_longlong),
    )


class _PairsGiven(ctypes.Structure):
    """Pairs that the blocks of a product sort for themselves (``cuda/experts/few_pairs.cuh``)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "map", "places")),
        *((name, ctypes.c_int) for name in ("pairs", "top", "experts", "map_size")),
    )


class _GroupedArguments(ctypes.Structure):
    """Parameters of ``cuda/kernels/experts_warpgroup.cuh``."""

    _fields_ = (
        ("x", ctypes.c_ubyte * TENSOR_MAP_BYTES),
        ("weight", ctypes.c_ubyte * (3 * TENSOR_MAP_BYTES)),
        *((name, ctypes.c_void_p) for name in ("scales", "zeros", "bias", "out", "records", "tiles")),
        ("given", _PairsGiven),
        *((name, ctypes.c_int) for name in ("n", "k", "dependent", "behind_route")),
    )


class _DirectArguments(ctypes.Structure):
    """Parameters of ``cuda/kernels/experts_stream.cuh`` and ``experts_shared.cuh``."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "words", "scales", "zeros", "bias", "ids", "map", "routing", "out")
        ),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "experts", "map_size")),
        ("x_stride", ctypes.c_longlong),
        ("dependent", ctypes.c_int),
        ("own", ctypes.c_int),
        *((name, ctypes.c_longlong) for name in ("words_apart", "scales_apart", "zeros_apart")),
    )


class _SumArguments(ctypes.Structure):
    """Parameters of ``cuda/experts/sum.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "places", "weights", "out")),
        *((name, ctypes.c_int) for name in ("top", "hidden")),
    )


class WeightAddresses(NamedTuple):
    """Addresses of one product's weights; 0 for zero points and biases that do not exist."""

    words: int
    scales: int
    zeros: int
    bias: int

    @classmethod
    def of(cls, stored: StoredExperts) -> WeightAddresses:
        return cls(
            stored.words.data_ptr(), stored.scales.data_ptr(), address(stored.zeros), address(stored.bias)
        )


class Addresses(NamedTuple):
    """Addresses that a call writes into the parameters of its launches.

    Attributes:
        x, ids, weights, out: addresses of the call's tensors.
        map: address of the expert map; 0 without one.
        gate_up, down: addresses of the products' weights.
        counts, records, tiles, places, rows, inner: addresses of an
            :class:`~marlinq.kernels.experts.workspace.ExpertsWorkspace`.
    """

    x: int
    ids: int
    weights: int
    out: int
    map: int
    gate_up: WeightAddresses
    down: WeightAddresses
    counts: int
    records: int
    tiles: int
    places: int
    rows: int
    inner: int


class Inputs(NamedTuple):
    """Properties of a call's inputs that launches depend on, besides the layer's sizes.

    Attributes:
        activation: name of the function between the products.
        wide: whether ids have 64 bits.
        map_size: experts of the expert map; 0 without one.
        x_stride: elements from one row of the activations to the next.
    """

    activation: str
    wide: bool
    map_size: int
    x_stride: int


class Step(NamedTuple):
    """One launch of a routed layer, whose kernel may not be compiled yet.

    Attributes:
        instantiation: the kernel.
        grid: blocks.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        arguments: the kernel's parameters.
        place: function that writes a call's addresses into such parameters.
        registers: registers of a thread at launch.
    """

    instantiation: Instantiation
    grid: int
    threads: int
    shared_bytes: int
    arguments: ctypes.Structure
    place: Callable[[Any, Addresses], None]
    registers: int = 255


def _route_steps(shape: ExpertsShape, tile_m: int, inputs: Inputs) -> list[Step]:
    """The launches that sort pairs and gather their rows: one for few pairs, otherwise two."""
    blocks = -(-shape.pairs // ROUTE_THREADS)
    shares = next((share for share in (1, 2, 4, 8, 16) if share * blocks >= _PLACE_BLOCKS), 32)
    arguments = _RouteArguments(
        m=shape.m,
        top=shape.top,
        hidden=shape.hidden,
        experts=shape.experts,
        map_size=inputs.map_size,
        shares=shares,
        x_stride=inputs.x_stride,
    )

    def place(given: _RouteArguments, call: Addresses) -> None:
        given.ids, given.map, given.x = call.ids, call.map, call.x
        given.counts, given.records, given.tiles = call.counts, call.records, call.tiles
        given.places, given.gathered = call.places, call.rows

    def step(name: str, grid: int) -> Step:
        parameters = (
            ("THREADS", ROUTE_THREADS),
            ("EXPERTS", at_least(shape.experts)),
            ("TILE_M", tile_m),
            ("STEP", f"RouteStep::{name}"),
            ("WIDE", inputs.wide),
        )
        instantiation = Instantiation("experts/route.cuh", "experts_route", parameters)
        return Step(instantiation, grid, ROUTE_THREADS, 0, arguments, place, registers=64)

    if blocks == 1:
        return [step("ALL", shape.m)]
    return [step("COUNT", blocks), step("PLACE", blocks * shares)]


def _grouped_step(shape: ExpertsShape, config: GroupedConfig, inputs: Inputs, *, dependent: bool) -> Step:
    """The launch of one product over all sorted rows."""
    problem = shape.product(gated=config.gated)
    n, k, tile = problem.n, problem.k, config.tile
    of_weights = (
        n,
        shape.experts * k,
        shape.experts * shape.granularity.groups(k),
        tile.tile_n // 64,
        tile.rows,
        problem.format.tile_words,
        problem.format.row_channels,
    )
    # Boxes of one row: a tile's rows are copied one by one from the unsorted batch.
    copies_rows = config.local_pairs > 0 and config.gated
    of_rows = (shape.m, k, 1, inputs.x_stride) if copies_rows else (shape.pairs, k, tile.tile_m, k)
    arguments = _GroupedArguments(n=n, k=k, dependent=dependent, behind_route=dependent and config.gated)
    if config.local_pairs:
        # Each product sorts the pairs for itself, so the second can begin while the first still runs.
        arguments.given = _PairsGiven(
            pairs=shape.pairs, top=shape.top, experts=shape.experts, map_size=inputs.map_size
        )

    def place(given: _GroupedArguments, call: Addresses) -> None:
        weights = call.gate_up if config.gated else call.down
        source, target = (call.rows, call.inner) if config.gated else (call.inner, call.rows)
        given.x = sorted_rows_map(call.x if copies_rows else source, *of_rows)
        given.weight = weight_maps(weights.words, weights.scales, weights.zeros, *of_weights)
        given.scales, given.zeros, given.bias = weights.scales, weights.zeros, weights.bias
        given.out, given.records, given.tiles = target, call.records, call.tiles
        if config.local_pairs:
            pairs = given.given
            pairs.ids, pairs.map = call.ids, call.map
            pairs.places = call.places if config.gated else 0

    return Step(
        config.instantiation(problem, inputs.activation, wide=inputs.wide),
        config.grid(problem, most_tiles(shape, tile.tile_m)),
        tile.threads,
        config.shared_bytes(problem),
        arguments,
        place,
        tile.launch_registers,
    )


def _direct_step(shape: ExpertsShape, config: DirectConfig, inputs: Inputs) -> Step:
    """The launch of one product without sorting."""
    problem = shape.product(gated=config.gated)
    arguments = _DirectArguments(
        m=shape.m,
        n=problem.n,
        k=problem.k,
        experts=shape.experts,
        map_size=inputs.map_size,
        x_stride=inputs.x_stride if config.gated else shape.inner,
        dependent=1,
        own=shape.experts,
    )

    def place(given: _DirectArguments, call: Addresses) -> None:
        weights = call.gate_up if config.gated else call.down
        given.words, given.scales, given.zeros, given.bias = weights
        given.x, given.out = (call.x, call.inner) if config.gated else (call.inner, call.out)
        given.ids, given.map, given.routing = call.ids, call.map, call.weights

    return Step(
        config.instantiation(problem, inputs.activation, wide=inputs.wide),
        config.grid(problem, shape.m, shape.experts),
        config.tile.threads,
        config.shared_bytes(problem),
        arguments,
        place,
    )


def sum_step(shape: ExpertsShape) -> Step:
    """The launch that sums the weighted results of each row's experts."""
    element = "Bfloat16" if shape.bfloat16 else "Half"
    parameters = (("Element", element), ("THREADS", _SUM_THREADS))
    grid = shape.m * -(-(shape.hidden // VECTOR) // _SUM_THREADS)

    def place(given: _SumArguments, call: Addresses) -> None:
        given.y, given.places, given.weights, given.out = call.rows, call.places, call.weights, call.out

    return Step(
        Instantiation("experts/sum.cuh", "experts_sum", parameters),
        grid,
        _SUM_THREADS,
        0,
        _SumArguments(top=shape.top, hidden=shape.hidden),
        place,
    )


def layer_steps(
    shape: ExpertsShape,
    decision: ExpertsDecision,
    inputs: Inputs,
    *,
    dependent: bool,
    summed: bool = True,
) -> list[Step]:
    """All launches of a layer without addresses, in order; each may begin before the one before has ended.

    Without ``summed`` the last launch is left out, and the results stay in the workspace's rows, sorted.
    """
    if isinstance(decision, DirectDecision):
        return [_direct_step(shape, config, inputs) for config in (decision.gate_up, decision.down)]
    return [
        *([] if decision.local_sort else _route_steps(shape, decision.tile_m, inputs)),
        *(
            _grouped_step(shape, config, inputs, dependent=dependent)
            for config in (decision.gate_up, decision.down)
        ),
        *([sum_step(shape)] if summed else []),
    ]


def placed_steps(
    shape: ExpertsShape,
    decision: ExpertsDecision,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str,
    expert_map: Tensor | None,
    out: Tensor,
    workspace: ExpertsWorkspace,
    *,
    dependent: bool,
    summed: bool = True,
    further: ExpertWeights | None = None,
) -> list[Step]:
    """:func:`layer_steps` whose parameters have the addresses of these tensors.

    ``further`` are experts in memory of their own, numbered from the end of ``experts`` on; or None.

    Raises:
        ValueError: ``further`` is given, and ``decision`` sorts pairs.
    """
    inputs = inputs_of(x, ids, activation, expert_map)
    if further is not None:
        if not isinstance(decision, DirectDecision):
            raise ValueError("experts in other memory: only products that don't sort pairs read them")
        decision = decision.with_further()
    steps = layer_steps(shape, decision, inputs, dependent=dependent, summed=summed)
    if further is not None:
        for step, stored, other in zip(steps, experts, further, strict=True):
            _place_further(step.arguments, stored, other)
    return place(steps, x, ids, weights, experts, expert_map, out, workspace)


def _place_further(arguments: Any, stored: StoredExperts, further: StoredExperts) -> None:
    """Let a kernel find the experts ``further``, numbered from the end of ``stored`` on, in their own memory.

    It adds the distance from the end of a tensor of ``stored`` to that of ``further``: in vectors of 16 bytes
    for words, in elements for scales and zero points.
    """
    arguments.own = stored.shape[0]
    for name, size in (("words", 16), ("scales", 2), ("zeros", 2)):
        mine, theirs = stored.tensors[name], further.tensors[name]
        if mine is not None and theirs is not None:
            gap = theirs.data_ptr() - mine.data_ptr() - mine.nbytes
            setattr(arguments, f"{name}_apart", gap // size)


def place(
    steps: list[Step],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    expert_map: Tensor | None,
    out: Tensor,
    workspace: ExpertsWorkspace,
) -> list[Step]:
    """Writes the addresses of these tensors into the parameters of ``steps``, which it returns."""
    addresses = Addresses(
        *(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr(), address(expert_map)),
        WeightAddresses.of(experts.gate_up),
        WeightAddresses.of(experts.down),
        *(value.data_ptr() for value in workspace),
    )
    for step in steps:
        step.place(step.arguments, addresses)
    return steps


def inputs_of(x: Tensor, ids: Tensor, activation: str, expert_map: Tensor | None) -> Inputs:
    """The properties of a call's inputs."""
    map_size = 0 if expert_map is None else expert_map.shape[0]
    # A single row's stride is meaningless, and may be one that no map can hold.
    stride = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    return Inputs(activation, ids.dtype == torch.int64, map_size, stride)


def shape_of(
    x: Tensor, ids: Tensor, experts: ExpertWeights, further: ExpertWeights | None = None
) -> ExpertsShape:
    """Sizes and types of a routed layer and its batch, from its operands."""
    shape = ExpertsShape.of(x.shape[0], ids.shape[1], experts)
    return shape if further is None else replace(shape, experts=shape.experts + further.down.shape[0])


def instantiations(
    shape: ExpertsShape, decision: ExpertsDecision, activation: str, *, wide: bool
) -> list[Instantiation]:
    """The kernels of a layer's launches; ``wide``: ids have 64 bits."""
    inputs = Inputs(activation, wide, 0, shape.hidden)
    return [step.instantiation for step in layer_steps(shape, decision, inputs, dependent=True)]
