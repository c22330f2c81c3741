"""Our checkpoints in the published vLLM for CPUs: they load, and say what ``marlinq.load`` says.

vLLM runs in an environment of its own, whose Python ``MARLINQ_VLLM_PYTHON`` names (``make interop``). Its
activations are bfloat16, ours float32 and exact, so log probabilities differ by the roundings of vLLM's way:
about a dozen a block, independent, each of relative size at most u = 2**-8. On logits of standard deviation S
that is at most S * u * sqrt(roundings), root mean square.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from marlinq.operations.convert import convert
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe
from marlinq.runtime import load
from tests.interop import vllm_cpu_kernels

PYTHON = os.environ.get("MARLINQ_VLLM_PYTHON")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(PYTHON is None, reason="needs vLLM for CPUs; run: make interop"),
]

VOCABULARY, BLOCKS, NEW = 256, 2, 16
FIRST = "compressed-tensors"
ROUNDINGS = 12 * BLOCKS
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": BLOCKS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Case:
    """A checkpoint of ours: quantised, and the formats that it is then converted to.

    Attributes:
        refused: words of vLLM's message for formats that it does not take on a CPU.
        without_amx: words of the message where the processor has no AMX; with it the format must agree.
        inputs: quantised inputs in sequence, E4M3 with a scale per token.
        plugin: layers that marlinq's plugin runs, comma-separated; others run in plain arithmetic.
    """

    model: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    without_amx: dict[str, str] = field(default_factory=dict)
    inputs: int = 0
    plugin: str = ""


SKIPPED = (Override(r"layers\.1\.mlp\.down_proj$", skip=True),)
MIXED_BITS = (Override(r"layers\.1\.mlp\.down_proj$", settings={"scheme": "int8"}),)
MIXED_GROUPS = (Override(r"layers\.1\.mlp\.down_proj$", settings={"group_size": 32}),)
# vLLM for CPUs takes GPTQ in 4 bits alone.
NO_8_BITS = {"gptq": "uint8b128"}
# Its extension for CPUs lacks the operator that quantises inputs with a stored scale.
NO_OPERATOR = "static_scaled_fp8_quant"

CASES = {
    "symmetric": Case(settings={"group_size": 64}, also=("gptq", "gptq-v2", "awq")),
    "zero points": Case(settings={"group_size": 32, "symmetric": False}, also=("awq",)),
    "8 bits": Case(settings={"scheme": "int8", "group_size": 64}, also=("gptq",), refused=NO_8_BITS),
    "mixed bits": Case(
        settings={"group_size": 64, "overrides": MIXED_BITS}, also=("gptq",), refused=NO_8_BITS
    ),
    "skipped layer": Case(settings={"group_size": 64, "overrides": SKIPPED}, also=("gptq", "awq")),
    "head": Case(settings={"group_size": 64, "quantize_head": "int4"}, also=("gptq", "awq")),
    "one scale a channel": Case(settings={"group_size": -1}, also=("gptq",)),
    "fp8": Case(settings={"scheme": "fp8"}, refused={FIRST: "ScaledMM linear layer"}),
    "fp8-dynamic": Case(settings={"scheme": "fp8-dynamic"}, inputs=4 * BLOCKS),
    "fp8-static": Case(
        settings={"scheme": "fp8-static", "samples": 2, "max_length": 64},
        also=("fp8", "modelopt"),
        refused={FIRST: NO_OPERATOR, "modelopt": NO_OPERATOR, "fp8": "activation_scale"},
    ),
    "fp8-block": Case(
        settings={"scheme": "fp8-block"},
        also=("fp8",),
        without_amx={FIRST: "requires AMX", "fp8": "requires AMX"},
        inputs=4 * BLOCKS,
    ),
    "mxfp8": Case(settings={"scheme": "mxfp8"}, refused={FIRST: "MXFP8 linear layer"}),
    "mxfp4": Case(settings={"scheme": "mxfp4"}, refused={FIRST: "MXFP4 linear layer"}),
    "nvfp4": Case(settings={"scheme": "nvfp4"}, refused={FIRST: "Marlin FP4 not available"}),
    "plugin": Case(settings={"group_size": 64}, also=("gptq", "awq"), plugin="linear"),
    "plugin, head, mixed groups": Case(
        settings={"group_size": 64, "quantize_head": "int4", "overrides": MIXED_GROUPS},
        also=("gptq",),
        plugin="linear",
    ),
    "plugin, zero points": Case(
        settings={"group_size": 32, "symmetric": False}, also=("awq",), plugin="linear"
    ),
    "plugin, 8 bits": Case(
        settings={"scheme": "int8", "group_size": 64, "symmetric": False}, plugin="linear"
    ),
    "plugin, fp8": Case(settings={"scheme": "fp8"}, plugin="linear"),
    "mixture": Case("qwen3_moe", {"group_size": 64}, also=("gptq", "awq"), plugin="experts"),
    "mixture, zero points": Case(
        "qwen3_moe", {"group_size": 32, "symmetric": False}, also=("awq",), plugin="experts"
    ),
    "mixture, 8 bits": Case("qwen3_moe", {"scheme": "int8", "group_size": 64}, plugin="linear,experts"),
}


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``llama`` and ``qwen3_moe`` of random models whose predictions are far from even."""
    root = tmp_path_factory.mktemp("bases")
    for name, more in (("llama", {}), ("qwen3_moe", _EXPERTS)):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[name](**_SIZES, **more)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # The usual initialisation is so small that all predictions are nearly even.
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.to(torch.bfloat16).save_pretrained(root / name)
    return root


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH whose metadata make vLLM load :mod:`tests.interop.vllm_cpu_kernels`."""
    folder = tmp_path_factory.mktemp("plugin")
    metadata = folder / "marlinq_interop-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: marlinq-interop\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nmarlinq_interop = {vllm_cpu_kernels.__name__}:register\n"
    )
    return folder


TEXTS = torch.randint(3, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> dict[str, Case]:
    """The cases whose tests run."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    names = {call.params.get("name") for call in calls if call is not None}
    return {name: case for name, case in CASES.items() if name in names}


