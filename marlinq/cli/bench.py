"""``marlinq bench``."""

from __future__ import annotations

from pathlib import Path

import click

from marlinq.cli.options import FOLDER, device_option, dtype_option, json_option
from marlinq.cli.output import print_report, progress_bar


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"expected whole numbers such as 1,8,64, found {value!r}")
    return tuple(int(part) for part in parts)


@click.group("bench", short_help="Measure speed: kernels or decoding.")
def command() -> None:
    """Measure speed: of single matrix multiplications, or of decoding with a checkpoint."""


@command.command(
    "kernels", short_help="Time matrix multiplications.", context_settings={"show_default": True}
)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("llama-3-8b",),
    help="Model whose layer shapes to measure; repeatable.",
)
@click.option(
    "--batch",
    "batches",
    metavar="M,M,...",
    callback=_numbers,
    default="1,8,16,64,256",
    help="Rows of activations to measure.",
)
@device_option
@json_option
def kernels(models: tuple[str, ...], batches: tuple[int, ...], device: str, as_json: bool) -> None:
    """Time the W4A16 kernel, cuBLAS FP16 and every installed peer on a model's layers, in one process."""
    from marlinq.benchmarks import bench_kernels

    with progress_bar() as progress:
        report = bench_kernels(models, batches=batches, device=device, progress=progress)
    print_report(report, as_json=as_json)


@command.command(
    "decode", short_help="Time decoding with a checkpoint.", context_settings={"show_default": True}
)
@click.argument("checkpoint", type=FOLDER, metavar="CKPT")
@click.option("--batch", type=click.IntRange(min=1), default=1, help="Sequences decoded together.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=512, help="Length of each prompt.")
@click.option("--new-tokens", type=click.IntRange(min=1), default=128, help="Tokens to decode.")
@device_option
@dtype_option
@json_option
def decode(
    checkpoint: Path,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure prefill and decode speed and the time to the first token with the checkpoint CKPT."""
    from marlinq.benchmarks import bench_decode

    with progress_bar() as progress:
        report = bench_decode(
            checkpoint,
            batch=batch,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            device=device,
            dtype=dtype,
            progress=progress,
        )
    print_report(report, as_json=as_json)
