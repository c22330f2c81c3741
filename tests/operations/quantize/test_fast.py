"""A method that is not sequential sees what the original makes of the text, in one run of each block."""

from __future__ import annotations

import json
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
from marlinq.operations.quantize import plan_quantize, quantize
from marlinq.operations.quantize.blocks import BlockQuantizer
from marlinq.operations.quantize.planned_text import recipes_of_parts, tokens_looked_at
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.mixtures import save_mixture
from tests.testing.original_folders import READ, folder_bytes, save_tiny

FAST = READ.replace(quality="fast")


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
def test_importance_comes_from_the_originals_inputs(
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


def test_no_more_text_is_used_than_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    text = tmp_path / "ids.jsonl"
    rows = [{"input_ids": [(7 * row + place) % 50 for place in range(40)]} for row in range(8)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(Imatrix, "enough_tokens", 200)
    told = "200 tokens are used, enough for imatrix; --tokens N"
    for name, recipe, tokens in (
        ("enough", FAST.replace(calibration=str(text)), 200),
        ("asked", FAST.replace(calibration=str(text), tokens=320), 320),
        ("self", FAST.replace(calibration="self"), 200),
    ):
        messages: list[str] = []
        plan = plan_quantize(source, tmp_path / name, recipe=recipe, device="cpu")
        report = quantize(source, tmp_path / name, recipe=recipe, device="cpu", message=messages.append)
        assert report.calibration is not None
        assert (plan.tokens, report.calibration["tokens"]) == (tokens, tokens), name
        limits = [line for line in messages if "tokens are used" in line]
        assert len(limits) == (name == "enough"), name
        assert all(told in line for line in limits), name
        if name == "self":
            announced = "writes its calibration text: 200 tokens (enough for imatrix)"
            assert any(announced in line for line in messages)


def test_the_token_limit_is_shared_and_options_override_it() -> None:
    recipe = Recipe.from_dict({"quality": "fast", "calibration": ["a.txt=3", "self=1"]})
    assert Imatrix.enough_tokens == 65_536
    assert [part.most for part in recipes_of_parts(recipe)] == [49_152, 16_384]
    assert [part.most for part in recipes_of_parts(recipe.replace(tokens=100_000))] == [None, None]
    # Tuning learns from every token, and GPTQ from more.
    assert tokens_looked_at(recipe.replace(tune_steps=10)) is None
    assert tokens_looked_at(Recipe()) is None
