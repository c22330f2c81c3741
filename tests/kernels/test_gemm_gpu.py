"""The CUDA kernels against float64, in every feature."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.kernels import (
    KERNELS,
    Device,
    Problem,
    batch_invariant,
    decide,
    dependent_launches,
    forced_kernel,
    precompile,
    w4a16_gemm,
)
from marlinq.kernels.choose.decision import available, estimates
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.product_tensors import ProductTensors as Tensors
from marlinq.kernels.driver import handover_memory
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.launch.call import launch_gemm
from marlinq.kernels.launch.precompile import precompile_variants
from marlinq.kernels.variants.stream import StreamConfig
from tests.kernels.problems import (
    BOUND,
    Operands,
    even_splits,
    int4_problem,
    random_operands,
    relative_error,
    tile_after_tile,
)

pytestmark = pytest.mark.gpu

SHAPES = ((4096, 4096), (576, 1536), (1536, 576), (2112, 448))
GROUPS = (32, 64, 128, -1)
DTYPES = (torch.float16, torch.bfloat16)
CASES = [
    (kernel, shape, group, dtype, zeros)
    for kernel, shape, group, dtype, zeros in itertools.product(
        KERNELS, SHAPES, GROUPS, DTYPES, (False, True)
    )
    if group == -1 or shape[0] % group == 0
]
BATCHES = (*range(1, 261), 777)


def gemm(x: Tensor, operands: Operands, n_out: int | None = None) -> Tensor:
    """The op on ``operands``."""
    n = operands.words.shape[1] // 2
    return w4a16_gemm(
        x, operands.words, operands.scales, operands.zeros, operands.bias, operands.group_size, n_out or n
    )


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> None:
    """Every variant that the exhaustive tests of this run need, compiled in parallel."""
    cases = [
        tuple(item.callspec.params[name] for name in ("kernel", "shape", "group", "dtype", "zeros"))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_every_batch_from_1_to_260.__name__
    ]
    for chosen in available(device_numbers(0)):
        with forced_kernel(chosen):
            precompile(
                int4_problem(m, shape[1], shape[0], group, zeros, dtype == torch.bfloat16)
                for kernel, shape, group, dtype, zeros in cases
                for m in BATCHES
                if kernel == chosen
            )


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("kernel", "shape", "group", "dtype", "zeros"), CASES)
def test_every_batch_from_1_to_260(
    kernel: str, shape: tuple[int, int], group: int, dtype: torch.dtype, zeros: bool
) -> None:
    if kernel not in available(device_numbers(0)):
        pytest.skip(f"the {kernel} kernel needs another GPU than {device_numbers(0).architecture}")
    k, n = shape
    operands = random_operands(k, n, group, dtype, zeros=zeros, bias=True)
    x = torch.randn(777, k, device="cuda").to(dtype)
    expected = operands.reference(x)
    errors = {}
    for m in BATCHES:
        out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
        with forced_kernel(kernel):
            launch_gemm(Tensors(x[:m], operands.operand, operands.bias, out))
        errors[m] = relative_error(out, expected[:m])
    # NaN compares false with everything, so an element that was never written fails too.
    wrong = {m: error for m, error in errors.items() if not error < BOUND[dtype]}
    assert not wrong


@pytest.fixture
def shares_tiles() -> Device:
    """The GPU, if its blocks can share tiles."""
    device = device_numbers(0)
    if not device.has_warpgroups:
        pytest.skip(f"the warpgroup kernel needs another GPU than {device.architecture}")
    return device


def _of_variant(x: Tensor, operands: Operands, config: Configuration) -> Tensor:
    """The result of one variant; NaN where it writes nothing."""
    out = torch.full((x.shape[0], operands.words.shape[1] // 2), float("nan"), dtype=x.dtype, device=x.device)
    launch_gemm(Tensors(x, operands.operand, operands.bias, out), config)
    return out


# Variants are taken from all candidates, of which some that no decision chooses spill.
@pytest.mark.filterwarnings("ignore::marlinq.kernels.driver.cache.KernelSpills")
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("number", range(8))
def test_tiles_dealt_out_in_chunks(shares_tiles: Device, number: int, dependent: bool) -> None:
    (k, n), group, dtype = SHAPES[number % 4], GROUPS[number // 2 % 4], DTYPES[number % 2]
    zeros = number >= 4
    if k % max(group, 1):
        group = 64
    operands = random_operands(k, n, group, dtype, zeros=zeros, bias=True)
    x = torch.randn(777, k, device="cuda").to(dtype)
    expected = operands.reference(x)
    for m in (1, 33, 64, 100, 128, 192, 260, 777):
        problem = int4_problem(m, n, k, group, zeros, dtype == torch.bfloat16)
        found = even_splits(problem, shares_tiles)
        # The fastest, and one of every further few.
        listed = [*found[:2], *found[2 :: max(1, len(found) // 4)]]
        precompile_variants((problem, config) for config in listed)
        for config in listed:
            with dependent_launches() if dependent else nullcontext():
                results = [_of_variant(x[:m], operands, config) for _ in range(4)]
            assert relative_error(results[0], expected[:m]) < BOUND[dtype], (problem, config)
            assert all(torch.equal(result, results[0]) for result in results), (problem, config)


# Variants are taken from all candidates, of which some that no decision chooses spill.
@pytest.mark.filterwarnings("ignore::marlinq.kernels.driver.cache.KernelSpills")
@pytest.mark.parametrize("blocks", [1, 3, 40])
@pytest.mark.parametrize("number", range(4))
def test_blocks_that_take_tile_after_tile(shares_tiles: Device, number: int, blocks: int) -> None:
    (k, n), group, dtype = SHAPES[number], GROUPS[number], DTYPES[number % 2]
    if k % max(group, 1):
        group = 64
    operands = random_operands(k, n, group, dtype, zeros=number == 1, bias=number != 2)
    x = torch.randn(777, k, device="cuda").to(dtype)
    expected = operands.reference(x)
    for m in (9, 64, 260, 777):
        problem = int4_problem(m, n, k, group, operands.zeros is not None, dtype == torch.bfloat16)
        found = tile_after_tile(problem, shares_tiles, blocks)
        listed = found[:: max(1, len(found) // 8)]
        precompile_variants((problem, config) for config in listed)
        for config in listed:
            results = [_of_variant(x[:m], operands, config) for _ in range(3)]
            assert relative_error(results[0], expected[:m]) < BOUND[dtype], (problem, config)
            assert all(torch.equal(result, results[0]) for result in results), (problem, config)


def test_tiles_dealt_out_on_many_streams_and_in_many_graphs(
    shares_tiles: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = random_operands(4096, 1024, 128, torch.float16)
    x = torch.randn(64, 4096, device="cuda").half()
    expected = operands.reference(x)
    config = even_splits(int4_problem(64, 1024, 4096, 128, False, False), shares_tiles)[0]
    precompile_variants([(int4_problem(64, 1024, 4096, 128, False, False), config)])
    first = _of_variant(x, operands, config)
    assert relative_error(first, expected) < BOUND[torch.float16]
    torch.cuda.synchronize()
    # As if the first launch ever were part of a graph.
    monkeypatch.setattr(handover_memory, "_pools", {})
    monkeypatch.setattr(handover_memory, "_owned", {})
    graphs, results = [], []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results += [_of_variant(x, operands, config) for _ in range(4)]
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(6)]
    for _ in range(30):
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[3:]:
            with torch.cuda.stream(stream):
                results.append(_of_variant(x, operands, config))
    torch.cuda.synchronize()
    assert all(torch.equal(result, first) for result in results)


def test_the_flags_of_graphs_that_are_gone_come_back(
    shares_tiles: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = random_operands(4096, 1024, 128, torch.float16)
    x = torch.randn(64, 4096, device="cuda").half()
    config = even_splits(int4_problem(64, 1024, 4096, 128, False, False), shares_tiles)[0]
    expected = _of_variant(x, operands, config)
    torch.cuda.synchronize()
    monkeypatch.setattr(handover_memory, "_pools", {})
    monkeypatch.setattr(handover_memory, "_owned", {})
    for _ in range(50):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = _of_variant(x, operands, config)
        for _ in range(3):
            graph.replay()
        # Destroyed while it may still run.
        graph.reset()
        torch.cuda.synchronize()
        # The driver tells the end of a graph on a thread of its own.
        time.sleep(0.02)
        del graph, result
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _of_variant(x, operands, config)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
    (pool,) = handover_memory._pools.values()
    assert pool.sets <= 3
    assert len(handover_memory._owned) <= 3


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_dequantised_once(group: int, dtype: torch.dtype, zeros: bool) -> None:
    k, n = (1408 if group == 128 else 2112), 448
    operands = random_operands(k, n, group, dtype, zeros=zeros, bias=True)
    x = torch.randn(777, k, device="cuda").to(dtype)
    expected = operands.reference(x)
    with forced_kernel("dequantise"):
        for m in (1, 16, 260, 777):
            # Twice: the second call finds what the first has remembered of the weight.
            for _ in range(2):
                assert relative_error(gemm(x[:m], operands), expected[:m]) < BOUND[dtype]
        order = torch.randperm(k, device="cuda").int()
        assert operands.bias is not None
        bias = operands.bias[: n - 3]
        taken = w4a16_gemm(x, operands.words, operands.scales, operands.zeros, bias, group, n - 3, order)
        assert relative_error(taken, operands.reference(x[:, order.long()])[:, : n - 3]) < BOUND[dtype]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = gemm(x, operands)
        x.mul_(2)
        graph.replay()
        assert relative_error(result, operands.reference(x)) < BOUND[dtype]


def _whole_numbers(problem: Problem) -> list[StreamConfig]:
    """Variants for one row by integer digits, one of every few."""
    device = device_numbers(0)
    estimated = (config for _, _, config in estimates(problem, device, "stream"))
    found = [config for config in estimated if isinstance(config, StreamConfig) and config.digits]
    if not found:
        pytest.skip(f"no variant for one row by integer digits is chosen on {device.architecture}")
    return found[:: len(found) // 5]


@pytest.mark.parametrize("loud", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_one_row_in_whole_numbers(group: int, dtype: torch.dtype, zeros: bool, loud: bool) -> None:
    k, n = (1408 if group == 128 else 2112), 448
    problem = int4_problem(1, n, k, group, zeros, dtype == torch.bfloat16)
    # Activations 2^24 times larger than the others, at channels without weights, must not matter.
    silent = (5, 100, 1001) if loud else ()
    operands = random_operands(k, n, group, dtype, zeros=zeros, bias=not loud, silent=silent)
    x = torch.randn(1, k, device="cuda").to(dtype)
    if loud:
        x *= 2.0**-8
        x[:, silent] = 50000.0
    listed = _whole_numbers(problem)
    precompile_variants((problem, config) for config in listed)
    for config in listed:
        assert relative_error(_of_variant(x, operands, config), operands.reference(x)) < BOUND[dtype], config
    for value in (torch.inf, torch.nan):
        x[0, 70] = value
        assert _of_variant(x, operands, listed[0]).isnan().all()


def test_the_same_problem_gives_the_same_bits() -> None:
    operands = random_operands(4096, 6144, 128, torch.float16)
    for m in (1, 16, 100):
        x = torch.randn(m, 4096, device="cuda").half()
        first = gemm(x, operands)
        assert all(torch.equal(gemm(x, operands), first) for _ in range(5))


@pytest.mark.parametrize("kernel", KERNELS)
def test_batch_invariant_rows_have_the_same_bits_in_every_batch(kernel: str) -> None:
    if kernel not in available(device_numbers(0)):
        pytest.skip(f"the {kernel} kernel needs another GPU than {device_numbers(0).architecture}")
    operands = random_operands(4096, 6144, 128, torch.float16)
    x = torch.randn(600, 4096, device="cuda").half()
    with forced_kernel(kernel), batch_invariant():
        alone = torch.cat([gemm(row, operands) for row in x[:70].split(1)])
        assert relative_error(alone, operands.reference(x[:70])) < BOUND[torch.float16]
        for m in (2, 7, 8, 9, 16, 17, 33, 64, 70, 130, 300, 600):
            assert torch.equal(gemm(x[:m], operands)[:70], alone[:m])
            assert torch.equal(gemm(x[70 - min(m, 70) : 70], operands), alone[70 - min(m, 70) :])


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("m", [1, 16, 77])
def test_graph_replay_follows_its_inputs(m: int, dependent: bool) -> None:
    operands = random_operands(1024, 1024, 128, torch.float16)
    x = torch.randn(m, 1024, device="cuda").half()
    gemm(x, operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = gemm(x, operands)
        if dependent:
            with dependent_launches():
                second = gemm(first, operands)
        else:
            second = gemm(first, operands)
    for _ in range(3):
        x.copy_(torch.randn(m, 1024, device="cuda").half())
        second.fill_(float("nan"))
        graph.replay()
        assert relative_error(first, operands.reference(x)) < BOUND[torch.float16]
        assert relative_error(second, operands.reference(first)) < BOUND[torch.float16]


def test_dependent_and_ordinary_launches_of_one_variant_take_turns() -> None:
    # A dependent launch asks for more shared memory, which the same kernel's ordinary one must not take away.
    operands = random_operands(1024, 1024, 128, torch.float16)
    x = torch.randn(3, 1024, device="cuda").half()
    config = decide(int4_problem(3, 1024, 1024, 128, False, False), device_numbers(0)).config
    assert config is not None
    for turn in range(4):
        out = torch.full((3, 1024), float("nan"), dtype=torch.float16, device="cuda")
        with dependent_launches() if turn % 2 else nullcontext():
            launch_gemm(Tensors(x, operands.operand, None, out), config)
        assert relative_error(out, operands.reference(x)) < BOUND[torch.float16]


def test_streams_do_not_disturb_each_other() -> None:
    operands = random_operands(4096, 4096, 128, torch.float16)
    inputs = [torch.randn(m, 4096, device="cuda").half() for m in (1, 5, 17, 64)]
    gemm(inputs[0], operands)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[Tensor]] = [[] for _ in inputs]
    for _ in range(20):
        for stream, x, mine in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(gemm(x, operands))
    torch.cuda.synchronize()
    for x, mine in zip(inputs, results, strict=True):
        expected = operands.reference(x)
        assert all(relative_error(found, expected) < BOUND[torch.float16] for found in mine)


@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_empty_and_batched_activations(kernel: str) -> None:
    if kernel not in available(device_numbers(0)):
        pytest.skip(f"the {kernel} kernel needs another GPU than {device_numbers(0).architecture}")
    operands = random_operands(512, 640, 64, torch.float16, bias=True)
    wide = torch.randn(9, 2, 1536, device="cuda").half()
    with forced_kernel(kernel):
        for x in (
            wide[..., :512],
            wide[..., 3:515],
            wide[:, 1, 512:1024],
            wide[0, 0, :512],
            wide[..., :512].mT.mT,
            wide[0, 0, :512].expand(4, 512),
            wide[0, 0, :515].clone()[None, :512].as_strided((1, 512), (515, 1)),
        ):
            found = gemm(x, operands)
            assert found.shape == (*x.shape[:-1], 640)
            assert relative_error(found.reshape(-1, 640), operands.reference(x.reshape(-1, 512))) < 1e-3
        assert gemm(wide[:0, 0, :512], operands).shape == (0, 640)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("m", [1, 9, 300])
def test_activation_order_is_gathered(m: int, dependent: bool) -> None:
    operands = random_operands(1024, 640, 64, torch.float16, bias=True)
    x = torch.randn(m, 1100, device="cuda").half()[:, 3:1003]
    order = torch.cat([torch.randperm(1000, device="cuda"), torch.full((24,), -1, device="cuda")])
    expected = operands.reference(torch.nn.functional.pad(x[:, order[:1000]], (0, 24)))

    def step() -> Tensor:
        with dependent_launches() if dependent else nullcontext():
            return w4a16_gemm(
                x, operands.words, operands.scales, None, operands.bias, 64, 640, order.to(torch.int32)
            )

    assert relative_error(step(), expected) < BOUND[torch.float16]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        assert relative_error(found, expected) < BOUND[torch.float16]


def test_padding_columns_are_cut_off() -> None:
    operands = random_operands(512, 640, 64, torch.float16)
    x = torch.randn(3, 512, device="cuda").half()
    found = gemm(x, operands, n_out=601)
    assert found.shape == (3, 601)
    assert torch.equal(found, gemm(x, operands)[:, :601])


@pytest.mark.parametrize("k", [64, 128, 192, 384])
@pytest.mark.parametrize("zeros", [False, True])
def test_fewer_chunks_than_parts(k: int, zeros: bool) -> None:
    operands = random_operands(k, 256, -1, torch.float16, zeros=zeros)
    x = torch.randn(16, k, device="cuda").half()
    # A block finds in shared memory what another left there: here NaN, as far as one can arrange it.
    gemm(torch.full((64, k), float("nan"), device="cuda").half(), operands)
    for kernel in available(device_numbers(0)):
        for m in (1, 5, 16):
            with forced_kernel(kernel):
                assert relative_error(gemm(x[:m], operands), operands.reference(x[:m])) < BOUND[torch.float16]


def test_large_batches_and_offsets_beyond_31_bits() -> None:
    operands = random_operands(64, 64, 64, torch.float16)
    x = torch.randn(65536, 64, device="cuda").half()
    assert relative_error(gemm(x, operands), operands.reference(x)) < 1e-3
    # 20,000 rows that lie 128 Ki elements apart: the last starts beyond 2^31 elements.
    storage = torch.randn(20_000 * 131_072, device="cuda", dtype=torch.float16)
    far = storage.view(20_000, 131_072)[:, :64]
    assert relative_error(gemm(far, operands), operands.reference(far)) < 1e-3


# torch's own compiler imports what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
def test_torch_compile_and_opcheck() -> None:
    operands = random_operands(512, 512, 128, torch.float16)
    x = torch.randn(4, 512, device="cuda").half()

    def step(value: Tensor) -> Tensor:
        return torch.nn.functional.silu(gemm(value, operands)) + 1

    found = torch.compile(step, fullgraph=True)(x)
    # The compiled element-wise part may keep float32 between its operations.
    torch.testing.assert_close(found, step(x), rtol=2**-9, atol=2**-9)
    for columns in (512, 500):
        arguments = (x, operands.words, operands.scales, None, None, 128, columns)
        torch.library.opcheck(torch.ops.marlinq.w4a16_gemm.default, arguments)


def test_the_driver_tells_how_many_clusters_run_at_once() -> None:
    device = device_numbers(0)
    if not device.has_clusters:
        pytest.skip(f"{device.architecture} has no clusters")
    for blocks, clusters in enumerate(device.clusters, start=1):
        assert clusters[0] == blocks * device.multiprocessors
        assert all(0 < size * count <= clusters[0] for size, count in enumerate(clusters, start=1))
    assert len(device.clusters) == 3


def test_wrong_operands_are_named() -> None:
    operands = random_operands(512, 512, 128, torch.float16)
    with pytest.raises(ValueError, match="x: expected 512 columns"):
        gemm(torch.randn(4, 256, device="cuda").half(), operands)
    with pytest.raises(UnsupportedError, match="float32"):
        w4a16_gemm(
            torch.randn(4, 512, device="cuda"), operands.words, operands.scales.float(), None, None, 128, 512
        )


def test_the_first_call_of_a_new_thread() -> None:
    operands = random_operands(512, 512, 128, torch.float16)
    x = torch.randn(4, 512, device="cuda").half()
    expected = gemm(x, operands)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(gemm, x, operands).result()
    assert torch.equal(found, expected)


def test_threads_on_their_own_streams_share_a_weight() -> None:
    operands = random_operands(1024, 1024, 128, torch.float16)
    inputs = [torch.randn(8, 1024, device="cuda").half() for _ in range(4)]
    expected = [gemm(x, operands) for x in inputs]
    torch.cuda.synchronize()

    def call(number: int) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return [gemm(inputs[number], operands) for _ in range(300)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(4)))
    torch.cuda.synchronize()
    for mine, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(result, wanted) for result in mine)


@pytest.mark.parametrize("m", [1, 40])
def test_repeated_calls_follow_their_tensors(m: int) -> None:
    operands = random_operands(1024, 640, 64, torch.float16, zeros=True, bias=True)
    order = torch.randperm(1024, device="cuda").to(torch.int32)
    inputs = [torch.randn(m, 1024, device="cuda").half() for _ in range(3)]

    def ordered(x: Tensor) -> Tensor:
        words, scales = operands.words, operands.scales
        return w4a16_gemm(x, words, scales, operands.zeros, operands.bias, 64, 640, order)

    for x in (*inputs, *inputs):
        assert relative_error(gemm(x, operands), operands.reference(x)) < BOUND[torch.float16]
        assert relative_error(ordered(x), operands.reference(x[:, order.long()])) < BOUND[torch.float16]
        with torch.inference_mode():
            assert gemm(x, operands).is_inference()
    # Other memory below the same tensor.
    operands.scales.data = 2 * operands.scales
    operands.weight *= 2
    assert relative_error(gemm(inputs[0], operands), operands.reference(inputs[0])) < BOUND[torch.float16]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_weight_on_another_gpu_than_the_current_one() -> None:
    operands = random_operands(1024, 640, 64, torch.float16, device="cuda:1")
    x = torch.randn(3, 1024, device="cuda:1").half()
    for _ in range(3):
        found = gemm(x, operands)
        assert found.device == x.device
        assert torch.cuda.current_device() == 0
        assert relative_error(found, operands.reference(x)) < BOUND[torch.float16]
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(gemm, x, operands).result(), found)
    with pytest.raises(ValueError, match="words: expected a contiguous tensor on cuda:0"):
        gemm(torch.zeros(3, 1024, dtype=torch.float16, device="cuda:0"), operands)
