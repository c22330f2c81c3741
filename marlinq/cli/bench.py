"""``marlinq bench``."""

from __future__ import annotations

import click

from marlinq.cli.options import device_option, dtype_option, json_option
from marlinq.cli.output import print_report, progress_bar
from marlinq.cli.types import SOURCE, OneOf


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"expected integers such as 1,8,64, found {value!r}")
    return tuple(int(part) for part in parts)


@click.group("bench", short_help="Measure speed: kernels or decoding.")
def command() -> None:
    """Measure speed: of single matrix multiplications, or of decoding with a checkpoint."""


@command.command(
    "kernels", short_help="Time matrix multiplications.", context_settings={"show_default": True}
)
@click.option("--model", "models", multiple=True, help="Model whose layers to measure; repeatable.")
@click.option(
    "--shape", "shapes", multiple=True, metavar="[NAME=]NxK", help="One more layer to measure; repeatable."
)
@click.option(
    "--batch",
    "batches",
    metavar="M,M,...",
    callback=_numbers,
    default="1,4,8,16,32,64,128,256,512,1024,2048,4096",
    help="Rows of activations to measure.",
)
@click.option(
    "--against",
    metavar="PEER,PEER,...",
    default="cublas,humming",
    help="Peers to measure alongside: cublas, humming, tinygemm; one that is not installed is noted. "
    "batch-invariant and act-order are the same kernel under those demands.",
)
@click.option(
    "--dtype",
    type=OneOf(("float16", "bfloat16"), {"fp16": "float16", "bf16": "bfloat16"}),
    default="float16",
    help="Type of activations and scales.",
)
@click.option(
    "--group-size",
    type=click.Choice(("32", "64", "128", "-1")),
    default="128",
    help="Channels that share a scale; -1 is all of them.",
)
@click.option("--asymmetric", is_flag=True, help="Measure weights with zero points.")
@click.option("--explain", is_flag=True, help="Give the reason of every kernel decision.")
@click.option(
    "--sustained",
    is_flag=True,
    help="Measure without rests, large products at the GPU's power limit instead of at its full clock.",
)
@device_option
@json_option
def kernels(
    models: tuple[str, ...],
    shapes: tuple[str, ...],
    batches: tuple[int, ...],
    against: str,
    dtype: str,
    group_size: str,
    asymmetric: bool,
    explain: bool,
    sustained: bool,
    device: str,
    as_json: bool,
) -> None:
    """Time the W4A16 kernel, cuBLAS FP16 and every installed peer on a model's layers, in one process.

    Models: gemma-2-9b, llama-3-70b, llama-3-8b, mistral-7b, mixtral-8x7b, qwen3-32b, qwen3-8b, smollm2-135m;
    without --model and --shape, llama-3-8b.
    """
    from marlinq.operations.bench import bench_kernels

    with progress_bar() as progress:
        report = bench_kernels(
            models or (() if shapes else ("llama-3-8b",)),
            batches=batches,
            device=device,
            against=[name.strip() for name in against.split(",") if name.strip()],
            dtype=dtype,
            group_size=int(group_size),
            asymmetric=asymmetric,
            explain=explain,
            sustained=sustained,
            shapes=shapes,
            progress=progress,
        )
    print_report(report, as_json=as_json)


@command.command(
    "decode", short_help="Time decoding with a checkpoint.", context_settings={"show_default": True}
)
@click.argument("checkpoint", type=SOURCE, metavar="CKPT")
@click.option("--batch", type=click.IntRange(min=1), default=1, help="Sequences decoded together.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=512, help="Length of each prompt.")
@click.option("--new-tokens", type=click.IntRange(min=1), default=128, help="Tokens to decode.")
@device_option
@dtype_option
@json_option
def decode(
    checkpoint: str,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure prefill and decode speed and the time to the first token with the checkpoint CKPT."""
    from marlinq.operations.bench import bench_decode

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
