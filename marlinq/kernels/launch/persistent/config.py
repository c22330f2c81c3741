"""Which variant of the persistent kernel suits a step, where its shared memory goes, and what none suits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marlinq.kernels.jit.instantiation import Instantiation
from marlinq.kernels.launch.persistent.operands import LayerOperands, Model

PARTS = 4
MAX_ROWS = 8
UNIT = 128
_ALIGNMENT = 1024
_STATIC_BYTES = 512  # of shared memory, at most


@dataclass(frozen=True)
class StepConfig:
    """A variant of the kernel, and where its shared memory goes.

    Attributes:
        rows: of the batch at most: 1, 4 or 8.
        team, teams: warps that share a stage, and such teams.
        stages: of the ring.
        window: stages on their way at most.
        slots: of sums of two tiles, and warps that add them.
        activation_bytes: shared memory for activations.
        head_dim: D.
        group_size: of all weights.
        zeros: whether they have zero points.
        bfloat16: the element.
        stream_units: units of 128 channels that a block keeps of the residual stream, at most.
        softcap: whether scores have a cap.
        post_norms: whether norms follow o and down.
        header: of the kernel; the lab has others.
    """

    rows: int
    team: int
    teams: int
    stages: int
    window: int
    slots: int
    activation_bytes: int
    head_dim: int
    group_size: int
    zeros: bool
    bfloat16: bool
    stream_units: int
    softcap: bool = False
    post_norms: bool = False
    header: str = "kernels/persistent.cuh"

    @property
    def digits(self) -> bool:
        """Whether products are those of integers (``cuda/mma/integer_digits.cuh``)."""
        return self.rows == 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.team * self.teams + self.slots + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return (
            self.stages * _stage_bytes(self.team, self.group_size, self.zeros)
            + self.activation_bytes
            + _stream_bytes(self.rows, self.stream_units, self.post_norms)
            + self.slots * _slot_bytes(self.rows, self.team * self.teams)
            + _ALIGNMENT
        )

    @property
    def instantiation(self) -> Instantiation:
        """The kernel."""
        return Instantiation(
            self.header,
            "persistent_step",
            (
                ("Codec", f"Int4<{'Bfloat16' if self.bfloat16 else 'Half'}>"),
                ("TEAM", self.team),
                ("TEAMS", self.teams),
                ("STAGES", self.stages),
                ("WINDOW", self.window),
                ("ROWS", self.rows),
                ("SLOTS", self.slots),
                ("HEAD_DIM", self.head_dim),
                ("QUANT_GROUP", self.group_size),
                ("DIGITS", self.digits),
                ("ZEROS", self.zeros),
                ("SOFTCAP", self.softcap),
                ("POST_NORMS", self.post_norms),
                ("ACTIVATION_BYTES", self.activation_bytes),
                ("STREAM_UNITS", self.stream_units),
                ("SHARED_BYTES", self.shared_bytes),
            ),
        )


def persistent_refusal(
    layers: Sequence[LayerOperands], model: Model, rows: int, architecture: str, shared_bytes: int
) -> str | None:
    """Why a decode step of ``rows`` rows can't run as one launch, one clause for people; None if it can.

    Args:
        layers: of one model; all are looked at.
        model: what they have in common.
        rows: M.
        architecture: of the GPU, for example ``sm_90a``.
        shared_bytes: shared memory that a block may have.
    """
    first = layers[0]
    head_dim = first.keys.shape[3]
    if architecture != "sm_90a":
        return f"the persistent kernel is for sm_90a, this GPU is {architecture}"
    if rows > MAX_ROWS:
        return f"a batch of {rows}, at most {MAX_ROWS} fit"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim} channels, 64, 128 or 256 are known"
    if model.heads % model.kv_heads or model.heads // model.kv_heads > 8:
        return f"{model.heads} heads of queries for {model.kv_heads} of keys, at most eight share one"
    kinds = {(operand.group_size, operand.zeros is None) for layer in layers for operand in layer.operands}
    if len(kinds) > 1:
        return "weights of several group sizes, or some with zero points and some without"
    if first.qkv.group_size not in (32, 64, 128):
        return f"groups of {first.qkv.group_size} channels, 32, 64 or 128 are known"
    shapes = {tuple((one.channels, one.columns) for one in layer.operands) for layer in layers}
    if len(shapes) > 1:
        return "layers of several shapes"
    for operand in first.operands:
        if operand.channels < PARTS * UNIT:
            return f"a product of {operand.channels} channels, {PARTS * UNIT} are the least"
    if choose_for(first, model, rows, bfloat16=False, shared_bytes=shared_bytes) is None:
        return f"{rows} rows of these products don't fit {shared_bytes} bytes of shared memory"
    return None


def choose_for(
    layer: LayerOperands, model: Model, rows: int, *, bfloat16: bool, shared_bytes: int
) -> StepConfig | None:
    """:func:`choose` for the layers of a model, of which ``layer`` is one."""
    return choose(
        [operand.channels for operand in layer.operands],
        rows,
        model,
        layer.keys.shape[3],
        layer.qkv.group_size,
        zeros=layer.qkv.zeros is not None,
        bfloat16=bfloat16,
        shared_bytes=shared_bytes,
    )


def choose(
    channels: Sequence[int],
    rows: int,
    model: Model,
    head_dim: int,
    group_size: int,
    *,
    zeros: bool,
    bfloat16: bool,
    shared_bytes: int,
    team: int = 4,
    teams: int = 2,
) -> StepConfig | None:
    """The variant for products of these K, or None where shared memory is too small."""
    height = next((height for height in (1, 4, 8) if rows <= height), None)
    if height is None:
        return None
    most = max(max(part_units(k)) for k in channels)
    digit_stride = 512 + 16 * (UNIT // group_size) + 16
    queries = model.heads // model.kv_heads
    entries = teams
    attention = 8 * head_dim * 2 + 2 * head_dim * 4 + 32 + entries * queries * (head_dim + 2) * 4
    activations = most * digit_stride if height == 1 else most * 2 * height * 128
    activation_bytes = -(-max(activations, attention) // 128) * 128
    slots = 3 if height == 1 and teams == 2 else 2
    stream_units = max(part_units(channels[0]))
    left = (
        shared_bytes
        - _STATIC_BYTES
        - _ALIGNMENT
        - activation_bytes
        - _stream_bytes(height, stream_units, model.post_norms)
    )
    left -= slots * _slot_bytes(height, team * teams)
    room = left // _stage_bytes(team, group_size, zeros) // teams * teams
    if room < 1:
        return None
    ring = min(room, 16)
    window = min(ring, 2)
    return StepConfig(
        height,
        team,
        teams,
        ring,
        window,
        slots,
        activation_bytes,
        head_dim,
        group_size,
        zeros,
        bfloat16,
        stream_units,
        model.softcap is not None,
        model.post_norms,
    )


def prepare_instantiation(bfloat16: bool) -> Instantiation:
    """The kernel that makes messages ready for a launch."""
    element = "Bfloat16" if bfloat16 else "Half"
    return Instantiation("persistent/prepare.cuh", "prepare_step", (("Element", element),))


def _stage_bytes(team: int, group_size: int, zeros: bool) -> int:
    return team * (UNIT * 32 + (2 if zeros else 1) * UNIT // group_size * 128)


def _slot_bytes(rows: int, warps: int) -> int:
    return warps * rows * (64 if rows == 1 else 68) * 4


def _stream_bytes(rows: int, units: int, post_norms: bool) -> int:
    return (2 if post_norms else 1) * rows * units * UNIT * 2


def chunk_positions(head_dim: int, team: int) -> int:
    """Positions of the cache in a stage, which holds their keys and values."""
    return min(32, team * 1024 // head_dim)


def part_units(channels: int) -> list[int]:
    """Units of 128 channels of every part of K."""
    units = -(-channels // UNIT)
    return [units * (part + 1) // PARTS - units * part // PARTS for part in range(PARTS)]
