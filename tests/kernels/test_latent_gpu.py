"""The kernels of latent attention on a GPU at the sizes of real models, against float64."""

from __future__ import annotations

import pytest
import torch

from marlinq.kernels import device_numbers
from marlinq.kernels.step import (
    LatentWeights,
    LatentWorkspace,
    RowNorm,
    bind,
    divide_latent,
    latent_attend,
    latent_queries,
    latent_values,
)
from tests.kernels.step_problems import (
    BOUND,
    expected_latent,
    expected_latent_queries,
    expected_latent_rows,
    random,
    relative_error,
    rotation_table,
)

pytestmark = pytest.mark.gpu


# Heads, plain and value channels, latent and rotated channels: DeepSeek-V2-Lite, GLM-4.7-Flash, DeepSeek-V3
# (heads in four blocks), MiniCPM3.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    "sizes",
    [(16, 128, 128, 512, 64), (20, 192, 256, 512, 64), (128, 128, 128, 512, 64), (40, 64, 64, 256, 32)],
)
def test_latent_attention(sizes: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    heads, plain, value, latent, rotated = sizes
    capacity, width = 1500, latent + rotated
    lengths = torch.tensor([1499, 0, 31, 32, 700, *range(100, 111)][:rows], dtype=torch.int32).cuda()
    weights = LatentWeights(
        keys=random(heads, latent, plain, dtype=dtype, size=plain**-0.5).cuda(),
        values=random(heads, value, latent, dtype=dtype, size=latent**-0.5).cuda(),
        norm=RowNorm("RMS", random(latent, dtype=dtype).cuda(), None, 1e-6),
        table=rotation_table(capacity, rotated).cuda(),
        interleaved=heads != 40,
    )
    device = device_numbers(torch.cuda.current_device())
    division = divide_latent(rows, heads, width, capacity, device.multiprocessors, device.shared_bytes)
    workspace = LatentWorkspace.of(rows, [(weights, division)], dtype)
    assert workspace is not None
    workspace.sums.fill_(torch.nan)
    workspace.totals.fill_(torch.nan)
    q = random(rows, heads * (plain + rotated), dtype=dtype).cuda()
    new = random(rows, width, dtype=dtype).cuda()
    cache = random(rows, capacity, width, dtype=dtype).cuda()
    queries = torch.full((rows, heads, width), torch.nan, dtype=dtype, device="cuda")
    out = torch.full((rows, heads * value), torch.nan, dtype=dtype, device="cuda")
    scale = width**-0.5
    prepared = (
        latent_queries(q, new, cache, lengths, weights, queries),
        latent_attend(queries, cache, lengths, weights, workspace, scale=scale, division=division),
        latent_values(out, lengths, weights, workspace, capacity=capacity, division=division),
    )
    for number, each in enumerate(prepared):
        bind(each, torch.cuda.current_device(), dependent=number > 0).start()
    assert relative_error(queries, expected_latent_queries(q, lengths, weights)) < BOUND[dtype]
    appended = cache[torch.arange(rows, device="cuda"), lengths.long()]
    assert relative_error(appended, expected_latent_rows(new, lengths, weights)) < BOUND[dtype]
    # Probabilities, sums of latents and results are rounded.
    expected = expected_latent(queries, cache, lengths, weights, scale)
    assert relative_error(out, expected) < 1.5 * BOUND[dtype]
