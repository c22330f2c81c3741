"""The base class of tensor layouts, and the descriptions of tensors and modules that it works with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marlinq.core.dtypes import dtype_name, torch_dtype
from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.core.granularity import Granularity, GranularityKind
from marlinq.core.scheme import Element, Scheme, TensorScale
from marlinq.core.sparsity import Sparsity
from marlinq.core.weight import Grid, QuantizedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_AS_BYTES = {"float8_e8m0fnu": "uint8"}

UNQUANTIZED = "weight"
"""The suffix of an unquantised linear's weight."""


@dataclass(frozen=True)
class TensorSpec:
    """Name of the dtype and shape of one stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    def holds(self, wanted: TensorSpec) -> bool:
        """Whether a stored tensor of this spec may stand for ``wanted``; some writers store E8M0 as uint8."""
        return self.shape == wanted.shape and _AS_BYTES.get(self.dtype, self.dtype) == _AS_BYTES.get(
            wanted.dtype, wanted.dtype
        )


@dataclass(frozen=True)
class ModuleSpec:
    """Shape and scheme of one quantised linear, known from config and stored shapes before its data is read.

    Attributes:
        in_features, out_features: K and N.
        scheme: scheme of the weight; ``scheme.act_order`` is taken from the config, or, when a checkpoint to
            write is planned, from the data.
        zero_writer: the program that packed GPTQ v1 zeros, where it is known
            (see :mod:`marlinq.formats.layouts.gptq`).
        extras: suffixes of :attr:`Layout.read_only` that the module has.
    """

    in_features: int
    out_features: int
    scheme: Scheme
    zero_writer: str | None = None
    extras: frozenset[str] = frozenset()

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.in_features, self.out_features

    @property
    def granularity(self) -> Granularity:
        """Granularity of the scales; a group of K or more is a channel."""
        return self.scheme.granularity.for_channels(self.in_features)

    @property
    def groups(self) -> int:
        """G."""
        return self.scheme.groups(self.in_features)

    @property
    def channels_per_group(self) -> int:
        """Input channels that share a scale, at most K."""
        return self.scheme.channels_per_group(self.in_features)

    @property
    def scale_dtype(self) -> torch.dtype:
        """The stored dtype of the scales."""
        return torch_dtype(self.scheme.scale_dtype)


@dataclass(frozen=True)
class PlainTensors:
    """The small tensors of a layout that can be checked as stored, without torch.

    Attributes:
        zeros: suffix of int32 words with one zero point a slot, in any order; None where none are stored.
        less: number by which stored zero points are smaller than true ones.
        order: suffix of the int32 g_idx; None where none is stored.
        shape: suffix of the int64 shape (N, K); None where none is stored.
    """

    zeros: str | None = None
    less: int = 0
    order: str | None = None
    shape: str | None = None


class Layout(ABC):
    """One on-disk layout of a quantised linear: the weights it can hold, and how they are packed and
    unpacked.

    A layout never reads files or configs. It maps a module's tensors, keyed by the suffix after
    ``<module>.``, to and from a :class:`~marlinq.core.weight.QuantizedWeight`. No other room knows a suffix
    or a layout by name.
    """

    name: str
    """Name in messages; a format of one layout has the same name."""
    family: str
    """Name shared by layouts that store codes and scales in the same bits."""
    key: str
    """The suffix of the codes; its presence marks a quantised module."""
    scale_key: str
    """The suffix of the scales."""
    mask_key: str | None = None
    """The suffix of the mask with the places of a sparse weight's stored codes; None where all are stored."""
    code_dtype: str = "int32"
    """The dtype of the codes' tensor."""
    suffixes: tuple[str, ...]
    """All suffixes the layout owns; ``bias`` is never among them, it is carried unchanged."""
    read_only: tuple[str, ...] = ()
    """Suffixes, of ``suffixes``, that only old writers wrote: read where present, never written."""
    elements: tuple[str, ...]
    """Names of the element types it holds."""
    granularities: tuple[GranularityKind, ...] = ("channel", "group")
    """Kinds of granularity it holds."""
    only_groups: int | None = None
    """The only group size it holds; None for any. In a weight with as many input channels, such a group is
    one scale per output channel."""
    tensor_scales: tuple[TensorScale, ...] = ("none",)
    """Kinds of second-level scale it holds; ``quantize`` makes the first."""
    holds_activations: bool = False
    """Whether its config can say how inputs are quantised."""
    sparsity: Sparsity | None = None
    """Sparsity of all weights it holds; None for a layout of dense weights, which can hold sparse ones, too,
    with their zeros as codes."""
    granularity: Granularity | None = None
    """Granularity that ``quantize`` takes where the recipe leaves the group size open; None for the largest
    group size that fits."""
    scale_dtype: str | None = "float16"
    """The dtype that loaders of this layout expect of scales; None keeps what the weight has."""
    rounds: str | None = None
    """Reason why reading rounds values; None where values are read exactly."""
    stores_order: bool = False
    """Whether a g_idx is stored, so that a weight in activation order can be held."""
    plain: PlainTensors | None = None
    """Tensors that ``inspect`` checks without decoding; None makes it decode every module's grid."""
    original_kernel: str | None = None
    """Name of the kernel that the layout was made for, if it takes fewer shapes than the layout
    (:meth:`strict_refusal`)."""

    def as_stored(self, scheme: Scheme) -> Scheme:
        """``scheme`` as this layout stores it: some layouts always store zero points, some never."""
        return scheme

    def says_all(self, spec: ModuleSpec) -> bool:
        """Whether ``spec`` alone decides the scheme of a module's values, since neither zero points nor g_idx
        are stored that could differ from the config."""
        return False

    def is_codes(self, suffix: str, dtype: str) -> bool:
        """Whether a tensor of this suffix and dtype holds a quantised linear's codes.

        The dtype matters where codes have the suffix of an unquantised weight.
        """
        return suffix == self.key and (suffix != UNQUANTIZED or dtype == self.code_dtype)

    def read_scale_dtype(self, stored: str) -> str:
        """The dtype of scales whose stored tensor has dtype ``stored``, which may be uint8 for E8M0."""
        return stored

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        """Why no weight of this scheme can be stored, whatever its shape, or None."""
        if scheme.element.name not in self.elements:
            return f"{scheme.element.name} weights; {self.name} holds {' and '.join(self.elements)} only"
        if scheme.granularity.kind not in self.granularities:
            held = " and ".join(self.granularities)
            return f"{scheme.granularity.describe()}; {self.name} holds scales per {held} only"
        if scheme.tensor_scale not in self.tensor_scales:
            kind = {"none": "no second-level scale", "multiplies": "a second-level scale that multiplies"}
            what = kind.get(scheme.tensor_scale, "a second-level scale that divides")
            return f"{what}; {self.name} does not hold such weights"
        if scheme.activations is not None and not self.holds_activations:
            return f"{scheme.activations.describe()}; {self.name} describes weights only"
        return None

    @abstractmethod
    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        """Why a module of this shape, group size and element can't be stored, or None.

        Zero points are not considered: only the values tell whether all of them are the midpoint.
        """

    def strict_refusal(self, spec: ModuleSpec) -> str | None:
        """Why the layout's :attr:`original_kernel` can't run the module, or None."""
        return self.shape_refusal(spec)

    def value_refusal(self, grid: Grid) -> str | None:
        """Why these values can't be stored although the shape could, or None."""
        return None

    def refusal(self, weight: Grid, scale_dtype: str | None = None) -> str | None:
        """Why ``pack`` would refuse ``weight``, or None if packing is lossless. It does not depend on
        codes."""
        dtype = scale_dtype or self.scale_dtype or weight.scheme.scale_dtype
        return (
            self.shape_refusal(spec_of(weight)) or self.value_refusal(weight) or _scale_refusal(weight, dtype)
        )

    @abstractmethod
    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        """Dtypes and shapes of a module's tensors on disk, by suffix."""

    @abstractmethod
    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        """(K, N) from the stored shapes alone."""

    @abstractmethod
    def pack_codes(self, codes: Tensor, spec: ModuleSpec) -> Tensor:
        """The tensor stored under ``key`` for ``codes``, uint8 [K, N]."""

    @abstractmethod
    def unpack_codes(self, stored: Tensor, spec: ModuleSpec, mask: Tensor | None = None) -> Tensor:
        """The codes, uint8 [K, N]; the inverse of :meth:`pack_codes`.

        Args:
            stored: tensor under :attr:`key`.
            spec: the module.
            mask: tensor under :attr:`mask_key`, where the layout has one.
        """

    def pack_mask(self, codes: Tensor, spec: ModuleSpec) -> Tensor:
        """The tensor stored under :attr:`mask_key` for ``codes``, uint8 [K, N], of a sparse weight."""
        raise NotImplementedError(f"{self.name} has no mask")

    @abstractmethod
    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        """The tensors of a grid that has been accepted and whose scales have the stored dtype.

        ``scheme.stores_zeros``: whether zero points are written.
        """

    @abstractmethod
    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        """The grid of tensors whose names, shapes and dtypes have been checked."""

    def pack(self, weight: QuantizedWeight, declared: Scheme | None = None) -> dict[str, Tensor]:
        """The module's tensors by suffix.

        Args:
            weight: weight to store.
            declared: scheme in the config, which decides the dtype of the scales and whether zero points are
                stored. They are stored even if all of them happen to be the midpoint. Default: scales in the
                layout's dtype, zero points where the weight has any.

        Raises:
            ConversionRefused: the layout can't hold ``weight`` without loss; the message is the reason.
        """
        tensors, spec = self.pack_grid(weight, declared), spec_of(weight)
        if self.sparsity is not None and (reason := self.sparsity.refusal(weight.used())) is not None:
            raise ConversionRefused(f"{self.name}: {reason}")
        packed = {self.key: self.pack_codes(weight.codes, spec), **tensors}
        if self.mask_key is not None:
            packed[self.mask_key] = self.pack_mask(weight.codes, spec)
        return packed

    def pack_grid(self, grid: Grid, declared: Scheme | None = None) -> dict[str, Tensor]:
        """The tensors of :meth:`pack` except the codes' own.

        Raises:
            ConversionRefused: as :meth:`pack`.
        """
        natural = self.scale_dtype or grid.scheme.scale_dtype
        wanted = declared or self.as_stored(replace(grid.scheme, scale_dtype=natural))
        reason = self.refusal(grid, wanted.scale_dtype)
        if reason is not None:
            raise ConversionRefused(f"{self.name}: {reason}")
        if grid.scheme.stores_zeros and not wanted.stores_zeros:
            raise ConversionRefused(
                f"{self.name}: declared symmetric, but not all zero points are the midpoint"
            )
        return self._pack_grid(replace(grid, scales=grid.scales.to(torch_dtype(wanted.scale_dtype))), wanted)

    def unpack(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> QuantizedWeight:
        """The weight stored in ``tensors``.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or of the wrong shape or dtype.
            ConversionRefused: the stored values are ambiguous.
        """
        self._check(tensors, spec)
        grid = self._unpack_grid(tensors, spec)
        mask = None if self.mask_key is None else tensors[self.mask_key]
        return grid.with_codes(self.unpack_codes(tensors[self.key], spec, mask))

    def unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        """Everything but the codes, from all tensors but that of the codes.

        Raises:
            CheckpointError, ConversionRefused: as :meth:`unpack`.
        """
        self._check(tensors, spec, without=self.key)
        return self._unpack_grid(tensors, spec)

    def mismatch(
        self, found: Mapping[str, TensorSpec], spec: ModuleSpec, without: str | None = None
    ) -> str | None:
        """How ``found`` differs from the tensors that a module of ``spec`` has; None where it doesn't.

        ``without`` is a suffix that is ignored.
        """
        expected = {suffix: want for suffix, want in self.expected(spec).items() if suffix != without}
        for suffix, want in expected.items():
            have = found.get(suffix)
            if have is None:
                return f"{suffix}: expected {want.dtype} {list(want.shape)}, found no tensor"
            if not have.holds(want):
                wanted = f"expected {want.dtype} {list(want.shape)}"
                return f"{suffix}: {wanted}, found {have.dtype} {list(have.shape)}"
        extra = sorted(set(found) - set(expected) - {without})
        return f"{extra[0]}: not a tensor of a {self.name} module of this kind" if extra else None

    def _check(self, tensors: Mapping[str, Tensor], spec: ModuleSpec, without: str | None = None) -> None:
        found = {
            suffix: TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))
            for suffix, tensor in tensors.items()
        }
        reason = self.mismatch(found, spec, without)
        if reason is not None:
            raise CheckpointError(reason)


