"""When marlinq loads for transformers, and when transformers' own quantizer does."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import BitsAndBytesConfig, GPTQConfig
from transformers.quantizers import auto

import marlinq
from marlinq.integrations import transformers as integration
from marlinq.integrations.transformers import MarlinqConfig, MarlinqQuantizer, register, unregister
from tests.testing import forks

OURS: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
NOT_READ: dict[str, Any] = {**OURS, "bits": 3}
MERGE = "merge_quantization_configs"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    register()


def chosen(stored: dict[str, Any], asked: Any = None) -> str:
    return type(auto.AutoHfQuantizer.merge_quantization_configs(stored, asked)).__name__


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
def test_what_marlinq_reads_is_its_own(stored: dict[str, Any]) -> None:
    assert chosen(stored) == "MarlinqConfig"
    assert auto.AutoHfQuantizer.supports_quant_method(stored)
    config = auto.AutoHfQuantizer.merge_quantization_configs(stored, None)
    assert config.to_dict() == stored
    assert isinstance(auto.AutoHfQuantizer.from_config(config, pre_quantized=True), MarlinqQuantizer)


def test_what_it_does_not_read_falls_to_transformers_with_the_reason() -> None:
    with pytest.warns(UserWarning, match="transformers' own quantizer does: quantization_config: .*bits"):
        assert chosen(NOT_READ) == "GPTQConfig"
    # A method that marlinq knows nothing of is no fallback.
    assert chosen({"quant_method": "bitsandbytes", "load_in_4bit": True}) == "BitsAndBytesConfig"


def test_who_asks_for_a_quantizer_gets_it() -> None:
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        assert chosen(OURS, GPTQConfig(bits=4)) == "GPTQConfig"
    asked = MarlinqConfig(operator="dense")
    for stored in (OURS, NOT_READ):
        config = auto.AutoHfQuantizer.merge_quantization_configs(stored, asked)
        assert (config.operator, config.stored) == ("dense", stored)
    assert asked.stored == {}
    with pytest.raises(ValueError, match="BitsAndBytesConfig"):
        chosen({"quant_method": "bitsandbytes", "load_in_4bit": True}, GPTQConfig(bits=4))
    assert chosen({"quant_method": "bitsandbytes"}, MarlinqConfig()) == "MarlinqConfig"
    assert isinstance(BitsAndBytesConfig(), auto.QuantizationConfigMixin)


def test_unregister_leaves_transformers_as_it_was() -> None:
    before = vars(auto.AutoHfQuantizer)[MERGE]
    unregister()
    unregister()
    own = vars(auto.AutoHfQuantizer)[MERGE]
    assert isinstance(own, classmethod)
    assert own is not before
    assert chosen(OURS) == "GPTQConfig"
    assert {"marlinq", "marlin"}.isdisjoint(
        {**auto.AUTO_QUANTIZER_MAPPING, **auto.AUTO_QUANTIZATION_CONFIG_MAPPING}
    )
    register()
    register()
    assert chosen(OURS) == "MarlinqConfig"
    unregister()
    assert vars(auto.AutoHfQuantizer)[MERGE] is own


def test_a_transformers_that_changed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    unregister()
    monkeypatch.delattr(auto.AutoHfQuantizer, MERGE)
    with pytest.warns(UserWarning, match=r"can't extend this transformers .*load with marlinq\.load"):
        register()
    assert "marlinq" not in auto.AUTO_QUANTIZER_MAPPING


CHOICE = """
from transformers.quantizers import auto
print(type(auto.AutoHfQuantizer.merge_quantization_configs(%r, None)).__name__)
"""


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("from transformers.quantizers import auto\nimport marlinq", "MarlinqConfig"),
        # Our own module is what imports transformers.
        pytest.param(
            "from marlinq.integrations.transformers.quantizer import MarlinqConfig",
            "MarlinqConfig",
            marks=pytest.mark.slow,
        ),
        # Looking for the module is not importing it.
        pytest.param(
            f"import importlib.util, marlinq\nimportlib.util.find_spec({auto.__name__!r})",
            "MarlinqConfig",
            marks=pytest.mark.slow,
        ),
        (
            "from marlinq.integrations.transformers import unregister\nunregister()",
            "GPTQConfig",
        ),
    ],
)
def test_in_whichever_order_they_are_imported(first: str, expected: str) -> None:
    code = f"{first}\n{CHOICE % OURS}"
    check = "import sys\nassert not any(type(f).__name__ == '_Waiting' for f in sys.meta_path)\n"
    # torch alone imports neither of them.
    run = forks.run(code + check, modules=forks.TORCH)
    assert (run.returncode, run.stdout.strip()) == (0, expected), run.stderr


def test_the_module_is_found_as_without_marlinq() -> None:
    spec = importlib.util.find_spec(auto.__name__)
    assert spec is not None
    assert auto.__spec__ is not None
    assert type(auto.__spec__.loader) is type(spec.loader)
    assert "exec_module" not in vars(auto.__spec__.loader)


def test_names_of_the_package() -> None:
    assert marlinq.__version__
    with warnings.catch_warnings():
        assert integration.MarlinqConfig is MarlinqConfig
    with pytest.raises(AttributeError, match="no attribute 'abacus'"):
        _ = integration.abacus
