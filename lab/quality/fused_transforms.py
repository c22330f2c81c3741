"""A checkpoint that computes the same with other weights, to be quantised: candidates outside the package.

    python lab/quality/fused_transforms.py MODEL OUT --kind heads
    python lab/quality/fused_transforms.py MODEL OUT --kind stream
    python lab/quality/fused_transforms.py MODEL OUT --kind channels --calibration FILE --power 0.25

For models of Llama's kind. ``heads`` rotates the values of each head by a random orthogonal matrix, in v_proj
and back in o_proj (SpinQuant's R2). ``stream`` rotates the residual stream (R1) by such a matrix, where
``marlinq rotate`` takes one with Hadamard's entries. ``channels`` makes the inputs of all layers more alike
(AWQ): a channel is divided by its mean magnitude on the text to ``--power``, in the norm or the projection
before.

Weights are stored in the dtype of MODEL; what this rounding costs ``evaluate`` tells of OUT itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from marlinq import load
from marlinq.calibration import load_tokenizer, read_documents
from marlinq.checkpoint import Checkpoint
from marlinq.core.dtypes import torch_dtype


def main() -> None:
    """Transform and write."""
    options = _options()
    torch.manual_seed(options.seed)
    live: Any = load(options.model, device="cpu", dtype="float32").model
    with torch.no_grad():
        {"heads": _heads, "stream": _stream, "channels": _channels}[options.kind](live, options)
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    untied = options.kind == "stream"
    dtype = next(iter(Checkpoint.open(options.model).tensors.values())).dtype
    stored = torch_dtype(dtype)
    tensors = {
        name: tensor.to(stored).contiguous()
        for name, tensor in live.state_dict().items()
        if untied or name != "lm_head.weight" or not config["tie_word_embeddings"]
    }
    config["tie_word_embeddings"] = config["tie_word_embeddings"] and not untied
    options.out.mkdir(parents=True)
    for file in options.model.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            shutil.copy(file, options.out)
    (options.out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors, options.out / "model.safetensors", metadata={"format": "pt"})


def _orthogonal(size: int) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()


def _heads(live: Any, options: argparse.Namespace) -> None:
    for layer in live.model.layers:
        attention = layer.self_attn
        size = attention.head_dim
        values, output = attention.v_proj.weight, attention.o_proj.weight
        each = len(values) // size
        shared = output.shape[1] // size // each
        turns = [_orthogonal(size) for _ in range(each)]
        for head in range(each):
            rows = slice(head * size, (head + 1) * size)
            values[rows] = turns[head] @ values[rows]
        for head in range(each * shared):
            columns = slice(head * size, (head + 1) * size)
            output[:, columns] = output[:, columns] @ turns[head // shared].t()


def _fold_norms(live: Any) -> None:
    head = live.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    pairs = [(live.model.norm, [head])]
    for layer in live.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        pairs.append((layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
        pairs.append((layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
    for norm, readers in pairs:
        for reader in readers:
            reader.weight.mul_(norm.weight)
        norm.weight.fill_(1.0)


def _stream(live: Any, options: argparse.Namespace) -> None:
    _fold_norms(live)
    turn = _orthogonal(live.config.hidden_size)
    readers, writers = [live.lm_head], []
    for layer in live.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers += [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
        writers += [attention.o_proj, mlp.down_proj]
    embedding = live.get_input_embeddings().weight
    embedding.copy_(embedding @ turn)
    for reader in readers:
        reader.weight.copy_(reader.weight @ turn)
    for writer in writers:
        writer.weight.copy_(turn.t() @ writer.weight)


def _channels(live: Any, options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(options.model)
    documents = read_documents(
        str(options.calibration),
        tokenizer=lambda: tokenizer,
        samples=64,
        max_length=512,
        seed=options.seed,
        vocabulary=live.config.vocab_size,
    )
    sums: dict[str, Tensor] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            # The first token's stream is a hundred times as large as others'.
            sums[name] = sums.get(name, 0) + given[0][0, 1:].abs().sum(0)

        return hook

    hooks = [
        module.register_forward_pre_hook(listen(name))
        for name, module in live.named_modules()
        if isinstance(module, nn.Linear)
    ]
    for document in documents:
        live(input_ids=torch.tensor([document.tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()

    def factors(name: str) -> Tensor:
        found = sums[name].clamp(min=1e-6).pow(options.power)
        return found / (found.max() * found.min()).sqrt()

    for index, layer in enumerate(live.model.layers):
        at = f"model.layers.{index}"
        attention, mlp = layer.self_attn, layer.mlp
        s = factors(f"{at}.self_attn.q_proj")
        layer.input_layernorm.weight.div_(s)
        for reader in (attention.q_proj, attention.k_proj, attention.v_proj):
            reader.weight.mul_(s)
        s = factors(f"{at}.mlp.gate_proj")
        layer.post_attention_layernorm.weight.div_(s)
        for reader in (mlp.gate_proj, mlp.up_proj):
            reader.weight.mul_(s)
        s = factors(f"{at}.mlp.down_proj")
        mlp.up_proj.weight.div_(s[:, None])
        mlp.down_proj.weight.mul_(s)
        # Heads that share values share their scales.
        s = factors(f"{at}.self_attn.o_proj")
        size, each = attention.head_dim, len(attention.v_proj.weight) // attention.head_dim
        s = s.view(each, -1, size).log().mean(1, keepdim=True).exp()
        repeated = s.expand(-1, attention.o_proj.weight.shape[1] // size // each, -1).flatten()
        attention.v_proj.weight.div_(s.flatten()[:, None])
        attention.o_proj.weight.mul_(repeated)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=["heads", "stream", "channels"], required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--power", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
