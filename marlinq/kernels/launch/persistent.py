"""A decode step's layers in one launch (``cuda/kernels/persistent.cuh``), on compute capability 9.0 alone.

One row is what it is made for. Up to eight rows are right, but slower than a chain of kernels
(docs/lab-notes/2026-11-22-persistent-step.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.jit.cache import compile_missing
from marlinq.kernels.jit.instantiation import Instantiation
from marlinq.kernels.launch.driver import (
    TENSOR_MAP_BYTES,
    Launches,
    encode_tensor_map,
    on_device,
)
from marlinq.kernels.launch.launch import device_numbers
from marlinq.kernels.launch.loading import load_kernel

PARTS = 4
MAX_SPLITS = 16
MAX_ROWS = 8
UNIT = 128
CHUNK_POSITIONS = 32
_PRODUCTS = 4
_WIDTHS = (1, 2, 4)  # tiles of a set
_ALIGNMENT = 1024
_STATIC_BYTES = 512  # of shared memory, at most
_PREPARE_THREADS = 256
_PREPARE_GRID = 264
Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class Operand:
    """A quantised weight as :func:`marlinq.kernels.ops.w4a16.w4a16_gemm` takes it, group scales only.

    Attributes:
        words: int32 [K/16, 2N].
        scales: [K/group, N] in stored order.
        zeros: as ``scales``, or None.
        bias: [N], or None.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None

    @property
    def channels(self) -> int:
        """K."""
        return self.words.shape[0] * 16

    @property
    def columns(self) -> int:
        """N."""
        return self.words.shape[1] // 2

    @property
    def group_size(self) -> int:
        """Channels that share a scale."""
        return self.channels // self.scales.shape[0]


@dataclass(frozen=True)
class LayerOperands:
    """What one layer computes with.

    Attributes:
        qkv: columns ``[q | k | v]``.
        output: the projection behind the attention.
        gate_up: columns in turns of 64, ``[g0 u0 g1 u1 ...]``.
        down: the last projection.
        attention_gamma, mlp_gamma: float32 [H], offsets included.
        keys, values: the cache [B, KV, L, D], contiguous; finite everywhere, since positions that are not
            there yet are read and not counted.
        query_gamma, key_gamma: float32 [D], or None.
        window: positions that a query sees at most, its own included; None for all.
    """

    qkv: Operand
    output: Operand
    gate_up: Operand
    down: Operand
    attention_gamma: Tensor
    mlp_gamma: Tensor
    keys: Tensor
    values: Tensor
    query_gamma: Tensor | None = None
    key_gamma: Tensor | None = None
    window: int | None = None

    @property
    def operands(self) -> tuple[Operand, Operand, Operand, Operand]:
        """In the order of their use."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class Model:
    """What all layers have in common.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        eps: of the layers' norms.
        scale: factor on the dot products of queries and keys.
        activation: of the gate.
        narrow_first: norms round before they multiply with gamma (:class:`marlinq.models.anatomy.Norm`).
        softcap: of the scores; None for no cap.
        query_eps: of query and key norms.
    """

    heads: int
    kv_heads: int
    eps: float
    scale: float
    activation: Activation = "silu"
    narrow_first: bool = True
    softcap: float | None = None
    query_eps: float = 1e-6


_Map = ctypes.c_ubyte * TENSOR_MAP_BYTES


class _Layer(ctypes.Structure):
    """``StepLayer``."""

    _fields_ = (
        ("words", _Map * len(_WIDTHS) * _PRODUCTS),
        ("scales", _Map * len(_WIDTHS) * _PRODUCTS),
        ("zeros", _Map * len(_WIDTHS) * _PRODUCTS),
        ("keys", _Map),
        ("values", _Map),
        *((name, ctypes.c_void_p) for name in ("attention_gamma", "mlp_gamma", "query_gamma", "key_gamma")),
        ("bias", ctypes.c_void_p * _PRODUCTS),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("window", ctypes.c_int),
        ("padding", ctypes.c_int * 11),
    )


class _Shape(ctypes.Structure):
    """``ProductShape``."""

    _fields_ = (
        ("channels", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("box_units", ctypes.c_int * len(_WIDTHS)),
    )


_MESSAGES = ("attention", "attention_weight", "mlp", "start", "squares", "mlp_squares", "arrivals")


class _Step(ctypes.Structure):
    """``StepArguments``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "lengths", "cosines", "sines", "result")),
        ("parts", ctypes.c_void_p * _PRODUCTS),
        *((name, ctypes.c_void_p) for name in _MESSAGES),
        ("shape", _Shape * _PRODUCTS),
        *(
            (name, ctypes.c_int)
            for name in (
                "layer_count",
                "rows",
                "hidden",
                "heads",
                "kv_heads",
                "capacity",
                "narrow_first",
                "activation",
            )
        ),
        *((name, ctypes.c_float) for name in ("eps", "scale", "softcap", "query_eps")),
        ("trace", ctypes.c_void_p),
    )


