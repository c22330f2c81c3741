"""Measures published quantisers with the model, the calibration text and the evaluation of quality.py.

    python lab/quality/quality_peers.py tokens MODEL --calibration FILE --out TOKENS
    PEER_PYTHON lab/quality/quality_peers.py quantize MODEL TOKENS WORK --method NAME
    python lab/quality/quality_peers.py evaluate MODEL FOLDER... --text FILE

``tokens`` writes the token ids of the documents that marlinq calibrates on. ``quantize`` runs in an
environment that holds the peer and needs no marlinq: the peer's own code writes WORK/NAME-SETTING.
``evaluate`` reads every folder through marlinq and computes in float32, so nothing but the weights differs.

Figures in docs/results.md: the hardware of quality.py; llm-compressor 0.14.0.1, GPTQModel 7.6.0, AutoRound
0.16.1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Only in this script's own process, because importing the file must not hide the GPU.
if __name__ == "__main__":
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its thread pool needs two workers even on two cores
    if "cuda" not in sys.argv:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

BITS = 4
PEER_NOTE = "peer.json"

Options = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """The task of every peer.

    Attributes:
        model: folder of the original.
        out: folder to write.
        documents: token ids of the calibration documents.
        group_size: input channels per scale; -1 for one scale per output channel.
        symmetric: whether there are no zero points.
        device: torch device.
        row: tokens of the rows of AutoRound, and of llm-compressor's AutoRound.
    """

    model: Path
    out: Path
    documents: list[list[int]]
    group_size: int
    symmetric: bool
    device: str
    row: int


Writer = Callable[[Task, Options], None]


def write_gptqmodel(task: Task, options: Options) -> None:
    """GPTQModel; ``options`` are ``QuantizeConfig`` arguments."""
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=BITS,
        group_size=task.group_size,
        sym=task.symmetric,
        offload_to_disk=False,
        **_objects(options),
    )
    loaded = GPTQModel.load(str(task.model), config, trust_remote_code=False, dtype=torch.float32)
    loaded.quantize(_examples(task.documents), batch_size=1)
    loaded.save(str(task.out))


def write_llmcompressor(task: Task, options: Options) -> None:
    """llm-compressor.

    ``options``: "weights" are ``QuantizationArgs``, "gptq", "awq" and "signround" arguments of the modifiers.
    Without "gptq" and "signround" the weights are rounded to nearest. "signround" gets :func:`full_rows`.
    """
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    strategy = "channel" if task.group_size == -1 else "group"
    plain: Options = {"num_bits": BITS, "type": "int", "strategy": strategy, "symmetric": task.symmetric}
    if strategy == "group":
        plain["group_size"] = task.group_size
    scheme = {"targets": ["Linear"], "weights": plain | options.get("weights", {})}
    common = {"ignore": ["lm_head"], "config_groups": {"group_0": scheme}}
    recipe: list[Any] = []
    if "awq" in options:
        if not torch.cuda.is_available():
            # llm-compressor always pins stored activations, which torch can't do without an accelerator.
            torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
        recipe.append(AWQModifier(**options["awq"]))
    documents = task.documents
    if "signround" in options:
        from llmcompressor.modifiers.autoround import AutoRoundModifier

        recipe.append(AutoRoundModifier(**common, **options["signround"]))
        documents = full_rows(documents, task.row, tokenizer.bos_token_id)
    elif "gptq" in options:
        recipe.append(GPTQModifier(**common, **options["gptq"]))
    else:
        recipe.append(QuantizationModifier(**common))
    # Ready batches, so that the peer neither cuts nor pads nor shuffles them.
    batches = [
        {
            "input_ids": torch.tensor([document]),
            "attention_mask": torch.ones(1, len(document), dtype=torch.int64),
        }
        for document in documents
    ]
    oneshot(
        model=loaded,
        processor=tokenizer,
        dataset=DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
        recipe=recipe,
        num_calibration_samples=len(batches),
    )
    # float16, as the other peers store it; codes are computed while saving and don't change by this rounding.
    loaded.to(torch.float16).save_pretrained(task.out, save_compressed=True)
    tokenizer.save_pretrained(task.out)


def full_rows(documents: list[list[int]], length: int, beginning: int | None) -> list[list[int]]:
    """Rows of ``length`` tokens cut from the concatenated documents; an incomplete last row is dropped.

    Each row begins with ``beginning``, the tokenizer's start token, which is removed from the documents; None
    if the tokenizer has none.
    """
    first = [] if beginning is None else [beginning]
    tokens = [
        token for document in documents for token in document[len(first) if document[:1] == first else 0 :]
    ]
    step = length - len(first)
    return [first + tokens[start : start + step] for start in range(0, len(tokens) - step + 1, step)]


def write_autoround(task: Task, options: Options) -> None:
    """AutoRound; ``options`` are its arguments.

    It drops documents shorter than its row, so it gets :func:`full_rows`.
    """
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task.model)
    rows = full_rows(task.documents, task.row, tokenizer.bos_token_id)
    mask = torch.ones(1, task.row, dtype=torch.int64)
    batches = [{"input_ids": torch.tensor([row]), "attention_mask": mask} for row in rows]
    quantizer = AutoRound(
        AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        tokenizer,
        bits=BITS,
        group_size=task.group_size,
        sym=task.symmetric,
        dataset=batches,
        seqlen=task.row,
        nsamples=len(rows),
        device_map=task.device,
        **options,
    )
    quantizer.quantize_and_save(str(task.out), format="auto_gptq")
    # AutoRound writes to a subfolder named after the model and the bits.
    for config in list(task.out.glob("*/config.json")):
        for file in config.parent.iterdir():
            file.rename(task.out / file.name)
        config.parent.rmdir()


METHODS: dict[str, tuple[str, Writer, Options]] = {
    "gptqmodel": ("gptqmodel", write_gptqmodel, {}),
    "gptqmodel-mse": ("gptqmodel", write_gptqmodel, {"mse": 2.4}),
    "gptqmodel-mse-static": (
        "gptqmodel",
        write_gptqmodel,
        {"mse": 2.4, "desc_act": True, "static_groups": True, "act_group_aware": False},
    ),
    "gptqmodel-mse-gptaq": ("gptqmodel", write_gptqmodel, {"mse": 2.4, "gptaq": {"alpha": 0.25}}),
    "gptqmodel-mse-foem": ("gptqmodel", write_gptqmodel, {"mse": 2.4, "foem": {"alpha": 0.0, "beta": 0.2}}),
    "llmc-rtn": ("llmcompressor", write_llmcompressor, {}),
    "llmc-gptq": ("llmcompressor", write_llmcompressor, {"gptq": {}}),
    "llmc-gptq-mse": (
        "llmcompressor",
        write_llmcompressor,
        {"gptq": {}, "weights": {"observer": "memoryless_mse"}},
    ),
    "llmc-gptq-imatrix": (
        "llmcompressor",
        write_llmcompressor,
        {"gptq": {}, "weights": {"observer": "imatrix_mse"}},
    ),
    "llmc-awq": ("llmcompressor", write_llmcompressor, {"awq": {}}),
    "llmc-awq-asym": ("llmcompressor", write_llmcompressor, {"awq": {}, "weights": {"symmetric": False}}),
    "llmc-awq-gptq": ("llmcompressor", write_llmcompressor, {"awq": {}, "gptq": {}}),
    "llmc-awq-signround": (
        "llmcompressor",
        write_llmcompressor,
        {"awq": {}, "signround": {"enable_torch_compile": False}},
    ),
    "llmc-awq-gptq-imatrix": (
        "llmcompressor",
        write_llmcompressor,
        {"awq": {}, "gptq": {}, "weights": {"observer": "imatrix_mse"}},
    ),
    "autoround": ("auto_round", write_autoround, {}),
    "autoround-best": ("auto_round", write_autoround, {"iters": 1000, "enable_alg_ext": True}),
    "autoround-rtn": ("auto_round", write_autoround, {"iters": 0}),
}


def tokens(options: argparse.Namespace) -> None:
    """Write what marlinq calibrates on, as a JSON list of documents of token ids."""
    from marlinq.calibration import load_tokenizer, read_documents
    from marlinq.checkpoint import Checkpoint

    documents = read_documents(
        str(options.calibration),
        tokenizer=lambda: load_tokenizer(options.model),
        samples=options.samples,
        max_length=options.max_length,
        seed=options.seed,
        vocabulary=Checkpoint.open(options.model).config["vocab_size"],
    )
    options.out.write_text(json.dumps([document.tokens for document in documents]), encoding="utf-8")
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens in {options.out}")


def quantize(options: argparse.Namespace) -> None:
    """Write WORK/METHOD-SETTING with the peer's code, and a note of versions, options and seconds."""
    package, write, arguments = METHODS[options.method]
    documents = json.loads(options.tokens.read_text(encoding="utf-8"))[: options.documents]
    setting = f"g{options.group_size}-{'asym' if options.asym else 'sym'}"
    out = options.work / f"{options.method}-{setting}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    start = time.perf_counter()
    task = Task(
        options.model,
        out,
        documents,
        options.group_size,
        not options.asym,
        options.device,
        options.row_length,
    )
    write(task, arguments)
    note = {
        "package": f"{package} {importlib.metadata.version(package)}",
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "options": arguments,
        "group_size": options.group_size,
        "symmetric": not options.asym,
        "device": options.device,
        "documents": len(documents),
        "row_length": options.row_length,
        "seconds": time.perf_counter() - start,
    }
    (out / PEER_NOTE).write_text(json.dumps(note, indent=2), encoding="utf-8")
    print(json.dumps(note))


