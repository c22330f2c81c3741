"""Codes that a layout stores in one word: which they are, and what an exchange of two would explain.

The chance that right codes look exchanged is not taken from a model. It is measured in the same module on
*control pairs*: slot i of a word with slot j of the same word in the next tile. No fault of packing
exchanges those, and in all else they are like the pairs of one word: the same channels' noise, the same
group, the same output channel where the pair has one output channel.
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
from marlinq.operations.verify.statistics.noise import DEGREES, Noise, log_density
from marlinq.operations.verify.statistics.tails import Tail

LEAST_SPREAD = 1.0
"""Of the tail of a log-likelihood ratio, where the noise is as modelled: P(L > x) <= exp(-x)."""
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
        rows, columns: its input and output channels.
        slots: codes in a word.
        order: int64 [rows * columns], the places of the block's codes, word by word.
        bytes: the pairs of slots that share a byte.
    """

    rows: int
    columns: int
    slots: int
    order: Tensor
    bytes: frozenset[tuple[int, int]]

    @property
    def words(self) -> int:
        """Words in a tile."""
        return self.rows * self.columns // self.slots

    def split(self, values: Tensor) -> Tensor:
        """[R, N] to [tile rows, tile columns, words, slots], by the word that holds each code."""
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
    """The tile of ``layout``, or None when no tile divides a [k, n] module."""
    sides = [1 << power for power in range(8)]
    shapes = sorted(((rows, columns) for rows in sides for columns in sides), key=lambda s: (s[0] * s[1], s))
    for rows, columns in shapes:
        scheme = Scheme(element, Granularity.channel(), element.zero_point)
        spec = ModuleSpec(rows, columns, layout.as_stored(scheme))
        fits = rows * columns <= _LARGEST_TILE and k % rows == 0 and n % columns == 0
        if fits and layout.shape_refusal(spec) is None and (tile := _tile_of(layout, spec)) is not None:
            return tile
    return None


def _tile_of(layout: Layout, spec: ModuleSpec) -> WordTile | None:
    """Reads the order off the layout itself: where codes differ, their slots of the words do.

    None when the words of so small a block have room for more codes, or for one only.
    """
    k, n, element = spec.in_features, spec.out_features, spec.scheme.element

    def stored(codes: Tensor) -> Tensor:
        scheme = Scheme(element, Granularity.channel(), element.zero_point)
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
        """Which bits of all words change, one after the other."""
        words = (before ^ stored(codes)).long()
        return (words.unsqueeze(1) >> shifts & 1).flatten()

    # Where the codes' lowest bits are; then, bit by bit, the numbers of the codes that they belong to.
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
    """A word that reads better with some of its codes exchanged: ``k`` and ``n`` are its first code's."""

    k: int
    n: int
    what: str
    evidence: float


@dataclass(frozen=True, eq=False)
class Exchanges:
    """What exchanges within words explain.

    Attributes:
        words: all words of the module.
        alternatives: exchanges that were tried on each.
        suspects: the words whose log-likelihood ratio is the largest, the largest first.
        tail: of the log-likelihood ratio of right words, from the control pairs.
        sums: (what, where, evidence) of exchanges that whole rows, columns or the whole module agree on.
    """

    words: int
    alternatives: int
    suspects: list[Suspect]
    tail: Tail
    sums: list[tuple[str, str, float]]


