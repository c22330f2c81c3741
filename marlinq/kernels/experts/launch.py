"""The launches of a routed layer: sort and gather pairs, gate and up, down, sum."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.contract.arguments import TENSOR_MAP_BYTES
from marlinq.kernels.contract.demands import demands
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel
from marlinq.kernels.driver.tensor_maps import sorted_rows_map, weight_maps
from marlinq.kernels.experts.configurations import (
    DirectConfig,
    DirectDecision,
    ExpertsDecision,
    ExpertsShape,
    GroupedConfig,
    SortedDecision,
)
from marlinq.kernels.experts.experts_decision import at_least, decide_experts
from marlinq.kernels.experts.stored_experts import ExpertWeights, StoredExperts
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, address

_ROUTE_THREADS, _SUM_THREADS = 1024, 64
# Largest grid of the kernel that gathers rows: two blocks a multiprocessor of an H200.
_PLACE_BLOCKS = 264
_ALIGNMENT = 256


class _RouteArguments(ctypes.Structure):
    """The parameters of ``cuda/experts/route.cuh``."""

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
    """The parameters of ``cuda/kernels/experts_warpgroup.cuh``."""

    _fields_ = (
        ("x", ctypes.c_ubyte * TENSOR_MAP_BYTES),
        ("weight", ctypes.c_ubyte * (3 * TENSOR_MAP_BYTES)),
        *((name, ctypes.c_void_p) for name in ("scales", "zeros", "bias", "out", "records", "tiles")),
        ("given", _PairsGiven),
        *((name, ctypes.c_int) for name in ("n", "k", "dependent", "behind_route")),
    )


class _DirectArguments(ctypes.Structure):
    """The parameters of ``cuda/kernels/experts_stream.cuh`` and ``experts_shared.cuh``."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "words", "scales", "zeros", "bias", "ids", "map", "routing", "out")
        ),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "experts", "map_size")),
        ("x_stride", ctypes.c_longlong),
        ("dependent", ctypes.c_int),
    )


