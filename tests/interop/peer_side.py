"""Answers of the published peers to a checkpoint: run as a program, in a process of its own.

    python tests/interop/peer_side.py REQUEST.json

The request is ``{"tokens": [[int]], "jobs": [{"folder", "out", "loader", "dtype", "decoded"}]}``. Each job
loads one checkpoint with a peer's own code and writes to ``out`` (safetensors) what it holds there:

    logits              float32 [B, T, V]
and, where ``decoded`` is true,

    <module>::weight    [N, K]   dequantised, in the peer's own dtype
    <module>::codes     uint8 [K, N], <module>::zeros uint8 [G, N]: decoded by the peer's functions

or, when the peer refuses, ``{"error": "Class: message"}`` to ``out`` with the suffix ``.json``. A process of
its own keeps the peers' patches of transformers, their warnings and their logging away from our tests.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its thread pool needs two workers even on two cores
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

Decoded = Iterator[tuple[str, dict[str, Tensor]]]


def gptq_modules(model: nn.Module) -> Decoded:
    """GPTQModel's torch kernel: it holds v2 zeros after loading, whatever the file held."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model_dequant import unpack_cols, unpack_rows

    for name, module in model.named_modules():
        if isinstance(module, TorchLinear):
            yield (
                name,
                {
                    "weight": module.dequantize_weight().t(),
                    "codes": unpack_rows(module.qweight, module.bits),
                    "zeros": unpack_cols(module.qzeros, module.bits),
                },
            )


def awq_modules(model: nn.Module) -> Decoded:
    """GPTQModel's AWQ torch kernel, through its unpacking functions."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import (
        dequantize_gemm,
        reverse_awq_order,
        unpack_awq,
    )

    for name, module in model.named_modules():
        if isinstance(module, AwqTorchLinear):
            codes, zeros = reverse_awq_order(*unpack_awq(module.qweight, module.qzeros, 4), 4)
            dense = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, module.group_size)
            yield name, {"weight": dense.t(), "codes": codes, "zeros": zeros}


def compressed_tensors_modules(folder: Path) -> Decoded:
    """compressed-tensors' pack-quantized compressor on the stored tensors."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils import match_targets
    from safetensors.torch import load_file

    stored: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        stored |= load_file(shard)
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(raw).config_groups
    for key in stored:
        name, _, suffix = key.rpartition(".")
        if suffix != "weight_packed":
            continue
        own = {
            part.rpartition(".")[2]: value for part, value in stored.items() if part.startswith(f"{name}.")
        }
        own.pop("bias", None)
        scheme = next(
            group for group in groups.values() if match_targets(name, nn.Linear(1, 1), group.targets)
        )
        bits = scheme.weights.num_bits
        middle = 1 << (bits - 1)
        shape = torch.Size(own["weight_shape"].tolist())
        codes = unpack_from_int32(own["weight_packed"], bits, shape).to(torch.int16) + middle
        zeros = torch.full(own["weight_scale"].shape, middle)
        if "weight_zero_point" in own:
            packed = own["weight_zero_point"]
            zeros = unpack_from_int32(packed, bits, own["weight_scale"].shape, packed_dim=0).to(torch.int16)
            zeros = zeros + middle
        weight = PackedQuantizationCompressor.decompress(own, scheme)["weight"]
        yield name, {"weight": weight, "codes": codes.t(), "zeros": zeros.t()}


def load(folder: Path, loader: str, dtype: torch.dtype) -> nn.Module:
    """The model as the peers load it.

    ``transformers`` goes through AutoModelForCausalLM with plain torch kernels, ``transformers-default``
    leaves the kernel to transformers, ``transformers-fp8`` has its FP8 reader dequantise, ``gptqmodel`` goes
    through GPTQModel's own loader.
    """
    from transformers import AutoModelForCausalLM, AwqConfig, CompressedTensorsConfig, GPTQConfig

    if loader == "gptqmodel":
        from gptqmodel import BACKEND, GPTQModel

        return GPTQModel.load(str(folder), backend=BACKEND.TORCH, dtype=dtype, device="cpu").model
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    options: dict[str, Any] = {}
    if loader == "transformers-fp8":
        from transformers import FineGrainedFP8Config

        settings = {name: value for name, value in stored.items() if name != "quant_method"}
        options["quantization_config"] = FineGrainedFP8Config(**settings, dequantize=True)
    if loader == "transformers":
        method = stored["quant_method"]
        if method == "gptq":
            options["quantization_config"] = GPTQConfig(bits=stored["bits"], backend="gptq_torch")
        elif method == "awq":
            options["quantization_config"] = AwqConfig(backend="torch_awq")
        else:
            # The default path of transformers can't read packed zero points.
            options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def decoded_modules(folder: Path, model: nn.Module) -> Decoded:
    """The quantised modules as the peer decodes them."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    if method == "gptq":
        return gptq_modules(model)
    return awq_modules(model) if method == "awq" else compressed_tensors_modules(folder)


def answer(job: dict[str, Any], tokens: Tensor) -> dict[str, Tensor]:
    """The logits, and the decoded modules, of one job."""
    folder = Path(job["folder"])
    model = load(folder, job["loader"], getattr(torch, job["dtype"])).eval()
    tensors: dict[str, Tensor] = {}
    for name, parts in decoded_modules(folder, model) if job["decoded"] else ():
        tensors[f"{name}::weight"] = parts["weight"].contiguous()
        tensors[f"{name}::codes"] = parts["codes"].to(torch.uint8).contiguous()
        tensors[f"{name}::zeros"] = parts["zeros"].to(torch.uint8).contiguous()
    with torch.no_grad():
        tensors["logits"] = model(tokens).logits.float().contiguous()
    return tensors


def main() -> None:
    """Answer every job of the request; a refusal is an answer."""
    from safetensors.torch import save_file

    request = json.loads(Path(sys.argv[1]).read_text())
    tokens = torch.tensor(request["tokens"])
    for job in request["jobs"]:
        out = Path(job["out"])
        try:
            save_file(answer(job, tokens), out)
        except Exception as error:  # noqa: BLE001 - a refusal of whatever class is this job's answer
            traceback.print_exc()
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            out.with_suffix(".json").write_text(json.dumps({"error": message}))


if __name__ == "__main__":
    main()
