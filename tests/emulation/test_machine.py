"""The emulated machine itself, with kernels of a few lines."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from marlinq.kernels.contract.instantiation import Instantiation
from tests.emulation.gemm import SOURCES

# Every wrapper.
INCLUDES = "\n".join(
    f'#include "{path.relative_to(SOURCES)}"'
    for path in sorted([*SOURCES.glob("ptx/*.cuh"), *SOURCES.glob("element/*.cuh")])
)
GATHER = Instantiation("kernels/gather.cuh", "gather", (("THREADS", 64),))


class _Arguments(ctypes.Structure):
    _fields_ = (("given", ctypes.c_void_p), ("out", ctypes.c_void_p))


class Probe:
    """Launches kernels of a few lines with parameters ``const u32* given`` and ``u32* out``."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def run(
        self,
        body: str,
        given: Tensor,
        out: Tensor,
        *,
        threads: int = 32,
        dynamic: int = 0,
        blocks: int = 1,
        flags: bool = False,
        seed: int = 0,
    ) -> Tensor:
        """``out`` after blocks that run at once have run ``body``; all tensors are int32.

        With ``flags`` those given are flags, all zero.
        """
        text = (
            f'{INCLUDES}\n#line 1 "probe.cu"\n'
            'extern "C" __global__ void __launch_bounds__(128) probe(const u32* given, u32* out) {\n'
            "    extern __shared__ __align__(16) unsigned char shared[];\n"
            f"    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;\n{body}\n}}\n"
        )
        kernel = EmulatedKernel(self._builder.kernel(text, "probe", SOURCES))
        given, out = apart(given), apart(out)
        memory = [Memory("given", given, writable=flags, flags=flags), Memory("out", out, writable=True)]
        arguments = _Arguments(given.data_ptr(), out.data_ptr())
        kernel.launch(blocks, threads, dynamic, arguments, memory, seed=seed, resident=blocks)
        return out


@pytest.fixture
def probe(builder: Builder) -> Probe:
    return Probe(builder)


def _words(*shape: int) -> Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


ARITHMETIC = """
    const u32 a = given[threadIdx.x], b = given[128 + threadIdx.x];
    u32* mine = out + 9 * threadIdx.x;
    mine[0] = E::subtract(a, b), mine[1] = E::multiply(a, b);
    mine[2] = __float_as_uint(widen_half<E, 0>(a)), mine[3] = __float_as_uint(widen_half<E, 1>(a));
    mine[4] = E::narrow(__uint_as_float(a), __uint_as_float(b));
    mine[5] = broadcast<0>(a), mine[6] = broadcast<1>(a), mine[7] = and_or<0x00f0f00fu, 0x12340000u>(a);
    mine[8] = E::add(a, b);
"""


@pytest.mark.parametrize(("element", "dtype"), [("Half", torch.float16), ("Bfloat16", torch.bfloat16)])
def test_arithmetic_on_pairs(probe: Probe, element: str, dtype: torch.dtype) -> None:
    # Random bits: numbers of every size, subnormals, infinities and NaN.
    given = torch.randint(-(2**31), 2**31, (2, 128), dtype=torch.int32)
    given[:, :32] &= 0x03FF03FF
    found = probe.run(f"typedef {element} E;{ARITHMETIC}", given, _words(128, 9), threads=128)
    a, b = (row.view(dtype).reshape(128, 2) for row in given)
    narrowed = given.view(torch.float32).T.to(dtype)
    for column, expected in ((0, a - b), (1, a * b), (4, narrowed), (8, a + b)):
        pair = found[:, column].contiguous().view(dtype).reshape(128, 2)
        torch.testing.assert_close(pair, expected, rtol=0, atol=0, equal_nan=True)
    widened = found[:, 2:4].contiguous().view(torch.float32)
    torch.testing.assert_close(widened, a.float(), rtol=0, atol=0, equal_nan=True)
    halves = given[0].view(torch.int16).reshape(128, 2)
    for half in range(2):
        assert torch.equal(
            found[:, 5 + half].contiguous().view(torch.int16).reshape(128, 2), halves[:, [half, half]]
        )
    assert torch.equal(found[:, 7], given[0] & 0x00F0F00F | 0x12340000)


