"""Random problems against float64: shapes, groups, types, features and forms of call, all from one seed.

``MARLINQ_FUZZ_SEED`` repeats a run, ``MARLINQ_FUZZ_PROBLEMS`` sets the problems of each weight format, and
``-k`` with a format's name chooses one. A failure is listed as the
expression that repeats it alone: ``relative_error_of(Call(...))``.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from marlinq.kernels import (
    GEMMS,
    GROUP_SIZES,
    Device,
    Problem,
    batch_invariant,
    decide,
    dependent_launches,
    forced_kernel,
)
from marlinq.kernels.choose.decision import available
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.product_tensors import ProductTensors as GemmOperands
from marlinq.kernels.contract.weight_formats import WEIGHT_FORMATS, WeightFormat
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.launch.call import launch_gemm
from marlinq.kernels.launch.precompile import precompile_variants
from marlinq.operations.bench.timing import capture
from tests.kernels.problems import (
    SPREADS,
    Operands,
    bound_of,
    even_splits,
    int4_problem,
    random_operands,
    relative_error,
    tile_after_tile,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = "cuda"
LARGEST_BATCH = 4096
# Weights and batches are few, calls are many: 2,000 calls come to about 740 compiled variants, a quarter of a
# minute on 16 cores. Weights and batches drawn anew for every call would come to twice as many.
WEIGHTS = 48
BATCHES_OF_A_WEIGHT = 8
LARGEST_WEIGHT = 2**24
# In blocks of 64: 448, 576, 1536, 2112, 4096, 6144 and 11008.
ODD_EXTENTS = (7, 9, 24, 33, 64, 96, 172)
FORMATS = [each for each in WEIGHT_FORMATS.values() if each.codec is not None]
PROBLEMS = 2000 // len(FORMATS)
"""problems of a format where none are asked for: 2,000 together"""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Weight:
    """A weight [K, N] that several calls share."""

    seed: int
    k: int
    n: int
    group_size: int
    dtype: str
    zeros: bool
    bias: bool
    spread: str
    format: str = "int4"

    @property
    def weight_format(self) -> WeightFormat:
        """The weight format of the name."""
        return WEIGHT_FORMATS[self.format]


@dataclass(frozen=True)
class Call:
    """One call of the operator.

    Attributes:
        weight: weight that the activations are multiplied by.
        seed: seed of the activations.
        m: rows of activations.
        out_features: columns to return.
        kernel: the forced one; None leaves the choice to the decision.
        form: how the activations lie in memory, of :data:`FORMS`.
        gathered: None, or the columns of x that an activation order brings to the channels of the weight.
        dependent: launched with programmatic dependent launch.
        batch_invariant: summed in an order that does not depend on M.
        captured: replayed from a graph, with other activations than at capture.
        even: by the fastest variant of the warpgroup kernel that deals tiles out in chunks, if there is one.
        blocks: unless 0, rather by a variant of which only this many blocks take tile after tile.
    """

    weight: Weight
    seed: int
    m: int
    out_features: int
    kernel: str | None
    form: str
    gathered: int | None
    dependent: bool
    batch_invariant: bool
    captured: bool
    even: bool = False
    blocks: int = 0

    @property
    def problem(self) -> Problem:
        """Problem to decide; the operator takes a group as long as K for a single one."""
        weight = self.weight
        group = -1 if weight.k == weight.group_size else weight.group_size
        bfloat16 = weight.dtype == "bfloat16"
        return int4_problem(self.m, weight.n, weight.k, group, weight.zeros, bfloat16, weight.weight_format)


def _rows(m: int, k: int, empty: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    x = empty(m, k)
    return x, x


def _columns_of_wider_rows(m: int, k: int, empty: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    x = empty(m, k + 192)[:, 64 : 64 + k]
    return x, x


def _misaligned(m: int, k: int, empty: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    x = empty(m, k + 16)[:, 3 : 3 + k]
    return x, x


def _transposed(m: int, k: int, empty: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    x = empty(k, m).t()
    return x, x


def _batches_with_gaps(m: int, k: int, empty: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    batches = next(count for count in (4, 3, 2, 1) if m % count == 0)
    x = empty(batches, m // batches + 1, k)[:, 1:]
    return x, x


def _one_row_repeated(m: int, k: int, empty: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    x = empty(1, k)
    return x, x.expand(m, k)


# Forms return (part of their memory that holds activations, x).
FORMS = {
    "rows": _rows,
    "columns of wider rows": _columns_of_wider_rows,
    "misaligned": _misaligned,
    "transposed": _transposed,
    "batches with gaps": _batches_with_gaps,
    "one row repeated": _one_row_repeated,
}


def draw(seed: int, count: int, kernels: tuple[str, ...], weight_format: WeightFormat) -> list[Call]:
    """``count`` calls, sorted by weight."""
    rng = random.Random(seed)
    zeros = (False, True) if weight_format.stores_zeros else (False,)
    features = itertools.cycle(itertools.product(groups_of(weight_format), DTYPES, zeros))
    weights = [_weight(rng, weight_format, *next(features)) for _ in range(WEIGHTS)]
    # Half of the batches are of 16 rows and fewer.
    batches = {
        weight: [round(LARGEST_BATCH ** (rng.random() ** 1.5)) for _ in range(BATCHES_OF_A_WEIGHT)]
        for weight in weights
    }
    calls = []
    for number in range(count):
        weight = weights[number * WEIGHTS // count]
        columns = rng.randint(max(1, weight.k - 70), weight.k + 70)
        call = Call(
            weight=weight,
            seed=rng.getrandbits(31),
            m=rng.choice(batches[weight]),
            out_features=weight.n - rng.choice((0, 0, rng.randint(1, 63))),
            kernel=rng.choice((None, *kernels)),
            # Twice as many of the plain form as of any other.
            form=rng.choice(("rows", *FORMS)),
            gathered=columns if rng.random() < 0.15 else None,
            dependent=rng.random() < 0.2,
            batch_invariant=rng.random() < 0.1,
            captured=rng.random() < 0.1,
        )
        # These go past the operator, which brings activations into a form that the kernels take.
        plain = call.gathered is None and call.form in ("rows", "columns of wider rows")
        if call.kernel == "warpgroup" and plain and not call.batch_invariant:
            call = replace(call, even=rng.random() < 0.7)
            if call.even and rng.random() < 0.4:
                call = replace(call, blocks=rng.choice((1, 2, 5, 20)))
        calls.append(call)
    return calls


def groups_of(weight_format: WeightFormat) -> list[int]:
    """Group sizes that the format has, -1 among them."""
    return sorted({*GROUP_SIZES, weight_format.smallest_group})


def _weight(
    rng: random.Random, weight_format: WeightFormat, group_size: int, dtype: str, zeros: bool
) -> Weight:
    multiple = math.lcm(weight_format.channel_multiple, max(group_size, 1))
    while True:
        n, k = (
            64 * rng.choice((rng.randint(1, 16), rng.randint(1, 64), rng.choice(ODD_EXTENTS))) for _ in "nk"
        )
        if n * k <= LARGEST_WEIGHT and k % multiple == 0:
            seed, spread = rng.getrandbits(31), rng.choice(SPREADS)
            bias = rng.random() < 0.5
            return Weight(seed, k, n, group_size, dtype, zeros, bias, spread, weight_format.name)


@contextmanager
def demanded(call: Call) -> Iterator[None]:
    """The context that the call is decided and launched in."""
    with ExitStack() as stack:
        if call.kernel is not None:
            stack.enter_context(forced_kernel(call.kernel))
        if call.dependent:
            stack.enter_context(dependent_launches())
        if call.batch_invariant:
            stack.enter_context(batch_invariant())
        yield


def decided(call: Call, device: Device) -> Configuration:
    """Configuration that the call will run."""
    if call.blocks and (found := tile_after_tile(call.problem, device, call.blocks)):
        return found[call.seed % len(found)]
    if call.even and (found := even_splits(call.problem, device)):
        return found[0]
    with demanded(call):
        config = decide(call.problem, device).config
    assert config is not None
    return config


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill whatever torch allocates inside with NaN, as it does while algorithms are to be deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@lru_cache(maxsize=1)
def operands_of(weight: Weight) -> Operands:
    """The weight's tensors; calls are sorted by weight, so one is enough to keep."""
    torch.manual_seed(weight.seed)
    return random_operands(
        weight.k,
        weight.n,
        weight.group_size,
        DTYPES[weight.dtype],
        zeros=weight.zeros,
        bias=weight.bias,
        spread=weight.spread,
        device=DEVICE,
        weight_format=weight.weight_format,
    )


