"""The panel kernel compiles everywhere; on a GPU its solve is the plain one."""

from __future__ import annotations

import pytest
import torch

from marlinq.kernels import ARCHITECTURES, compile_kernel
from marlinq.kernels.solve import PANEL_ROWS, PanelTensors, prepare_panel
from marlinq.kernels.solve.panel import instantiation, shared_bytes
from marlinq.methods.grid import search_factors
from tests.testing.schemes import scheme


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_variant_spills(architecture: str, symmetric: bool) -> None:
    wanted = scheme(symmetric=symmetric)
    for factors in (0, len(search_factors())):
        compiled = compile_kernel(instantiation(wanted, factors), architecture)
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


def test_the_largest_panel_fits_the_smallest_gpu() -> None:
    # 99 KB a block on compute capability 8.6 and 8.9.
    assert shared_bytes(PANEL_ROWS) <= 99 << 10


def test_what_the_kernel_cannot_read_is_refused() -> None:
    rows, n = 32, 8
    wide, vector = torch.zeros(rows, n), torch.zeros(n)
    codes = torch.zeros(rows, n, dtype=torch.uint8)
    square = torch.zeros(rows, rows)
    good = PanelTensors(wide, None, wide, square, vector, None, vector, vector, codes, wide)
    prepare_panel(good, scheme(), 0.0)
    wrong = (
        good._replace(difference=torch.zeros(n, rows).t()),
        good._replace(feedback=square[:, 1:]),
        good._replace(base=wide),
        good._replace(scales=wide),
    )
    for tensors in wrong:
        with pytest.raises(ValueError, match="expected a contiguous|needs both"):
            prepare_panel(tensors, scheme(), 0.0)
    tall = torch.zeros(PANEL_ROWS + 1, n)
    with pytest.raises(ValueError, match="expected 1 to 128 channels, found 129"):
        prepare_panel(good._replace(updated=tall), scheme(), 0.0)
