"""``marlinq recommend``."""

from __future__ import annotations

from functools import partial

import click

from marlinq.cli.options import device_option, output_options, refuse_options, revision_option
from marlinq.cli.output import print_report, print_report_and_save, showing_progress
from marlinq.cli.types import OUTPUT_FILE, SOURCE, names


@click.command(
    "recommend",
    short_help="Recommend a type of weights for a model, a GPU and a load.",
    context_settings={"show_default": True},
)
@click.argument("model")
@click.option(
    "--synthetic",
    is_flag=True,
    help="Take MODEL as the name of a shape that marlinq bench decode --synthetic knows.",
)
@click.option("--gpu", default="h200", help="GPU: h200, h100, h100-pcie, a100, l40s, l4, 4090, 5090 or b200.")
@click.option("--batch", type=click.IntRange(1, 1 << 20), default=1, help="Sequences decoded together.")
@click.option(
    "--context", type=click.IntRange(1, 1 << 31), default=2048, help="Mean number of tokens per sequence."
)
@click.option("--prompt", type=click.IntRange(1, 1 << 31), default=512, help="Tokens per prompt.")
@click.option(
    "--servers",
    metavar="NAME,NAME,...",
    callback=names,
    multiple=True,
    help="Servers that must load the weights, such as vllm,sglang,transformers; by default any.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Load the model, round its weights to each type, and measure the KL divergence.",
)
@click.option("--plot", type=OUTPUT_FILE, help="Also draw the roofline into an SVG file.")
@revision_option
@device_option
@output_options
@click.pass_context
def command(
    click_context: click.Context,
    /,
    model: str,
    synthetic: bool,
    gpu: str,
    batch: int,
    context: int,
    prompt: int,
    servers: tuple[str, ...],
    measure: bool,
    plot: str | None,
    revision: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Compare types of weights for MODEL: memory, expected decode step and prefill, quality, servers.

    Only config.json is read and no GPU is needed, except with --measure, which runs on --device.
    """
    if synthetic:
        refuse_options(click_context, "revision", reason="--synthetic reads no checkpoint; leave it out")
    else:
        SOURCE.convert(model, None, click_context)
    if not measure:
        refuse_options(
            click_context,
            "device",
            reason="only with --measure; --gpu names the GPU that is judged",
        )
    from marlinq.operations.recommend import recommend, save_plot

    with showing_progress() as progress:
        report = recommend(
            model,
            synthetic=synthetic,
            gpu=gpu,
            batch=batch,
            context=context,
            prompt=prompt,
            servers=servers,
            measured=measure,
            revision=revision,
            device=device,
            progress=progress,
        )
    if plot is None:
        print_report(report, as_json=as_json)
    else:
        print_report_and_save(report, partial(save_plot, report, plot), as_json=as_json)
