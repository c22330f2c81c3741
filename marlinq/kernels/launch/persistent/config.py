"""Configurations of the persistent kernel: their shared memory, the choice among them, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.problem import GRANULARITIES
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.launch.persistent.operands import LayerOperands, Model

PARTS = 4
"""Parts of K; each is multiplied by another block (``cuda/persistent/shape.cuh``)."""
UNIT = 128
"""Channels of a unit, the piece in which K is divided."""
_ALIGNMENT = 1024  # bytes lost at most by aligning the ring
_STATIC_BYTES = 512  # bytes of static shared memory at most


@dataclass(frozen=True)
class StepConfig:
    """Compile-time parameters of the persistent kernel.

    Attributes:
        team: warps that share a stage of the ring.
        teams: teams that take the stages in turns.
        stages: stages of the ring.
        window: stages whose copies may be in flight at once.
        slots: buffers, each for the partial sums of two tiles and with a warp that adds them.
        activation_bytes: bytes of shared memory for activations.
        head_dim: channels D of a head.
        granularity: a group of 32, 64 or 128 channels, of all weights.
        zeros: True if weights have zero points.
        bfloat16: True for BF16 activations, False for FP16.
        stream_units: units of 128 channels of the residual stream that a block keeps, at most.
        softcap: True if attention scores are capped.
        post_norms: True if norms follow the output projection and the down projection.
    """

    team: int
    teams: int
    stages: int
    window: int
    slots: int
    activation_bytes: int
    head_dim: int
    granularity: Granularity
    zeros: bool
    bfloat16: bool
    stream_units: int
    softcap: bool = False
    post_norms: bool = False

    @property
    def quant_group(self) -> int:
        """QUANT_GROUP of the kernel: channels that share a scale."""
        return self.granularity.channels

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.team * self.teams + self.slots + 1)

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return (
            self.stages * _stage_bytes(self.team, self.quant_group, self.zeros)
            + self.activation_bytes
            + _stream_bytes(self.stream_units, self.post_norms)
            + self.slots * _slot_bytes(self.team * self.teams)
            + _ALIGNMENT
        )

    @property
    def instantiation(self) -> Instantiation:
        """The kernel template with this configuration."""
        return Instantiation(
            "kernels/persistent.cuh",
            "persistent_step",
            (
                ("Codec", f"Int4<{'Bfloat16' if self.bfloat16 else 'Half'}>"),
                ("TEAM", self.team),
                ("TEAMS", self.teams),
                ("STAGES", self.stages),
                ("WINDOW", self.window),
                ("SLOTS", self.slots),
                ("HEAD_DIM", self.head_dim),
                ("QUANT_GROUP", self.quant_group),
                ("ZEROS", self.zeros),
                ("SOFTCAP", self.softcap),
                ("POST_NORMS", self.post_norms),
                ("ACTIVATION_BYTES", self.activation_bytes),
                ("STREAM_UNITS", self.stream_units),
                ("SHARED_BYTES", self.shared_bytes),
            ),
        )


def persistent_refusal(
    layers: Sequence[LayerOperands], model: Model, architecture: str, shared_bytes: int
) -> str | None:
    """Why a decode step of one row can't run as one launch, in one clause; None if it can.

    Args:
        layers: every layer of a model, in order.
        model: sizes and features that the layers share.
        architecture: the GPU's architecture, for example ``sm_90a``.
        shared_bytes: bytes of shared memory that a block may have.
    """
    first = layers[0]
    head_dim = first.keys.shape[3]
    if architecture != "sm_90a":
        return f"the persistent kernel is for sm_90a, this GPU is {architecture}"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim} channels, the kernel takes 64, 128 or 256"
    if model.heads % model.kv_heads or model.heads // model.kv_heads > 8:
        return f"{model.heads} heads of queries for {model.kv_heads} of keys, at most eight share one"
    formats = {operand.weight.format for layer in layers for operand in layer.operands} - {INT4}
    if formats:
        names = ", ".join(sorted(one.name for one in formats))
        return f"weights in {names}, the kernel multiplies {INT4.name}"
    weights = [operand.weight for layer in layers for operand in layer.operands]
    kinds = {(weight.granularity, weight.zeros is None) for weight in weights}
    if len(kinds) > 1:
        return "weights of several granularities, or some with zero points and some without"
    granularity = weights[0].granularity
    if granularity.kind != "group" or granularity not in GRANULARITIES:
        return f"{granularity.describe()}; the kernel takes groups of 32, 64 or 128"
    shapes = {tuple((one.channels, one.columns) for one in layer.operands) for layer in layers}
    if len(shapes) > 1:
        return "layers of several shapes"
    for operand in first.operands:
        if operand.channels < PARTS * UNIT:
            return f"a product of {operand.channels} channels, the kernel takes {PARTS * UNIT} and more"
    if choose_for(first, model, bfloat16=False, shared_bytes=shared_bytes) is None:
        return f"a row of these products doesn't fit {shared_bytes} bytes of shared memory"
    return None


def choose_for(layer: LayerOperands, model: Model, *, bfloat16: bool, shared_bytes: int) -> StepConfig | None:
    """The configuration for the layers of a model (:func:`choose`); ``layer`` is any of them."""
    return choose(
        [operand.channels for operand in layer.operands],
        model,
        layer.keys.shape[3],
        layer.qkv.weight.granularity,
        zeros=layer.qkv.weight.zeros is not None,
        bfloat16=bfloat16,
        shared_bytes=shared_bytes,
    )


def choose(
    channels: Sequence[int],
    model: Model,
    head_dim: int,
    granularity: Granularity,
    *,
    zeros: bool,
    bfloat16: bool,
    shared_bytes: int,
    team: int = 4,
    teams: int = 2,
) -> StepConfig | None:
    """The configuration for products with these K; None if shared memory is too small.

    Args:
        channels: K of qkv, output, gate_up and down.
        model: sizes and features that the layers share.
        head_dim: channels D of a head.
        granularity: a group of 32, 64 or 128 channels, of all weights.
        zeros: True if weights have zero points.
        bfloat16: True for BF16 activations, False for FP16.
        shared_bytes: bytes of shared memory that a block may have.
        team: warps that share a stage of the ring, 2 or 4.
        teams: teams that take the stages in turns, 1 or 2.
    """
    most = max(max(part_units(k)) for k in channels)
    quant_group = granularity.channels
    digit_stride = 512 + 16 * (UNIT // quant_group) + 16
    queries = model.heads // model.kv_heads
    attention = 8 * head_dim * 2 + 2 * head_dim * 4 + 32 + teams * queries * (head_dim + 2) * 4
    activation_bytes = -(-max(most * digit_stride, attention) // 128) * 128
    slots = 3 if teams == 2 else 2
    stream_units = max(part_units(channels[0]))
    left = (
        shared_bytes
        - _STATIC_BYTES
        - _ALIGNMENT
        - activation_bytes
        - _stream_bytes(stream_units, model.post_norms)
    )
    left -= slots * _slot_bytes(team * teams)
    room = left // _stage_bytes(team, quant_group, zeros) // teams * teams
    if room < 1:
        return None
    ring = min(room, 16)
    window = min(ring, 2)
    return StepConfig(
        team,
        teams,
        ring,
        window,
        slots,
        activation_bytes,
        head_dim,
        granularity,
        zeros,
        bfloat16,
        stream_units,
        model.softcap is not None,
        model.post_norms,
    )


def prepare_instantiation(bfloat16: bool) -> Instantiation:
    """The kernel that runs before each launch and writes its first messages."""
    element = "Bfloat16" if bfloat16 else "Half"
    return Instantiation("persistent/prepare.cuh", "prepare_step", (("Element", element),))


def _stage_bytes(team: int, quant_group: int, zeros: bool) -> int:
    return team * (UNIT * 32 + (2 if zeros else 1) * UNIT // quant_group * 128)


def _slot_bytes(warps: int) -> int:
    return warps * 64 * 4


def _stream_bytes(units: int, post_norms: bool) -> int:
    return (2 if post_norms else 1) * units * UNIT * 2


def chunk_positions(head_dim: int, team: int) -> int:
    """Positions of the cache whose keys and values fill a stage."""
    return min(32, team * 1024 // head_dim)


def part_units(channels: int) -> list[int]:
    """Units of 128 channels in each part of K."""
    units = -(-channels // UNIT)
    return [units * (part + 1) // PARTS - units * part // PARTS for part in range(PARTS)]
