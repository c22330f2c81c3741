"""Output errors of one layer's weights on texts that the calibration did not see.

    python lab/quality/held_out.py MODEL --calibration FILE --text FILE [--block 10] [--tokens 20000]

The original runs as far as the block. Each projection is quantised with the Hessian of the first tokens of
FILE, shrunk by several shares, and its error is taken with the Hessians of other texts, those of FILE's last
documents among them. For projections that write to the residual stream, errors are relative to each token's
stream, and the Hessian is also tried with all tokens alike. Symmetric INT4, groups of 64; thousandths.

For models of Llama's modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from marlinq.calibration import load_tokenizer, read_documents
from marlinq.core.scheme import Scheme, integer_element
from marlinq.methods.gptq import solve_gptq
from marlinq.models.narrow import NarrowLinears

STREAMS = {"self_attn.o_proj": "mid", "mlp.down_proj": "out"}
NAMES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
SHRINKAGES = (0.0, 0.05, 0.1, 0.25, 0.4)
HELD_OUT = 40
TEXT_ROWS = 20


class _Stop(Exception):
    """The block has been reached and run."""


def main() -> None:
    """Print a line for each projection and setting."""
    options = _options()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(options.model)

    def documents(source: Path, samples: int) -> list[list[int]]:
        found = read_documents(
            str(source),
            tokenizer=lambda: tokenizer,
            samples=samples,
            max_length=options.max_length,
            seed=0,
            vocabulary=model.config.vocab_size,
        )
        return [list(document.tokens) for document in found]

    rows = documents(options.calibration, options.samples)
    texts = {source.name: documents(source, TEXT_ROWS) for source in options.texts}
    seen = _inputs(model, options.block, rows[:-HELD_OUT])
    others = {"held out": _inputs(model, options.block, rows[-HELD_OUT:])}
    others |= {name: _inputs(model, options.block, text) for name, text in texts.items()}
    scheme = Scheme(integer_element(4), 64, "midpoint", "float16")
    for name in NAMES:
        weight = model.model.layers[options.block].get_submodule(name).weight.detach()
        stream = STREAMS.get(name)
        judges = {text: _hessian(found, name, stream) for text, found in others.items()}
        for alike in (False, True) if stream else (True,):
            known = _hessian(seen, name, None if alike else stream, options.tokens)
            for share in SHRINKAGES:
                used = (1 - share) * known + share * torch.diag(known.diagonal())
                lost = weight - solve_gptq(weight, used, scheme)[0].dequantize()
                errors = {
                    text: 1e3 * float(((lost @ h) * lost).sum() / ((weight @ h) * weight).sum())
                    for text, h in judges.items()
                }
                told = ", ".join(f"{text} {error:.3f}" for text, error in errors.items())
                weighed = "" if not stream else ", tokens alike" if alike else ", by their streams"
                print(f"{name}{weighed}, shrinkage {share}: {told}", flush=True)


def _inputs(model: nn.Module, block: int, rows: Iterable[list[int]]) -> dict[str, Tensor]:
    """Inputs of projections and the residual stream behind them, [tokens, ...]."""
    found: dict[str, list[Tensor]] = {}
    layers = model.get_submodule("model.layers")
    layer = layers[block]

    def keep(name: str, x: Tensor) -> None:
        found.setdefault(name, []).append(x[0])

    def ended(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        keep("out", output)
        raise _Stop

    watched = {name: layer.get_submodule(name) for name in NAMES} | {"mid": layer.post_attention_layernorm}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: keep(name, args[0]))
        for name, module in watched.items()
    ]
    hooks.append(layer.register_forward_hook(ended))
    with torch.no_grad(), NarrowLinears(torch.bfloat16):
        for row in rows:
            with suppress(_Stop):
                model(torch.tensor([row]))
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def _hessian(found: Mapping[str, Tensor], name: str, stream: str | None, tokens: int | None = None) -> Tensor:
    x = found[name][:tokens]
    if stream:
        x = x / found[stream][:tokens].square().mean(dim=1, keepdim=True).sqrt()
    return 2 * x.t() @ x / len(x)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", dest="texts", type=Path, action="append", default=[])
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=104, help="documents, the last 40 of them held out")
    parser.add_argument("--max-length", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()