def test_products_of_bytes(probe: Probe) -> None:
    body = """
    const u32 a[4] = {given[lane], given[32 + lane], given[64 + lane], given[96 + lane]};
    const u32 b[2] = {given[128 + lane], given[160 + lane]};
    u32 d[4] = {lane, 1, 2, 3};
    multiply_bytes(d, a, b);
    for (int i = 0; i < 4; ++i) out[32 * i + lane] = d[i];
    """
    given = torch.randint(-(2**31), 2**31, (192,), dtype=torch.int32)
    found = probe.run(body, given, _words(128)).reshape(2, 2, 8, 4)
    # A lane's words are four neighbours of row l / 4 (or 8 more) of A, and of column l / 4 of B.
    a = given[:128].view(torch.uint8).reshape(2, 2, 8, 16).permute(1, 2, 0, 3).reshape(16, 32).long()
    b = given[128:].view(torch.int8).reshape(2, 8, 16).permute(0, 2, 1).reshape(32, 8).long()
    sums = (a @ b).reshape(2, 8, 4, 2).permute(0, 3, 1, 2)
    started = torch.tensor([0, 1, 2, 3]).reshape(2, 2, 1, 1).expand(2, 2, 8, 4).clone()
    started[0, 0] = torch.arange(32).reshape(8, 4)
    assert torch.equal(found.long(), sums + started)


def test_whole_numbers_and_the_largest_of_a_warp(probe: Probe) -> None:
    body = """
    out[lane] = round_to_int(__uint_as_float(given[lane]));
    out[32 + lane] = warp_max(given[32 + lane]);
    out[64 + lane] = dot_bytes(given[lane], given[32 + lane]);
    """
    numbers = torch.tensor([0.5, 1.5, -2.5, 3e9, -3e9, torch.nan, 7.49, -0.51]).repeat(4)
    given = torch.cat([numbers.view(torch.int32), torch.arange(-16, 16, dtype=torch.int32)])
    found = probe.run(body, given, _words(96))
    assert found[:8].tolist() == [0, 2, -2, 2**31 - 1, -(2**31), 0, 7, -1]
    # As numbers without a sign.
    assert found[32:64].tolist() == [-1] * 32
    a, b = given.view(torch.int8).reshape(2, 32, 4).int()
    assert torch.equal(found[64:], (a * b).sum(1, dtype=torch.int32))


def test_lanes_with_the_same_number_and_bits(probe: Probe) -> None:
    body = """
    out[lane] = lanes_with_same(given[lane]);
    out[32 + lane] = count_bits(given[lane]);
    """
    given = torch.tensor([5, -1, 5, 0, -1, 5, 7, 0] * 4, dtype=torch.int32)
    found = probe.run(body, given, _words(64))
    same = (given[:, None] == given[None]).long() << torch.arange(32)
    assert torch.equal(found[:32].long() & 0xFFFFFFFF, same.sum(1))
    assert found[32:].tolist() == [2, 32, 2, 0, 32, 2, 3, 0] * 4


def test_matrices_go_to_memory_transposed_and_come_back(probe: Probe) -> None:
    body = """
    const u32 at = shared_address(shared) + lane * 16;
    const u32 fragments[4] = {given[lane], given[32 + lane], given[64 + lane], given[96 + lane]};
    store_matrix_x4_transposed(at, fragments);
    __syncwarp();
    u32 loaded[4];
    load_matrix_x4(loaded, at);
    for (int i = 0; i < 4; ++i) out[32 * i + lane] = loaded[i];
    """
    given = torch.arange(256, dtype=torch.int16).view(torch.int32)
    found = probe.run(body, given, _words(128), dynamic=512)
    # Lane l of an 8x8 matrix holds row l / 4, columns 2 (l % 4) and the next.
    matrices = given.view(torch.int16).reshape(4, 8, 8)
    assert torch.equal(found.view(torch.int16).reshape(4, 8, 8), matrices.mT)


