"""The layouts once more, nibble by nibble in plain Python, from the formulas of docs/formats.md."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight

AWQ_SLOTS = (0, 2, 4, 6, 1, 3, 5, 7)
MARLIN_SLOTS = (0, 2, 4, 6, 1, 3, 5, 7)
MARLIN_ROWS = (0, 1, 8, 9)
SINGLE_GROUP = (0, 1, 8, 9, 16, 17, 24, 25)

Rows = list[list[int]]


def words(rows: Rows) -> Tensor:
    """Unsigned words as the int32 bit patterns that files hold."""
    return torch.tensor(
        [[word - (1 << 32) if word >= 1 << 31 else word for word in row] for row in rows], dtype=torch.int32
    )


def packed(values: list[int], bits: int) -> int:
    """One word: slot i in bits ``bits * i`` and up."""
    return sum(value << (bits * slot) for slot, value in enumerate(values))


def gptq(q: QuantizedWeight, version: int) -> dict[str, Tensor]:
    """qweight packs 32 / bits channels of one column, qzeros as many columns of one group."""
    slots, codes, zeros = 32 // q.element.bits, q.codes.tolist(), q.zeros.tolist()
    lower = 1 if version == 1 else 0
    return {
        "qweight": words(
            [
                [
                    packed([codes[slots * row + i][n] for i in range(slots)], q.element.bits)
                    for n in range(q.out_features)
                ]
                for row in range(q.in_features // slots)
            ]
        ),
        "qzeros": words(
            [
                [
                    packed([group[slots * c + i] - lower for i in range(slots)], q.element.bits)
                    for c in range(q.out_features // slots)
                ]
                for group in zeros
            ]
        ),
        "scales": q.scales,
        "g_idx": q.g_idx,
    }


def awq(q: QuantizedWeight) -> dict[str, Tensor]:
    """Eight columns of one row in the order 0 2 4 6 1 3 5 7."""

    def interleaved(matrix: Rows) -> Tensor:
        return words(
            [[packed([row[8 * c + j] for j in AWQ_SLOTS], 4) for c in range(len(row) // 8)] for row in matrix]
        )

    return {
        "qweight": interleaved(q.codes.tolist()),
        "qzeros": interleaved(q.zeros.tolist()),
        "scales": q.scales,
    }


def marlin(q: QuantizedWeight) -> dict[str, Tensor]:
    """The fragment of lane t for tile (kt, nt), and the scales beside it."""
    codes, scales = q.codes.tolist(), q.scales.tolist()
    rows = []
    for kt in range(q.in_features // 16):
        row = []
        for nt in range(q.out_features // 64):
            for t in range(32):
                for part in range(4):
                    fragment = []
                    for slot in range(8):
                        j = MARLIN_SLOTS[slot]
                        k = 16 * kt + 2 * (t % 4) + MARLIN_ROWS[j % 4]
                        n = 64 * nt + 16 * part + t // 4 + 8 * (j // 4)
                        fragment.append(codes[k][n])
                    row.append(packed(fragment, 4))
        rows.append(row)
    stored = [[0.0] * q.out_features for _ in range(q.groups)]
    for g in range(q.groups):
        for n in range(q.out_features):
            if q.groups > 1:
                block, i, j = n // 64 * 64, n % 64 // 8, n % 8
                stored[g][n] = scales[g][block + i + 8 * j]
            else:
                block, i, t = n // 32 * 32, n % 32 // 8, n % 8
                stored[g][n] = scales[g][block + 2 * i + SINGLE_GROUP[t]]
    return {"B": words(rows), "s": torch.tensor(stored, dtype=q.scales.dtype)}


def compressed_tensors(q: QuantizedWeight) -> dict[str, Tensor]:
    """Everything transposed; zero points packed along N and left out when symmetric."""
    slots, codes, zeros = 32 // q.element.bits, q.codes.tolist(), q.zeros.tolist()
    tensors = {
        "weight_packed": words(
            [
                [
                    packed([codes[slots * c + i][n] for i in range(slots)], q.element.bits)
                    for c in range(q.in_features // slots)
                ]
                for n in range(q.out_features)
            ]
        ),
        "weight_scale": q.scales.t().contiguous(),
        "weight_shape": torch.tensor([q.out_features, q.in_features]),
    }
    if not all(zero == 1 << (q.element.bits - 1) for group in zeros for zero in group):
        tensors["weight_zero_point"] = words(
            [
                [
                    packed([zeros[g][slots * row + i] for i in range(slots)], q.element.bits)
                    for g in range(q.groups)
                ]
                for row in range(q.out_features // slots)
            ]
        )
    return tensors


def pack(name: str, q: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of layout ``name``."""
    if name in ("gptq", "gptq-v2"):
        return gptq(q, 1 if name == "gptq" else 2)
    return {"awq": awq, "marlin": marlin, "compressed-tensors": compressed_tensors}[name](q)


def refusals(name: str, q: QuantizedWeight) -> set[str]:
    """Words of which a refusal must hold one; empty when the layout holds ``q``. By the matrix of layouts."""
    k, n, size = q.in_features, q.out_features, q.channels_per_group
    slots = 32 // q.element.bits
    zeros = [zero for group in q.zeros.tolist() for zero in group]
    symmetric = all(zero == 1 << (q.element.bits - 1) for zero in zeros)
    ordered = q.g_idx.tolist() == [channel // size for channel in range(k)]
    found = set()
    if name in ("awq", "marlin") and q.element.bits != 4:
        found.add("int8 weights")
    if name == "marlin" and (k % 16 or n % 64):
        found.add("tile")
    if name != "marlin" and (k % slots or (n % slots and not (name == "compressed-tensors" and symmetric))):
        found.add("multiple")
    if name not in ("gptq", "gptq-v2") and k % size:
        found.add("multiple of the group size")
    if name == "marlin" and q.groups > 1 and size not in (32, 64, 128):
        found.add("group size")
    if name == "marlin" and not symmetric:
        found.add("asymmetric")
    if name not in ("gptq", "gptq-v2") and not ordered:
        found.add("activation order")
    if name == "gptq" and 0 in zeros:
        found.add("zero point of 0")
    return found
