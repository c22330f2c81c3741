"""Finds codes that were exchanged inside a word, by the slots of a layout's words.

The probability that right codes look exchanged is not taken from a model. It is measured in the same module
on *control pairs*: slot i of a word and slot j of the same word in the next tile. No packing fault exchanges
those, and otherwise they are like the pairs of one word: they have the same channels' noise, the same group,
and the same output channel if the pair has one output channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Element, Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import Layout, ModuleSpec
from marlinq.operations.verify.statistics.finding import MOST_SAY
from marlinq.operations.verify.statistics.kept_codes import CHANNELS_PER_CODE
from marlinq.operations.verify.statistics.noise import DEGREES, Noise, log_density
from marlinq.operations.verify.statistics.tails import Tail

LEAST_SPREAD = 1.0
"""Least spread of the tail of a log-likelihood ratio, from the noise model's bound P(L > x) <= exp(-x)."""
_FLOOR = 3.0
_CONTROLS = (1, 2)
_CHUNK_ELEMENTS = 1 << 22
_GAIN_ELEMENTS = 1 << 17
_SAMPLED_TILES = 32
_LARGEST_TILE = 1 << 12


@dataclass(frozen=True, eq=False)
class WordTile:
    """The smallest block of codes that fills whole words.

    Attributes:
        rows, columns: number of input and output channels of the block.
        slots: codes per word.
        order: int64 [rows * columns], indices of the block's codes, word by word.
        bytes: pairs of slots that share a byte.
    """

    rows: int
    columns: int
    slots: int
    order: Tensor
    bytes: frozenset[tuple[int, int]]

    @property
    def words(self) -> int:
        """Number of words in a tile."""
        return self.rows * self.columns // self.slots

    def split(self, values: Tensor) -> Tensor:
        """Values [R, N] in the order of words: [tile rows, tile columns, words, slots]."""
        rows, columns = values.shape
        tiles = values.reshape(rows // self.rows, self.rows, columns // self.columns, self.columns)
        flat = tiles.transpose(1, 2).flatten(2)
        ordered = flat[:, :, self.order.to(values.device)]
        return ordered.reshape(*ordered.shape[:2], self.words, self.slots)

    def place(self, tile_row: int, tile_column: int, word: int) -> tuple[int, int]:
        """(input channel, output channel) of the first code of a word."""
        first = int(self.order[word * self.slots])
        return (
            tile_row * self.rows + first // self.columns,
            tile_column * self.columns + first % self.columns,
        )

    def along_k(self, i: int, j: int) -> bool:
        """Whether slots i and j of a word hold different input channels."""
        return int(self.order[i]) // self.columns != int(self.order[j]) // self.columns


@lru_cache(maxsize=64)
def word_tile(layout: Layout, element: Element, k: int, n: int) -> WordTile | None:
    """The tile of ``layout``, or None when no tile divides a matrix [k, n] of stored codes: of all codes, or
    of the kept ones where the layout is sparse."""
    sides = [1 << power for power in range(8)]
    shapes = sorted(((rows, columns) for rows in sides for columns in sides), key=lambda s: (s[0] * s[1], s))
    for rows, columns in shapes:
        scheme = Scheme(element, Granularity.channel(), element.zero_point, sparsity=layout.sparsity)
        channels = rows if layout.sparsity is None else rows * CHANNELS_PER_CODE
        spec = ModuleSpec(channels, columns, layout.as_stored(scheme))
        fits = rows * columns <= _LARGEST_TILE and k % rows == 0 and n % columns == 0
        if fits and layout.shape_refusal(spec) is None:
            tile = _tile_of(layout, scheme, rows, columns)
            if tile is not None:
                return tile
    return None


def _tile_of(layout: Layout, scheme: Scheme, k: int, n: int) -> WordTile | None:
    """Finds the order of [k, n] stored codes by packing: a changed code changes the bits of its slot.

    None where the words of so small a block have unused slots, or a single slot.
    """
    element, sparsity = scheme.element, layout.sparsity

    def stored(codes: Tensor) -> Tensor:
        if sparsity is not None:
            # No code below is the midpoint, so that these are kept, in this order.
            spans = codes.reshape(-1, sparsity.kept, n)
            codes = torch.full((len(spans), sparsity.span, n), element.midpoint, dtype=torch.uint8)
            codes[:, : sparsity.kept] = spans
            codes = codes.flatten(0, 1)
        blank = QuantizedWeight.from_codes(scheme, codes, scales=torch.ones((1, n), dtype=torch.float16))
        return layout.pack(blank)[layout.key].reshape(-1)

    codes = torch.zeros((k, n), dtype=torch.uint8)
    before = stored(codes)
    full = before ^ stored(torch.full_like(codes, element.codes - 1))
    slots = k * n // before.numel()
    if slots < 2 or not bool((full == -1).all()):
        return None
    shifts = torch.arange(8 * before.element_size())

    def changed(codes: Tensor) -> Tensor:
        """Bits of all words, in order, that change when ``codes`` replace zeros."""
        words = (before ^ stored(codes)).long()
        return (words.unsqueeze(1) >> shifts & 1).flatten()

    # First the bits of the codes' lowest bits; then, bit by bit, the index of the code that each belongs to.
    numbers = torch.arange(k * n, dtype=torch.int32).reshape(k, n)
    places = changed(torch.ones_like(codes)).nonzero()[:, 0]
    order = torch.zeros_like(places)
    for power in range((k * n - 1).bit_length()):
        order += changed((numbers >> power & 1).to(torch.uint8))[places] << power
    octet = (places % len(shifts) // 8).tolist()
    pairs = frozenset((i, i + 1) for i in range(slots - 1) if octet[i] == octet[i + 1])
    return WordTile(k, n, slots, order, pairs)


@dataclass(frozen=True)
class Suspect:
    """A word that fits the weights better with two codes exchanged; ``k`` and ``n`` are the channels of its
    first code."""

    k: int
    n: int
    what: str
    evidence: float


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Evidence for exchanges of codes inside words.

    Attributes:
        words: number of words in the module.
        alternatives: number of exchanges tried on each word.
        suspects: words with the largest log-likelihood ratios, the largest first.
        tail: tail of the log-likelihood ratio of right words, from the control pairs.
        sums: (what, where, evidence) of exchanges that whole rows, columns or the whole module share.
    """

    words: int
    alternatives: int
    suspects: list[Suspect]
    tail: Tail
    sums: list[tuple[str, str, float]]


class _Module:
    """The words of one module, in chunks of whole rows of tiles."""

    def __init__(self, q: QuantizedWeight, noise: Noise, tile: WordTile, channels: Tensor | None) -> None:
        self.channels = channels
        self.channels_per_row = 1 if channels is None else CHANNELS_PER_CODE
        self.q = q
        self.noise = noise
        self.tile = tile
        self.pairs = list(combinations(range(tile.slots), 2))
        self.tile_rows = q.in_features // tile.rows
        self.tile_columns = q.out_features // tile.columns

    @property
    def alternatives(self) -> int:
        return len(self.pairs) + bool(self.tile.bytes)

    def name(self, alternative: int) -> str:
        if alternative == len(self.pairs):
            return "the two codes of every byte"
        i, j = self.pairs[alternative]
        return f"slots {i} and {j}"

    def chunks(self) -> Iterator[_Chunk]:
        # At least four rows of tiles, because control pairs span up to four.
        height = 4 * max(1, _CHUNK_ELEMENTS // (4 * self.tile.rows * self.q.out_features))
        for start in range(0, self.tile_rows, height):
            yield self.chunk(start, min(start + height, self.tile_rows), slice(None))

    def chunk(self, start: int, stop: int, tile_columns: slice | Tensor) -> _Chunk:
        rows = slice(start * self.tile.rows, stop * self.tile.rows)
        r, sigma = self.noise.r[rows], self.noise.sigma(rows)
        codes = self.q.codes[rows]
        if isinstance(tile_columns, Tensor):
            columns = _inside(tile_columns, self.tile.columns)
            r, sigma, codes = r[:, columns], sigma[:, columns], codes[:, columns]
        return _Chunk(self, start, r, sigma, codes)

    def rows(self, tile_rows: Tensor) -> _Chunk:
        """Whole rows of tiles that need not lie side by side."""
        rows = _inside(tile_rows, self.tile.rows)
        return _Chunk(self, 0, self.noise.r[rows], self.noise.sigma(rows), self.q.codes[rows])


class _Chunk:
    """Words as columns of tensors [slots, words]."""

    def __init__(self, module: _Module, first: int, r: Tensor, sigma: Tensor, codes: Tensor) -> None:
        tile = module.tile
        self._module = module
        self.first = first
        split = tile.split(r)
        self.shape = split.shape[:3]
        places = _by_slot(split)
        widths = _by_slot(tile.split(sigma))
        lacks = log_density(places, widths).neg_()
        codes = _by_slot(tile.split(codes)).float()
        self.total = lacks.sum(dim=0)
        self._slots = _Slots(codes, places.add_(codes), widths.mul_(math.sqrt(DEGREES)).reciprocal_(), lacks)

    def own(self, words: Tensor | None = None) -> Tensor:
        """Gain of every alternative, [A, words]; for all words if ``words`` is None."""
        slots = self._slots if words is None else self._slots.of(words)
        every, by_byte = self._gains(slots, slots, self._module.pairs)
        return torch.cat((every, by_byte.unsqueeze(0))) if self._module.tile.bytes else every

    def best(self, words: Tensor, others: Tensor, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """(largest gain of exchanging slot i of ``words`` with slot j of ``others``, sum of the gains over
        pairs that share a byte), [words] each.

        Gains of single pairs above the floor are exact; smaller ones may be minus infinity.
        """
        one = self._slots.of(words)
        other = one if words is others else self._slots.of(others)
        best = torch.full_like(one.lacks[0], -torch.inf)
        for i, j in _runs(pairs):
            # An exchange can't gain more than the negative log-densities of its two codes.
            few, which = (one.lacks[i] + other.lacks[j] > _FLOOR).nonzero().unbind(1)
            gain = _gain(one.at(i, which), other.at(few + j.start, which))
            best.scatter_reduce_(0, which, gain, "amax")
        in_bytes = [pair for pair in pairs if pair in self._module.tile.bytes]
        return best, self._gains(one, other, in_bytes)[1]

    def _gains(self, one: _Slots, other: _Slots, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """(log-likelihood ratio L of exchanging slot i of ``one`` with slot j of ``other`` for each pair,
        [P, words]; its sum over pairs that share a byte, [words])."""
        words = one.lacks.shape[1]
        every = torch.empty((len(pairs), words), device=one.lacks.device)
        # Few words at a time, so that intermediate values stay in a core's cache.
        step = max(1, _GAIN_ELEMENTS // self._module.tile.slots)
        for start in range(0, words, step):
            part = slice(start, start + step)
            begin = 0
            for i, j in _runs(pairs):
                end = begin + j.stop - j.start
                every[begin:end, part] = _gain(one.at(i, part), other.at(j, part))
                begin = end
        by_byte = torch.zeros(words, device=every.device)
        for index, pair in enumerate(pairs):
            if pair in self._module.tile.bytes:
                by_byte += every[index]
        return every, by_byte

    def controls(self, step: int) -> tuple[Tensor, int]:
        """(largest gains of words' control pairs that are above the floor, number of words with such
        pairs)."""
        module = self._module
        rows, columns, inside = self.shape
        numbers = torch.arange(rows * columns * inside, device=self.total.device)
        tile_row = numbers // (columns * inside)
        tile_column = numbers // inside % columns
        best = torch.full_like(self.total, -torch.inf)
        by_byte = torch.zeros_like(self.total)
        every = torch.zeros_like(self.total, dtype=torch.bool)
        compared = torch.zeros_like(every)
        for along_k in (True, False):
            pairs = [pair for pair in module.pairs if module.tile.along_k(*pair) == along_k]
            if not pairs:
                continue
            # The neighbour inside a block of four tiles, which mostly stays inside a group of 32 channels.
            if along_k:
                there, shift = (tile_row ^ step) < rows, ((tile_row ^ step) - tile_row) * columns
            else:
                there, shift = (tile_column ^ step) < columns, (tile_column ^ step) - tile_column
            neighbour = torch.where(there, numbers + shift * inside, numbers)
            compared |= there
            some = (there & (self.total + self.total[neighbour] > _FLOOR)).nonzero()[:, 0]
            gains, in_bytes = self.best(some, neighbour[some], pairs)
            best[some] = torch.maximum(best[some], gains)
            by_byte[some] += in_bytes
            every[some] = True
        if module.tile.bytes:
            best = torch.where(every, torch.maximum(best, by_byte), best)
        return best[best > _FLOOR], int(compared.sum())


@dataclass(frozen=True, eq=False)
class _Slots:
    """Codes of words, as float32 tensors of one shape: [slots, words] or a part of it.

    Attributes:
        codes: stored codes.
        places: places of their weights on the grid, in code units.
        narrowness: 1 / (sigma * sqrt(degrees)).
        lacks: negative logarithm of each code's density.
    """

    codes: Tensor
    places: Tensor
    narrowness: Tensor
    lacks: Tensor

    def of(self, words: Tensor) -> _Slots:
        """These values for some of the words."""
        return _Slots(*(getattr(self, name).index_select(1, words) for name in _SLOT_FIELDS))

    def at(self, slots: int | slice | Tensor, words: slice | Tensor) -> _Slots:
        """These values for some slots and words."""
        return _Slots(*(getattr(self, name)[slots, words] for name in _SLOT_FIELDS))


_SLOT_FIELDS = ("codes", "places", "narrowness", "lacks")


def _inside(tiles: Tensor, size: int) -> Tensor:
    """The channels of tiles of ``size`` channels."""
    return (tiles.unsqueeze(1) * size + torch.arange(size, device=tiles.device)).flatten()


def _by_slot(split: Tensor) -> Tensor:
    """[tile rows, tile columns, words, slots] to [slots, words of all tiles]."""
    return split.flatten(0, 2).t().contiguous()


def _gain(one: _Slots, other: _Slots) -> Tensor:
    """Log-likelihood ratio L of exchanging the codes of ``one`` and ``other``, whose shapes broadcast.

    The two logarithms of :func:`log_density` become one: log (1 + a) (1 + b) = log1p(a + b + a b).
    """
    a = (one.places - other.codes).mul_(one.narrowness).square_()
    b = (other.places - one.codes).mul_(other.narrowness).square_()
    gain = b.addcmul_(a, b).add_(a).log1p_().mul_(-(DEGREES + 1) / 2)
    return gain.add_(one.lacks).add_(other.lacks)


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, slice]]:
    """The pairs in order, with one slice for consecutive second slots of the same first slot."""
    start = 0
    for index, (i, j) in enumerate(pairs):
        if index + 1 == len(pairs) or pairs[index + 1] != (i, j + 1):
            yield i, slice(pairs[start][1], j + 1)
            start = index + 1


def find_exchanges(
    q: QuantizedWeight, layout: Layout, noise: Noise, *, most: int, channels: Tensor | None = None
) -> Exchanges | None:
    """Tries every exchange of two codes of a word, and of the two codes of every byte.

    Args:
        q: stored weight.
        layout: layout that it is stored in, which decides the codes that share a word.
        noise: from :func:`marlinq.operations.verify.statistics.noise.measure_noise`.
        most: largest number of suspects to return.
        channels: int64 of the shape of the codes, input channel of each, where ``q`` holds the kept codes of
            a sparse weight; otherwise its rows are the input channels.

    Returns:
        The evidence, or None where the module is no whole number of the layout's tiles.
    """
    tile = word_tile(layout, q.element, q.in_features, q.out_features)
    if tile is None:
        return None
    module = _Module(q, noise, tile, channels)
    suspects: list[Suspect] = []
    controls: list[Tensor] = []
    compared = 0
    for chunk in module.chunks():
        for step in _CONTROLS:
            values, count = chunk.controls(step)
            controls.append(values)
            compared += count
        suspects += _suspects(module, chunk, most)
    suspects = sorted(suspects, key=lambda suspect: -suspect.evidence)[:most]
    tail = Tail.fit(torch.cat(controls), compared, floor=_FLOOR, least_spread=LEAST_SPREAD)
    words = q.in_features * q.out_features // tile.slots
    return Exchanges(words, module.alternatives, suspects, tail, list(_sums(module)))


def _suspects(module: _Module, chunk: _Chunk, most: int) -> list[Suspect]:
    # An exchange can't gain more than the sum of the word's negative log-densities.
    some = (chunk.total > _FLOOR).nonzero()[:, 0]
    if not len(some):
        return []
    count = min(most, len(some))
    best, by_byte = chunk.best(some, some, module.pairs)
    if module.tile.bytes:
        best = torch.maximum(best, by_byte)
    if int((best > _FLOOR).sum()) >= count:
        some = some[best.topk(count).indices]
    best, which = chunk.own(some).max(dim=0)
    suspects = []
    for index in best.topk(count).indices.tolist():
        rest, word = divmod(int(some[index]), chunk.shape[2])
        row, column = divmod(rest, chunk.shape[1])
        k, n = module.tile.place(chunk.first + row, column, word)
        if module.channels is not None:
            k = int(module.channels[k, n])
        suspects.append(Suspect(k, n, f"{module.name(int(which[index]))} look exchanged", float(best[index])))
    return suspects


def _sums(module: _Module) -> Iterator[tuple[str, str, float]]:
    """Exchanges that many words share: along rows and columns of tiles, and in the whole module.

    Each word adds at most MOST_SAY, and a row or column is judged by a sample of its tiles.
    """
    tile, device = module.tile, module.noise.r.device
    sampled = _spaced(module.tile_columns, device)
    height = max(1, _CHUNK_ELEMENTS // (8 * tile.rows * tile.columns * len(sampled)))
    rows = []
    for start in range(0, module.tile_rows, height):
        stop = min(start + height, module.tile_rows)
        # [A, tile rows, tile columns, words]
        rows.append(_limited(module.chunk(start, stop, sampled)).sum(dim=2))
    sums = torch.cat(rows, dim=1)
    yield from _agreed(module, sums.sum(dim=(1, 2)).unsqueeze(1), lambda _: "the whole module")

    def of_tile_row(row: int) -> str:
        step = tile.rows * module.channels_per_row
        first, last = row * step, (row + 1) * step - 1
        return f"the words that hold input channel {first}" + (f" to {last}" if last > first else "")

    yield from _agreed(module, sums.sum(dim=2), of_tile_row)
    if tile.rows > 1 and tile.words > 1:

        def of_row(index: int) -> str:
            row, word = divmod(index, tile.words)
            k, _ = tile.place(row, 0, word)
            return f"the words that begin with input channel {k * module.channels_per_row}"

        yield from _agreed(module, sums.flatten(1), of_row)
    picked = _spaced(module.tile_rows, device)
    height = max(1, _GAIN_ELEMENTS // (tile.rows * module.q.out_features))
    columns = torch.zeros((), device=device)
    for together in torch.split(picked, height):
        columns = columns + _limited(module.rows(together)).sum(dim=1)

    def of_column(index: int) -> str:
        column, word = divmod(index, tile.words)
        _, n = tile.place(0, column, word)
        return f"the words that begin with output channel {n}"

    yield from _agreed(module, columns.flatten(1), of_column)


def _limited(chunk: _Chunk) -> Tensor:
    return chunk.own().clamp_(max=MOST_SAY).reshape(-1, *chunk.shape)


def _spaced(count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, count - 1, min(count, _SAMPLED_TILES), device=device).round().long()


def _agreed(module: _Module, sums: Tensor, where: Callable[[int], str]) -> Iterator[tuple[str, str, float]]:
    """The best alternative of every place, where its sum [A, places] is positive."""
    best, which = sums.max(dim=0)
    for index in (best > 0).nonzero()[:, 0].tolist():
        yield f"{module.name(int(which[index]))} are exchanged", where(index), float(best[index])
