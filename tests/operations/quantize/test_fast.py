"""A method that is not sequential sees what the original makes of the text, in one run of each block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from marlinq.calibration import Batch
from marlinq.methods.imatrix import Imatrix, InputPower
from marlinq.models import BlockReplay
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.blocks import BlockQuantizer
from tests.testing.mixtures import save_mixture
from tests.testing.original_folders import RECIPE, folder_bytes, save_tiny

FAST = RECIPE.replace(quality="fast")


def run_watched(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Tensor], list[Batch]]:
    """The importance that each projection was solved with, and the text."""
    seen: dict[str, Tensor] = {}
    texts: list[Batch] = []
    solve, start = Imatrix.solve, BlockQuantizer.run

    def solving(
        self: Imatrix, weights: Sequence[Tensor], statistics: InputPower, *rest: Any, names: Sequence[str]
    ) -> Any:
        seen.update(dict.fromkeys(names, statistics.importance().clone()))
        return solve(self, weights, statistics, *rest, names=names)

    def starting(self: BlockQuantizer) -> None:
        texts.extend(self._batches)
        start(self)

    monkeypatch.setattr(Imatrix, "solve", solving)
    monkeypatch.setattr(BlockQuantizer, "run", starting)
    quantize(source, out, recipe=FAST, device="cpu")
    return seen, texts


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_importance_is_that_of_the_originals_inputs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model"
    if name == "llama":
        save_tiny(name, source)
    else:
        save_mixture(source, name)
    seen, batches = run_watched(source, tmp_path / "out", monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    sums: dict[str, Tensor] = {}
    tokens = 0

    def watch(of: str, batch: Batch) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = args[0].reshape(-1, args[0].shape[-1])[batch.mask().flatten()]
            sums[of] = sums.get(of, torch.zeros(())) + rows.double().square().sum(dim=0)

        return hook

    linears = {
        of: module for of, module in model.named_modules() if of in seen and isinstance(module, nn.Linear)
    }
    assert len(linears) >= 8  # attention's, which every token reaches
    for batch in batches:
        handles = [module.register_forward_pre_hook(watch(of, batch)) for of, module in linears.items()]
        with torch.no_grad():
            model(input_ids=batch.ids, use_cache=False)
        tokens += int(batch.mask().sum())
        for handle in handles:
            handle.remove()
    for of, total in sums.items():
        # Both are float32 passes in batches of another shape.
        assert torch.allclose(seen[of].double(), total / tokens, rtol=1e-4), of


def test_each_block_runs_once_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    runs: list[tuple[int, int]] = []
    call = BlockReplay.call

    def counted(self: BlockReplay, block: int, batch: int, *rest: Any) -> Tensor:
        runs.append((block, batch))
        return call(self, block, batch, *rest)

    monkeypatch.setattr(BlockReplay, "call", counted)
    report = quantize(source, tmp_path / "out", recipe=FAST, device="cpu")
    assert len(runs) == len(set(runs))
    assert {block for block, _ in runs} == set(range(report.blocks))


def test_an_interrupted_run_goes_on_from_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    quantize(source, tmp_path / "whole", recipe=FAST, device="cpu")
    advance = BlockQuantizer._block
    with pytest.MonkeyPatch.context() as patch:

        def stop_in_the_last(self: BlockQuantizer, index: int, *rest: Any) -> None:
            if index == 2:
                raise KeyboardInterrupt
            advance(self, index, *rest)

        patch.setattr(BlockQuantizer, "_block", stop_in_the_last)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / "out", recipe=FAST, device="cpu")
    quantize(source, tmp_path / "out", recipe=FAST, device="cpu", resume=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
