"""Which layouts of floats there are, by the format that they belong to."""

from __future__ import annotations

from marlinq.formats.layouts.float_codes import FloatCodes, FloatNames

FP8, FP4 = "fp8_e4m3", "fp4_e2m1"
_MX, _NV = 32, 16
"""Channels that share a scale in the MX formats and in NVFP4."""

COMPRESSED_MXFP4 = FloatCodes(
    "mxfp4-pack-quantized",
    FP4,
    FloatNames(
        codes="weight_packed",
        code_dtype="uint8",
        scales="weight_scale",
        scale_dtype="float8_e8m0fnu",
        exponent_bytes=True,
    ),
    granularities=("group",),
    groups=_MX,
)
"""MXFP4 in compressed-tensors, and of one expert of GPT-OSS."""

COMPRESSED_FLOATS = (
    FloatCodes(
        "mxfp8-quantized",
        FP8,
        FloatNames(scales="weight_scale", scale_dtype="float8_e8m0fnu", exponent_bytes=True),
        granularities=("group",),
        groups=_MX,
    ),
    COMPRESSED_MXFP4,
    FloatCodes(
        "nvfp4-pack-quantized",
        FP4,
        FloatNames(
            codes="weight_packed",
            code_dtype="uint8",
            scales="weight_scale",
            scale_dtype="float8_e4m3fn",
            second="weight_global_scale",
            second_use="divides",
            inputs="input_global_scale",
            single=(1,),
        ),
        granularities=("group",),
        groups=_NV,
    ),
    FloatCodes(
        "float-quantized",
        FP8,
        FloatNames(scales="weight_scale", inputs="input_scale", single=(1,)),
        granularities=("tensor", "channel", "block"),
    ),
)
"""compressed-tensors, beside pack-quantized; groups come first, which may be as wide as a weight."""

HUGGING_FACE_FP8 = tuple(
    FloatCodes(
        name,
        FP8,
        FloatNames(scales=scales, inputs=inputs, scale_dtype="float32"),
        granularities=("tensor", "block"),
    )
    for name, scales, inputs in (
        ("fp8", "weight_scale_inv", "activation_scale"),
        ("fp8-vllm", "weight_scale", "input_scale"),
        ("fp8-deepseek-v4", "scale", None),
        ("fp8-mistral", "qscale_weight", "qscale_act"),
    )
)
"""Hugging Face ``fp8``: the names that scales have on disk. The first is the one that is written."""

GPTQMODEL_FP8 = FloatCodes(
    "gptqmodel-fp8",
    FP8,
    FloatNames(scales="weight_scale_inv", scale_dtype="float32", flat=True, divides=True),
    granularities=("tensor", "channel", "block"),
)
"""GPTQModel ``fp8``: weight = code / scale."""

DEEPSEEK_FP4 = FloatCodes(
    "deepseek-v4-fp4",
    FP4,
    FloatNames(code_dtype="int8", scales="scale", scale_dtype="float8_e8m0fnu"),
    granularities=("group",),
    groups=_MX,
)
"""Experts of DeepSeek-V4, beside FP8."""

MODELOPT = (
    FloatCodes(
        "modelopt-nvfp4",
        FP4,
        FloatNames(
            code_dtype="uint8",
            scales="weight_scale",
            scale_dtype="float8_e4m3fn",
            second="weight_scale_2",
            second_use="multiplies",
            inputs="input_scale",
        ),
        granularities=("group",),
        groups=_NV,
    ),
    FloatCodes(
        "modelopt-fp8",
        FP8,
        FloatNames(scales="weight_scale", scale_dtype="float32", inputs="input_scale"),
        granularities=("tensor",),
    ),
)
"""ModelOpt."""
