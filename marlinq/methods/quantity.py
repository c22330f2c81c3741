"""The quantities that a method reports as the error of a weight. Two of them never share a column."""

from __future__ import annotations

from enum import StrEnum


class ErrorQuantity(StrEnum):
    """What tr(D H D^T) / tr(W H W^T) with D = W - Q is, by the H that was used."""

    OUTPUTS = "outputs"
    """H is the Hessian of the layer's inputs: the squared error of its outputs on the calibration text."""
    INPUTS = "inputs"
    """H is the diagonal of that Hessian: the weights' squared error, each weighted by its input channel."""
    WEIGHTS = "weights"
    """H is the identity: the squared error of the weights. No text has a part in it."""

    @property
    def label(self) -> str:
        """The name of a column or line that holds it."""
        return _LABELS[self]

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return _MEANINGS[self]


_LABELS = {
    ErrorQuantity.OUTPUTS: "output error",
    ErrorQuantity.INPUTS: "input-weighted weight error",
    ErrorQuantity.WEIGHTS: "weight error",
}
_MEANINGS = {
    ErrorQuantity.OUTPUTS: "Squared error of the outputs on the calibration text, relative to the outputs.",
    ErrorQuantity.INPUTS: "Squared error of the weights, each weighted by the mean square of its input "
    "channel on the calibration text, relative to the weights weighted alike.",
    ErrorQuantity.WEIGHTS: "Squared error of the weights, relative to the weights.",
}
