"""Values of ``--quality``: named, versioned settings that trade time for a better output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT = "default"


@dataclass(frozen=True)
class Quality:
    """Named settings of a recipe; the recipe may override each of them.

    Attributes:
        name: name on the command line and in recipes.
        version: number that is raised whenever the settings change, to tell outputs apart.
        meaning: the settings in words, for help texts.
        settings: key of a recipe or of its method's options -> value.
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
            "round-to-nearest, with scales chosen by the size of each input channel's activations",
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
            20,
            "GPTQ with --output-hessian, then codes, scales and norms tuned towards the original's "
            "predictions, also on text that the model writes",
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
"""Every quality by name. Those of one method set the same keys, so that none of the old quality's settings
remain when it is replaced by another."""
