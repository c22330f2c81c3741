"""The comparison of the stub with a published vLLM finds names that changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.vllm import stub
from tests.interop.vllm_differences import compared


def more_that_is_optional(mod: Any, name: str, new: Any, device: str = "cpu") -> None: ...


def renamed(layer: Any, name: str, new: Any) -> None: ...


def asks_for_more(mod: Any, name: str, new: Any, device: str) -> None: ...


class Kernel:
    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str) -> None: ...

    @classmethod
    def can_implement(cls, c: Any) -> bool: ...

    def apply_weights(self, layer: Any, x: Any) -> None: ...


@pytest.mark.parametrize(
    ("real", "value", "words"),
    [
        (stub.replace_parameter, stub.replace_parameter, []),
        (more_that_is_optional, stub.replace_parameter, []),
        (renamed, stub.replace_parameter, ["layer, name, new"]),
        (asks_for_more, stub.replace_parameter, ["mod, name, new, device"]),
        (None, stub.replace_parameter, ["is gone"]),
        ((), [], ["is a tuple, not a list"]),
        (stub.MoeConfig, stub.MoeConfig, []),
        (stub.MoeConfig, stub.Parallel, ["dp_size", "use_all2all_kernels", "enable_eplb"]),
        (stub.OtherKernel, stub.OtherKernel, []),
        (
            Kernel,
            stub.OtherKernel,
            ["__init__ takes", "apply_weights takes", "process_weights_after_loading"],
        ),
    ],
)
def test_differences(real: Any, value: Any, words: list[str]) -> None:
    found = list(compared("vllm.it", real, value))
    assert len(found) == len(words)
    assert all(any(word in sentence for sentence in found) for word in words)
