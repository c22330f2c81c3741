"""The persistent kernel's global memory: arguments, descriptors of layers, and messages between blocks.

The structures mirror ``cuda/persistent/arguments.cuh``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from marlinq.kernels.contract.arguments import TENSOR_MAP_BYTES
from marlinq.kernels.driver.cuda_driver import encode_tensor_map
from marlinq.kernels.launch.persistent.config import PARTS, UNIT, StepConfig, chunk_positions, part_units
from marlinq.kernels.launch.persistent.operands import Activation, LayerOperands, Model

MAX_SPLITS = 16
"""Parts at most that attention splits the context into."""
_PRODUCTS = 4
_WIDTHS = (1, 2, 4)  # tiles of 64 columns in a set, which a block computes together
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")

_Map = ctypes.c_ubyte * TENSOR_MAP_BYTES


class _Layer(ctypes.Structure):
    """``StepLayer``."""

    _fields_ = (
        ("words", _Map * len(_WIDTHS) * _PRODUCTS),
        ("scales", _Map * len(_WIDTHS) * _PRODUCTS),
        ("zeros", _Map * len(_WIDTHS) * _PRODUCTS),
        ("keys", _Map),
        ("values", _Map),
        ("attention_gamma", ctypes.c_void_p),
        ("mlp_gamma", ctypes.c_void_p),
        ("post_gamma", ctypes.c_void_p * 2),
        ("query_gamma", ctypes.c_void_p),
        ("key_gamma", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("bias", ctypes.c_void_p * _PRODUCTS),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("window", ctypes.c_int),
        ("padding", ctypes.c_int * 19),
    )


class _Shape(ctypes.Structure):
    """``ProductShape``."""

    _fields_ = (
        ("channels", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("box_units", ctypes.c_int * len(_WIDTHS)),
    )


_MESSAGES = (
    "attention",
    "attention_weight",
    "mlp",
    "start",
    "squares",
    "mlp_squares",
    "post_squares",
    "post_mlp_squares",
    "arrivals",
)


class _Step(ctypes.Structure):
    """``StepArguments``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "lengths", "result")),
        ("parts", ctypes.c_void_p * _PRODUCTS),
        *((name, ctypes.c_void_p) for name in _MESSAGES),
        ("shape", _Shape * _PRODUCTS),
        *(
            (name, ctypes.c_int)
            for name in (
                "layer_count",
                "hidden",
                "heads",
                "kv_heads",
                "capacity",
                "narrow_first",
                "activation",
            )
        ),
        *((name, ctypes.c_float) for name in ("eps", "scale", "softcap", "query_eps")),
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


def step_arguments(
    layers: Sequence[LayerOperands],
    model: Model,
    config: StepConfig,
    messages: dict[str, int],
    *,
    hidden: Tensor,
    lengths: Tensor,
    descriptors: Tensor,
) -> StepArguments:
    """The kernel's parameter.

    Args:
        messages: addresses of the parts of ``PersistentLayers.messages``, by name.
        layers, model, config, hidden, lengths, descriptors: as in ``PersistentLayers``.
    """
    first = layers[0]
    shapes = [
        _Shape(operand.channels, operand.columns // 64, _boxes(operand.channels, config.team))
        for operand in first.operands
    ]
    return StepArguments(
        _Step(
            descriptors.data_ptr(),
            lengths.data_ptr(),
            hidden.data_ptr(),
            (ctypes.c_void_p * _PRODUCTS)(*(messages[f"parts{index}"] for index in range(_PRODUCTS))),
            *(messages[name] for name in _MESSAGES),
            (_Shape * _PRODUCTS)(*shapes),
            len(layers),
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
        )
    )


def _box_units(channels: int, team: int, width: int) -> int:
    """Units of K in a box, which one TMA copy of ``width`` tiles brings."""
    units = part_units(channels)
    return next(
        size for size in (4, 2, 1) if size <= max(team // width, 1) and not any(n % size for n in units)
    )


def _boxes(channels: int, team: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(_WIDTHS))(*(_box_units(channels, team, width) for width in _WIDTHS))


def make_messages(
    layer: LayerOperands, model: Model, hidden: Tensor, grid: int
) -> tuple[Tensor, dict[str, int]]:
    """Memory for all messages, and the addresses of its parts.

    Args:
        layer: any of the layers.
        model: sizes and features that the layers share.
        hidden: [1, H].
        grid: blocks of a launch.
    """
    width = hidden.shape[1]
    channels = layer.output.channels
    squares = grid // PARTS * -(-width // UNIT)
    sizes = {
        "start": width,
        "squares": squares,
        "mlp_squares": squares,
        "post_squares": squares,
        "post_mlp_squares": squares,
        "arrivals": grid,
        "mlp": layer.down.channels,
        "attention": MAX_SPLITS * channels,
        "attention_weight": MAX_SPLITS * model.heads,
        **{f"parts{index}": PARTS * operand.columns for index, operand in enumerate(layer.operands)},
    }
    # The kernel reads four words at a time.
    sizes = {name: -(-size // 4) * 4 for name, size in sizes.items()}
    memory = torch.full((sum(sizes.values()),), -1, dtype=torch.int32, device=hidden.device)
    places, at = {}, memory.data_ptr()
    for name, size in sizes.items():
        places[name] = at
        at += 4 * size
    return memory, places


def layer_descriptors(layers: Sequence[LayerOperands], config: StepConfig, device: torch.device) -> Tensor:
    """The ``StepLayer`` structures of all layers, in the device's memory."""
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
            tensor_map = encode_tensor_map(
                operand.weight.words.data_ptr(),
                4,
                (128, n // 64, k // 16),
                (512, 8 * n),
                (128, width, units * UNIT // 16),
                swizzled=False,
            )
            made.words[index][place] = _Map.from_buffer_copy(tensor_map)
            for maps, tensor in ((made.scales, operand.weight.scales), (made.zeros, operand.weight.zeros)):
                if tensor is not None:
                    tensor_map = encode_tensor_map(
                        tensor.data_ptr(),
                        2,
                        (64, n // 64, tensor.shape[0]),
                        (128, 2 * n),
                        (64, width, units * UNIT // config.quant_group),
                        swizzled=False,
                    )
                    maps[index][place] = _Map.from_buffer_copy(tensor_map)
    caches = []
    for cache in (layer.keys, layer.values):
        head_dim = cache.shape[3]
        caches.append(
            encode_tensor_map(
                cache.data_ptr(),
                2,
                (head_dim, cache.numel() // head_dim),
                (2 * head_dim,),
                (64, chunk_positions(head_dim, config.team)),
                swizzled=True,
            )
        )
    made.keys, made.values = (_Map.from_buffer_copy(one) for one in caches)
    made.attention_gamma, made.mlp_gamma = layer.attention_gamma.data_ptr(), layer.mlp_gamma.data_ptr()
    for index, gamma in enumerate((layer.post_attention_gamma, layer.post_mlp_gamma)):
        made.post_gamma[index] = None if gamma is None else gamma.data_ptr()
    made.cosines, made.sines = layer.cosines.data_ptr(), layer.sines.data_ptr()
    made.query_gamma = 0 if layer.query_gamma is None else layer.query_gamma.data_ptr()
    made.key_gamma = 0 if layer.key_gamma is None else layer.key_gamma.data_ptr()
    for index, operand in enumerate(layer.operands):
        made.bias[index] = None if operand.bias is None else operand.bias.data_ptr()
    made.key_cache, made.value_cache = layer.keys.data_ptr(), layer.values.data_ptr()
    made.window = layer.window or 0
    return made
