from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.calibration import Document, HiddenStates, make_batches
from marlinq.checkpoint import Checkpoint, CheckpointWriter
from marlinq.core.errors import NumericsError, UsageError
from marlinq.methods import GPTQOptions, outputs
from marlinq.models import BlockReplay, ModelInstance, build_blueprint
from marlinq.operations.quantize import QuantizeReport, gradients, quantize, quantize_model
from marlinq.operations.quantize.budget import Work, gradient_jobs, gradient_tokens
from marlinq.operations.quantize.gradients import LossGradients
from marlinq.operations.quantize.override import Override
from tests.testing.mixtures import calibration_text, save_mixture
from tests.testing.original_folders import READ, folder_bytes, save_tiny
from tests.testing.tiny_models import tiny_model

CPU = torch.device("cpu")
MINDED = READ.replace(output_hessian=True)


def taken(
    source: Path, folder: Path, documents: list[Document], jobs: list[int]
) -> tuple[ModelInstance, LossGradients, HiddenStates]:
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source=str(source), tensors=checkpoint.tensors)
    instance = ModelInstance(blueprint, checkpoint, device=CPU, dtype=torch.float32)
    replay = BlockReplay(instance)
    batches = make_batches(documents, token_budget=64)
    first = list(replay.record(batch.ids for batch in batches))
    states = HiddenStates(
        [tuple(x.shape) for x in first],  # type: ignore[misc]
        dtype=torch.float32,
        device=CPU,
        limit_bytes=1 << 30,
        folder=folder,
    )
    for number, hidden in enumerate(first):
        states.store(number, hidden)
    found = LossGradients(
        instance,
        replay,
        batches,
        jobs,
        states,
        logits=7,
        seed=0,
        folder=folder,
        device_bytes=0,
        progress=lambda *_: None,
    )
    return instance, found, states