@pytest.fixture(scope="session")
def folders(
    selected: dict[str, Case], bases: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """Every selected case's checkpoints by case and format."""
    found = {}
    for name, case in selected.items():
        root = tmp_path_factory.mktemp("checkpoints")
        recipe = Recipe(format=FIRST, method="rtn", **case.settings)
        quantize(bases / case.model, root / FIRST, recipe=recipe, progress=False)
        for layout in case.also:
            convert(root / FIRST, root / layout, target_format=layout, progress=False)
        found |= {(name, layout): root / layout for layout in (FIRST, *case.also)}
    return found


@pytest.fixture(scope="session")
def answers(
    folders: dict[tuple[str, str], Path], plugin: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], dict[str, Any]]:
    """vLLM's answers to every checkpoint (:mod:`tests.interop.vllm_side`)."""
    root = tmp_path_factory.mktemp("answers")
    outs = {key: root / f"{number}.json" for number, key in enumerate(folders)}
    jobs = [
        {
            "folder": str(folder),
            "prompts": TEXTS[:, :8].tolist(),
            "forced": TEXTS.tolist(),
            "new": NEW,
            "environment": {vllm_cpu_kernels.PLUGIN: CASES[key[0]].plugin},
            "out": str(outs[key]),
        }
        for key, folder in folders.items()
    ]
    (root / "request.json").write_text(json.dumps(jobs))
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{plugin}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    run = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("vllm_side.py")), str(root / "request.json")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    (root / "log").write_text(run.stdout)
    return {
        key: json.loads(out.read_text()) if out.exists() else {"error": run.stdout[-6000:]}
        for key, out in outs.items()
    }


def typical_error(errors: torch.Tensor, *, outliers: bool) -> float:
    """Root mean square; with ``outliers`` that of the normal distribution of the same median.

    In a mixture a router's near tie may fall the other way in bfloat16, and a token gets another expert.
    """
    if outliers:
        return float(errors.abs().median()) / 0.6745
    return float(errors.square().mean().sqrt())


@pytest.mark.parametrize("name", CASES)
def test_vllm_says_what_we_say(
    name: str,
    folders: dict[tuple[str, str], Path],
    answers: dict[tuple[str, str], dict[str, Any]],
    table: list[str],
) -> None:
    loaded = load(folders[name, FIRST], dtype="float32", progress=False)
    with torch.no_grad():
        logits = loaded.model(TEXTS).logits[:, :-1].double()
    exact = logits.log_softmax(-1).gather(2, TEXTS[:, 1:, None]).squeeze(2)
    # Inputs of E4M3 are off by half a step, 2**-4 of themselves, at most.
    rounded = math.hypot(2.0**-8 * math.sqrt(ROUNDINGS), 2.0**-4 * math.sqrt(CASES[name].inputs))
    bound = float(logits.std()) * rounded
    first = answers[name, FIRST]
    for layout in (FIRST, *CASES[name].also):
        answer = answers[name, layout]
        if layout in CASES[name].refused:
            assert CASES[name].refused[layout] in answer["error"]
            continue
        if CASES[name].without_amx.get(layout, "no such words") in answer.get("error", ""):
            continue
        assert "error" not in answer, f"{layout}: {answer['error']}"
        found = torch.tensor(answer["logprobs"], dtype=torch.float64)
        error = typical_error(found - exact, outliers=CASES[name].model != "llama")
        table.append(f"vLLM, {name:26} {layout:20} log probabilities off by {error:.1e} (bound {bound:.1e})")
        assert error <= bound
        # The same weights from every file, so the same arithmetic.
        assert answer == first


def said_in_vllms_environment(script: str, **environment: str) -> Any:
    """The JSON that a script of this folder prints last."""
    run = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name(script))],
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_PLUGINS": ""} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def test_the_stub_of_the_plugins_tests_is_like_vllm() -> None:
    assert said_in_vllms_environment("vllm_differences.py") == []


@pytest.mark.parametrize("mode", ["all", "off"])
def test_vllm_asks_the_plugin_first(mode: str) -> None:
    chosen = said_in_vllms_environment("vllm_choice.py", MARLINQ_VLLM=mode)
    for layer, (before, after) in chosen.items():
        taken = mode == "all" and layer != "groups of 16"
        assert after == ("IntegerLinearKernel" if taken else before), layer
        assert before != "IntegerLinearKernel"
