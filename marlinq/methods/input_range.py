"""Round-to-nearest for weights whose inputs are quantised by one stored scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.core.scheme import Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.method import Method, SolveReport, real_rows
from marlinq.methods.rtn import RTN, RTNOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


@dataclass
class InputRange:
    """The largest magnitude of an input.

    Attributes:
        name: name of the input in error messages.
        largest: float32 [], largest magnitude seen so far.
        tokens: tokens seen so far.
    """

    name: str
    largest: Tensor
    tokens: int = 0

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """As :meth:`marlinq.methods.Statistics.add`."""
        rows = real_rows(x, mask, self.name)
        self.tokens += len(rows)
        if len(rows):
            self.largest = torch.maximum(self.largest, rows.abs().amax().to(torch.float32))

    def merge(self, other: InputRange) -> None:
        """As :meth:`marlinq.methods.Statistics.merge`."""
        self.tokens += other.tokens
        self.largest = torch.maximum(self.largest, other.largest)

    def blend(self, other: InputRange, share: float) -> None:
        """As :meth:`marlinq.methods.Statistics.blend`, but takes the larger of both ranges for any share."""
        self.largest = torch.maximum(self.largest, other.largest)

    def as_share(self, tokens: int) -> Sequence[Tensor]:
        """As :meth:`marlinq.methods.Statistics.as_share`.

        Raises:
            UnsupportedError: always, since a maximum over shards is not a sum.
        """
        raise UnsupportedError(f"{self.name}: activation ranges are taken in one process; leave out torchrun")


class StaticRTN(Method[RTNOptions, InputRange]):
    """:class:`~marlinq.methods.rtn.RTN` with a static activation scale that maps the largest input to the
    largest code."""

    name = "rtn-static"
    options = RTNOptions
    sequential = False
    per_output = False

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        inputs = scheme.activations
        if inputs is None or inputs.dynamic:
            return f"{scheme.describe()}; {self.name} is for static activations; use rtn"
        return super().scheme_refusal(scheme)

    def statistics(
        self, in_features: int, options: RTNOptions, *, device: torch.device, name: str
    ) -> InputRange:
        return InputRange(name, torch.zeros((), device=device))

    def solve(
        self,
        weights: Sequence[Tensor],
        statistics: InputRange | None,
        scheme: Scheme,
        options: RTNOptions,
        *,
        names: Sequence[str],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        assert statistics is not None, "the method is calibrated"
        assert scheme.activations is not None, "scheme_refusal says so"
        largest = float(statistics.largest)
        if not largest > 0:
            raise NumericsError(
                f"{names[0]}: its input is zero on the calibration text, which gives no activation scale; "
                "calibrate on more text, or skip it with an override"
            )
        scale = torch.tensor(largest / scheme.activations.element.ends[1], device=weights[0].device)
        dtype = scheme.scale_dtype
        stored = float(scale.to(torch_dtype(dtype)))
        if not 0 < stored < torch.inf:
            raise NumericsError(
                f"{names[0]}: its largest input on the calibration text is {largest:.3g}, and {dtype} rounds "
                f"the activation scale of {float(scale):.3g} to {stored:g}; choose --format fp8, whose "
                "scales are float32, or skip it with an override"
            )
        solved = RTN().solve(weights, None, scheme, options, names=names)
        return [(replace(weight, input_scale=scale), report) for weight, report in solved]
