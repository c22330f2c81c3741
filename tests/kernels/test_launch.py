"""Prepared calls through to the driver, whose library a stand-in replaces: addresses are never mixed up."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from marlinq.kernels import Device, batch_invariant, decide, dependent_launches, early_launches, forced_kernel
from marlinq.kernels.contract.configuration import register_variant
from marlinq.kernels.contract.handover import Handover
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.driver import cuda_driver, tensor_maps
from marlinq.kernels.launch import call, gather
from marlinq.kernels.variants import KERNELS
from marlinq.kernels.variants.warpgroup_config import WarpgroupConfig
from tests.kernels.problems import even_splits, int4_problem, random_operands
from tests.kernels.toy_variant import TOY, ToyConfig, toy_variant

H200 = Device("sm_90a", multiprocessors=132, shared_bytes=232_448)
OUT, PARTIALS, FLAGS = 5, 11, 12  # places among the parameters


class _Driver:
    """Keeps the numbers at chosen parameters of every launch, read while other threads run."""

    def __init__(self) -> None:
        self.places = [0, OUT]
        self.launches: list[list[int | None]] = []

    def cuLaunchKernelEx(self, config: object, handle: object, pointers: object, extra: None) -> int:  # noqa: N802
        time.sleep(1e-4)
        given = pointers._obj  # type: ignore[attr-defined]
        self.launches.append([ctypes.c_void_p.from_address(given[at]).value for at in self.places])
        return 0

    def cuTensorMapEncodeTiled(  # noqa: N802
        self, found: ctypes.c_void_p, kind: int, rank: int, address: ctypes.c_void_p, *rest: object
    ) -> int:
        # A map that is the address alone.
        ctypes.c_uint64.from_address(found.value or 0).value = address.value or 0
        return 0

    def cuCtxGetCurrent(self, context: object) -> int:  # noqa: N802
        context._obj.value = 1  # type: ignore[attr-defined]
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Driver]:
    library = _Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: library)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(call, "device_numbers", lambda _: H200)
    monkeypatch.setattr(call, "_load", lambda *_: cuda_driver.Function(None, ctypes.c_void_p(1), 0, 1))
    caches = tensor_maps.activation_maps, tensor_maps.weight_maps
    for cache in caches:
        cache.cache_clear()
    yield library
    for cache in caches:
        cache.cache_clear()


def small_operands(m: int, k: int, n: int) -> ProductTensors:
    """Random operands in float16 with groups of 64."""
    made = random_operands(k, n, 64, torch.float16, device="cpu")
    x, out = torch.zeros(m, k).half(), torch.zeros(m, n).half()
    return ProductTensors(x, made.operand, None, out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_that_share_a_call_do_not_mix_addresses(library: _Driver, kernel: str) -> None:
    with forced_kernel(kernel):
        prepared = call.prepare(small_operands(16, 512, 256))
    # Neighbours repeat an address of activations, as calls with the same tensor do.
    pairs = [(4096 + 16 * (number // 2), 1 << 30 | number) for number in range(400)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: prepared.start(*pair), pairs))
    assert sorted(library.launches) == [list(pair) for pair in pairs]


def test_sums_are_kept_until_the_launch_is_made(library: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    config = even_splits(int4_problem(64, 1024, 4096, 64, False, False), H200)[0]
    prepared = call.prepare(small_operands(64, 4096, 1024), config)
    assert prepared.handover == config.handover(int4_problem(64, 1024, 4096, 64, False, False))
    events: list[str] = []

    class Sums:
        def data_ptr(self) -> int:
            return 48

        def __del__(self) -> None:
            events.append(f"gone after {len(library.launches)} launches")

    def memory(handover: Handover, device_index: int) -> tuple[Tensor, int]:
        return Sums(), 64  # type: ignore[return-value]

    monkeypatch.setattr(call, "handover_memory", memory)
    library.places = [PARTIALS, FLAGS]
    prepared.start(4096, 8192)
    assert library.launches == [[48, 64]]
    assert events == ["gone after 1 launches"]


def test_a_gathered_product_reads_what_was_gathered(
    library: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []

    def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(torch.empty_strided(shape, strides, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(gather, "empty_strided", empty_strided)
    function = cuda_driver.Function(None, ctypes.c_void_p(1), 0, 1)
    launches = cuda_driver.Launches(function, 5, 128, 0, gather._Arguments(m=3, k=512, x_stride=700))
    with forced_kernel("stream"):
        prepared = call.prepare(small_operands(3, 512, 256))
    ordered = gather.Gathered(launches, 2048, 3, 512, torch.float16, prepared)
    library.places = [0, 1, 2, OUT]
    ordered.start(4096, 8192)
    (rows,) = made
    assert (rows.shape, rows.dtype) == ((3, 512), torch.float16)
    gathering, product = library.launches
    assert gathering[:3] == [4096, 2048, rows.data_ptr()]
    assert (product[0], product[3]) == (rows.data_ptr(), 8192)


@pytest.mark.parametrize(
    ("architecture", "attributes"), [("sm_80", 0), ("sm_89", 0), ("sm_90a", 1), ("sm_120a", 1)]
)
def test_only_gpus_that_know_it_gather_in_a_launch_that_overlaps(
    monkeypatch: pytest.MonkeyPatch, architecture: str, attributes: int
) -> None:
    monkeypatch.setattr(call, "device_numbers", lambda _: Device(architecture, 108, 166_912))
    monkeypatch.setattr(gather, "_function", lambda _: cuda_driver.Function(None, ctypes.c_void_p(1), 0, 1))
    gather._launches.cache_clear()
    x, order = torch.zeros(3, 512, dtype=torch.float16), torch.arange(512, dtype=torch.int32)
    with dependent_launches():
        inside = gather.gathering(x, order)
    outside = gather.gathering(x, order)
    gather._launches.cache_clear()
    assert (inside._config.attribute_count, outside._config.attribute_count) == (attributes, 0)


@pytest.mark.parametrize(("cluster", "attributes"), [(1, 1), (2, 1), (4, 0)])
def test_large_clusters_do_not_start_before_their_predecessor_ends(
    library: _Driver, cluster: int, attributes: int
) -> None:
    config = WarpgroupConfig(16, 2, 1, 1, 8, cluster, 4, 1, 132)
    given = small_operands(16, 1024, 256)
    with dependent_launches():
        inside = call.prepare(given, config)
    with early_launches():
        early = call.prepare(given, config)
    behind = call.prepare(given, config, behind_own=True)
    made = inside, early, behind
    assert [one.launches._config.attribute_count for one in made] == [attributes, attributes, 1]
    assert [one.launches.take().arguments.dependent for one in made] == [attributes, attributes, 1]


def test_a_kernel_registered_in_one_file_is_chosen_and_launched(library: _Driver) -> None:
    problem = int4_problem(3, 256, 512, 64, False, False)
    before = decide(problem, H200)
    with toy_variant():
        decision = decide(problem, H200)
        assert (decision.kernel, decision.config, decision.grid) == ("toy", ToyConfig(4), 4)
        assert decision.reason.startswith("toy tile of 4 rows: 4 blocks on 132 multiprocessors")
        assert decide(replace(problem, m=5), H200).kernel != "toy"
        with pytest.raises(ValueError, match="toy"):
            register_variant(replace(TOY))
        prepared = call.prepare(small_operands(3, 512, 256))
        library.places = [0, 1]
        prepared.start(4096, 8192)
        assert library.launches == [[4096, 8192]]
        assert prepared.launches._config.grid == 4
        assert prepared.launches._config.threads == ToyConfig.threads
        with batch_invariant():
            assert decide(problem, H200).kernel == "stream"
    # Decisions depend on the kernels that are registered.
    assert decide(problem, H200) == before