def spec_of(weight: Grid) -> ModuleSpec:
    """The spec that describes ``weight``; a single group counts as one scale per channel."""
    return ModuleSpec(weight.in_features, weight.out_features, weight.scheme)


def _scale_refusal(q: Grid, dtype: str) -> str | None:
    """Why the scales can't be cast to ``dtype`` exactly, or None.

    NaN and infinity are not refused, since a cast keeps them; ``verify`` reports them.
    """
    wide = q.scales.to(torch.float32)
    back = wide.to(torch_dtype(dtype)).to(torch.float32)
    changed = (wide != back) & ~(wide.isnan() & back.isnan())
    count = int(changed.sum())
    if count == 0:
        return None
    worst = float(wide[changed][0])
    return (
        f"{count} of {wide.numel()} scales are not exactly representable in {dtype} (for example {worst!r})"
    )


def zero_range_refusal(q: Grid, lowest: int) -> str | None:
    """Why the zero points are not in ``lowest`` .. ``lowest + 2**bits - 1``, the range of a stored field; or
    None."""
    highest = q.element.codes - 1
    low, high = int(q.zeros.min()), int(q.zeros.max())
    if low >= lowest and high <= highest:
        return None
    wrong = low if low < lowest else high
    return f"a zero point of {wrong} is outside the storable range {lowest}..{highest}"


def g_idx_refusal(q: Grid) -> str | None:
    """Why a layout without g_idx can't hold ``q``, or None."""
    if q.has_trivial_g_idx:
        return None
    return "activation order: g_idx is not k // group_size, and the layout has no g_idx"
