"""Writing ``quantization_config`` in the dialect that each layout's loaders read (docs/formats.md)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marlinq import __version__
from marlinq.core.errors import ConversionRefused
from marlinq.formats import ModuleSpec

# Loaders that fuse these match rules against the fused name, others against the parts (docs/formats.md).
_FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)
_CHECKPOINT_FORMAT = {"gptq": "gptq", "gptq-v2": "gptq_v2", "marlin": "marlin"}

_CONFIG_KEYS = ("quantization_config", "compression_config")

_Key = tuple[int, int, bool]


def emit_quantization_config(
    layout: str, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint.

    Args:
        layout: a name in :data:`marlinq.formats.FORMATS`.
        modules: every quantised module and what is stored for it.
        unquantized: linear modules that stay unquantised, lm_head included.

    Raises:
        ConversionRefused: the dialect can't express these settings (AWQ with two group sizes).
    """
    if not modules:
        raise ConversionRefused(f"{layout}: no module is quantised; nothing to describe")
    settings = _settings(layout, modules)
    if layout == "awq":
        return _awq(settings, unquantized)
    if layout == "compressed-tensors":
        return _compressed_tensors(settings, unquantized)
    # Loaders that read the flag for a module whose g_idx is trivial still get the right weights.
    act_order = any(spec.act_order for spec in modules.values())
    return _gptq(layout, settings, unquantized, act_order)


def extra_configs(layout: str, quantization_config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Files beside config.json that some loaders read first: GPTQModel wants quantize_config.json in step."""
    return {} if layout == "compressed-tensors" else {"quantize_config.json": quantization_config}


def replace_quantization_config(config: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` with ``new`` as its only quantization_config, wherever an old one stood."""
    result = {key: value for key, value in config.items() if key not in _CONFIG_KEYS}
    text_config = result.get("text_config")
    if isinstance(text_config, dict):
        result["text_config"] = {key: value for key, value in text_config.items() if key not in _CONFIG_KEYS}
    result["quantization_config"] = dict(new)
    return result


def _settings(layout: str, modules: Mapping[str, ModuleSpec]) -> dict[str, _Key]:
    grouped = Counter(spec.group_size for spec in modules.values() if spec.groups > 1)
    usual = grouped.most_common(1)[0][0] if grouped else -1
    settings = {}
    for name, spec in modules.items():
        # One group of K channels is the usual group size where that is K, and -1 otherwise.
        single = usual if spec.in_features == usual else -1
        group_size = single if spec.groups == 1 else spec.group_size
        # AWQ always stores its zero points; the other dialects tell symmetric modules apart.
        settings[name] = (spec.bits, group_size, spec.symmetric and layout != "awq")
    return settings


def _majority(settings: Mapping[str, _Key]) -> _Key:
    # Ties go to the first module in file order, so that the same checkpoint always gives the same config.
    return Counter(settings.values()).most_common(1)[0][0]


def _gptq(
    layout: str, settings: Mapping[str, _Key], unquantized: Sequence[str], act_order: bool
) -> dict[str, Any]:
    default = _majority(settings)
    bits, group_size, symmetric = default
    dynamic: dict[str, Any] = {}
    skipped = [name for name in unquantized if _in_block(name)]
    if skipped:
        dynamic["-:" + _names_pattern(skipped, settings)] = {}
    for other in dict.fromkeys(value for value in settings.values() if value != default):
        members = [name for name, value in settings.items() if value == other]
        dynamic["+:" + _names_pattern(members, unquantized)] = {
            "bits": other[0],
            "group_size": other[1],
            "sym": other[2],
            "desc_act": act_order,
        }
    layout_key = _CHECKPOINT_FORMAT[layout]
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": layout_key,
        "format": layout_key,
        "pack_dtype": "int32",
        "lm_head": any(name.split(".")[-1] == "lm_head" for name in settings),
        "meta": {"quantizer": [f"marlinq:{__version__}"]},
    }
    if dynamic:
        config["dynamic"] = dynamic
    inside = list(dict.fromkeys(_inside_block(name) for name in settings if _in_block(name)))
    if skipped and not {_inside_block(name) for name in skipped} & set(inside):
        # transformers' loader ignores dynamic rules; it can follow a skip that holds in every block.
        config["modules_in_block_to_quantize"] = [inside]
    return config


def _awq(settings: Mapping[str, _Key], unquantized: Sequence[str]) -> dict[str, Any]:
    sizes = sorted({group_size for _, group_size, _ in settings.values()})
    if len(sizes) > 1:
        raise ConversionRefused(
            f"awq: group sizes {sizes} in one checkpoint; AWQ configs have no per-module settings"
        )
    for skipped in unquantized:
        caught = next((name for name in settings if skipped in name), None)
        if caught is not None:
            raise ConversionRefused(
                f"awq: {skipped} is not quantised and {caught} is; AWQ configs exclude modules by a part of "
                "their name, which can't tell these two apart"
            )
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": sizes[0],
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(unquantized),
        "lm_head": any(name.split(".")[-1] == "lm_head" for name in settings),
    }


def _compressed_tensors(settings: Mapping[str, _Key], unquantized: Sequence[str]) -> dict[str, Any]:
    default = _majority(settings)
    groups: dict[str, Any] = {}
    for index, key in enumerate(sorted(dict.fromkeys(settings.values()), key=lambda key: key == default)):
        bits, group_size, symmetric = key
        members = [name for name, value in settings.items() if value == key]
        # A class target does not reach lm_head in every loader, so it is always named.
        named = [name for name in members if name.split(".")[-1] == "lm_head"] if key == default else members
        targets = ["re:" + _names_pattern(named, settings)] if named else []
        groups[f"group_{index}"] = {
            "targets": [*targets, "Linear"] if key == default else targets,
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "channel" if group_size == -1 else "group",
                "group_size": None if group_size == -1 else group_size,
                "dynamic": False,
                "actorder": None,
            },
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(unquantized),
        "config_groups": groups,
        "kv_cache_scheme": None,
    }


def _in_block(name: str) -> bool:
    return re.search(r"\.\d+\.", name) is not None


def _inside_block(name: str) -> str:
    """``model.layers.3.mlp.up_proj`` -> ``mlp.up_proj``."""
    return re.split(r"\.\d+\.", name, maxsplit=1)[-1]


def _names_pattern(members: Sequence[str], others: Iterable[str]) -> str:
    """One regular expression that matches exactly ``members``, and the fused name of a complete set of parts.

    Members that stand in several blocks are written once with the block numbers as an alternation.
    """
    others = set(others) - set(members)
    names = list(members)
    for fused, parts in _FUSED:
        for name in members:
            stem, _, last = name.rpartition(".")
            if last == parts[0] and not any(f"{stem}.{part}" in others for part in parts):
                names.append(f"{stem}.{fused}")
    blocks: dict[tuple[str, str], list[str]] = {}
    plain: list[str] = []
    for name in names:
        found = re.fullmatch(r"(.*?)\.(\d+)\.(.*)", name)
        if found is None:
            plain.append(re.escape(name))
        else:
            blocks.setdefault((found[1], found[3]), []).append(found[2])
    by_numbers: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (stem, inner), numbers in blocks.items():
        by_numbers.setdefault((stem, tuple(numbers)), []).append(inner)
    for (stem, numbers_), inners in by_numbers.items():
        alternatives = "|".join(re.escape(inner) for inner in inners)
        plain.append(f"{re.escape(stem)}\\.(?:{'|'.join(numbers_)})\\.(?:{alternatives})")
    return f"(?:{'|'.join(plain)})$"
