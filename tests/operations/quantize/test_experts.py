"""Which tokens experts are calibrated on, and what is said of those that few tokens reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from marlinq.calibration import load_tokenizer, make_batches, read_documents
from marlinq.core.errors import UnsupportedError
from marlinq.methods import METHODS
from marlinq.operations.quantize import QuantizeReport, Recipe, quantize, solve
from marlinq.operations.quantize import expert_statistics as calibration
from marlinq.operations.quantize.override import Override
from tests.testing.mixtures import calibration_text, save_mixture

LAYER = "model.layers.0.mlp"
NOBODYS = 3
SAMPLES, LENGTH = 8, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE whose first layer never chooses expert 3, and rarely expert 2."""
    root = tmp_path_factory.mktemp("mixture")
    save_mixture(root / "model", "qwen3-moe", num_experts_per_tok=1)
    path = root / "model" / "model.safetensors"
    tensors = load_file(path)
    router = tensors[f"{LAYER}.gate.weight"]
    # Nothing can be larger than the greatest of a number and its negative, but for zero.
    router[1] = -router[0]
    router[NOBODYS] = 0
    router[2] *= 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    calibration_text(root)
    return root


def run(folder: Path, out: Path, device: str = "cpu", **changes: Any) -> QuantizeReport:
    recipe = Recipe(
        group_size=32, calibration=str(folder / "calibration.txt"), samples=SAMPLES, max_length=LENGTH
    ).replace(**changes)
    return quantize(folder / "model", out, recipe=recipe, device=device)


def tokens_of(report: QuantizeReport, part: str = "gate_proj", layer: int = 0) -> list[int]:
    return [report.modules[f"model.layers.{layer}.mlp.experts.{e}.{part}"].tokens for e in range(4)]


def inputs_of_the_layer(folder: Path) -> tuple[Tensor, Any]:
    """(inputs of the first layer's experts, computed by the original model; the layer's module)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    documents = read_documents(
        str(folder / "calibration.txt"),
        tokenizer=lambda: load_tokenizer(folder / "model", trust_remote_code=False),
        samples=SAMPLES,
        max_length=LENGTH,
        seed=0,
        vocabulary=288,
    )
    seen: list[Tensor] = []
    layer = model.model.layers[0].mlp
    with torch.no_grad():
        hook = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2)))
        for batch in make_batches(documents, token_budget=2048, pad=False):
            model(batch.ids)
        hook.remove()
    return torch.cat(seen), layer


def hessians_of_solves(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Filled, by module, while a run solves."""
    hessians: dict[str, Tensor] = {}
    method = METHODS["gptq"]
    solve = method.solve

    def watch(weights, statistics, scheme, options, *, names):
        # The solve shrinks it in place.
        hessians.update(dict.fromkeys(names, statistics.hessian().clone()))
        return solve(weights, statistics, scheme, options, names=names)

    monkeypatch.setattr(method, "solve", watch)
    return hessians


