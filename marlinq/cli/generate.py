"""``marlinq generate``."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

import click

from marlinq.cli.lean_imports import lean_imports
from marlinq.cli.options import model_options, refuse_options
from marlinq.cli.output import print_explained, print_piece, showing_progress
from marlinq.cli.types import SOURCE
from marlinq.core.startup import open_gpu_early

if TYPE_CHECKING:
    from marlinq.runtime import Generation, Generations
    from marlinq.runtime.generation import Speculate


@click.command("generate", short_help="Continue prompts.", context_settings={"show_default": True})
@click.argument("checkpoint", type=SOURCE, metavar="CKPT")
@click.option(
    "--prompt",
    "prompts",
    required=True,
    multiple=True,
    help="Text to continue; given several times, the texts are decoded together.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1, 1 << 31),
    default=128,
    help="Largest number of new tokens per prompt.",
)
@click.option("--greedy", is_flag=True, help="Take the most likely token every time.")
@click.option(
    "--temperature",
    type=click.FloatRange(1e-3, 1e3),
    help="Temperature of the sampling. [default: 1.0]",
)
@click.option(
    "--top-k", type=click.IntRange(0, 2**31 - 1), help="Draw from the K most likely tokens; 0 for all."
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Draw only from the most likely tokens whose probabilities add up to this.",
)
@click.option(
    "--min-p",
    type=click.FloatRange(0, 1),
    help="Draw only from tokens with at least this share of the most likely token's probability.",
)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(1e-3, 1e3),
    help="Divide the logits of tokens that occurred before by this (multiply negative logits).",
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, help="Seed of the sampling.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option(
    "--speculate",
    type=click.Choice(["auto", "mtp", "lookup", "off"]),
    default="auto",
    help="Speculative decoding: how to draft tokens, several of which are checked per step; the text stays "
    "the same. mtp: by the model's own draft head; lookup: from earlier text; auto: by the head if there "
    "is one, else lookup, while it pays.",
)
@click.option(
    "--activations",
    type=click.Choice(["16", "fp8"]),
    default="16",
    help="Type of the activations of INT4 layers in long prompts; fp8 is less exact.",
)
@model_options
@click.pass_context
def command(
    context: click.Context,
    /,
    checkpoint: str,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    greedy: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    seed: int,
    chat: bool,
    speculate: Speculate,
    activations: str,
    revision: str | None,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Continue a prompt with the checkpoint CKPT: print the text as it is made, then tokens per second.

    Without --greedy, tokens are drawn from the model's probabilities. Sampling settings in
    generation_config.json are not used. The texts of several prompts are printed when all have ended.
    """
    if greedy:
        drawing = ("temperature", "top_k", "top_p", "min_p", "seed")
        refuse_options(context, *drawing, reason="no effect with --greedy; keep one")
    if len(prompts) > 1 and speculate in ("mtp", "lookup"):
        refuse_options(
            context,
            "speculate",
            reason="several prompts are decoded without drafts; leave it out, or give one --prompt",
        )
    # A thread opens the GPU and pins memory while libraries are imported.
    open_gpu_early(device)
    from marlinq.checkpoint import lock_ring_early

    lock_ring_early(device)
    # A checkpoint's own code may need any package, so nothing is hidden from it.
    with nullcontext() if trust_remote_code else lean_imports():
        import transformers.generation.utils  # noqa: F401

        from marlinq.operations.loading import load
        from marlinq.runtime import Interrupted, Sampling, generate, generate_batch

    sampling = Sampling(
        temperature=None if greedy else temperature or 1.0,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    with showing_progress() as progress:
        loaded = load(
            checkpoint,
            revision=revision,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            activations=None if activations == "16" else activations,
            only_decodes=True,
            progress=progress,
        )
    streams = len(prompts) == 1 and not as_json

    def show(report: Generation | Generations) -> None:
        if streams:
            print_piece("\n\n")
        print_explained(report, as_json=as_json, explain=explain)

    try:
        with ExitStack() as shown:
            progress = shown.enter_context(showing_progress())

            def print_text(piece: str) -> None:
                # Closes the progress bar before the first piece of text.
                shown.close()
                print_piece(piece)

            report: Generation | Generations
            if len(prompts) == 1:
                report = generate(
                    loaded,
                    prompts[0],
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    chat=chat,
                    speculate=speculate,
                    on_text=print_text if streams else None,
                    progress=progress,
                )
            else:
                report = generate_batch(
                    loaded,
                    prompts,
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    chat=chat,
                    progress=progress,
                )
        show(report)
    except Interrupted as interrupted:
        if not as_json:
            show(interrupted.partial)
        raise
