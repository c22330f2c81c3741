"""A model's tokenizer, with the chat template that a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marlinq.calibration import load_tokenizer
from marlinq.core import boundaries
from marlinq.core.errors import UnsupportedError, UsageError
from marlinq.core.files import read_regular
from marlinq.core.native_output import told_as_warning
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.recipe_settings import NO_TEMPLATE
from marlinq.operations.quantize.spelling import spelled

OWN_TEMPLATE = "model"
_MOST_TEMPLATE_BYTES = 1_000_000


def own_tokenizer(folder: Path, recipe: Recipe, *, trust_remote_code: bool) -> Any:
    """The model's tokenizer, with the chat template from the recipe's file where it names one.

    Raises:
        CheckpointError: the model has no tokenizer, or it can't be read.
        UsageError: the template's file can't be read.
        UnsupportedError: the recipe asks for the model's own template, and it has none.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    template = read_template(recipe)
    if template is not None:
        tokenizer.chat_template = template
    if recipe.chat_template == OWN_TEMPLATE and not getattr(tokenizer, "chat_template", None):
        raise UnsupportedError(
            f"{spelled('chat_template')} {OWN_TEMPLATE}: the tokenizer in {folder} has no chat template; "
            "leave it out, or name a file with a Jinja template"
        )
    return tokenizer


def template_file(recipe: Recipe) -> str | None:
    """Name of the recipe's template file, for messages; None where it names no file."""
    own = recipe.chat_template in (NO_TEMPLATE, OWN_TEMPLATE)
    return None if own else f"{spelled('chat_template')} {recipe.chat_template}"


def check_user_message(tokenizer: Any, recipe: Recipe) -> None:
    """Checks that the template of the recipe's file renders a user's message alone, which the model writes,
    and then the beginning of an answer. Conversations of other text may have what the template asks for
    beside that.

    Raises:
        CheckpointError: it does not.
    """
    file = template_file(recipe)
    if file is not None:
        message = {"role": "user", "content": "text"}
        for answer in (False, True):
            boundaries.rendered(
                tokenizer, [message], subject=file, advice="correct the file", add_generation_prompt=answer
            )


def own_processor(folder: Path, *, trust_remote_code: bool) -> Any:
    """The model's processor of images.

    Raises:
        UnsupportedError: the folder has none.
        CheckpointError: it can't be read.
        EnvironmentProblem: a package that it needs is missing.
    """
    from transformers import AutoProcessor

    with (
        boundaries.foreign(str(folder), "no usable processor of images", "restore its files"),
        told_as_warning(folder),
    ):
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if getattr(processor, "image_processor", None) is None:
        raise UnsupportedError(
            f"{folder}: the text holds images, and the model has no processor that reads them; leave rows "
            "with images out, or restore preprocessor_config.json and processor_config.json"
        )
    return processor


def read_template(recipe: Recipe) -> str | None:
    """The text of the recipe's template file; None where it names no file.

    Raises:
        UsageError: the file can't be read.
    """
    if template_file(recipe) is None:
        return None
    path = Path(recipe.chat_template)
    try:
        return read_regular(path, _MOST_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{spelled('chat_template')} {path}: can't be read ({error}); expected {NO_TEMPLATE}, "
            f"{OWN_TEMPLATE} or a file with a Jinja template"
        ) from None
