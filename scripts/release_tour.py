"""Runs the installed ``marlinq`` command on a tiny model in a fresh environment.

    python scripts/release_tour.py FOLDER    # FOLDER is empty; python is the environment's

``release_check.py`` runs it with each version of Python, away from the repository, so that nothing but the
wheel is imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMANDS = (
    ("--version",),
    ("doctor",),
    ("quantize", "model", "int4", "--method", "rtn", "--group-size", "32", "--format", "compressed-tensors"),
    ("verify", "int4", "--against", "model"),
    ("inspect", "int4"),
    ("convert", "int4", "gptq", "--to", "gptq"),
    ("verify", "gptq", "--against", "model"),
    ("report", "gptq"),
)


def make_model(folder: Path) -> None:
    """A random Llama of two blocks, 64 channels wide."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        dtype="float16",
    )
    LlamaForCausalLM(config).half().save_pretrained(folder)


def main() -> None:
    """Makes the model and runs the commands; ends at the first that fails."""
    folder = Path(sys.argv[1]).resolve()
    make_model(folder / "model")
    command = str(Path(sys.executable).with_name("marlinq"))
    for arguments in COMMANDS:
        print("$ marlinq", *arguments, flush=True)
        code = subprocess.run([command, *arguments], cwd=folder, check=False).returncode
        if code != 0:
            sys.exit(f"error: marlinq {arguments[0]} ended with exit code {code}")


if __name__ == "__main__":
    main()
