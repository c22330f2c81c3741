"""The config of compressed-tensors checkpoints (docs/formats.md).

It has groups of targets, each with a scheme. Targets are exact names, class names, or ``re:`` patterns
matched with ``re.match``. As in the loaders, names and patterns take precedence over classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep, Matcher, Rule, Rules
from marlinq.core.scheme import Activations, Element, Scheme
from marlinq.core.schemes import MX_GROUP
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.formats.dialects.dialect import Dialect, QuantizationConfig, declared_schemes, majority
from marlinq.formats.dialects.keys import Keys
from marlinq.formats.dialects.name_patterns import (
    EXPERTS,
    in_wrapper,
    is_head,
    names_pattern,
    whole_drafts,
    without_prefix,
)
from marlinq.formats.format import Format
from marlinq.formats.layouts import ModuleSpec

_CLASSES = ("Linear", "Conv1D")
_FLOATS = {8: E4M3, 4: E2M1}
_TWO_LEVELS = "tensor_group"
"""The strategy of scales with a second level."""
_SCALE_DTYPES = {"torch.uint8": "float8_e8m0fnu", "torch.float8_e4m3fn": "float8_e4m3fn"}
_ROUTED, _WORD = ".experts.", "experts"
"""Part of the names of routed experts, and of these and shared ones."""
_LARGEST_BLOCK = 1 << 20
_SPARSE_FORMAT = "marlin-24"
"""The format of sparse integers, here and in :data:`marlinq.formats.FORMATS`."""
_DENSE_STORAGE = "dense"
"""Format in a ``sparsity_config`` of weights that are stored as the format of their group says."""
_MIXED = "mixed-precision"
"""Format of a checkpoint whose groups have different formats."""


class CompressedTensorsDialect(Dialect):
    """``quant_method: compressed-tensors``."""

    name = "compressed-tensors"
    quant_methods = ("compressed-tensors",)
    settings = ("format", "config_groups", "ignore")

    def read(self, keys: Keys) -> QuantizationConfig:
        if keys.mapping("transform_config"):
            raise UnsupportedError(f"{keys.where}: a non-empty transform_config is not supported")
        said = keys.mapping("sparsity_config").get("format", _DENSE_STORAGE)
        if said != _DENSE_STORAGE:
            raise UnsupportedError(
                f"{keys.where}: sparsity_config: format {said!r} beside quantised weights is not supported"
            )
        if keys.raw.get("kv_cache_scheme") is not None:
            raise UnsupportedError(f"{keys.where}: a quantised KV cache (kv_cache_scheme) is not supported")
        rules: list[Rule[Scheme]] = [
            Rule(_target(keys, name), Keep(f"ignore: {name}")) for name in keys.names("ignore")
        ]
        default: Scheme | Keep = Keep("no config group targets its class")
        groups = keys.mapping("config_groups")
        if not groups:
            raise CheckpointError(f"{keys.where}: config_groups: expected at least one group, found none")
        for label, group in groups.items():
            if not isinstance(group, dict):
                raise CheckpointError(
                    f"{keys.where}: config_groups.{label}: expected an object, found {group!r}"
                )
            inner = Keys(group, f"{keys.where}: config_groups.{label}")
            scheme = _scheme(inner, keys.raw.get("format"))
            for target in inner.names("targets"):
                if target in _CLASSES:
                    default = scheme
                else:
                    rules.append(Rule(_target(inner, target), scheme))
        outcomes = (default, *(rule.outcome for rule in rules))
        sparse = any(isinstance(each, Scheme) and each.sparsity is not None for each in outcomes)
        return QuantizationConfig(
            _SPARSE_FORMAT if sparse else "compressed-tensors", Rules(default, tuple(rules))
        )

    def says_head(self, config: QuantizationConfig, name: str) -> bool:
        # Targets by class don't count: servers have another class for heads.
        outcome = next((r.outcome for r in config.rules.ordered if r.matcher.matches(name)), None)
        return isinstance(outcome, Scheme)

    def write(
        self, form: Format, modules: Mapping[str, ModuleSpec], unquantized: Sequence[str]
    ) -> dict[str, Any]:
        schemes = declared_schemes(form, modules)
        default = majority(schemes)
        groups: dict[str, Any] = {}
        wrapped = in_wrapper([*schemes, *unquantized])
        drafts, others = whole_drafts(unquantized, schemes)
        routed = {own for name, own in schemes.items() if _ROUTED in name}
        # transformers takes the first group whose patterns have this word for that of routed experts.
        first = routed if any(_WORD in name for name, own in schemes.items() if own not in routed) else set()
        ordered = sorted(
            dict.fromkeys(schemes.values()), key=lambda scheme: (scheme not in first, scheme == default)
        )
        for index, scheme in enumerate(ordered):
            members = [name for name, own in schemes.items() if own == scheme]
            # A class target does not reach lm_head in every loader, so it is always named.
            named = members
            if scheme == default:
                told = scheme in first
                named = [name for name in members if is_head(name) or (told and _ROUTED in name)]
            targets = ["re:" + names_pattern(named, schemes, wrapped=wrapped)] if named else []
            groups[f"group_{index}"] = {
                "targets": [*targets, "Linear"] if scheme == default else targets,
                "format": _format(scheme),
                "input_activations": _input_settings(scheme),
                "output_activations": None,
                "weights": _weight_settings(scheme),
            }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else _MIXED,
            "quantization_status": "compressed",
            "ignore": [
                *(f"re:{pattern}" for pattern in drafts),
                *_ignored(others, wrapped=wrapped),
            ],
            "config_groups": groups,
            "kv_cache_scheme": None,
        }


def _ignored(names: Sequence[str], *, wrapped: bool) -> list[str]:
    """Entries of ``ignore``: names, or patterns where a name is not enough.

    Loaders look experts up one by one, even where they are stored as one tensor; and they spell the names of
    a ``wrapped`` language model differently.
    """

    def respelled(name: str) -> bool:
        return wrapped and (is_head(name) or without_prefix(name) != name)

    inside = [name for name in names if respelled(name)]
    return [
        *(["re:" + names_pattern(inside, (), wrapped=True)] if inside else []),
        *(
            "re:" + names_pattern([name], ()) if name.endswith(EXPERTS) else name
            for name in names
            if not respelled(name)
        ),
    ]


def _scheme(keys: Keys, outer_format: object) -> Scheme:
    if keys.raw.get("output_activations"):
        raise UnsupportedError(f"{keys.where}: quantised outputs (output_activations) are not supported")
    weights = Keys(keys.mapping("weights"), f"{keys.where}.weights")
    element = _element(weights)
    if weights.raw.get("dynamic"):
        # Loaders quantise such weights when they are loaded, so files hold them unquantised.
        raise UnsupportedError(
            f"{weights.where}: dynamic: weights that are quantised when loaded, not stored"
        )
    said = keys.raw.get("format") or outer_format
    scheme = Scheme(
        element=element,
        granularity=_granularity(weights),
        zero_point=element.zero_point if weights.boolean("symmetric", True) else "stored",
        scale_dtype=_SCALE_DTYPES.get(str(weights.raw.get("scale_dtype")), "float16"),
        tensor_scale="divides" if weights.raw.get("strategy") == _TWO_LEVELS else "none",
        act_order=weights.raw.get("actorder") in ("group", "dynamic"),
        activations=_activations(keys, element),
        sparsity=TWO_OF_FOUR if said == _SPARSE_FORMAT else None,
    )
    if said not in (wanted := _formats(scheme)):
        raise UnsupportedError(
            f"{keys.where}: format {said!r} is not supported for {scheme.describe()}; "
            f"marlinq reads {' and '.join(wanted)}"
        )
    return scheme


def _element(weights: Keys) -> Element:
    kind = weights.raw.get("type", "int")
    if kind == "int":
        return weights.element("num_bits")
    element = _FLOATS.get(weights.integer("num_bits")) if kind == "float" else None
    if element is None:
        bits = weights.raw.get("num_bits")
        raise UnsupportedError(f"{weights.where}: type {kind!r} of {bits!r} bits is not supported")
    return element


def _granularity(settings: Keys) -> Granularity:
    """Granularity of the weights of a config group."""
    strategy = settings.raw.get("strategy")
    if strategy is None:
        strategy = "channel" if settings.first("group_size") in (None, -1) else "group"
    if strategy == "tensor":
        return Granularity.tensor()
    if strategy == "channel":
        return Granularity.channel()
    if strategy in ("group", _TWO_LEVELS):
        return settings.granularity("group_size")
    block = settings.raw.get("block_structure")
    if isinstance(block, str):
        block = [int(side) if side.isdecimal() else side for side in block.split("x")]
    if strategy == "block" and isinstance(block, list) and len(block) == 2:
        if all(type(side) is int and 0 < side < _LARGEST_BLOCK for side in block):
            return Granularity.block(block[0], block[1])
        raise CheckpointError(
            f"{settings.where}: block_structure: expected two positive integers, found {block!r}"
        )
    raise UnsupportedError(f"{settings.where}: strategy {strategy!r} is not supported")


def _activations(keys: Keys, weights: Element) -> Activations | None:
    if not keys.raw.get("input_activations"):
        return None
    settings = Keys(keys.mapping("input_activations"), f"{keys.where}.input_activations")
    element = _element(settings)
    if weights.table is None or element.table is None:
        raise UnsupportedError(f"{settings.where}: quantised activations of integers are not supported")
    strategy = settings.raw.get("strategy")
    granularity = Granularity.channel() if strategy == "token" else _granularity(settings)
    # "local": dynamic scales of groups, times a stored scale of the whole tensor.
    dynamic = settings.raw.get("dynamic") is True
    return Activations(element, granularity, dynamic)


def _formats(scheme: Scheme) -> tuple[str, ...]:
    """Names of formats that a config may have for a scheme; the first is the one that is written."""
    element = scheme.element
    if element.table is None:
        return ("pack-quantized",) if scheme.sparsity is None else (_SPARSE_FORMAT,)
    if scheme.tensor_scale != "none":
        return ("nvfp4-pack-quantized",)
    if element == E2M1:
        return ("mxfp4-pack-quantized",)
    if scheme.granularity == MX_GROUP:
        return ("mxfp8-quantized",)
    names = ("float-quantized", "naive-quantized")
    return names if scheme.activations is not None else names[::-1]


def _format(scheme: Scheme) -> str:
    return _formats(scheme)[0]


def _weight_settings(scheme: Scheme) -> dict[str, Any]:
    granularity = scheme.granularity
    settings: dict[str, Any] = {
        "num_bits": scheme.element.bits,
        "type": "int" if scheme.element.table is None else "float",
        "symmetric": not scheme.stores_zeros,
        "strategy": _TWO_LEVELS if scheme.tensor_scale != "none" else granularity.kind,
        "group_size": granularity.channels if granularity.kind == "group" else None,
        "dynamic": False,
        "actorder": None,
    }
    if granularity.kind == "block":
        settings["block_structure"] = [granularity.outputs, granularity.channels]
    if scheme.element.table is not None and granularity.kind == "group":
        settings["scale_dtype"] = "torch.float8_e4m3fn" if scheme.tensor_scale != "none" else "torch.uint8"
    return settings


def _input_settings(scheme: Scheme) -> dict[str, Any] | None:
    inputs = scheme.activations
    if inputs is None:
        return None
    two_levels = scheme.tensor_scale != "none"
    strategy: str = "token" if inputs.granularity.kind == "channel" else inputs.granularity.kind
    settings: dict[str, Any] = {
        "num_bits": inputs.element.bits,
        "type": "float",
        "symmetric": True,
        "strategy": _TWO_LEVELS if two_levels else strategy,
        "group_size": inputs.granularity.channels or None,
        "dynamic": inputs.dynamic or ("local" if two_levels else False),
    }
    if two_levels:
        settings["scale_dtype"] = "torch.float8_e4m3fn"
    return settings


def _target(keys: Keys, text: str) -> Matcher:
    return keys.pattern(text[3:]) if text.startswith("re:") else keys.exact(text)
