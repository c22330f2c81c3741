"""What every on-disk layout offers, and the values it works with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.core.weight import Grid, QuantizedTensor, group_count
from marlinq.formats.nibbles import pack_rows, slots_per_word, unpack_rows

_SLAB_CODES = 1 << 21
_SLAB_STEP = 16


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModuleSpec:
    """What a config and the stored shapes say about one quantised linear, before its data is read.

    ``group_size`` is -1 or positive, as configs write it; ``zero_writer`` names the program that packed
    GPTQ v1 zeros where it is known (see :mod:`marlinq.formats.layouts.gptq`); ``scale_dtype`` is the
    stored dtype of the scales; ``has_g_idx`` says that a layout which does not need a g_idx stores one all
    the same; ``act_order`` that the stored g_idx is not ``k // group_size``, which only the data can tell.
    """

    in_features: int
    out_features: int
    group_size: int
    bits: int = 4
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16
    zero_writer: str | None = None
    has_g_idx: bool = False
    act_order: bool = False

    @property
    def groups(self) -> int:
        """G."""
        return group_count(self.in_features, self.group_size)

    @property
    def channels_per_group(self) -> int:
        """The group size with -1 resolved, and never above K."""
        return self.in_features if self.group_size == -1 else min(self.group_size, self.in_features)


class Format(ABC):
    """One on-disk layout: what it can hold, and the way there and back.

    A format never reads files or configs; it maps a module's tensors, keyed by the suffix after
    ``<module>.``, to and from the neutral tuple.
    """

    name: str
    """The name used on the command line."""
    family: str
    """Layouts of one family store codes and scales in the same bits."""
    key: str
    """The suffix whose presence marks a quantised module."""
    suffixes: tuple[str, ...]
    """All suffixes the layout owns; ``bias`` is never among them, it is carried unchanged."""
    scale_dtype: torch.dtype | None = torch.float16
    """The dtype that loaders of this layout expect of scales; None keeps what the tuple has."""

    @abstractmethod
    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        """Why a module of this shape, group size and width can't be stored, or None."""

    def value_refusal(self, grid: Grid) -> str | None:
        """Why these values can't be stored although the shape could, or None."""
        return None

    def refusal(self, q: QuantizedTensor | Grid, scale_dtype: torch.dtype | None = None) -> str | None:
        """Why ``pack`` would refuse, or None when it is lossless. The codes play no part in it."""
        grid = q.grid if isinstance(q, QuantizedTensor) else q
        return (
            self.shape_refusal(spec_of(grid))
            or self.value_refusal(grid)
            or _scale_refusal(grid, scale_dtype or self.scale_dtype or grid.scales.dtype)
        )

    @abstractmethod
    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        """The tensors, by suffix, that a module of this kind has on disk."""

    @abstractmethod
    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], bits: int) -> tuple[int, int]:
        """(K, N) from the stored shapes alone."""

    @abstractmethod
    def from_natural(self, natural: Tensor) -> Tensor:
        """The words stored under ``key`` from natural words.

        Natural words are int32 [K*bits/32, N], slot i of word (r, n) the code of channel r*slots + i: every
        layout stores a permutation of them, so that conversion never has to unpack.
        """

    @abstractmethod
    def to_natural(self, stored: Tensor) -> Tensor:
        """The inverse of :meth:`from_natural`."""

    @abstractmethod
    def channels(self, stored: Tensor, start: int, stop: int, bits: int) -> Tensor:
        """The view of ``stored`` with input channels ``start .. stop - 1``; both multiples of 16, or K."""

    @abstractmethod
    def _pack_grid(self, grid: Grid, symmetric: bool) -> dict[str, Tensor]:
        """The tensors of an accepted grid; ``symmetric`` says that zeros need not be stored."""

    @abstractmethod
    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        """The grid of tensors whose names, shapes and dtypes have been checked."""

    def pack(
        self,
        q: QuantizedTensor,
        scale_dtype: torch.dtype | None = None,
        symmetric: bool | None = None,
    ) -> dict[str, Tensor]:
        """The module's tensors by suffix, its scales in ``scale_dtype`` (default: the layout's own).

        ``symmetric`` is what the config declares (default: what the zeros are). A tuple whose zeros happen
        to be the middle code may be declared asymmetric, so that it stores the tensors the config promises.

        Raises:
            ConversionRefused: the layout can't hold ``q`` without loss; the message is the reason.
        """
        tensors = self.pack_grid(q.grid, scale_dtype, symmetric)
        return {self.key: transcode(pack_rows(q.codes, q.bits), spec_of(q), None, self), **tensors}

    def pack_grid(
        self, grid: Grid, scale_dtype: torch.dtype | None = None, symmetric: bool | None = None
    ) -> dict[str, Tensor]:
        """The tensors of :meth:`pack` except the codes' own.

        Raises:
            ConversionRefused: as :meth:`pack`.
        """
        reason = self.refusal(grid, scale_dtype)
        if reason is not None:
            raise ConversionRefused(f"{self.name}: {reason}")
        if symmetric and not grid.symmetric:
            raise ConversionRefused(
                f"{self.name}: declared symmetric, but not all zero points are the middle code"
            )
        dtype = scale_dtype or self.scale_dtype or grid.scales.dtype
        return self._pack_grid(
            replace(grid, scales=grid.scales.to(dtype)), grid.symmetric if symmetric is None else symmetric
        )

    def unpack(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> QuantizedTensor:
        """The neutral tuple stored in ``tensors``.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or of the wrong shape or dtype.
            ConversionRefused: the stored values are ambiguous.
        """
        self._check(tensors, spec)
        grid = self._unpack_grid(tensors, spec)
        codes = unpack_rows(transcode(tensors[self.key], spec, self, None), spec.bits)
        return QuantizedTensor(codes, grid.scales, grid.zeros, grid.g_idx, grid.group_size, grid.bits)

    def unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        """Everything but the codes, from the tensors except the codes' own.

        Raises:
            CheckpointError, ConversionRefused: as :meth:`unpack`.
        """
        self._check(tensors, spec, without=self.key)
        return self._unpack_grid(tensors, spec)

    def mismatch(
        self, found: Mapping[str, TensorSpec], spec: ModuleSpec, without: str | None = None
    ) -> str | None:
        """How ``found`` differs from the tensors that a module of this kind has, or None.

        ``without`` is a suffix that is not looked at.
        """
        expected = {suffix: want for suffix, want in self.expected(spec).items() if suffix != without}
        for suffix, want in expected.items():
            have = found.get(suffix)
            if have is None:
                return f"{suffix}: expected {want.dtype} {list(want.shape)}, found no tensor"
            if have != want:
                wanted = f"expected {want.dtype} {list(want.shape)}"
                return f"{suffix}: {wanted}, found {have.dtype} {list(have.shape)}"
        extra = sorted(set(found) - set(expected) - {without})
        return f"{extra[0]}: not a tensor of a {self.name} module of this kind" if extra else None

    def _check(self, tensors: Mapping[str, Tensor], spec: ModuleSpec, without: str | None = None) -> None:
        found = {suffix: TensorSpec(tensor.dtype, tuple(tensor.shape)) for suffix, tensor in tensors.items()}
        reason = self.mismatch(found, spec, without)
        if reason is not None:
            raise CheckpointError(reason)


def transcode(words: Tensor, spec: ModuleSpec, source: Format | None, target: Format | None) -> Tensor:
    """The words that ``target`` stores for the codes that ``source`` stores as ``words``.

    None stands for natural words (:meth:`Format.from_natural`).

    Works on slabs of about two million codes: they stay in the processor's caches, and beside the two tensors
    only a few MB are in memory.

    Args:
        words: the source's codes tensor, of the shape that ``spec`` says.
        spec: the module; ``target`` must be able to hold its shape.
    """
    if source is target or (source and target and source.family == target.family):
        return words
    bits, slots = spec.bits, slots_per_word(spec.bits)
    natural_shape = (spec.in_features // slots, spec.out_features)
    shape = target.expected(spec)[target.key].shape if target else natural_shape
    result = torch.empty(shape, dtype=torch.int32, device=words.device)
    step = max(_SLAB_STEP, _SLAB_CODES // spec.out_features // _SLAB_STEP * _SLAB_STEP)
    for start in range(0, spec.in_features, step):
        stop = min(start + step, spec.in_features)
        rows = slice(start // slots, stop // slots)
        natural = source.to_natural(source.channels(words, start, stop, bits)) if source else words[rows]
        slab = target.channels(result, start, stop, bits) if target else result[rows]
        slab.copy_(target.from_natural(natural) if target else natural)
    return result


def spec_of(q: QuantizedTensor | Grid, zero_writer: str | None = None) -> ModuleSpec:
    """The spec that describes ``q``; a single group counts as channelwise (-1)."""
    return ModuleSpec(
        in_features=q.in_features,
        out_features=q.out_features,
        group_size=-1 if q.groups == 1 else q.group_size,
        bits=q.bits,
        symmetric=q.symmetric,
        scale_dtype=q.scales.dtype,
        zero_writer=zero_writer,
        act_order=not q.has_trivial_g_idx,
    )


def _scale_refusal(q: Grid, dtype: torch.dtype) -> str | None:
    """Why the scales can't be cast to ``dtype`` exactly, or None.

    NaN and infinity survive the cast as they are, so they are not refused here; ``verify`` reports them.
    """
    wide = q.scales.to(torch.float32)
    back = wide.to(dtype).to(torch.float32)
    changed = (wide != back) & ~(wide.isnan() & back.isnan())
    count = int(changed.sum())
    if count == 0:
        return None
    worst = float(wide[changed][0])
    return (
        f"{count} of {wide.numel()} scales are not exactly representable "
        f"in {str(dtype).removeprefix('torch.')} (for example {worst!r})"
    )


def zero_range_refusal(q: Grid, lowest: int) -> str | None:
    """Why the zero points don't fit a field of ``q.bits`` bits that starts at ``lowest``, or None."""
    highest = (1 << q.bits) - 1
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
