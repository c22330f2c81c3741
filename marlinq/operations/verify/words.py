"""Codes that a layout stores in one word: which they are, and what an exchange of two would explain.

The chance that right codes look exchanged is not taken from a model. It is measured in the same module on
*control pairs*: slot i of a word with slot j of the same word in the next tile. No fault of packing
exchanges those, and in all else they are like the pairs of one word: the same channels' noise, the same
group, the same output channel where the pair has one output channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from marlinq.core.scheme import CHANNEL, Element, Scheme
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats import Layout, ModuleSpec
from marlinq.operations.verify.finding import MOST_SAY
from marlinq.operations.verify.noise import Noise, log_density
from marlinq.operations.verify.tails import Tail

LEAST_SPREAD = 1.0
"""Of the tail of a log-likelihood ratio, where the noise is as modelled: P(L > x) <= exp(-x)."""
_FLOOR = 3.0
_CONTROLS = (1, 2)
_CHUNK_ELEMENTS = 1 << 22
_GAIN_ELEMENTS = 1 << 18
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
        spec = ModuleSpec(rows, columns, layout.as_stored(Scheme(element, CHANNEL)))
        fits = rows * columns <= _LARGEST_TILE and k % rows == 0 and n % columns == 0
        if fits and layout.shape_refusal(spec) is None and (tile := _tile_of(layout, spec)) is not None:
            return tile
    return None


def _tile_of(layout: Layout, spec: ModuleSpec) -> WordTile | None:
    """Reads the order off the layout itself: where one code differs, its slot of one word does.

    None when the words of so small a block have room for more codes, or for one only.
    """
    k, n, element = spec.in_features, spec.out_features, spec.scheme.element

    def stored(codes: Tensor) -> Tensor:
        blank = QuantizedWeight(
            codes=codes,
            scales=torch.ones((1, n), dtype=torch.float16),
            zeros=torch.full((1, n), element.midpoint, dtype=torch.uint8),
            g_idx=trivial_g_idx(k, CHANNEL),
            group_size=k,
            element=element,
        )
        return layout.pack(blank)[layout.key].reshape(-1)

    codes = torch.zeros((k, n), dtype=torch.uint8)
    before = stored(codes)
    full = before ^ stored(torch.full_like(codes, element.codes - 1))
    slots = k * n // before.numel()
    if slots < 2 or not bool((full == -1).all()):
        return None
    width = 8 * before.element_size()
    places, bits = [], []
    for index in range(k * n):
        codes.view(-1)[index] = 1
        changed = before ^ stored(codes)
        codes.view(-1)[index] = 0
        word = int(changed.nonzero()[0])
        bit = (int(changed[word]) & ((1 << width) - 1)).bit_length() - 1
        places.append(word * width + bit)
        bits.append(bit)
    order = torch.argsort(torch.tensor(places))
    octet = [bits[int(index)] // 8 for index in order[:slots]]
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
            inside = torch.arange(self.tile.columns, device=r.device)
            columns = (tile_columns.unsqueeze(1) * self.tile.columns + inside).flatten()
            r, sigma, codes = r[:, columns], sigma[:, columns], codes[:, columns]
        return _Chunk(self, start, r, sigma, codes)


class _Chunk:
    """Words as rows of tensors [words, slots]."""

    def __init__(self, module: _Module, first: int, r: Tensor, sigma: Tensor, codes: Tensor) -> None:
        tile = module.tile
        self._module = module
        self.first = first
        split = tile.split(r)
        self.shape = split.shape[:3]
        self._r = split.flatten(0, 2)
        self._sigma = tile.split(sigma).flatten(0, 2)
        self._codes = tile.split(codes).flatten(0, 2).float()
        self._lacks = log_density(self._r, self._sigma).neg_()
        self.total = self._lacks.sum(dim=1)

    def gains(self, one: Tensor, other: Tensor, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """L of exchanging slot i of ``one`` with slot j of ``other``, for each pair, [P, words], and the sum
        over the pairs that share a byte, [words]."""
        places, codes, sigma, lacks = self._slots(one)
        both = (places, codes, sigma, lacks) if one is other else self._slots(other)
        places_b, codes_b, sigma_b, lacks_b = both
        every = torch.empty((len(pairs), len(one)), device=places.device)
        by_byte = torch.zeros(len(one), device=places.device)
        first, second = torch.tensor(pairs, device=places.device).t()
        # Many pairs at once: where there are few words an operation takes longer to start than to compute.
        step = max(1, _GAIN_ELEMENTS // max(len(one), 1))
        for start in range(0, len(pairs), step):
            i, j = first[start : start + step], second[start : start + step]
            gain = log_density(places[i] - codes_b[j], sigma[i])
            gain += log_density(places_b[j] - codes[i], sigma_b[j])
            gain += lacks[i] + lacks_b[j]
            every[start : start + step] = gain
        for index, pair in enumerate(pairs):
            if pair in self._module.tile.bytes:
                by_byte += every[index]
        return every, by_byte

    def _slots(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Places in code units, codes, sigmas and negative densities, [slots, words]."""
        codes = self._codes[words].t().contiguous()
        places = self._r[words].t().contiguous() + codes
        return places, codes, self._sigma[words].t().contiguous(), self._lacks[words].t().contiguous()

    def own(self, words: Tensor) -> Tensor:
        """The gain of every alternative, [A, words]."""
        every, by_byte = self.gains(words, words, self._module.pairs)
        return torch.cat((every, by_byte.unsqueeze(0))) if self._module.tile.bytes else every

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
            gains, in_bytes = self.gains(some, neighbour[some], pairs)
            best[some] = torch.maximum(best[some], gains.max(dim=0).values)
            by_byte[some] += in_bytes
            every[some] = True
        if module.tile.bytes:
            best = torch.where(every, torch.maximum(best, by_byte), best)
        return best[best > _FLOOR], int(compared.sum())


def find_exchanges(q: QuantizedWeight, layout: Layout, noise: Noise, *, most: int) -> Exchanges | None:
    """Try every exchange of two codes of a word, and of the two codes of every byte.

    Args:
        q: what is stored.
        layout: where it is stored; it says which codes share a word.
        noise: see :func:`marlinq.operations.verify.noise.measure_noise`.
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
    best, which = chunk.own(some).max(dim=0)
    found = []
    for index in best.topk(min(most, len(best))).indices.tolist():
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
    picked = _spaced(module.tile_rows, device).tolist()
    columns = torch.zeros((), device=device)
    for row in picked:
        columns = columns + _limited(module.chunk(row, row + 1, slice(None))).sum(dim=1)

    def of_column(index: int) -> str:
        column, word = divmod(index, tile.words)
        _, n = tile.place(0, column, word)
        return f"the words that begin with output channel {n}"

    yield from _agreed(module, columns.flatten(1), of_column)


def _limited(chunk: _Chunk) -> Tensor:
    words = torch.arange(len(chunk.total), device=chunk.total.device)
    return chunk.own(words).clamp_(max=MOST_SAY).reshape(-1, *chunk.shape)


def _spaced(count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, count - 1, min(count, _SAMPLED_TILES), device=device).round().long()


def _agreed(module: _Module, sums: Tensor, where: Callable[[int], str]) -> Iterator[tuple[str, str, float]]:
    """The best alternative of every place, [A, places], where it is better than none."""
    best, which = sums.max(dim=0)
    for index in (best > 0).nonzero()[:, 0].tolist():
        yield f"{module.name(int(which[index]))} are exchanged", where(index), float(best[index])
