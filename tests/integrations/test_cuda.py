"""On a GPU: from_pretrained's models multiply with the kernel, eagerly, compiled and in captured graphs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, pipeline
from transformers.generation import CompileConfig

from marlinq.runtime import QuantLinear, load
from tests.integrations.folders import saved
from tests.testing.layouts import INTEGERS
from tests.testing.near_ties import is_near_tie
from tests.testing.runnable_folders import save_tokenizer

# Inductor uses what torch deprecates, and says what it can't do with models as small as these.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:::torch")]

PROMPT = [1, 9, 30, 77, 250, 3]
NEW_TOKENS = 24


def needs_inductor() -> None:
    from torch.utils._triton import has_triton

    if not has_triton():
        pytest.skip("no Triton, which inductor needs on a GPU")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, which Triton needs")


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT], device="cuda")).logits


def greedy(model: PreTrainedModel, **options: object) -> list[int]:
    ids = torch.tensor([PROMPT], device=model.device)
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)[0].tolist()


def assert_same_up_to_near_ties(found: list[int], expected: list[int], on_cpu: PreTrainedModel) -> None:
    assert len(found) == len(expected) == len(PROMPT) + NEW_TOKENS
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine != theirs:
            assert is_near_tie(on_cpu, expected[:place]), place
            return


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "gpt2"])
@pytest.mark.parametrize("layout", INTEGERS)
def test_logits_and_text_are_those_of_load(name: str, layout: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name, layout)
    expected = load(folder, device="cuda", dtype="float16")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    assert found.device == torch.device("cuda", 0)
    packed = [module for module in found.modules() if isinstance(module, QuantLinear)]
    assert len(packed) == len(found.hf_quantizer.decisions) > 0
    assert found.hf_quantizer.decisions == expected.decisions
    assert torch.equal(logits(found), logits(expected.model))
    assert greedy(found) == greedy(expected.model)


@pytest.mark.parametrize("device_map", ["cuda", "cuda:0", 0, "auto", {"": "cuda"}])
def test_devices(device_map: object, tmp_path: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(
        saved(tmp_path, "llama"), dtype=torch.float16, device_map=device_map
    )
    tensors = [*found.parameters(), *found.buffers()]
    assert {tensor.device for tensor in tensors} == {torch.device("cuda", 0)}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_as_one_graph(name: str, mode: str, tmp_path: Path) -> None:
    needs_inductor()
    found = AutoModelForCausalLM.from_pretrained(
        saved(tmp_path, name, symmetric=False, act_order=True), dtype=torch.float16
    )
    expected = logits(found).float()
    torch.compiler.reset()
    compiled = torch.compile(found, fullgraph=True, mode=mode)
    # Inductor rounds the glue between products less often: a rounding of 2**-11 at each of its some 40
    # places, each grown at most a few times on its way to the logits.
    tolerance = 16 * torch.finfo(torch.float16).eps
    for _ in range(3):
        # The second call captures a graph, the third replays it.
        found_logits = logits(compiled).float()
        assert float((found_logits - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
def test_static_cache_eager_and_compiled(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    on_cpu = load(folder, device="cpu").model
    expected = greedy(on_cpu)
    static = greedy(found, cache_implementation="static", disable_compile=True)
    assert_same_up_to_near_ties(static, expected, on_cpu)
    needs_inductor()
    torch.compiler.reset()
    # transformers compiles the step of a static cache by itself; here a break of the graph is an error.
    compiled = greedy(found, cache_implementation="static", compile_config=CompileConfig(fullgraph=True))
    assert hasattr(found, "_compiled_call")
    assert_same_up_to_near_ties(compiled, expected, on_cpu)


def test_pipeline(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", "marlin")
    tokenizer = save_tokenizer(folder)
    answer = pipeline("text-generation", model=str(folder), dtype=torch.float16)
    assert answer.model.device == torch.device("cuda", 0)
    options = {"max_new_tokens": 12, "max_length": None, "do_sample": False, "return_full_text": False}
    found = answer("Hello", clean_up_tokenization_spaces=False, **options)[0]["generated_text"]
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"].cuda()
    reference = load(folder, device="cuda", dtype="float16").model
    tokens = reference.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert found == tokenizer.decode(tokens, skip_special_tokens=True)
