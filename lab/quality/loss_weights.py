"""GPTQ whose tokens count by what an error there does to the loss: a candidate outside the package.

    python lab/quality/loss_weights.py MODEL OUT --calibration FILE --power 1

The gradient of the loss on labels that the original draws from its own predictions (the Fisher information's)
is taken down for every token at the output of every linear layer, in one backward pass. A token's share in a
layer's Hessian is then the gradient's squared norm, raised to ``--power``; of layers that share an input the
sum. Everything else is the default's. ``--power 0`` is the default but for the residual stream's own weights,
which this replaces.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq import load, quantize
from marlinq.calibration import Batch, Document, load_tokenizer, read_documents
from marlinq.checkpoint import Checkpoint
from marlinq.operations.quantize import gathering
from marlinq.operations.quantize.recipe import Recipe

Energies = dict[tuple[int, ...], dict[str, Tensor]]


def main() -> None:
    """Take gradients, quantise."""
    options = _options()
    recipe = Recipe(
        group_size=options.group_size,
        calibration=str(options.calibration),
        samples=options.samples,
        max_length=options.max_length,
        seed=options.seed,
    )
    cache = options.gradients
    if cache is not None and cache.exists():
        energies = torch.load(cache, weights_only=True)
    else:
        tokenizer = load_tokenizer(options.model)
        documents = read_documents(
            str(options.calibration),
            tokenizer=lambda: tokenizer,
            samples=options.samples,
            max_length=options.max_length,
            seed=options.seed,
            vocabulary=Checkpoint.open(options.model).config["vocab_size"],
        )
        energies = gradients(options.model, documents, options.seed)
        if cache is not None:
            torch.save(energies, cache)
    weigh(energies, options.power, options.most)
    print(quantize(options.model, options.out, recipe=recipe, device="cpu").render())


def gradients(model: Path, documents: Sequence[Document], seed: int) -> Energies:
    """Squared norms of the gradients [T] of every token, by document and linear layer."""
    live: Any = load(model, device="cpu", dtype="float32").model
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, given: Any, gradient: tuple[Tensor, ...]) -> None:
            found[name] = gradient[0][0].square().sum(-1)

        return hook

    for name, module in live.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.register_full_backward_hook(listen(name))
    out: Energies = {}
    for document in documents:
        embedded = live.get_input_embeddings()(torch.tensor([document.tokens])).requires_grad_()
        logits = live(inputs_embeds=embedded, use_cache=False).logits[0]
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        F.cross_entropy(logits, labels, reduction="sum").backward()
        out[document.tokens] = dict(found)
    return out


def weigh(energies: Energies, power: float, most: float) -> None:
    """Makes the quantise operation weigh tokens."""

    class Weighted(gathering.Gathering):
        def __init__(self, instance: Any, replay: Any, method: Any, batches: Sequence[Batch], ranks: Any):
            super().__init__(instance, replay, method, batches, ranks)
            self._texts = [
                [tuple(row[:length].tolist()) for row, length in zip(batch.ids, batch.lengths, strict=True)]
                for batch in batches
            ]
            self._roots: dict[str, list[Tensor]] = {}

        def roots(self, name: str, batch: int) -> Tensor:
            """[B, T]: a token's input is multiplied by it."""
            if name not in self._roots:
                whole = torch.cat([_energy(each, name) for each in energies.values()]).pow(power)
                unit = float(whole.mean())
                padded = []
                for texts, shape in zip(self._texts, self.shapes, strict=True):
                    root = torch.zeros(shape)
                    for row, text in zip(root, texts, strict=True):
                        share = _energy(energies[text], name).pow(power) / unit
                        row[: len(text)] = share.clamp(max=most).sqrt()
                    padded.append(root)
                self._roots[name] = padded
            return self._roots[name][batch]

        def gather_late(
            self, index: int, members: Sequence[Any], states: Any, gathered: gathering.Gathered
        ) -> None:
            names = {name for group in gathered.late for name in group}
            late = [planned.projection for planned in members if planned.projection.name in names]
            assert self.original is not None
            for number, mask in enumerate(self.masks):
                inputs: dict[str, Tensor] = {}
                output = self.replay.inputs(index, number, states.load(number), late, inputs.__setitem__)
                assert output is not None
                for name, x in inputs.items():
                    _add_stream(
                        gathered.statistics[name],
                        x,
                        output,
                        self.original.output(number),
                        mask,
                        self.roots(name, number),
                    )

    class Block(gathering._Block):
        def receive(self, name: str, x: Tensor) -> None:
            if name not in self._places:
                root = self._all.roots(name, self._batch).view(*x.shape[:-1], 1)  # type: ignore[attr-defined]
                other = self._original.inputs.get(name)
                if other is not None:
                    self._original.inputs[name] = other * root
                x = x * root
            super().receive(name, x)

        def _reach(self, place: str, stream: Tensor) -> None:
            for name in [name for name in self._waiting if self._places[name] == place]:
                _add_stream(
                    self.statistics[name],
                    self._waiting.pop(name),
                    stream,
                    self._original.streams.get(place),
                    self._all.masks[self._batch],
                    self._all.roots(name, self._batch),  # type: ignore[attr-defined]
                )

    gathering._Block = Block  # type: ignore[misc]
    # Where the quantise operation looks for it.
    from marlinq.operations.quantize import blocks

    blocks.Gathering = Weighted  # type: ignore[misc]


def _add_stream(
    statistics: Any, x: Tensor, stream: Tensor, original: Tensor | None, mask: Tensor | None, root: Tensor
) -> None:
    root = root.view(*x.shape[:-1], 1)
    if original is None:
        statistics.add(x * root, mask)
    else:
        flat = [((original - stream) * root).flatten(0, -2), (x * root).flatten(0, -2)]
        statistics._add(flat[1], flat[0], mask)


_TOGETHER = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}


def _energy(by_name: Mapping[str, Tensor], name: str) -> Tensor:
    """Of the layers that share the input of ``name``, the first of them, [T]."""
    parent, _, last = name.rpartition(".")
    return torch.stack([by_name[f"{parent}.{each}"] for each in _TOGETHER.get(last, (last,))]).sum(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--power", type=float, default=1.0)
    parser.add_argument("--most", type=float, default=100.0, help="largest share, of a mean token's")
    parser.add_argument("--gradients", type=Path, help="where gradients are kept between runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
