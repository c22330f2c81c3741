"""``marlinq bench``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import click

from marlinq.cli.options import device_option, dtype_option, output_options, refuse_options
from marlinq.cli.output import INTERRUPTED_CODE, print_report, print_report_and_save, showing_progress
from marlinq.cli.types import OUTPUT_FILE, SOURCE, OneOf, names
from marlinq.core.errors import UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _numbers(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[int, ...]:
    listed = ",".join(value)
    parts = [part.strip() for part in listed.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"expected integers such as 1,8,64, found {listed!r}")
    return tuple(int(part) for part in parts)


def _numbers_option(
    *names: str, default: str, words: str, metavar: str = "M,M,..."
) -> Callable[[_Command], _Command]:
    """An option whose value is several numbers of at least 1; it may be repeated."""
    return click.option(
        *names, metavar=metavar, callback=_numbers, multiple=True, default=(default,), help=words
    )


def _rows_option(
    default: str, words: str = "Rows of activations to measure."
) -> Callable[[_Command], _Command]:
    """``--batch``."""
    return _numbers_option("--batch", "batches", default=default, words=words)


def _against_option(default: str, words: str) -> Callable[[_Command], _Command]:
    """``--against``."""
    shown = "PEER,PEER,..."
    return click.option(
        "--against", metavar=shown, callback=names, multiple=True, default=(default,), help=words
    )


def _group_size_option(words: str) -> Callable[[_Command], _Command]:
    """``--group-size``, or "auto"."""
    choice = click.Choice(("auto", "32", "64", "128", "-1"))
    return click.option("--group-size", type=choice, default="auto", help=words)


_group_size_choice = click.Choice(("32", "64", "128", "-1"))


def _scheme_option(words: str) -> Callable[[_Command], _Command]:
    """``--scheme``."""
    return click.option(
        "--scheme", type=click.Choice(("int4", "int8", "fp8", "mxfp4", "nvfp4")), default="int4", help=words
    )


_SCHEME_WORDS = (
    "Type of the weights; by default fp8 has one scale per channel, mxfp4 groups of 32, nvfp4 groups of 16."
)


def _weight_options(command: _Command) -> _Command:
    """Options for the types of weights and activations, and ``--explain``."""
    for option in (
        click.option("--explain", is_flag=True, help="Give the reason for every choice of a kernel."),
        click.option("--asymmetric", is_flag=True, help="Measure weights with zero points."),
        click.option(
            "--dtype",
            type=OneOf(("float16", "bfloat16"), {"fp16": "float16", "bf16": "bfloat16"}),
            default="float16",
            help="Type of activations and scales.",
        ),
    ):
        command = option(command)
    return command


@click.group("bench", short_help="Measure speed: kernels, decoding or vLLM.")
def command() -> None:
    """Measure the speed of matrix multiplications, of decoding, and of vLLM with and without the plugin."""


@command.command(
    "kernels", short_help="Time matrix multiplications.", context_settings={"show_default": True}
)
@click.option("--model", "models", multiple=True, help="Model whose layers to measure; repeatable.")
@click.option(
    "--shape", "shapes", multiple=True, metavar="[NAME=]NxK", help="One more layer to measure; repeatable."
)
@_rows_option("1,4,8,16,32,64,128,256,512,1024,2048,4096")
@_against_option(
    "cublas,humming",
    "Peers to measure in the same process: cublas, humming, tinygemm; one that is not installed is left "
    "out with a note. batch-invariant, act-order and fp8-activations measure marlinq's own kernels in these "
    "modes.",
)
@_group_size_option(
    "Input channels that share a scale; -1 is all of them, auto the largest number that divides every layer."
)
@_scheme_option(_SCHEME_WORDS)
@click.option(
    "--sparsity",
    type=click.Choice(("2:4",)),
    help="Prune the weights at random, and also measure the sparse kernel.",
)
@_weight_options
@click.option(
    "--sustained",
    is_flag=True,
    help="Measure without pauses, so that large products run at the GPU's power limit and not at full clock.",
)
@device_option
@output_options
def kernels(
    models: tuple[str, ...],
    shapes: tuple[str, ...],
    batches: tuple[int, ...],
    against: tuple[str, ...],
    dtype: str,
    scheme: str,
    group_size: str,
    sparsity: str | None,
    asymmetric: bool,
    explain: bool,
    sustained: bool,
    device: str,
    as_json: bool,
) -> None:
    """Time matrix multiplications with packed weights on a model's layers, beside peers in one process.

    Models: gemma-2-9b, llama-3-70b, llama-3-8b, mistral-7b, mixtral-8x7b, qwen3-32b, qwen3-8b, smollm2-135m;
    without --model and --shape, llama-3-8b.
    """
    from marlinq.operations.bench import bench_kernels

    with showing_progress() as progress:
        report = bench_kernels(
            models or (() if shapes else ("llama-3-8b",)),
            batches=batches,
            device=device,
            against=against,
            dtype=dtype,
            scheme=scheme,
            group_size=None if group_size == "auto" else int(group_size),
            asymmetric=asymmetric,
            sparsity=sparsity,
            explain=explain,
            sustained=sustained,
            shapes=shapes,
            progress=progress,
        )
    print_report(report, as_json=as_json)


@command.command("experts", short_help="Time layers of experts.", context_settings={"show_default": True})
@click.option("--model", "models", multiple=True, help="Model whose layer to measure; repeatable.")
@_rows_option("1,4,16,64,256,1024,4096,16384")
@_against_option(
    "humming",
    "Peers to measure in the same process: cublas, grouped_mm, humming; one that can't run is left out "
    "with a note.",
)
@_group_size_option(
    "Input channels that share a scale; -1 is all of them, auto the scheme's own groups, else 128."
)
@_scheme_option(_SCHEME_WORDS)
@_weight_options
@device_option
@output_options
def experts(
    models: tuple[str, ...],
    batches: tuple[int, ...],
    against: tuple[str, ...],
    dtype: str,
    scheme: str,
    group_size: str,
    asymmetric: bool,
    explain: bool,
    device: str,
    as_json: bool,
) -> None:
    """Time a layer's experts: sorting tokens, both products, activation, weighting and sum.

    Models: deepseek-v3-tp8 (an eighth of every expert), mixtral-8x7b, qwen3-30b-a3b, qwen3.6-35b-a3b; without
    --model, qwen3-30b-a3b.
    """
    from marlinq.operations.bench import bench_experts

    with showing_progress() as progress:
        report = bench_experts(
            models or ("qwen3-30b-a3b",),
            batches=batches,
            device=device,
            against=against,
            dtype=dtype,
            scheme=scheme,
            group_size=None if group_size == "auto" else int(group_size),
            asymmetric=asymmetric,
            explain=explain,
            progress=progress,
        )
    print_report(report, as_json=as_json)


@command.command("decode", short_help="Time decoding with a model.", context_settings={"show_default": True})
@click.argument("checkpoint", type=SOURCE, metavar="[CKPT]", required=False)
@click.option(
    "--synthetic",
    metavar="MODEL",
    help="Make a model of this shape with random weights instead of loading one.",
)
@click.option("--layers", type=click.IntRange(1, 1 << 31), help="Decoder blocks of the synthetic model.")
@click.option(
    "--group-size",
    type=_group_size_choice,
    default="128",
    help="Input channels that share a scale in the synthetic model; fewer where a layer is not divisible.",
)
@click.option(
    "--scheme",
    type=click.Choice(("16", "int4", "int4-2:4", "int8", "fp8", "mxfp4", "nvfp4")),
    default="int4",
    help="Type of the synthetic model's weights; 16 is unquantised, int4-2:4 is 2:4 sparse.",
)
@click.option(
    "--head",
    type=click.Choice(("16", "int4")),
    default="16",
    help="Type of the synthetic model's output head.",
)
@_numbers_option("--batch", "batches", metavar="B,B,...", default="1", words="Sequences decoded together.")
@_numbers_option("--context", "contexts", metavar="T,T,...", default="512", words="Tokens of each prompt.")
@click.option(
    "--new-tokens", type=click.IntRange(1, 1 << 31), default=128, help="Decode steps of a timed run."
)
@click.option(
    "--against",
    metavar="PEER",
    type=click.Choice(("transformers",)),
    help="Also measure transformers with an unquantised model of the same shapes, compiled, with a static "
    "cache.",
)
@click.option(
    "--profile",
    type=OUTPUT_FILE,
    help="Write a trace of decode steps at the last batch and context to FILE, and list their kernels.",
)
@click.option("--sustained", is_flag=True, help="Measure without pauses, as on a busy server.")
@device_option
@dtype_option
@output_options
@click.pass_context
def decode(
    context: click.Context,
    /,
    checkpoint: str | None,
    synthetic: str | None,
    layers: int | None,
    group_size: str,
    scheme: str,
    head: Literal["16", "int4"],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    new_tokens: int,
    against: str | None,
    profile: str | None,
    sustained: bool,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure prefill and decode steps of the checkpoint CKPT over a grid of batches and contexts.

    Models for --synthetic: deepseek-v2-lite, gemma-3-12b, gemma-3-4b, gemma-4-26b-a4b, gemma-4-31b,
    gemma-4-e4b, glm-4.7-flash, gpt-oss-20b, granite-4.0-h-small, kimi-linear-48b-a3b, lfm2-2.6b,
    lfm2-8b-a1b, llama-3-70b, llama-3-8b, mistral-7b, nemotron-h-8b, qwen3-30b-a3b, qwen3-8b, qwen3.5-27b,
    qwen3.5-35b-a3b, smollm2-135m.
    """
    from marlinq.operations.bench import Synthetic, bench_decode

    measured: str | Synthetic
    if synthetic is not None and checkpoint is None:
        measured = Synthetic(synthetic, layers, int(group_size), head, scheme)
    elif checkpoint is not None and synthetic is None:
        refuse_options(
            context, "layers", "head", "scheme", "group_size", reason="only with --synthetic; leave it out"
        )
        measured = checkpoint
    else:
        found = "neither" if checkpoint is None else "both"
        raise UsageError(f"bench decode: expected either CKPT or --synthetic MODEL, found {found}; give one")
    with showing_progress() as progress:
        report = bench_decode(
            measured,
            batches=batches,
            contexts=contexts,
            new_tokens=new_tokens,
            against=() if against is None else (against,),
            profile=profile,
            sustained=sustained,
            device=device,
            dtype=dtype,
            progress=progress,
        )
    print_report(report, as_json=as_json)


