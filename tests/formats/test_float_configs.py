"""Configs of float schemes: what is written reads back; what other programs write is understood."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from marlinq.core.errors import ConversionRefused, UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep
from marlinq.core.scheme import INT4, Activations, Scheme
from marlinq.core.schemes import SCHEMES
from marlinq.formats import FORMATS, ModuleSpec
from marlinq.formats.dialects import Keys, QuantizationConfig, dialect_of, write_quantization_config

Q, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj"
FLOATS = ("fp8", "fp8-dynamic", "fp8-static", "fp8-block", "mxfp8", "mxfp4", "nvfp4")


def read(raw: dict[str, Any]) -> QuantizationConfig:
    return dialect_of(raw, "config").read(Keys(raw, "config"))


def stored(form: str, name: str) -> Scheme:
    """A named scheme as modules of a format have it."""
    named = SCHEMES[name]
    scheme = named.example(Scheme(named.element, Granularity.group(128), "midpoint"))
    return FORMATS[form].layout_of(scheme).as_stored(scheme)


def written(
    form: str, schemes: dict[str, str], unquantized: tuple[str, ...] = ("lm_head",)
) -> dict[str, Any]:
    modules = {module: ModuleSpec(256, 256, stored(form, name)) for module, name in schemes.items()}
    return write_quantization_config(FORMATS[form], modules, ["lm_head"])


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("compressed-tensors", name) for name in FLOATS),
        ("fp8", "fp8-static"),
        ("fp8", "fp8-block"),
        ("modelopt", "nvfp4"),
        ("modelopt", "fp8-static"),
    ],
)
def test_a_scheme_reads_back(form: str, name: str) -> None:
    config = read(written(form, {Q: name}))
    assert config.format == form
    assert config.rules.scheme(Q) == stored(form, name)
    assert isinstance(config.rules.outcome("lm_head"), Keep)


def test_schemes_are_mixed_by_module() -> None:
    schemes = {f"model.layers.{i}.mlp.up_proj": name for i, name in enumerate((*FLOATS, "int4", "int8"))}
    raw = written("compressed-tensors", schemes)
    assert raw["format"] == "mixed-precision"
    config = read(raw)
    for module, name in schemes.items():
        assert config.rules.scheme(module) == stored("compressed-tensors", name), module
    raw = written("modelopt", {Q: "nvfp4", EXPERT: "fp8-static"})
    assert raw["quant_algo"] == "MIXED_PRECISION"
    assert {read(raw).rules.scheme(module) for module in (Q, EXPERT)} == {
        stored("modelopt", "nvfp4"),
        stored("modelopt", "fp8-static"),
    }


def test_hugging_face_says_one_scheme_and_fp4_of_experts() -> None:
    with pytest.raises(ConversionRefused, match="in one checkpoint"):
        written("fp8", {Q: "fp8-static", EXPERT: "fp8-block"})
    raw = written("deepseek-v4", {Q: "fp8-block", EXPERT: "mxfp4"})
    assert raw["expert_dtype"] == "fp4"
    assert raw["scale_fmt"] == "ue8m0"
    config = read(raw)
    assert config.format == "deepseek-v4"
    assert config.rules.scheme(EXPERT) == stored("deepseek-v4", "mxfp4")
    assert config.rules.scheme(Q) == stored("deepseek-v4", "fp8-block")
    assert written("deepseek-v4", {Q: "fp8-block", EXPERT: "fp8-block"})["expert_dtype"] == "fp8"
    assert "expert_dtype" not in written("fp8", {Q: "fp8-block"})
    with pytest.raises(ConversionRefused, match="of experts only"):
        written("deepseek-v4", {Q: "mxfp4"})
    # Loaders of this format quantise activations.
    sixteen = replace(stored("fp8", "fp8-block"), activations=None)
    with pytest.raises(ConversionRefused, match="16-bit activations"):
        write_quantization_config(FORMATS["fp8"], {Q: ModuleSpec(256, 256, sixteen)}, ())


def test_the_same_names_mean_the_reverse_in_files_of_gptqmodel() -> None:
    raw = {
        "quant_method": "fp8",
        "weight_scale_method": "row",
        "weight_scale_semantics": "inverse",
        "dynamic": {"-:.*down_proj": {}},
    }
    config = read(raw)
    assert config.format == "gptqmodel-fp8"
    assert config.rules.scheme(Q) == Scheme(SCHEMES["fp8"].element, Granularity.channel(), "none")
    assert config.rules.scheme("model.layers.0.mlp.down_proj") is None
    assert FORMATS[config.format].layouts[0].rounds is not None


def test_a_mistral_or_deepseek_config() -> None:
    config = read(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "ignored_layers": ["lm_head", "model.vision_tower"],
            "scale_fmt": "ue8m0",
        }
    )
    assert config.rules.scheme(Q) == stored("fp8", "fp8-block")
    assert config.rules.scheme("model.vision_tower.blocks.0.fc1") is None
    suffixes = {layout.scale_key for layout in FORMATS["fp8"].layouts}
    assert suffixes == {"weight_scale_inv", "weight_scale", "scale", "qscale_weight"}


def test_modelopt_by_patterns() -> None:
    raw = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "ignore": ["*router*", "lm_head"],
    }
    config = read(raw)
    assert config.rules.scheme(Q) == stored("modelopt", "nvfp4")
    assert config.rules.scheme("model.layers.0.mlp.router.proj") is None
    weights_and_inputs = read({**raw, "quant_algo": "NVFP4"}).rules.scheme(Q)
    assert weights_and_inputs is not None
    assert weights_and_inputs.activations == Activations(
        SCHEMES["nvfp4"].element, Granularity.group(16), dynamic=False
    )
    with pytest.raises(UnsupportedError, match="NVFP4_AWQ"):
        read({**raw, "quant_algo": "NVFP4_AWQ"})


def test_auto_round_says_what_differs() -> None:
    raw = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "extra_config": {
            Q: {"bits": 8, "group_size": 32},
            "mlp.down_proj": {"bits": 16},
            r"layers\.[12]\..*up": {"sym": False},
        },
    }
    config = read(raw)
    assert config.format == "gptq"
    default = Scheme(INT4, Granularity.group(128), "midpoint")
    assert config.rules.scheme("model.layers.0.mlp.up_proj") == default
    assert config.rules.scheme("model.layers.1.mlp.up_proj") == replace(default, zero_point="stored")
    assert config.rules.scheme("model.layers.1.mlp.down_proj") is None
    changed = config.rules.scheme(Q)
    assert changed is not None
    assert (changed.element.name, changed.granularity) == ("int8", Granularity.group(32))
    assert read({**raw, "packing_format": "auto_round:auto_awq", "sym": False}).format == "awq"
    with pytest.raises(UnsupportedError, match="packing_format"):
        read({**raw, "packing_format": "auto_round:fp8"})