def test_an_expert_is_calibrated_on_the_tokens_that_choose_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, layer = inputs_of_the_layer(folder)
    chosen = (hidden @ layer.gate.weight.t()).argmax(-1)
    hessians = hessians_of_solves(monkeypatch)
    report = run(folder, tmp_path / "out", expert_tokens=0)
    counts = [int((chosen == expert).sum()) for expert in range(4)]
    assert counts[NOBODYS] == 0
    assert tokens_of(report) == tokens_of(report, "down_proj") == counts
    assert sum(counts) == report.modules["model.layers.0.self_attn.q_proj"].tokens
    for expert in range(3):
        x = hidden[chosen == expert]
        gate, up = functional.linear(x, layer.experts.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = functional.silu(gate) * up
        for part, inputs in (("gate_proj", x), ("up_proj", x), ("down_proj", inner)):
            expected = 2 * inputs.t() @ inputs / inputs.shape[0]
            # float32 sums of some hundred products in another order.
            torch.testing.assert_close(
                hessians[f"{LAYER}.experts.{expert}.{part}"], expected, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("way", ["blend", "all", "shared"])
def test_a_starved_expert_gets_the_named_fallback(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, layer = inputs_of_the_layer(folder)
    chosen = (hidden @ layer.gate.weight.t()).argmax(-1)
    hessians = hessians_of_solves(monkeypatch)
    counts = [int((chosen == expert).sum()) for expert in range(4)]
    least = sorted(counts)[1] + 1  # the two rarest experts have fewer
    report = run(folder, tmp_path / "out", expert_tokens=least, expert_fallback=way)
    starved = [expert for expert in range(4) if counts[expert] < least]
    assert len(starved) == 2
    meaning = {"blend": "blended", "all": "Hessian of all tokens", "shared": "of all its experts"}[way]
    for expert in range(4):
        found = report.modules[f"{LAYER}.experts.{expert}.down_proj"]
        assert found.tokens == counts[expert]
        if expert in starved:
            assert found.fallback is not None
            assert f"{counts[expert]} tokens, fewer than {least}" in found.fallback
            assert meaning in found.fallback
        else:
            assert found.fallback is None

    def second(expert: int, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, layer.experts.gate_up_proj[expert]).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def mean(x: Tensor) -> Tensor:
        return 2 * x.t() @ x / max(x.shape[0], 1)

    pool = torch.cat([second(expert, hidden[chosen == expert]) for expert in range(4)])
    for expert in starved:
        own, share = hidden[chosen == expert], 1 - counts[expert] / least
        wanted = {
            "gate_proj": (mean(own), mean(hidden)),
            "down_proj": (mean(second(expert, own)), mean(second(expert, hidden))),
        }
        for part, (mine, whole) in wanted.items():
            if way == "shared" and part == "down_proj":
                whole = mean(pool)
            expected = (1 - share) * mine + share * whole if way == "blend" else whole
            torch.testing.assert_close(
                hessians[f"{LAYER}.experts.{expert}.{part}"], expected, rtol=1e-4, atol=1e-5
            )


def test_the_report_tells_of_experts_in_few_lines(folder: Path, tmp_path: Path) -> None:
    report = run(folder, tmp_path / "out", expert_tokens=10_000)
    (facts,) = report.display()
    text = "\n".join(f"{label} {value}" for label, value in facts.rows)
    assert "8 of 8 experts" in text
    assert "fewer than 10000" in text
    assert text.count("fallback") < 4


def test_all_tokens_for_every_expert(folder: Path, tmp_path: Path) -> None:
    report = run(folder, tmp_path / "all", experts="all")
    everything = report.modules["model.layers.0.self_attn.q_proj"].tokens
    for layer in (0, 1):
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert tokens_of(report, part, layer) == [everything] * 4
    assert not report.fallbacks


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("changes", [{}, {"experts": "all"}, {"expert_fallback": "shared"}])
def test_slices_change_no_byte(
    changes: dict[str, Any], device: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    slices = calibration._slices

    def watch(count: int, size: int) -> Any:
        sizes.append(size)
        return slices(count, size)

    monkeypatch.setattr(calibration, "_slices", watch)
    outputs = []
    for limit in (1, 1 << 30):
        monkeypatch.setattr(calibration, "_free_bytes", lambda device, limit=limit: limit)
        run(folder, tmp_path / str(limit), device, **changes)
        outputs.append(load_file(tmp_path / str(limit) / "model.safetensors"))
    assert sizes[:2] == [1, 1]
    assert sizes[-1] > 4
    assert outputs[0].keys() == outputs[1].keys()
    for key, value in outputs[0].items():
        assert torch.equal(value, outputs[1][key]), key


def test_portions_of_the_layers_inputs_agree(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch a portion, against all batches in one that is kept: sums are taken in another order."""
    reports, portions = [], []
    given = calibration.ExpertCalibration._given

    def watch(*args: Any) -> Any:
        portions.append(0)
        for portion in given(*args):
            portions[-1] += 1
            yield portion

    monkeypatch.setattr(calibration.ExpertCalibration, "_given", watch)
    monkeypatch.setattr(solve, "TOKEN_BUDGET", {"cpu": 2 * LENGTH})
    for limit in (1, 1 << 28):
        monkeypatch.setattr(calibration, "_PORTION_BYTES", {"cpu": limit})
        reports.append(run(folder, tmp_path / str(limit), experts="routed", expert_tokens=40))
    # Two layers, the first looked at twice: the second time for experts that few tokens chose.
    assert portions == [SAMPLES // 2] * 3 + [1] * 3
    assert reports[0].fallbacks
    assert reports[0].fallbacks.keys() == reports[1].fallbacks.keys()
    for name, report in reports[0].modules.items():
        assert reports[1].modules[name].tokens == report.tokens
        # Rounding to 4 bits makes a difference of one code out of a tie, of which there are few.
        assert reports[1].modules[name].relative_error == pytest.approx(report.relative_error, rel=0.02)


def test_an_interrupted_run_continues_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "whole")
    recipe = Recipe(
        group_size=32, calibration=str(folder / "calibration.txt"), samples=SAMPLES, max_length=LENGTH
    )

    def stop(what: str, done: int, total: int) -> None:
        if what == "quantising blocks" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(folder / "model", tmp_path / "cut", recipe=recipe, device="cpu", progress=stop)
    report = quantize(folder / "model", tmp_path / "cut", recipe=recipe, device="cpu", resume=True)
    assert report.resumed_blocks == 1
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(value, cut[key]) for key, value in whole.items())


def test_experts_of_a_layer_need_one_scheme(folder: Path, tmp_path: Path) -> None:
    for text in (r"experts\.2\.=skip", r"experts\.0\.gate_proj=symmetric=false", "down_proj=group_size=-1"):
        with pytest.raises(UnsupportedError, match=r"one scheme for all loaders.*mlp\.experts"):
            run(folder, tmp_path / "out", method="rtn", overrides=(Override.parse(text),))


def test_groups_that_cannot_be_split_over_eight_gpus_are_told(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "qwen3-moe", moe_intermediate_size=256)
    recipe = Recipe(method="rtn", group_size=32, overrides=(Override.parse("experts=group_size=64"),))
    with pytest.warns(UserWarning, match=r"256 channels in groups of 64 .* 4 GPUs; --group-size 32"):
        quantize(tmp_path / "model", tmp_path / "64", recipe=recipe, device="cpu")
    quantize(tmp_path / "model", tmp_path / "32", recipe=Recipe(method="rtn", group_size=32), device="cpu")


def test_an_automatic_group_size_divides_all_products(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "qwen3-moe")
    report = quantize(
        tmp_path / "model", tmp_path / "out", recipe=Recipe(method="rtn", group_size="auto"), device="cpu"
    )
    found = {name: module.group_size for name, module in report.modules.items() if ".experts." in name}
    # H = 64 and I = 32; one group of 32 is one per channel, which every loader reads as either.
    assert {size for name, size in found.items() if "down" not in name} == {32}
    assert {size for name, size in found.items() if "down" in name} == {-1}


def test_never_more_than_one_block_is_dense(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from marlinq.models import ModelInstance

    present: dict[int, int] = {}
    materialise = ModelInstance.materialise

    def watch(self: ModelInstance, *args: Any, **kwargs: Any) -> Any:
        module = materialise(self, *args, **kwargs)
        dense = [
            experts.name
            for block in self.blueprint.blocks
            for experts in block.experts
            if not self.model.get_parameter(experts.parameters[0]).is_meta
        ]
        present[len(present)] = len(dense)
        return module

    monkeypatch.setattr(ModelInstance, "materialise", watch)
    run(folder, tmp_path / "out")
    assert max(present.values()) == 1