def _order(k: int, columns: int, generator: torch.Generator) -> Tensor:
    """An activation order int32 [K]: distinct columns of x, and -1 for the rest, anywhere."""
    order = torch.full((max(k, columns),), -1, dtype=torch.int32, device=DEVICE)
    order[:columns] = torch.randperm(columns, generator=generator, device=DEVICE)
    return order[torch.randperm(len(order), generator=generator, device=DEVICE)[:k]].contiguous()


def relative_error_of(call: Call) -> float:
    """The error of the call's result over its bound; NaN when an element was not written."""
    gemm = GEMMS[call.weight.format]
    operands, dtype = operands_of(call.weight), DTYPES[call.weight.dtype]
    bias = None if operands.bias is None else operands.bias[: call.out_features].contiguous()
    generator = torch.Generator(DEVICE).manual_seed(call.seed)
    # Memory between and behind the activations is NaN: it must not even be multiplied by 0.
    held, x = FORMS[call.form](
        call.m,
        call.gathered or call.weight.k,
        lambda *shape: torch.full(shape, torch.nan, dtype=dtype, device=DEVICE),
    )
    order = None if call.gathered is None else _order(call.weight.k, call.gathered, generator)
    values = torch.empty(held.shape, dtype=dtype, device=DEVICE)
    results: list[Tensor] = []

    def multiply(_: int = 0) -> None:
        # Until this kernel has ended the activations are old or NaN: a dependent launch waits for it.
        held.copy_(values)
        with demanded(call), poisoned_memory():
            if call.even:
                full = torch.empty(call.m, call.weight.n, dtype=dtype, device=DEVICE)
                given = GemmOperands(x, operands.operand, operands.bias, full)
                launch_gemm(given, decided(call, device_numbers(0)))
                results.append(full[:, : call.out_features])
                return
            results.append(
                gemm(
                    x,
                    operands.words,
                    operands.scales,
                    operands.zeros,
                    bias,
                    call.weight.group_size,
                    call.out_features,
                    order,
                )
            )

    def error() -> float:
        found = results[-1]
        if found.shape != (*x.shape[:-1], call.out_features):
            return float("inf")
        rows = x.reshape(call.m, -1)
        if order is not None:
            rows = torch.nn.functional.pad(rows, (0, 1))[:, order]  # a column of zeros for the entries -1
        expected = operands.reference(rows)[:, : call.out_features]
        return relative_error(found.reshape(-1, call.out_features), expected) / bound_of(operands)

    values.normal_(generator=generator)
    multiply()
    found = error()
    if call.captured and found < 1:
        recording = capture(multiply, 1)
        values.normal_(generator=generator)
        results[-1].fill_(torch.nan)
        recording.graph.replay()
        torch.cuda.synchronize()
        found = error()
    return found