@command.command(
    "serve", short_help="Time vLLM with and without marlinq.", context_settings={"show_default": True}
)
@click.argument("checkpoint", type=click.Path(file_okay=False), metavar="CKPT")
@_rows_option("1,4,16,64", "Sequences decoded together.")
@click.option(
    "--context",
    type=click.IntRange(1),
    default=128,
    help="Mean number of tokens in the cache at a timed step.",
)
@_numbers_option(
    "--prompts",
    metavar="P,P,...",
    default="1,8",
    words="Numbers of prompts whose first tokens are timed together.",
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1), default=2048, help="Tokens of each prompt of --prompts."
)
@click.option(
    "--requests",
    type=click.IntRange(0),
    default=256,
    help="Number of requests in a mixed load that measures throughput; 0 leaves it out.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    help="Timed runs of each batch, of which the median is reported.",
)
@click.option(
    "--gpus", type=click.IntRange(1), default=1, help="GPUs that share the model by tensor parallelism."
)
@click.option(
    "--dtype",
    type=OneOf(("float16", "bfloat16"), {"fp16": "float16", "bf16": "bfloat16"}),
    default="bfloat16",
    help="Type of activations.",
)
@click.option("--plot", type=OUTPUT_FILE, help="Also draw the decode steps into an SVG file.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Also keep every measurement in FILE as soon as it is made, as JSON. A repeated command runs only "
    "engines that FILE lacks.",
)
@output_options
def serve(
    checkpoint: str,
    batches: tuple[int, ...],
    context: int,
    prompts: tuple[int, ...],
    prompt_tokens: int,
    requests: int,
    repeats: int,
    gpus: int,
    dtype: str,
    plot: str | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Time vLLM's offline engine on the folder CKPT, with its own kernels and with marlinq's.

    Each runs in a process of its own, one after the other. Measured are decode steps, the time to first
    tokens, and new tokens a second under a mixed load. Prompts are random tokens, so the folder needs no
    tokenizer. If an engine fails or Ctrl-C comes, what was measured is printed.
    """
    from marlinq.core.errors import EnvironmentProblem
    from marlinq.operations.bench import Workload, bench_serve
    from marlinq.operations.bench.serve import INTERRUPTED
    from marlinq.operations.bench.serve_plot import save_plot

    workload = Workload(
        checkpoint=checkpoint,
        batches=batches,
        context=context,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        requests=requests,
        repeats=repeats,
        dtype=dtype,
        gpus=gpus,
    )
    with showing_progress() as progress:
        report = bench_serve(workload, progress, out)
    if plot is None or report.unfinished is not None:
        print_report(report, as_json=as_json)
    else:
        print_report_and_save(report, partial(save_plot, report, plot), as_json=as_json)
    if report.unfinished is not None:
        interrupted = report.unfinished == INTERRUPTED
        click.get_current_context().exit(INTERRUPTED_CODE if interrupted else EnvironmentProblem.exit_code)