class _Module:
    """The words of one module, in chunks of whole rows of tiles."""

    def __init__(self, q: QuantizedWeight, noise: Noise, tile: WordTile) -> None:
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
        # Four rows of tiles at least, which is as far as control pairs reach.
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
        """The gain of every alternative, [A, words]; of all words if None."""
        slots = self._slots if words is None else self._slots.of(words)
        every, by_byte = self._gains(slots, slots, self._module.pairs)
        return torch.cat((every, by_byte.unsqueeze(0))) if self._module.tile.bytes else every

    def best(self, words: Tensor, others: Tensor, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The largest gain of exchanging slots i and j of ``words`` and of ``others``, [words], and the sum
        over the pairs that share a byte, [words].

        Gains of single pairs are exact above the floor; below it they may be minus infinity.
        """
        one = self._slots.of(words)
        other = one if words is others else self._slots.of(others)
        best = torch.full_like(one.lacks[0], -torch.inf)
        for i, j in _runs(pairs):
            # An exchange can't gain more than what its two codes lack, and few lack so much.
            few, which = (one.lacks[i] + other.lacks[j] > _FLOOR).nonzero().unbind(1)
            gain = _gain(one.at(i, which), other.at(few + j.start, which))
            best.scatter_reduce_(0, which, gain, "amax")
        in_bytes = [pair for pair in pairs if pair in self._module.tile.bytes]
        return best, self._gains(one, other, in_bytes)[1]

    def _gains(self, one: _Slots, other: _Slots, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """L of exchanging slot i of ``one`` with slot j of ``other``, for each pair, [P, words], and the sum
        over the pairs that share a byte, [words]."""
        words = one.lacks.shape[1]
        every = torch.empty((len(pairs), words), device=one.lacks.device)
        # Few words at once, so that what is computed of a run stays in a core's cache.
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
        """The largest gain of the control pairs of each word, where it is above the floor, and how many
        words had any."""
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
            # The neighbour within a block of four tiles: it stays within a group of 32 channels where it can.
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
    """Codes of words, float32 tensors of one shape: [slots, words] or a part of it.

    Attributes:
        codes: as they are stored.
        places: where their weights lie on the grid, in code units.
        narrowness: 1 / (sigma * sqrt(degrees)).
        lacks: the negative logarithm of each code's density.
    """

    codes: Tensor
    places: Tensor
    narrowness: Tensor
    lacks: Tensor

    def of(self, words: Tensor) -> _Slots:
        """Of some words."""
        return _Slots(*(getattr(self, name).index_select(1, words) for name in _SLOT_FIELDS))

    def at(self, slots: int | slice | Tensor, words: slice | Tensor) -> _Slots:
        """A part, indexed as tensors are."""
        return _Slots(*(getattr(self, name)[slots, words] for name in _SLOT_FIELDS))


_SLOT_FIELDS = ("codes", "places", "narrowness", "lacks")


def _inside(tiles: Tensor, size: int) -> Tensor:
    """The channels of tiles of ``size`` channels."""
    return (tiles.unsqueeze(1) * size + torch.arange(size, device=tiles.device)).flatten()


def _by_slot(split: Tensor) -> Tensor:
    """[tile rows, tile columns, words, slots] to [slots, words of all tiles]."""
    return split.flatten(0, 2).t().contiguous()


def _gain(one: _Slots, other: _Slots) -> Tensor:
    """L of an exchange of the codes of ``one`` and ``other``, whose shapes broadcast.

    Both logarithms of :func:`log_density` are taken at once: log (1 + a) (1 + b) = log1p(a + b + a b).
    """
    a = (one.places - other.codes).mul_(one.narrowness).square_()
    b = (other.places - one.codes).mul_(other.narrowness).square_()
    gain = b.addcmul_(a, b).add_(a).log1p_().mul_(-(DEGREES + 1) / 2)
    return gain.add_(one.lacks).add_(other.lacks)


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, slice]]:
    """The pairs in their order, those of one first slot and consecutive second ones together."""
    start = 0
    for index, (i, j) in enumerate(pairs):
        if index + 1 == len(pairs) or pairs[index + 1] != (i, j + 1):
            yield i, slice(pairs[start][1], j + 1)
            start = index + 1


def find_exchanges(q: QuantizedWeight, layout: Layout, noise: Noise, *, most: int) -> Exchanges | None:
    """Try every exchange of two codes of a word, and of the two codes of every byte.

    Args:
        q: stored weight.
        layout: where it is stored; it says which codes share a word.
        noise: see :func:`marlinq.operations.verify.statistics.noise.measure_noise`.
        most: how many suspects to return.

    Returns:
        What was found, or None when no whole number of the layout's words makes the module.
    """
    tile = word_tile(layout, q.element, q.in_features, q.out_features)
    if tile is None:
        return None
    module = _Module(q, noise, tile)
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
    # Undoing an exchange can't gain more than what the word lacks.
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
    found = []
    for index in best.topk(count).indices.tolist():
        rest, word = divmod(int(some[index]), chunk.shape[2])
        row, column = divmod(rest, chunk.shape[1])
        k, n = module.tile.place(chunk.first + row, column, word)
        found.append(Suspect(k, n, f"{module.name(int(which[index]))} look exchanged", float(best[index])))
    return found


def _sums(module: _Module) -> Iterator[tuple[str, str, float]]:
    """Exchanges that many words agree on: along rows and columns of tiles, and in the whole module.

    Each word has a limited say, and a sample of tiles speaks for its row or column.
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
        first, last = row * tile.rows, (row + 1) * tile.rows - 1
        return f"the words that hold input channel {first}" + (f" to {last}" if last > first else "")

    yield from _agreed(module, sums.sum(dim=2), of_tile_row)
    if tile.rows > 1 and tile.words > 1:

        def of_row(index: int) -> str:
            row, word = divmod(index, tile.words)
            k, _ = tile.place(row, 0, word)
            return f"the words that begin with input channel {k}"

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
    """The best alternative of every place, [A, places], where it is better than none."""
    best, which = sums.max(dim=0)
    for index in (best > 0).nonzero()[:, 0].tolist():
        yield f"{module.name(int(which[index]))} are exchanged", where(index), float(best[index])