def test_numbered_barriers_order_only_their_own_threads(probe: Probe) -> None:
    body = """
    u32* words = reinterpret_cast<u32*>(shared);
    words[threadIdx.x] = given[threadIdx.x];
    barrier_sync(1 + warp / 2, 64);
    out[threadIdx.x] = words[threadIdx.x ^ NEIGHBOUR];
    """
    given = torch.arange(128, dtype=torch.int32)
    found = probe.run(body.replace("NEIGHBOUR", "32"), given, _words(128), threads=128, dynamic=512)
    assert torch.equal(found, given ^ 32)
    with pytest.raises(KernelFault, match="a load reads what thread .* writes without waiting for it"):
        probe.run(body.replace("NEIGHBOUR", "64"), given, _words(128), threads=128, dynamic=512)


def test_a_deadlock_says_who_waits_where(probe: Probe) -> None:
    body = "if (warp == 0) barrier_sync(3, 64); else if (warp == 1) __syncthreads();"
    with pytest.raises(KernelFault, match="deadlock") as fault:
        probe.run(body, _words(1), _words(1), threads=96)
    said = str(fault.value)
    assert "32 threads have ended" in said
    assert "32 threads wait for barrier 3, where 32 of 64 threads are: block 0 warp 0;" in said
    assert "32 threads wait for barrier 0, where 32 of 96 threads are: block 0 warp 1;" in said


RELAY = """
    u32* flag = const_cast<u32*>(given) + blockIdx.x;
    if (blockIdx.x > 0) {
        if (lane == 0) while (load_acquire(flag - 1) == 0) continue;
        __syncwarp();
    }
    u32 sum = threadIdx.x;
    for (int block = 0; block < blockIdx.x; ++block) sum += load_l2(out + 4 * (block * 32 + lane)).x;
    *reinterpret_cast<uint4*>(out + 4 * (blockIdx.x * 32 + lane)) = make_uint4(sum, 0, 0, 0);
    __syncwarp();
    if (lane == 0) store_release(flag, 1);
"""


LAST = """
    u32* flag = const_cast<u32*>(given);
    out[4 * (blockIdx.x * 32 + lane)] = blockIdx.x + lane;
    __syncwarp();
    const u32 before = uniform(lane == 0 ? ADD : 0);
    __syncwarp();
    if (before != 3) return;
    u32 sum = 0;
    for (int block = 0; block < 4; ++block) sum += load_l2_word(out + 4 * (block * 32 + lane));
    out[4 * lane + 1] = sum;
"""