class _SumArguments(ctypes.Structure):
    """The parameters of ``cuda/experts/sum.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "places", "weights", "out")),
        *((name, ctypes.c_int) for name in ("top", "hidden")),
    )


class Step(NamedTuple):
    """One launch of a routed layer, whose kernel may not be compiled yet.

    Attributes:
        instantiation: the kernel.
        grid: blocks.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        arguments: the kernel's parameters.
        registers: registers of a thread at launch.
    """

    instantiation: Instantiation
    grid: int
    threads: int
    shared_bytes: int
    arguments: ctypes.Structure
    registers: int = 255


class ExpertsWorkspace(NamedTuple):
    """Memory between the launches of a routed layer, uninitialised before the first.

    Attributes:
        counts: int32 [blocks that sort, experts], pairs of each expert that a block has counted.
        records: int32 [most tiles, 4], expert and rows of each tile (``cuda/experts/records.cuh``).
        tiles: int32 [1], number of tiles.
        places: int32 [M * T], index of a pair's row among the sorted ones.
        rows: [M * T, H], sorted activations; overwritten by the results of down.
        inner: [M * T, I], results of gate and up.
    """

    counts: Tensor
    records: Tensor
    tiles: Tensor
    places: Tensor
    rows: Tensor
    inner: Tensor

    @classmethod
    def of(
        cls, shape: ExpertsShape, decision: ExpertsDecision, dtype: torch.dtype, device: torch.device
    ) -> ExpertsWorkspace:
        """Uninitialised memory in one allocation; without sorting all but ``inner`` are empty."""
        sorts = not isinstance(decision, DirectDecision)
        routes = isinstance(decision, SortedDecision) and not decision.local_sort
        tiles = most_tiles(shape, decision.tile_m) if isinstance(decision, SortedDecision) and routes else 0
        blocks = -(-shape.pairs // _ROUTE_THREADS)
        extents = (
            (torch.int32, (blocks if routes and blocks > 1 else 0, at_least(shape.experts))),
            (torch.int32, (tiles, 4)),
            (torch.int32, (int(routes), 1)),
            (torch.int32, (shape.pairs if sorts else 0, 1)),
            (dtype, (shape.pairs if sorts else 0, shape.hidden)),
            (dtype, (shape.pairs, shape.inner)),
        )
        sizes = [kind.itemsize * rows * columns for kind, (rows, columns) in extents]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        return cls(
            *(
                memory[start : start + size].view(kind).view(extent)
                for start, size, (kind, extent) in zip(starts, sizes, extents, strict=False)
            )
        )


def most_tiles(shape: ExpertsShape, tile_m: int) -> int:
    """Largest possible number of tiles of sorted rows."""
    return shape.pairs // tile_m + min(shape.pairs, shape.experts)


def route_steps(
    shape: ExpertsShape,
    tile_m: int,
    x: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    workspace: ExpertsWorkspace,
) -> list[Step]:
    """The launches that sort pairs and gather their rows: one for few pairs, otherwise two."""
    blocks = -(-shape.pairs // _ROUTE_THREADS)
    shares = next((share for share in (1, 2, 4, 8, 16) if share * blocks >= _PLACE_BLOCKS), 32)
    arguments = _RouteArguments(
        ids.data_ptr(),
        address(expert_map),
        x.data_ptr(),
        *(
            value.data_ptr()
            for value in (
                workspace.counts,
                workspace.records,
                workspace.tiles,
                workspace.places,
                workspace.rows,
            )
        ),
        shape.m,
        shape.top,
        shape.hidden,
        shape.experts,
        0 if expert_map is None else expert_map.shape[0],
        shares,
        x.stride(0),
    )

    def step(name: str, grid: int) -> Step:
        parameters = (
            ("THREADS", _ROUTE_THREADS),
            ("EXPERTS", at_least(shape.experts)),
            ("TILE_M", tile_m),
            ("STEP", f"RouteStep::{name}"),
            ("WIDE", ids.dtype == torch.int64),
        )
        instantiation = Instantiation("experts/route.cuh", "experts_route", parameters)
        return Step(instantiation, grid, _ROUTE_THREADS, 0, arguments, registers=64)

    if blocks == 1:
        return [step("ALL", shape.m)]
    return [step("COUNT", blocks), step("PLACE", blocks * shares)]


def grouped_step(
    shape: ExpertsShape,
    config: GroupedConfig,
    stored: StoredExperts,
    activation: str,
    x: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    workspace: ExpertsWorkspace,
    *,
    dependent: bool,
) -> Step:
    """The launch of one product over all sorted rows."""
    problem = shape.product(gated=config.gated)
    experts, k, n = stored.shape
    source, target = (workspace.rows, workspace.inner) if config.gated else (workspace.inner, workspace.rows)
    tile = config.tile
    if config.local_pairs and config.gated:
        # Boxes of one row: a tile's rows are copied one by one from the unsorted batch.
        rows = sorted_rows_map(x.data_ptr(), shape.m, k, 1, x.stride(0) if shape.m > 1 else k)
    else:
        rows = sorted_rows_map(source.data_ptr(), shape.pairs, k, tile.tile_m, k)
    # Each product sorts the pairs for itself, so the second can begin while the first still runs.
    given = _PairsGiven(
        ids.data_ptr(),
        address(expert_map),
        workspace.places.data_ptr() if config.gated else 0,
        shape.pairs,
        shape.top,
        shape.experts,
        0 if expert_map is None else expert_map.shape[0],
    )
    arguments = _GroupedArguments(
        rows,
        weight_maps(
            stored.words.data_ptr(),
            stored.scales.data_ptr(),
            address(stored.zeros),
            n,
            experts * k,
            experts * stored.scales.shape[1],
            tile.tile_n // 64,
            tile.rows,
            problem.format.tile_words,
            problem.format.row_channels,
        ),
        stored.scales.data_ptr(),
        address(stored.zeros),
        address(stored.bias),
        target.data_ptr(),
        workspace.records.data_ptr(),
        workspace.tiles.data_ptr(),
        given if config.local_pairs else _PairsGiven(),
        n,
        k,
        dependent,
        dependent and config.gated,
    )
    return Step(
        config.instantiation(problem, activation, wide=ids.dtype == torch.int64),
        config.grid(problem, most_tiles(shape, tile.tile_m)),
        tile.threads,
        config.shared_bytes(problem),
        arguments,
        tile.launch_registers,
    )


def direct_step(
    shape: ExpertsShape,
    config: DirectConfig,
    stored: StoredExperts,
    activation: str,
    x: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    weights: Tensor,
    out: Tensor,
) -> Step:
    """The launch of one product without sorting."""
    problem = shape.product(gated=config.gated)
    _, k, n = stored.shape
    arguments = _DirectArguments(
        x.data_ptr(),
        stored.words.data_ptr(),
        stored.scales.data_ptr(),
        address(stored.zeros),
        address(stored.bias),
        ids.data_ptr(),
        address(expert_map),
        weights.data_ptr(),
        out.data_ptr(),
        shape.m,
        n,
        k,
        shape.experts,
        0 if expert_map is None else expert_map.shape[0],
        x.stride(0),
        1,
    )
    return Step(
        config.instantiation(problem, activation, wide=ids.dtype == torch.int64),
        config.grid(problem, shape.m, shape.experts),
        config.tile.threads,
        config.shared_bytes(problem),
        arguments,
    )


def sum_step(shape: ExpertsShape, weights: Tensor, out: Tensor, workspace: ExpertsWorkspace) -> Step:
    """The launch that sums the weighted results of each row's experts."""
    parameters = (("Element", ELEMENTS[out.dtype]), ("THREADS", _SUM_THREADS))
    arguments = _SumArguments(
        workspace.rows.data_ptr(),
        workspace.places.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        shape.top,
        shape.hidden,
    )
    grid = shape.m * -(-(shape.hidden // VECTOR) // _SUM_THREADS)
    return Step(Instantiation("experts/sum.cuh", "experts_sum", parameters), grid, _SUM_THREADS, 0, arguments)


def layer_steps(
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
) -> list[Step]:
    """All launches of a layer, in order; each may begin before the one before has ended.

    Without ``summed`` the last launch is left out, and the results stay in ``workspace.rows``, sorted.
    """
    if isinstance(decision, DirectDecision):
        routed = activation, x, ids, expert_map, weights
        inner = workspace.inner
        return [
            direct_step(shape, decision.gate_up, experts.gate_up, *routed, inner),
            direct_step(
                *(shape, decision.down, experts.down, activation, inner, ids, expert_map, weights, out)
            ),
        ]
    return [
        *([] if decision.local_sort else route_steps(shape, decision.tile_m, x, ids, expert_map, workspace)),
        *(
            grouped_step(
                *(shape, config, stored, activation, x, ids, expert_map, workspace), dependent=dependent
            )
            for config, stored in ((decision.gate_up, experts.gate_up), (decision.down, experts.down))
        ),
        *([sum_step(shape, weights, out, workspace)] if summed else []),
    ]


def shape_of(x: Tensor, ids: Tensor, experts: ExpertWeights) -> ExpertsShape:
    """Sizes and types of a routed layer, from its operands."""
    count, inner, hidden = experts.down.shape
    return ExpertsShape(
        x.shape[0],
        ids.shape[1],
        count,
        hidden,
        inner,
        experts.down.granularity,
        experts.down.zeros is not None,
        x.dtype == torch.bfloat16,
        experts.down.format,
        experts.down.bias is not None,
    )


@lru_cache(maxsize=1024)
def _function(instantiation: Instantiation, device_index: int, shared_bytes: int) -> Function:
    return load_kernel(instantiation, device_numbers(device_index).architecture, device_index, shared_bytes)


def instantiations(
    shape: ExpertsShape, decision: ExpertsDecision, activation: str, dtype: torch.dtype, *, wide: bool
) -> list[Instantiation]:
    """The kernels of a layer's launches; ``wide``: ids have 64 bits."""
    if isinstance(decision, DirectDecision):
        return [
            config.instantiation(shape.product(gated=config.gated), activation, wide=wide)
            for config in (decision.gate_up, decision.down)
        ]
    device = torch.device("meta")
    x = torch.empty(shape.m, shape.hidden, dtype=dtype, device=device)
    ids = torch.empty(shape.m, shape.top, dtype=torch.int64 if wide else torch.int32, device=device)
    workspace = ExpertsWorkspace.of(shape, decision, dtype, device)
    routing = [] if decision.local_sort else route_steps(shape, decision.tile_m, x, ids, None, workspace)
    return [
        *(step.instantiation for step in routing),
        *(
            config.instantiation(shape.product(gated=config.gated), activation, wide=wide)
            for config in (decision.gate_up, decision.down)
        ),
        sum_step(shape, ids, x, workspace).instantiation,
    ]


def precompile_experts(shapes: Iterable[ExpertsShape], activation: str, device_index: int) -> int:
    """Compile in parallel the kernels of routed layers that the cache lacks; returns their number.

    Kernels for ids of 32 bits.

    Args:
        shapes: shapes of layers and batches.
        activation: name of the function between the products.
        device_index: index of the GPU.

    Raises:
        EnvironmentProblem: a kernel does not compile, or the cache can't be written.
        UnsupportedError: no configuration fits a layer.
    """
    device = device_numbers(device_index)
    wanted = [
        instantiation
        for shape in shapes
        for instantiation in instantiations(
            shape,
            decide_experts(shape, device),
            activation,
            torch.bfloat16 if shape.bfloat16 else torch.float16,
            wide=False,
        )
    ]
    return compile_missing(device.architecture, list(dict.fromkeys(wanted)))


def start(steps: list[Step], device_index: int) -> None:
    """Launch on the current stream, inside :func:`marlinq.kernels.driver.cuda_driver.on_device`.

    Each launch may begin before its predecessor of the same layer has ended. The first does so only inside
    :func:`marlinq.kernels.contract.demands.dependent_launches` or ``early_launches``.
    """
    first_overlaps = demands().dependent or demands().early
    for number, step in enumerate(steps):
        function = _function(step.instantiation, device_index, step.shared_bytes)
        overlapping = number > 0 or first_overlaps
        Launches(
            function, step.grid, step.threads, step.shared_bytes, step.arguments, dependent=overlapping
        ).take().start()


def launch_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str,
    expert_map: Tensor | None,
    decision: ExpertsDecision | None = None,
) -> Tensor:
    """:func:`marlinq.kernels.experts.routed_experts` on a GPU, for operands that have been checked.

    ``decision`` overrides :func:`decide_experts`.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.shape[0] or not ids.shape[1]:
        return out.zero_()
    if x.stride(1) != 1 or x.stride(0) % VECTOR or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    index = x.device.index
    shape = shape_of(x, ids, experts)
    chosen = decision or decide_experts(shape, device_numbers(index))
    workspace = ExpertsWorkspace.of(shape, chosen, x.dtype, x.device)
    steps = layer_steps(
        shape, chosen, x, ids, weights, experts, activation, expert_map, out, workspace, dependent=True
    )
    with on_device(index):
        start(steps, index)
    return out
