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
    """The settings of a recipe: fields, defaults, accepted values and descriptions.

    :class:`marlinq.operations.quantize.recipe.Recipe` is the class to construct.

    Attributes:
        quality: name in :data:`marlinq.operations.quantize.quality.QUALITIES`, which gives the defaults of
            some of the settings below. A recipe applies it before the settings that are given with it.
        format: output format, a name in :data:`marlinq.formats.FORMATS`.
        method: name in :data:`marlinq.methods.METHODS`.
        scheme: name in :data:`marlinq.core.schemes.SCHEMES`.
        group_size: input channels per scale for int4 and int8: 32, 64 or 128; -1 for one scale per output
            channel; "auto" for the largest of 128, 64 and 32 that divides every quantised module's K.
        symmetric: whether zero points are fixed at the middle code.
        sparsity: name in :data:`marlinq.core.sparsity.SPARSITIES` of the pattern that integer linears are
            pruned to, or "none".
        quantize_head: scheme of the output head, or "none" to leave it unquantised. Its other settings are
            those of the other modules, or of an override that matches its name.
        target_bits: largest mean bits per weight of the decoder's linears, stored scales included, for which
            each module's scheme is chosen (:mod:`marlinq.operations.quantize.allocation`); or "none".
        target_size: largest bytes of all output tensors for which each module's scheme is chosen; or "none".
        served_by: server whose loader must take the chosen schemes.
        calibration: "self", a file, or the name of a dataset; or several of them, each optionally followed by
            ``=WEIGHT``. Unused by a method without calibration.
        samples: number of calibration documents; "auto" is 128, or with ``tokens`` as many as these take.
        tokens: largest number of tokens in all calibration documents. "auto" is no limit for files and
            datasets, and an amount that suits the device for text that the model writes
            (:mod:`marlinq.operations.quantize.budget`). Without tuning, "auto" is never more than the
            method's :attr:`~marlinq.methods.Method.enough_tokens`.
        max_length: tokens that a document is cut to.
        chat_template: "model" puts every text into the model's chat template, as a user's message, and lets
            the model write conversations; a path does so with the template in that file; "none" leaves text
            as it is.
        seed: seed of all random choices, in the calibration text and in the order of tuning.
        experts: "routed" calibrates experts on the tokens routed to them, "all" on all tokens of their layer.
        expert_tokens: number of routed tokens below which an expert gets the fallback.
        expert_fallback: inputs for an expert with too few tokens. ``blend``: its own, and all inputs of the
            layer in the place of the missing tokens. ``all``: all inputs of the layer. ``shared``: all inputs
            of the layer for gate and up, the inputs of all experts together for down.
        tune_steps, tune_tokens, tune_rate: steps, tokens per step and largest change of end-to-end tuning
            (:mod:`marlinq.operations.quantize.tuning`); "auto" follows a budget
            (:mod:`marlinq.operations.quantize.budget`).
        tune_codes, tune_norms: whether tuning changes codes, and norms and biases, besides scales.
        tune_own_text: whether tuning also learns from text that the model writes.
        options: options of the method; a plain ``MethodOptions()`` becomes the method's defaults. In files,
            their keys are beside the recipe's own.
        allocation: candidate (:data:`marlinq.operations.quantize.candidates.CANDIDATES`) -> modules that it
            was chosen for; empty until schemes are chosen. Overrides win over it.
        overrides: rules for single modules; the first whose pattern matches a module's name applies.
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
        "Prune int4 and int8 linears: 2:4 keeps two of every four neighbouring input channels.",
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
        "documents.",
    )
    options: MethodOptions = field(default_factory=MethodOptions)
    allocation: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