class StepArguments(ctypes.Structure):
    """The parameter of the persistent kernel."""

    _fields_ = (("step", _Step),)


class PrepareArguments(ctypes.Structure):
    """The parameters of ``cuda/persistent/prepare.cuh``."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("messages", ctypes.c_void_p),
        ("channels", ctypes.c_int),
        ("others", ctypes.c_longlong),
    )


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
            + _stream_bytes(self.rows, self.stream_units)
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
    if head_dim not in (64, 128):
        return f"heads of {head_dim} channels, 64 or 128 are known"
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


def prepare_instantiation(bfloat16: bool) -> Instantiation:
    """The kernel that makes messages ready for a launch."""
    element = "Bfloat16" if bfloat16 else "Half"
    return Instantiation("persistent/prepare.cuh", "prepare_step", (("Element", element),))


def _stage_bytes(team: int, group_size: int, zeros: bool) -> int:
    return team * (UNIT * 32 + (2 if zeros else 1) * UNIT // group_size * 128)


def _slot_bytes(rows: int, warps: int) -> int:
    return warps * rows * (64 if rows == 1 else 68) * 4


def _stream_bytes(rows: int, units: int) -> int:
    return rows * units * UNIT * 2


def _units(channels: int) -> list[int]:
    """Units of 128 channels of every part of K."""
    units = -(-channels // UNIT)
    return [units * (part + 1) // PARTS - units * part // PARTS for part in range(PARTS)]


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
    most = max(max(_units(k)) for k in channels)
    digit_stride = 512 + 16 * (UNIT // group_size) + 16
    queries = model.heads // model.kv_heads
    entries = teams
    attention = 8 * head_dim * 2 + 2 * head_dim * 4 + 32 + entries * queries * (head_dim + 2) * 4
    activations = most * digit_stride if height == 1 else most * 2 * height * 128
    activation_bytes = -(-max(activations, attention) // 128) * 128
    slots = 3 if height == 1 and teams == 2 else 2
    stream_units = max(_units(channels[0]))
    left = shared_bytes - _STATIC_BYTES - _ALIGNMENT - activation_bytes - _stream_bytes(height, stream_units)
    left -= slots * _slot_bytes(height, team * teams)
    room = left // _stage_bytes(team, group_size, zeros) // teams * teams
    if room < 1:
        return None
    ring = min(room, 16)
    window = min(ring, 6)
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
    )


class PersistentLayers:
    """The layers of a decode step as one launch, to be repeated and captured.

    Args:
        layers: in order; tensors are kept alive.
        model: what they have in common.
        cosines, sines: float32 [positions, D/2], of the rotary embedding.
        hidden: [M, H] in the activations' dtype; a launch replaces it by what leaves the last layer.
        lengths: int32 [M], positions in the cache; the launch appends at that position and changes no length.
        grid: blocks, a multiple of four; by default as many as the GPU has multiprocessors.
        config: the variant; chosen by default.
        progress: called after each kernel that is compiled.

    Attributes:
        config, grid: as above.
        arguments, prepare_arguments: the parameters of the two kernels of a launch.
        descriptors: all layers', on the device.
        messages: what blocks hand each other.
        trace: marks of the lab's variants.

    Raises:
        ValueError: no variant fits.
        EnvironmentProblem: CuPy or NVRTC is missing.
    """

    def __init__(
        self,
        layers: Sequence[LayerOperands],
        model: Model,
        cosines: Tensor,
        sines: Tensor,
        hidden: Tensor,
        lengths: Tensor,
        *,
        grid: int | None = None,
        config: StepConfig | None = None,
        progress: ReportProgress = no_progress,
    ) -> None:
        device = hidden.device
        numbers = device_numbers(device.index) if device.type == "cuda" else None
        first = layers[0]
        rows = hidden.shape[0]
        chosen = config or choose_for(
            first,
            model,
            rows,
            bfloat16=hidden.dtype == torch.bfloat16,
            shared_bytes=numbers.shared_bytes if numbers else 0,
        )
        if chosen is None:
            raise ValueError(f"no persistent kernel of {rows} rows fits the shared memory")
        self.config = chosen
        self.grid = grid or (numbers.multiprocessors // PARTS * PARTS if numbers else PARTS)
        self._kept = (tuple(layers), cosines, sines, hidden, lengths)
        self.descriptors = _descriptors(layers, chosen, device)
        self.messages, places = _messages(first, model, rows, hidden.shape[1], self.grid, device)
        shapes = [
            _Shape(operand.channels, operand.columns // 64, _boxes(operand.channels, chosen.team))
            for operand in first.operands
        ]
        self.trace = torch.zeros(self.grid, 5, 64, dtype=torch.int64, device=device)
        self.arguments = StepArguments(
            _Step(
                self.descriptors.data_ptr(),
                lengths.data_ptr(),
                cosines.data_ptr(),
                sines.data_ptr(),
                hidden.data_ptr(),
                (ctypes.c_void_p * _PRODUCTS)(*(places[f"parts{index}"] for index in range(_PRODUCTS))),
                *(places[name] for name in _MESSAGES),
                (_Shape * _PRODUCTS)(*shapes),
                len(layers),
                rows,
                hidden.shape[1],
                model.heads,
                model.kv_heads,
                first.keys.shape[2],
                model.narrow_first,
                _ACTIVATIONS.index(model.activation),
                model.eps,
                model.scale,
                model.softcap or 0.0,
                model.query_eps,
                self.trace.data_ptr(),
            )
        )
        self.prepare_arguments = PrepareArguments(
            hidden.data_ptr(),
            self.messages.data_ptr(),
            hidden.numel(),
            self.messages.numel() - hidden.numel(),
        )
        self._device = device
        if numbers is None:
            return
        prepare = prepare_instantiation(chosen.bfloat16)
        compile_missing(numbers.architecture, [prepare, chosen.instantiation], progress)
        self._launches = (
            Launches(
                load_kernel(prepare, numbers.architecture, device.index),
                _PREPARE_GRID,
                _PREPARE_THREADS,
                0,
                self.prepare_arguments,
            ),
            Launches(
                load_kernel(chosen.instantiation, numbers.architecture, device.index, chosen.shared_bytes),
                self.grid,
                chosen.threads,
                chosen.shared_bytes,
                self.arguments,
                cooperative=True,
            ),
        )

    def launch(self) -> None:
        """Replace ``hidden`` by what leaves the last layer, on the current stream.

        Raises:
            RuntimeError: the driver refused a launch.
        """
        with on_device(self._device.index):
            for launches in self._launches:
                launch = launches.take()
                launch.start()
                launches.give(launch)


def _box_units(channels: int, team: int, width: int) -> int:
    """Units of K that one copy of ``width`` tiles brings."""
    units = _units(channels)
    return next(size for size in (4, 2, 1) if size <= max(team // width, 1) and not any(n % size for n in units))


def _boxes(channels: int, team: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(_WIDTHS))(*(_box_units(channels, team, width) for width in _WIDTHS))


def _messages(
    layer: LayerOperands, model: Model, rows: int, hidden: int, grid: int, device: torch.device
) -> tuple[Tensor, dict[str, int]]:
    """Memory for all messages, and the addresses of its parts."""
    channels = layer.output.channels
    squares = grid // PARTS * rows * -(-hidden // UNIT)
    sizes = {
        "start": rows * hidden,
        "squares": squares,
        "mlp_squares": squares,
        "arrivals": grid,
        "mlp": rows * layer.down.channels,
        "attention": rows * MAX_SPLITS * channels,
        "attention_weight": rows * MAX_SPLITS * model.heads,
        **{f"parts{index}": PARTS * rows * operand.columns for index, operand in enumerate(layer.operands)},
    }
    # Everything is read by vectors of four.
    sizes = {name: -(-size // 4) * 4 for name, size in sizes.items()}
    memory = torch.full((sum(sizes.values()),), -1, dtype=torch.int32, device=device)
    places, at = {}, memory.data_ptr()
    for name, size in sizes.items():
        places[name] = at
        at += 4 * size
    return memory, places


def _descriptors(layers: Sequence[LayerOperands], config: StepConfig, device: torch.device) -> Tensor:
    """All layers' ``StepLayer`` in the device's memory."""
    made = b"".join(bytes(_layer(layer, config)) for layer in layers)
    host = torch.frombuffer(bytearray(made + bytes(128)), dtype=torch.uint8)
    if device.type == "cuda":
        return host.to(device)
    aligned = torch.empty(len(made) + 64, dtype=torch.uint8)
    start = -aligned.data_ptr() % 64
    aligned[start : start + len(made)] = host[: len(made)]
    return aligned[start : start + len(made)]


def _layer(layer: LayerOperands, config: StepConfig) -> _Layer:
    made = _Layer()
    for index, operand in enumerate(layer.operands):
        n, k = operand.columns, operand.channels
        for place, width in enumerate(_WIDTHS):
            if width > min(config.team, n // 64):
                continue
            units = _box_units(k, config.team, width)
            found = encode_tensor_map(
                operand.words.data_ptr(),
                4,
                (128, n // 64, k // 16),
                (512, 8 * n),
                (128, width, units * UNIT // 16),
                swizzled=False,
            )
            made.words[index][place] = _Map.from_buffer_copy(found)
            for maps, tensor in ((made.scales, operand.scales), (made.zeros, operand.zeros)):
                if tensor is not None:
                    found = encode_tensor_map(
                        tensor.data_ptr(),
                        2,
                        (64, n // 64, tensor.shape[0]),
                        (128, 2 * n),
                        (64, width, units * UNIT // config.group_size),
                        swizzled=False,
                    )
                    maps[index][place] = _Map.from_buffer_copy(found)
    caches = []
    for cache in (layer.keys, layer.values):
        head_dim = cache.shape[3]
        caches.append(
            encode_tensor_map(
                cache.data_ptr(),
                2,
                (head_dim, cache.numel() // head_dim),
                (2 * head_dim,),
                (64, CHUNK_POSITIONS),
                swizzled=True,
            )
        )
    made.keys, made.values = (_Map.from_buffer_copy(one) for one in caches)
    made.attention_gamma, made.mlp_gamma = layer.attention_gamma.data_ptr(), layer.mlp_gamma.data_ptr()
    made.query_gamma = 0 if layer.query_gamma is None else layer.query_gamma.data_ptr()
    made.key_gamma = 0 if layer.key_gamma is None else layer.key_gamma.data_ptr()
    for index, operand in enumerate(layer.operands):
        made.bias[index] = None if operand.bias is None else operand.bias.data_ptr()
    made.key_cache, made.value_cache = layer.keys.data_ptr(), layer.values.data_ptr()
    made.window = layer.window or 0
    return made
