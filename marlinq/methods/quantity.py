"""The quantities in which methods report the error of a weight; reports keep them in separate columns."""

from __future__ import annotations

from enum import StrEnum


class ErrorQuantity(StrEnum):
    """Meaning of tr(D H D^T) / tr(W H W^T), D = W - Q, by the matrix H."""

    OUTPUTS = "outputs"
    """H is the Hessian of the layer's inputs: the squared error of its outputs on the calibration text."""
    INPUTS = "inputs"
    """H is the diagonal of that Hessian: the weights' squared error, each weighted by its input channel."""
    WEIGHTS = "weights"
    """H is the identity: the squared error of the weights, independent of any text."""

    @property
    def label(self) -> str:
        """Title of a column or line with this quantity."""
        return _LABELS[self]

    @property
    def meaning(self) -> str:
        """One sentence that explains the quantity."""
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
