"""How much a quantise run does for quality: named, versioned settings of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT = "default"


@dataclass(frozen=True)
class Quality:
    """Settings under one name; any of them can be given another value beside it.

    Attributes:
        name: on the command line and in recipes.
        version: raised whenever the settings change, so that two outputs can be told apart.
        meaning: in words, for help texts.
        settings: keys of a recipe or of its method's options, with their values.
    """

    name: str
    version: int
    meaning: str
    settings: Mapping[str, Any]


QUALITIES: dict[str, Quality] = {
    quality.name: quality
    for quality in (
        Quality(
            "fast",
            4,
            "round-to-nearest, on scales that mind how strong the inputs are",
            {"method": "imatrix", "tune_steps": 0, "tune_codes": False, "tune_own_text": False},
        ),
        Quality(
            DEFAULT,
            3,
            "GPTQ",
            {
                "method": "gptq",
                "output_hessian": False,
                "tune_steps": 0,
                "tune_codes": False,
                "tune_own_text": False,
            },
        ),
        Quality(
            "best",
            15,
            "the default with --output-hessian, then codes, scales and norms tuned towards the "
            "original's predictions, on text that the model writes as well",
            {
                "method": "gptq",
                "output_hessian": True,
                "tune_steps": "auto",
                "tune_codes": True,
                "tune_own_text": True,
            },
        ),
    )
}
"""Every quality by its name. All of one method set the same keys, so that one replaces another without a
rest."""
