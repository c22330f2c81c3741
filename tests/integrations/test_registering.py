"""When marlinq loads for transformers, and when transformers' own quantizer does."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from transformers import GPTQConfig
from transformers.quantizers import auto

import marlinq
from marlinq.core.errors import EnvironmentProblem
from marlinq.integrations.transformers import register, unregister
from marlinq.integrations.transformers.quantizer import MarlinqQuantizer
from tests.testing import forks

OURS: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
NOT_READ: dict[str, Any] = {**OURS, "bits": 3}


def merged(stored: dict[str, Any], asked: Any = None) -> Any:
    return auto.AutoHfQuantizer.merge_quantization_configs(stored, asked)


def chosen(stored: dict[str, Any]) -> str:
    return type(merged(stored)).__name__


@pytest.mark.parametrize(
    "stored",
    [
        OURS,
        {**OURS, "checkpoint_format": "gptq_v2"},
        {**OURS, "checkpoint_format": "marlin"},
        {"quant_method": "marlin", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    ],
)
def test_configs_that_marlinq_reads_are_taken(stored: dict[str, Any]) -> None:
    assert chosen(stored) == "MarlinqConfig"
    assert auto.AutoHfQuantizer.supports_quant_method(stored)
    config = merged(stored)
    assert config.to_dict() == stored
    assert isinstance(auto.AutoHfQuantizer.from_config(config, pre_quantized=True), MarlinqQuantizer)


def test_other_configs_fall_to_transformers_with_the_reason() -> None:
    with pytest.warns(UserWarning, match="transformers' own quantizer does: quantization_config: .*bits"):
        assert chosen(NOT_READ) == "GPTQConfig"
    # A method that marlinq knows nothing of is no fallback.
    assert chosen({"quant_method": "bitsandbytes", "load_in_4bit": True}) == "BitsAndBytesConfig"


def test_settings_are_those_of_the_last_call() -> None:
    assert (merged(OURS).operator, merged(OURS).compile_kernels) == ("auto", True)
    register(operator="dense", compile_kernels=False)
    assert (merged(OURS).operator, merged(OURS).compile_kernels) == ("dense", False)
    register()
    assert merged(OURS).operator == "auto"


def test_asking_for_another_quantizer_is_refused_while_registered() -> None:
    with pytest.raises(ValueError, match="quantized with MarlinqConfig but you are passing a GPTQConfig"):
        merged(OURS, GPTQConfig(bits=4))
    unregister()
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        assert type(merged(OURS, GPTQConfig(bits=4))).__name__ == "GPTQConfig"


def test_unregister_leaves_transformers_as_it_was() -> None:
    unregister()
    before = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    unregister()
    register()
    register()
    assert chosen(OURS) == "MarlinqConfig"
    unregister()
    assert before == (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    assert chosen(OURS) == "GPTQConfig"


@pytest.mark.parametrize("first", [None, object()])
def test_a_transformers_without_the_tables_is_an_error(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "marlinq.integrations.transformers.registry", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.quantizers.auto", first)
    with pytest.raises(EnvironmentProblem, match=r"can't be extended: .* load with marlinq\.load"):
        register()
    monkeypatch.undo()


STATE = """
import gc, json, logging, os, sys, threading, warnings

def state():
    values = {
        "finders": [repr(finder) for finder in sys.meta_path],
        "path hooks": [repr(hook) for hook in sys.path_hooks],
        "path": list(sys.path),
        "collector": [gc.isenabled(), gc.get_freeze_count(), gc.get_threshold(), len(gc.callbacks)],
        "environment": dict(os.environ),
        "warnings": [repr(item) for item in warnings.filters] + [repr(warnings.showwarning)],
        "records": repr(logging.getLogRecordFactory()),
        "threads": threading.active_count(),
    }
    if "torch" in sys.modules:
        import torch
        from transformers.quantizers import auto
        from transformers.utils import import_utils
        values["torch"] = [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()]
        values["tables"] = [repr(auto.AUTO_QUANTIZER_MAPPING), repr(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)]
        values["transformers"] = [repr(vars(auto.AutoHfQuantizer)), repr(vars(import_utils))]
    return values

%s
before, modules = state(), set(sys.modules)
import marlinq
dir(marlinq)
after = state()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps({"changed": changed, "new": sorted(set(sys.modules) - modules)}))
"""


@pytest.mark.parametrize("first", ["", "import torch, transformers.quantizers.auto"])
def test_importing_changes_nothing_in_the_process(first: str) -> None:
    run = forks.run(STATE % first, modules=forks.TORCH if first else ())
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["changed"] == {}
    assert "marlinq" in found["new"]
    assert [
        name for name in found["new"] if name.partition(".")[0] not in (*sys.stdlib_module_names, "marlinq")
    ] == []


def test_names_of_the_package() -> None:
    assert marlinq.__version__
    assert set(marlinq.__all__) <= set(dir(marlinq))
    for name in marlinq.__all__:
        assert getattr(marlinq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'abacus'"):
        _ = marlinq.abacus