def evaluate(options: argparse.Namespace) -> None:
    """Measure every checkpoint that is finished, print a table."""
    import marlinq

    original = marlinq.load(options.model, device=options.device, dtype="float32")
    _remember(original.model)
    print("| weights | made by | options | perplexity | mean KL, nats | top-1 agreement | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for folder in options.folders:
        measured = marlinq.evaluate(
            folder,
            against=original,
            text=str(options.text),
            windows=options.windows,
            length=options.length,
            device=options.device,
            dtype="float32",
        )
        written = folder / PEER_NOTE
        note = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
        row = {"name": folder.name, "original": measured.against_perplexity, **note, **measured.to_dict()}
        row["seconds"] = note.get("seconds")
        seconds = f"{row['seconds']:.0f}" if note else ""
        print(
            f"| {folder.name} | {note.get('package', 'marlinq')} | {json.dumps(note.get('options', {}))} "
            f"| {measured.perplexity:.3f} | {measured.kl:.4f} | {100 * (measured.top1_agreement or 0):.2f} % "
            f"| {seconds} |",
            flush=True,
        )
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
    print(f"original: perplexity {measured.against_perplexity:.3f}", file=sys.stderr)


def _remember(model: torch.nn.Module) -> None:
    """Caches the original's logits (4 bytes * windows * length * vocabulary), which all checkpoints need."""
    known: dict[tuple[int, ...], Any] = {}
    forward = model.forward

    def remembering(input_ids: torch.Tensor, **others: Any) -> Any:
        key = tuple(input_ids.flatten().tolist())
        if key not in known:
            known[key] = forward(input_ids=input_ids, **others)
        return known[key]

    model.forward = remembering


def _examples(documents: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"input_ids": document, "attention_mask": [1] * len(document)} for document in documents]