def likeliest(rows: Tensor, predict: Any, generator: torch.Generator) -> Tensor:
    """In place of drawn labels the likeliest ones, which can be found again."""
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        logits = predict(leaf)
        loss = F.cross_entropy(logits, logits.argmax(-1), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bloom", "phi3"])
def test_moments_are_those_of_a_backward_pass_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = save_tiny(name, tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    documents = [
        Document(tuple(torch.randint(3, 60, (n,), generator=generator).tolist())) for n in (20, 31, 17)
    ]
    monkeypatch.setattr(gradients, "_slope", likeliest)
    # Longest first, two to a batch.
    instance, found, states = taken(source, tmp_path, documents, [0, 1])
    model = tiny_model(name).eval()
    linears = {each.name: each for each in instance.blueprint.projections() if each.whole}
    sums = {key: torch.zeros(each.out_features, each.out_features) for key, each in linears.items()}
    for key, each in linears.items():

        def listen(module: Any, given: Any, gradient: Any, key: str = key) -> None:
            rows = gradient[0].reshape(-1, gradient[0].shape[-1])
            sums[key].addmm_(rows.t(), rows)

        model.get_submodule(each.module).register_full_backward_hook(listen)
    for document in documents:
        logits = model(input_ids=torch.tensor([document.tokens]), use_cache=False).logits[0]
        F.cross_entropy(logits, logits.argmax(-1), reduction="sum").backward()
    batches = make_batches(documents, token_budget=64)
    hidden = [states.load(number) for number in range(len(batches))]
    for index, block in enumerate(instance.blueprint.blocks):
        instance.block(index)
        members = [each for each in linears.values() if each.name.startswith(block.name + ".")]
        assert members
        for number, state in enumerate(hidden):
            states.store(number, state)
        for key, moment in found.moments(index, members, states).items():
            mine = moment.hessian() * moment.tokens / 2
            torch.testing.assert_close(mine, sums[key], rtol=1e-3, atol=1e-5 * float(sums[key].abs().max()))
        hidden = [found._replay.run(index, number, state) for number, state in enumerate(hidden)]
        instance.release_block(index)


def test_labels_are_drawn_from_what_is_predicted() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    rows = logits.repeat(40_000, 1)
    slope = gradients._slope(rows, lambda x: x, torch.Generator().manual_seed(0))
    p = logits.softmax(-1)[0]
    drawn = (p - slope).mean(0)
    # Five standard deviations of a share.
    assert torch.all((drawn - p).abs() < 5 * (p * (1 - p) / len(rows)).sqrt())
    assert torch.equal((p - slope > 0.5).sum(-1), torch.ones(len(rows), dtype=torch.int64))
    # Their second moment is the curvature of the divergence.
    moment = slope.t() @ slope / len(rows)
    torch.testing.assert_close(moment, p.diag() - p.outer(p), rtol=0, atol=0.01)


@pytest.fixture(scope="module", autouse=True)
def few_parts() -> Iterator[None]:
    """Outputs are solved in four parts, where there would be sixteen solves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "_MOST_PARTS", 4)
        yield


@pytest.fixture(scope="module")
def minded_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, QuantizeReport]:
    """A model, what a run that minds gradients makes of it, and its report; nobody changes them."""
    folder = tmp_path_factory.mktemp("minded")
    source = save_tiny("llama", folder / "model", blocks=2)
    return source, folder / "out", quantize(source, folder / "out", recipe=MINDED, device="cpu")


def test_a_run_with_gradients_repeats_its_bytes(
    tmp_path: Path, minded_run: tuple[Path, Path, QuantizeReport]
) -> None:
    source, folder, minded = minded_run
    plain = quantize(source, tmp_path / "plain", recipe=READ, device="cpu")
    quantize(source, tmp_path / "again", recipe=MINDED, device="cpu")
    expected = folder_bytes(folder)
    assert folder_bytes(tmp_path / "again") == expected
    assert expected["model.safetensors"] != (tmp_path / "plain" / "model.safetensors").read_bytes()
    assert minded.modules.keys() == plain.modules.keys()
    assert all(module.fallback is None for module in minded.modules.values())
    manifest = json.loads((folder / "marlinq.json").read_text())
    assert manifest["recipe"]["output_hessian"] is True
    assert manifest["quality"]["changed"] == ["output_hessian"]


def test_a_resumed_run_uses_the_same_gradients(
    tmp_path: Path, minded_run: tuple[Path, Path, QuantizeReport]
) -> None:
    source, whole, _ = minded_run
    commit = CheckpointWriter.commit
    count = 0

    def dying(self: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        commit(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "commit", dying)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / "out", recipe=MINDED, device="cpu")
    report = quantize(source, tmp_path / "out", recipe=MINDED, device="cpu", resume=True)
    assert 0 < report.resumed_blocks < report.blocks
    assert folder_bytes(tmp_path / "out") == folder_bytes(whole)


def test_some_modules_alone(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    only = READ.replace(overrides=(Override(r"layers\.2\..*down_proj", settings={"output_hessian": True}),))
    plain = quantize(source, tmp_path / "plain", recipe=READ, device="cpu")
    some = quantize(source, tmp_path / "some", recipe=only, device="cpu")
    differing = {
        name
        for name in plain.modules
        if plain.modules[name].relative_error != some.modules[name].relative_error
    }
    assert differing == {"model.layers.2.mlp.down_proj"}


def test_without_calibration_no_gradients_are_taken(tmp_path: Path) -> None:
    recipe = READ.replace(quality="best", method="rtn", tune_steps=0)
    assert not hasattr(recipe.options, "output_hessian")
    assert recipe.replace(quality="best", method="gptq").options == GPTQOptions(output_hessian=True)
    assert recipe.replace(quality="default").options == GPTQOptions()


def test_gradients_are_left_out_with_experts(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "mixtral")
    recipe = MINDED.replace(calibration=str(calibration_text(tmp_path)))
    with pytest.warns(UserWarning, match="output_hessian is left out, because the model is a mixture"):
        quantize(tmp_path / "model", tmp_path / "out", recipe=recipe, device="cpu")
    quantize(
        tmp_path / "model", tmp_path / "plain", recipe=recipe.replace(output_hessian=False), device="cpu"
    )
    left = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert left == (tmp_path / "plain" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "option"), [({"output_hessian": True}, "--no-output-hessian"), ({"tune_steps": 1}, "--tune-")]
)
def test_ranks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], option: str
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    two = SimpleNamespace(size=2, first=True)
    monkeypatch.setattr(quantize_model, "joined_ranks", lambda device: nullcontext(two))
    with pytest.raises(UsageError, match=rf"one process, found 2 ranks; .*{option}"):
        quantize(source, tmp_path / "out", recipe=READ.replace(**changes), device="cpu")
    assert not (tmp_path / "out").exists()


def test_nan_gradients_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(gradients, "_slope", lambda rows, *_: torch.full_like(rows, float("inf")))
    with pytest.raises(NumericsError, match=r"gradients hold NaN or infinity in float32; pass --no-output"):
        quantize(source, tmp_path / "out", recipe=MINDED, device="cpu")


@pytest.mark.parametrize(
    ("weights", "tokens", "expected"),
    [
        (1_000_000, [100] * 3, [0, 1, 2] * 4),
        (1_000_000, [8192] * 5, [0, 1, 2, 3, 4]),
        (1_000_000, [8192] * 20, list(range(0, 20, 3))),
        # 35,714 tokens of a model of 8 billion weights.
        (8_000_000_000, [8192] * 32, list(range(0, 32, 8))),
    ],
)
def test_gradients_are_taken_on_evenly_spaced_or_repeated_batches(
    weights: int, tokens: list[int], expected: list[int]
) -> None:
    work = Work(weights, weights, 0, 0, None)
    device = torch.device("cuda")
    assert gradient_jobs(tokens, work, device) == expected
    seen = sum(tokens[number] for number in expected)
    assert seen <= gradient_tokens(sum(tokens), work, device) or len(expected) == 1
