"""Every process of xdist collects the same names of tests, whenever it does."""

from __future__ import annotations

import gzip

import pytest


@pytest.mark.parametrize("content", [gzip.compress(b"text"), b"text"])
def test_bytes_are_no_part_of_a_name(content: bytes, request: pytest.FixtureRequest) -> None:
    assert request.node.name in {f"test_bytes_are_no_part_of_a_name[content{number}]" for number in (0, 1)}