# Random variants are not those that decisions choose, so some spill.
@pytest.mark.filterwarnings("ignore::marlinq.kernels.driver.cache.KernelSpills")
@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda each: each.name)
def test_random_problems(weight_format: WeightFormat, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("MARLINQ_FUZZ_SEED") or secrets.randbits(31))
    count = int(os.environ.get("MARLINQ_FUZZ_PROBLEMS") or PROBLEMS)
    device = device_numbers(0)
    calls = draw(seed, count, available(device), weight_format)
    variants = {}
    for call in calls:
        config = decided(call, device)
        variants[config, call.problem] = call.problem, config
    compiled = precompile_variants(variants.values())
    with capsys.disabled():
        text = f"{weight_format.name}: {count} problems, {compiled} variants compiled"
        print(f"\nMARLINQ_FUZZ_SEED={seed}: {text}", flush=True)
    with poisoned_memory():
        assert torch.empty(64, device=DEVICE).isnan().all()
    failures = []
    for call in calls:
        try:
            found = relative_error_of(call)
        except Exception as error:
            error.add_note(f"MARLINQ_FUZZ_SEED={seed}: relative_error_of({call})")
            raise
        # NaN compares false with everything.
        if not found < 1:
            failures.append(f"{found:.2e} of the bound: relative_error_of({call})")
    assert not failures, f"MARLINQ_FUZZ_SEED={seed}: {len(failures)} of {count}:\n" + "\n".join(failures[:20])
