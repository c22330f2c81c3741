"""Elements: values of codes, and codes of values."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.scheme import INT4, INT8, Element, integer_element

ALL_BYTES = torch.arange(256, dtype=torch.int16).to(torch.uint8)


def test_e4m3_is_torchs() -> None:
    values = ALL_BYTES.view(torch.float8_e4m3fn).float()
    ours = E4M3.decode(ALL_BYTES)
    assert torch.equal(ours.isnan(), values.isnan())
    assert torch.equal(ours.nan_to_num(0), values.nan_to_num(0))
    assert torch.equal(torch.signbit(ours), torch.signbit(values))


@given(st.lists(st.floats(-460, 460, width=32), min_size=1, max_size=50))
def test_values_are_rounded_to_e4m3_as_torch_rounds(values: list[float]) -> None:
    wide = torch.tensor(values).clamp(-448, 448)
    codes = E4M3.nearest(wide)
    assert torch.equal(E4M3.decode(codes), wide.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("element", [E4M3, E2M1, INT4, INT8], ids=lambda element: element.name)
def test_every_value_and_every_point_halfway(element: Element) -> None:
    codes = torch.arange(element.codes, dtype=torch.int16).to(torch.uint8)
    values = element.decode(codes)
    values = values[~values.isnan()].unique()
    assert torch.equal(element.decode(element.nearest(values)), values)
    halfway = (values[1:] + values[:-1]) / 2
    taken = element.nearest(halfway)
    assert bool((taken % 2 == 0).all())
    beyond = torch.tensor([float(values[0]) * 4 - 1, float(values[-1]) * 4])
    assert torch.equal(element.decode(element.nearest(beyond)), values[[0, -1]])


def test_e2m1_has_the_published_values() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert E2M1.decode(torch.arange(8, dtype=torch.uint8)).tolist() == positive
    assert E2M1.decode(torch.arange(8, 16, dtype=torch.uint8)).tolist() == [-value for value in positive]


def test_elements_are_compared_by_name_and_survive_a_process_boundary() -> None:
    assert pickle.loads(pickle.dumps(E4M3)) == E4M3
    assert integer_element(4) == INT4 != INT8
