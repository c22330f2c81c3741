"""One quantised weight as its checkpoint stores it, decoded only as far as somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from marlinq.core.errors import MarlinqError
from marlinq.core.scheme import Scheme
from marlinq.core.weight import Grid, QuantizedWeight
from marlinq.formats.layouts import Layout, ModuleSpec, transcode
from marlinq.formats.packing import unpack_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """The tensors of one quantised linear, as read, and what they stand for.

    Whoever can work with the stored words takes :attr:`words` and pays for no decoding; :attr:`grid` and
    :meth:`weight` decode the small tensors and everything.

    Attributes:
        name: what error messages call it.
        layout: of the tensors.
        spec: what the config and the shapes say.
        tensors: by suffix, all on one device, of the names, shapes and dtypes that the layout expects.
    """

    name: str
    layout: Layout
    spec: ModuleSpec
    tensors: Mapping[str, Tensor]

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
        """The packed codes, int32, as stored."""
        return self.tensors[self.layout.key]

    @property
    def scales(self) -> Tensor:
        """The scales as stored."""
        return self.tensors[self.layout.scale_key]

    @property
    def scheme(self) -> Scheme:
        """What the values are (:attr:`marlinq.core.weight.Grid.scheme`); read from the zero points and g_idx
        only where the layout has any that could differ from what the config says."""
        if not self.layout.says_all(self.spec):
            return self.grid.scheme
        # Configs speak of activation order where no g_idx bears it out, too.
        return replace(self.spec.scheme, act_order=False)

    @property
    def g_idx(self) -> Tensor:
        """int32 [K], the group of each input channel."""
        return self.grid.g_idx

    @cached_property
    def grid(self) -> Grid:
        """Scales, zero points and g_idx in neutral order.

        Raises:
            CheckpointError, ConversionRefused: as :meth:`marlinq.formats.layouts.Layout.unpack_grid`.
        """
        small = {suffix: tensor for suffix, tensor in self.tensors.items() if suffix != self.layout.key}
        with self._named():
            return self.layout.unpack_grid(small, self.spec)

    def weight(self, device: torch.device | None = None) -> QuantizedWeight:
        """The neutral value on ``device``, by default where the tensors are; codes travel packed and are
        unpacked there.

        Raises:
            CheckpointError, ConversionRefused: as :meth:`marlinq.formats.layouts.Layout.unpack`.
        """
        grid = self.grid if device is None else self.grid.to(device)
        words = self.words if device is None else self.words.to(device)
        codes = unpack_rows(transcode(words, self.spec, self.layout, None), grid.element.bits)
        with self._named():
            return grid.with_codes(codes)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except MarlinqError as error:
            raise type(error)(f"{self.name}: {error}") from None