def _objects(options: Options) -> Options:
    from gptqmodel.quantization.config import FOEMConfig, GPTAQConfig

    classes = {"gptaq": GPTAQConfig, "foem": FOEMConfig}
    return {key: classes[key](**value) if key in classes else value for key, value in options.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("tokens")
    writing.add_argument("model", type=Path)
    writing.add_argument("--calibration", type=Path, required=True)
    writing.add_argument("--out", type=Path, required=True)
    writing.add_argument("--samples", type=int, default=64)
    writing.add_argument("--max-length", type=int, default=512)
    writing.add_argument("--seed", type=int, default=0)
    writing.set_defaults(run=tokens)
    making = commands.add_parser("quantize")
    making.add_argument("model", type=Path)
    making.add_argument("tokens", type=Path)
    making.add_argument("work", type=Path)
    making.add_argument("--method", choices=list(METHODS), required=True)
    making.add_argument("--group-size", type=int, default=64)
    making.add_argument("--asym", action="store_true", help="with zero points")
    making.add_argument("--device", default="cpu")
    making.add_argument("--documents", type=int, help="only the first ones")
    making.add_argument("--row-length", type=int, default=512, help="tokens of AutoRound's rows")
    making.set_defaults(run=quantize)
    measuring = commands.add_parser("evaluate")
    measuring.add_argument("model", type=Path)
    measuring.add_argument("folders", type=Path, nargs="+")
    measuring.add_argument("--text", type=Path, required=True)
    measuring.add_argument("--windows", type=int, default=32)
    measuring.add_argument("--length", type=int, default=1024)
    measuring.add_argument("--device", default="cpu")
    measuring.add_argument("--json", type=Path, help="append one line a checkpoint here")
    measuring.set_defaults(run=evaluate)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = _options()
    chosen.run(chosen)
