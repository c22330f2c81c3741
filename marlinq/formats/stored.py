"""One quantised weight as a checkpoint stores it, decoded on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.core.scheme import Scheme
from marlinq.core.weight import Grid, QuantizedWeight
from marlinq.formats.layouts import Layout, ModuleSpec
from marlinq.formats.stored_values import codes_fault, order_fault, scales_fault, stored_scales_fault

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WRONG_VERSION = (
    "either sym or checkpoint_format (gptq stores zero - 1, gptq_v2 zero) is wrong in quantization_config"
)

_DAMAGED = "copy the checkpoint again, or quantise the original again"


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """The stored tensors of one quantised linear, with their layout.

    :attr:`words` are the packed codes without decoding; :attr:`grid` decodes the small tensors,
    :meth:`weight` everything.

    Attributes:
        name: name in error messages.
        layout: layout of the tensors.
        spec: scheme and shape, from config and shapes.
        tensors: tensors by suffix, all on one device, with the names, shapes and dtypes that the layout
            expects.
        declared: scheme that config.json gives the module; None where no config mentions it.
        checked: whether the values of :attr:`grid` and :meth:`weight` are known to be ones that a quantiser
            writes, because both refuse others (:mod:`marlinq.formats.stored_values`).
    """

    name: str
    layout: Layout
    spec: ModuleSpec
    tensors: Mapping[str, Tensor]
    declared: Scheme | None = None
    checked: bool = False

    @property
    def in_features(self) -> int:
        """K."""
        return self.spec.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self.spec.out_features

    @property
    def words(self) -> Tensor:
        """The packed codes as stored."""
        return self.tensors[self.layout.key]

    @property
    def scales(self) -> Tensor:
        """The scales as stored."""
        return self.tensors[self.layout.scale_key]

    @property
    def scheme(self) -> Scheme:
        """The scheme that the values have (:attr:`marlinq.core.weight.Grid.scheme`).

        Zero points and g_idx are decoded only where the layout has any that could differ from the config.
        """
        if not self.layout.says_all(self.spec):
            return self.grid.scheme
        # Some configs claim activation order although no g_idx is stored.
        return replace(self.spec.scheme, act_order=False)

    @property
    def g_idx(self) -> Tensor:
        """int32 [K], the group of each input channel."""
        return self.grid.g_idx

    @cached_property
    def grid(self) -> Grid:
        """Scales, zero points and g_idx in neutral order.

        Raises:
            CheckpointError: as :meth:`marlinq.formats.layouts.Layout.unpack_grid`, or as
                :func:`check_grid`.
            ConversionRefused: as :meth:`marlinq.formats.layouts.Layout.unpack_grid`.
        """
        small = {suffix: tensor for suffix, tensor in self.tensors.items() if suffix != self.layout.key}
        with self._named():
            grid = self.layout.unpack_grid(small, self.spec)
            check_grid(grid, self.declared, self._codes, zeros_only=not self.checked)
            return grid

    def check_values(self) -> None:
        """Check scales and zero points, without decoding scales that are taken as stored.

        Raises:
            CheckpointError, ConversionRefused: as :attr:`grid`.
        """
        if self.layout.plain is None or not self.layout.says_all(self.spec):
            _ = self.grid
            return
        fault = stored_scales_fault(self.spec.scheme.element, self.scales, self.weight)
        if fault is not None:
            raise CheckpointError(f"{self.name}: {fault}; {_DAMAGED}")

    def weight(self, device: torch.device | None = None) -> QuantizedWeight:
        """The weight in neutral order on ``device``, by default the device of the tensors.

        Codes are copied packed and unpacked on ``device``.

        Raises:
            CheckpointError: as :meth:`marlinq.formats.layouts.Layout.unpack`, or as :attr:`grid`; or
                :attr:`checked`, and a code stands for NaN.
            ConversionRefused: as :meth:`marlinq.formats.layouts.Layout.unpack`.
        """
        grid = self.grid if device is None else self.grid.to(device)
        with self._named():
            weight = grid.with_codes(self._codes(device))
            if self.checked and (fault := codes_fault(weight)) is not None:
                raise CheckpointError(f"{fault}; {_DAMAGED}")
            return weight

    def _codes(self, device: torch.device | None = None) -> Tensor:
        """uint8 [K, N]."""
        words = self.words if device is None else self.words.to(device)
        mask = None if self.layout.mask_key is None else self.tensors[self.layout.mask_key].to(words.device)
        return self.layout.unpack_codes(words, self.spec, mask)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except MarlinqError as error:
            raise type(error)(f"{self.name}: {error}") from None


def check_grid(
    grid: Grid, declared: Scheme | None, codes: Callable[[], Tensor], *, zeros_only: bool = False
) -> None:
    """Check that a module's small tensors hold values that a quantiser writes.

    Args:
        grid: the decoded grid.
        declared: scheme that the config gives the module; None where no config mentions it.
        codes: function that returns the codes, uint8 [K, N]; called only where ``grid`` alone doesn't decide.
        zeros_only: whether to check the zero points alone, not scales and g_idx.

    Raises:
        CheckpointError: as :func:`check_zero_points`; or a scale or the g_idx breaks
            a rule of :mod:`marlinq.formats.stored_values`.
    """
    if declared is not None:
        check_zero_points(grid, declared, codes)
    if zeros_only:
        return
    if (fault := scales_fault(grid, codes) or order_fault(grid)) is not None:
        raise CheckpointError(f"{fault}; {_DAMAGED}")


def check_zero_points(grid: Grid, declared: Scheme, codes: Callable[[], Tensor]) -> None:
    """Check that zero points were not stored by another version of GPTQ than the config names.

    GPTQ v1 stores zero - 1 and GPTQ v2 zero: read as the other version, every zero point is one off.

    Args:
        grid: the decoded grid.
        declared: scheme that the config gives the module.
        codes: function that returns the codes, uint8 [K, N]; called only where the zero points alone don't
            decide.

    Raises:
        CheckpointError: the config says symmetric and a zero point is not the midpoint; or all zero points
        are
            one off the midpoint although the mean of the codes is nearer to the midpoint.
    """
    if not grid.scheme.stores_zeros:
        return
    middle = grid.element.midpoint
    if not declared.stores_zeros:
        wrong = grid.zeros[grid.zeros != middle]
        raise CheckpointError(
            f"the config says sym: true, but {wrong.numel()} of {grid.zeros.numel()} zero points decode to "
            f"another value than {middle}, for example {int(wrong[0])}; {_WRONG_VERSION}"
        )
    low, high = int(grid.zeros.min()), int(grid.zeros.max())
    # Equal zero points also arise where all weights have one sign, but then they lie at an end of the range.
    if low == high and abs(low - middle) == 1:
        mean = float(codes().float().mean())
        if abs(mean - middle) < abs(mean - low):
            raise CheckpointError(
                f"every zero point decodes to {low}, but the codes have a mean of {mean:.2f}, nearer to "
                f"{middle}; {_WRONG_VERSION}"
            )
