"""Settings of a recipe: their defaults, the values they accept and their help texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from marlinq.core.schemes import SCHEMES
from marlinq.core.settings import (
    AUTO,
    NONE,
    Automatic,
    Bits,
    Bytes,
    Choice,
    Flag,
    Fraction,
    Text,
    Texts,
    Unset,
    WholeNumber,
    setting,
)
from marlinq.formats import FORMATS
from marlinq.methods import METHODS, MethodOptions
from marlinq.operations.quantize.override import DENSE, SHARED, Override
from marlinq.operations.quantize.quality import DEFAULT, QUALITIES

UNQUANTIZED = NONE
EXPERTS = ("routed", "all")
EXPERT_FALLBACKS = ("blend", "all", "shared")
NO_TEMPLATE = NONE
SERVED_BY = ("vllm", "sglang", "transformers", "marlinq")
"""Values of ``--for``."""
TARGETS = ("target_bits", "target_size")
"""Settings for which each module's scheme is chosen; a recipe has at most one."""


@dataclass(frozen=True)
class RecipeSettings:
    """The settings of a recipe, each with its default, the values it accepts and its help text.

    :class:`marlinq.operations.quantize.recipe.Recipe`, the class to construct, says more about each.
    """

    quality: str = setting(
        DEFAULT,
        Choice(QUALITIES),
        "Named settings that trade time for quality: "
        + "; ".join(f"{quality.name}: {quality.meaning}" for quality in QUALITIES.values())
        + ".",
    )
    format: str = setting("gptq", Choice(FORMATS), "Output format.")
    method: str = setting("gptq", Choice(METHODS), "Method that quantises the weights.")
    scheme: str = setting(
        "int4",
        SHARED["scheme"],
        "Type and grouping of the stored weights: "
        + "; ".join(f"{each.name}: {each.meaning}" for each in SCHEMES.values())
        + ".",
    )
    group_size: int | str = setting(
        AUTO,
        SHARED["group_size"],
        "Input channels that share a scale. -1 is one scale per output channel; auto is the largest of 128, "
        "64 and 32 that divides the input channels of every quantised linear.",
    )
    symmetric: bool = setting(
        True,
        SHARED["symmetric"],
        "Fix zero points at the middle code, or choose and store one for each group.",
    )
    sparsity: str = setting(
        DENSE,
        SHARED["sparsity"],
        "Prune the decoder's int4 and int8 linears: 2:4 keeps two of every four neighbouring channels.",
    )
    quantize_head: str = setting(
        UNQUANTIZED,
        Choice(SCHEMES, UNQUANTIZED),
        "Quantise the output head with this scheme, even if it is tied to the embedding.",
    )
    target_bits: float | str = setting(
        NONE,
        Unset(Bits()),
        "Choose each module's scheme so that the model changes least while the decoder's linears take at "
        "most this many bits per weight on average, scales included.",
    )
    target_size: int | str = setting(
        NONE,
        Unset(Bytes()),
        "Choose each module's scheme so that the model changes least while all tensors take at most this "
        "many bytes, such as 6GB.",
    )
    served_by: str = setting(
        SERVED_BY[0],
        Choice(SERVED_BY),
        "Server or library whose loader must take the schemes that --target-bits or --target-size choose.",
    )
    calibration: str | tuple[str, ...] = setting("self", Texts(), "Text to calibrate on.")
    samples: int | str = setting(
        AUTO,
        Automatic(WholeNumber(1)),
        "Number of calibration documents; auto is 128, or as many as --tokens take.",
    )
    tokens: int | str = setting(
        AUTO,
        Automatic(WholeNumber(16)),
        "Largest number of tokens in all calibration documents; auto depends on the source of the text, the "
        "device and the method.",
    )
    max_length: int = setting(2048, WholeNumber(1), "Tokens that a document is cut to.")
    chat_template: str = setting(
        NO_TEMPLATE,
        Text(),
        "Calibrate on conversations: 'model' takes the model's chat template, a path the Jinja template in "
        "that file. Text becomes a user's message; the model itself writes a question and its answer.",
    )
    seed: int = setting(0, WholeNumber(0), "Seed of every random choice.")
    experts: str = setting(
        "routed",
        Choice(EXPERTS),
        "Calibrate an expert on the tokens routed to it, or on all tokens of its layer.",
    )
    expert_tokens: int = setting(
        256, WholeNumber(0), "Number of routed tokens below which an expert gets --expert-fallback."
    )
    expert_fallback: str = setting(
        "blend",
        Choice(EXPERT_FALLBACKS),
        "Inputs for an expert with too few tokens. blend: its own, filled up with those of the layer; all: "
        "those of the layer; shared: those of the layer for gate and up, of all its experts for down.",
    )
    tune_steps: int | str = setting(
        0,
        Automatic(WholeNumber(0)),
        "Steps of end-to-end tuning towards the original's predictions; 0 is no tuning, auto depends on "
        "model and device.",
    )
    tune_tokens: int | str = setting(
        AUTO,
        Automatic(WholeNumber(1)),
        "Tokens per step of tuning; auto is 8192, and fewer where auto steps are few.",
    )
    tune_rate: float | str = setting(
        AUTO,
        Automatic(Fraction()),
        "Largest relative change of a scale in a step of tuning; auto is 0.84 divided by the number of "
        "steps (up to 1,400), at most 0.002.",
    )
    tune_codes: bool = setting(False, Flag(), "Tune codes as well as scales.")
    tune_norms: bool = setting(
        True, Flag(), "Tune norms and biases too; they stay unquantised but differ from the original's."
    )
    tune_own_text: bool = setting(
        False,
        Flag(),
        "Also tune on text that the model writes, so that tuning does not overfit a few calibration "
        "documents; left out where its predictions there have less than 0.85 of their entropy in these.",
    )
    options: MethodOptions = field(default_factory=MethodOptions)
    allocation: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
