"""The layouts of FP8 and FP4 codes, grouped by format."""

from __future__ import annotations

from marlinq.formats.layouts.float_codes import FloatCodes, FloatNames

FP8, FP4 = "fp8_e4m3", "fp4_e2m1"
_MX, _NV = 32, 16
"""Group sizes of the MX formats and of NVFP4."""

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
"""MXFP4 in compressed-tensors; also of one expert of GPT-OSS, taken out of its stack."""

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
"""Layouts of compressed-tensors besides pack-quantized. Those in groups come first: in a weight of K = one
group, groups and channels look alike."""

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
        ("fp8-scale", "scale", None),
        ("fp8-mistral", "qscale_weight", "qscale_act"),
    )
)
"""Layouts of Hugging Face ``fp8``, one for each name of the scales on disk. The first is the one that is
written."""

GPTQMODEL_FP8 = FloatCodes(
    "gptqmodel-fp8",
    FP8,
    FloatNames(scales="weight_scale_inv", scale_dtype="float32", flat=True, divides=True),
    granularities=("tensor", "channel", "block"),
)
"""GPTQModel ``fp8``: weight = code / scale."""

DEEPSEEK_V4 = (
    FloatCodes(
        "deepseek-v4-fp8",
        FP8,
        FloatNames(scales="scale", scale_dtype="float8_e8m0fnu"),
        granularities=("block",),
    ),
    FloatCodes(
        "deepseek-v4-fp4",
        FP4,
        FloatNames(code_dtype="int8", scales="scale", scale_dtype="float8_e8m0fnu"),
        granularities=("group",),
        groups=_MX,
    ),
)
"""DeepSeek-V4: FP4 experts, other linears FP8."""

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
"""Layouts of ModelOpt."""
