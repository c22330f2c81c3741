"""Tensor maps of the emulation in the place of the driver's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from emulation.launching import encode_tensor_map
from marlinq.kernels.driver import tensor_maps


@contextmanager
def emulated_tensor_maps() -> Iterator[None]:
    """Within it, marlinq makes tensor maps for the emulation; none stays in its caches."""
    caches = tensor_maps.activation_maps, tensor_maps.sorted_rows_map, tensor_maps.weight_maps
    for cache in caches:
        cache.cache_clear()
    try:
        with mock.patch("marlinq.kernels.driver.tensor_maps.encode_tensor_map", encode_tensor_map):
            yield
    finally:
        for cache in caches:
            cache.cache_clear()