@pytest.mark.parametrize("seed", range(3))
def test_additions_to_a_flag_order_blocks(probe: Probe, seed: int) -> None:
    body = LAST.replace("ADD", "add_acquire_release(flag, 1)")
    flag = torch.zeros(1, dtype=torch.int32)
    found = probe.run(body, flag, _words(4, 32, 4), blocks=4, flags=True, seed=seed)
    assert found[0, :, 1].tolist() == [6 + 4 * lane for lane in range(32)]
    unordered = LAST.replace("ADD", "(store_relaxed(flag, load_acquire(flag) + 1), 3)")
    with pytest.raises(KernelFault, match="nobody has written|without waiting for it"):
        probe.run(unordered, flag, _words(4, 32, 4), blocks=4, flags=True, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_releases_and_acquires_order_blocks(probe: Probe, seed: int) -> None:
    # The third block has not waited for the first, but for one that had.
    found = probe.run(
        RELAY, torch.zeros(3, dtype=torch.int32), _words(3, 32, 4), blocks=3, flags=True, seed=seed
    )
    lanes = torch.arange(32, dtype=torch.int32)
    assert torch.equal(found[..., 0], torch.stack([lanes, 2 * lanes, 4 * lanes]))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("store_release(flag, 1)", "store_relaxed(flag, 1)", "without waiting for it"),
        ("load_acquire(flag - 1) == 0", "false", "nobody has written|without waiting for it"),
        (
            "__syncwarp();\n    if (lane == 0) store",
            "if (lane == 0) store",
            "nobody has|without waiting for it",
        ),
        ("store_release(flag, 1);", ";", "deadlock.* wait for flag 0, which is 0: block 1 warp 0;"),
        ("store_release(flag, 1)", "*flag = 1", "a store of given, which is for flags"),
        ("store_release(flag, 1)", "store_release(out, 1)", "st to a flag of out, which is no flag"),
    ],
)
def test_blocks_that_are_not_ordered(probe: Probe, old: str, new: str, message: str) -> None:
    assert old in RELAY
    with pytest.raises(KernelFault, match=message):
        probe.run(
            RELAY.replace(old, new), torch.zeros(3, dtype=torch.int32), _words(3, 32, 4), blocks=3, flags=True
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (lane < 16) __syncthreads(); else __syncwarp();", "while other lanes of its warp execute"),
        ("if (lane < 16) lanes_with_same(lane);", "the other lanes"),
        ("if (warp == 0) registers_shrink<24>();", "setmaxnreg by some warps of a warpgroup"),
        ("if (lane == 0) return; __syncthreads();", "the other lanes at bar.sync, where 31 of 32 are"),
    ],
)
def test_instructions_that_want_whole_warps(probe: Probe, body: str, message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        probe.run(body, _words(1), _words(1), threads=64)


FAULTS = {
    "out[64] = 1;": "probe.cu:4: .*a store of 4 bytes out of bounds of global memory: 4 bytes past .* out",
    "out[0] = lane;": "writes byte 0 of out a second time",
    "*const_cast<u32*>(given) = 1;": "writes given, which is an input",
    "out[lane] = *(shared + 64);": "a load out of bounds of shared memory: 1 bytes at",
    "load_cached(out);": "reads out through the read-only path",
    "copy_async_16(shared_address(shared), given, 16);": "thread ends with a cp.async in flight",
    "copy_async_16(shared_address(shared) + 8, given, 16);": "no multiple of 16",
    "barrier_arrive(shared_address(shared));": "no mbarrier was initialised",
    "registers_shrink<20>();": "setmaxnreg.dec to 20 registers",
    "*reinterpret_cast<uint4*>(shared + 8) = make_uint4(lane, 0, 0, 0);": "probe.cu:4: .*is not aligned",
    "const uint2 v = *reinterpret_cast<const uint2*>(given + 1); out[lane] = v.y;": "is not aligned",
    "*reinterpret_cast<u64*>(shared + 4) = lane;": "is not aligned",
    "out[lane] = *reinterpret_cast<const u32*>(shared + 2);": "is not aligned",
    "out[lane] = *reinterpret_cast<const u16*>(shared + 1);": "is not aligned",
    "matrix_multiply_half<8, true>(*(float(*)[4])shared, {1, 1, 1, 1}, 0);": "without a wgmma.fence",
}


@pytest.mark.parametrize("body", FAULTS)
def test_faults_of_one_line(probe: Probe, body: str) -> None:
    with pytest.raises(KernelFault, match=FAULTS[body]):
        probe.run(body, _words(64), _words(63), dynamic=64)


def test_launches_that_a_gpu_would_refuse(builder: Builder) -> None:
    kernel = EmulatedKernel(builder.kernel(GATHER.text(), "gather", SOURCES))
    with pytest.raises(KernelFault, match="128 threads a block, the kernel's launch bounds allow 64"):
        kernel.launch(1, 128, 0, _Arguments(), [])
    with pytest.raises(KernelFault, match="2 parameters given to a kernel of 6"):
        kernel.launch(1, 64, 0, _Arguments(), [])
