"""The protocol of quantisation methods: options, statistics of inputs, solve, report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.core.scheme import Scheme
from marlinq.core.settings import check_settings
from marlinq.core.weight import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    from marlinq.core.lazy import torch


@dataclass(frozen=True)
class MethodOptions:
    """The options of a method: a subclass has a :func:`~marlinq.core.settings.setting` for each.

    Recipes, ``--override`` and the manifest use the fields' names as keys.

    Raises:
        UsageError: a value is of the wrong type or out of range.
    """

    def __post_init__(self) -> None:
        check_settings(self)


class Statistics(Protocol):
    """Statistics of an input over the tokens of the calibration; projections that read the input share
    them."""

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        ...

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the inputs of one call.

        Args:
            x: float [..., K].
            mask: bool [B, T], false at padding; None without padding.
        """
        ...

    def merge(self, other: Any) -> None:
        """Add the statistics ``other``, of the same class and K, of another shard of the calibration."""
        ...

    def blend(self, other: Any, share: float) -> None:
        """Replace the statistics by ``(1 - share)`` of their own and ``share`` (0 to 1) of ``other``'s.

        ``other`` is of the same class and K. Numbers of tokens don't matter, but statistics of no token are
        left out.
        """
        ...

    def as_share(self, tokens: int) -> Sequence[Tensor]:
        """Weight the statistics as those of one of several shards with ``tokens`` tokens together.

        Returns:
            Tensors to be summed in place over all shards; the sums are the statistics of all tokens.
        """
        ...


@dataclass(frozen=True)
class SolveReport:
    """Error and circumstances of the quantisation of one weight.

    Attributes:
        relative_error: tr(D H D^T) / tr(W H W^T) with D = W - Q.
        quantity: meaning of H, an :class:`~marlinq.methods.quantity.ErrorQuantity`.
        fallback: sentence on the procedure used instead of the method, and why; None where it succeeded.
        figures: further figures of the method, by name.
        norm: tr(W H W^T), the denominator of ``relative_error``; 1 where the method does not give it.
    """

    relative_error: float
    quantity: str
    fallback: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    norm: float = 1.0

    @classmethod
    def of_slices(cls, reports: Sequence[SolveReport]) -> SolveReport:
        """The report of a weight that was solved in slices of its output channels, with one Hessian."""
        norm = sum(report.norm for report in reports)
        loss = sum(report.relative_error * report.norm for report in reports)
        fallback = next((report.fallback for report in reports if report.fallback), None)
        error = loss / norm if norm > 0 else 0.0
        return cls(error, reports[0].quantity, fallback, reports[0].figures, norm)


StatisticsT = TypeVar("StatisticsT", bound=Statistics)


@dataclass(frozen=True, eq=False)
class Inputs(Generic[StatisticsT]):
    """Projections that share an input.

    Attributes:
        weights: float [N_i, K] each, on one device.
        statistics: statistics of the input; None for a method without calibration.
        names: names of the weights in error messages.
    """

    weights: Sequence[Tensor]
    statistics: StatisticsT | None
    names: Sequence[str]


OptionsT = TypeVar("OptionsT", bound=MethodOptions)


class Method(ABC, Generic[OptionsT, StatisticsT]):
    """A quantisation method: tensors in, quantised weights out.

    The quantise operation handles files, devices, progress and the order of blocks; it knows no method by
    name.
    """

    name: str
    """Name in recipes and on the command line."""
    options: type[OptionsT]
    """Class of its options."""
    calibrated: bool = True
    """Whether it needs statistics of the inputs. If not, no text is read and no block is run."""
    sequential: bool = True
    """Whether a block's inputs are computed by the quantised blocks before it. Otherwise they are computed by
    the original blocks, and every block runs once."""
    enough_tokens: int | None = None
    """Tokens of text beyond which more bring nothing; None where more always help."""
    per_output: bool = True
    """Whether it supports only schemes whose output channels share no scale (:attr:`Scheme.per_output`)."""
    prunes: bool = False
    """Whether it supports sparse schemes (:attr:`Scheme.sparsity`)."""

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        """Why the method can't make weights of this scheme, or None."""
        if scheme.element.table is not None and scheme.stores_zeros:
            return f"asymmetric {scheme.element.name} weights; values of a table have no zero points"
        if self.per_output and not scheme.per_output:
            return f"{scheme.describe()}; {self.name} solves each output channel alone"
        if scheme.sparsity is not None and not self.prunes:
            return f"{scheme.sparsity.describe()} weights; {self.name} does not prune"
        return None

    def takes_unasked(self, scheme: Scheme) -> bool:
        """Whether a recipe of this method makes ``scheme`` by it, and not by rounding to nearest, where no
        rule names an option of the method. Integers always are."""
        return True

    def statistics(
        self, in_features: int, options: OptionsT, *, device: torch.device, name: str
    ) -> StatisticsT:
        """Empty statistics of an input of K = ``in_features`` channels; called only if :attr:`calibrated`.

        Args:
            in_features: K.
            options: options of the first projection that reads the input.
            device: device of the statistics.
            name: name of the input in error messages.
        """
        raise NotImplementedError(f"{self.name} gathers no statistics")

    def paired(self, options: OptionsT) -> bool:
        """Whether the method compares a layer's inputs in the quantised and in the original model.

        Statistics then have the methods of :class:`~marlinq.methods.drift.PairedHessian`: ``add_pair``,
        called where both inputs are known, and ``write_to_stream`` and ``add_stream`` for projections that
        write to the residual stream.
        """
        return False

    def uses_output_gradients(self, options: OptionsT) -> bool:
        """Whether the method uses the loss's gradients at a projection's outputs.

        Statistics then have a dictionary ``outputs``, which is filled with them
        (:mod:`marlinq.methods.outputs`).
        """
        return False

    def transform(self, block: nn.Module, options: OptionsT) -> None:
        """Change weights of a materialised decoder block, in place, before statistics are gathered.

        The block's function must stay the same up to rounding. Parameters that are not quantised must not
        change, since they are copied from the source.
        """
        return

    @abstractmethod
    def solve(
        self,
        weights: Sequence[Tensor],
        statistics: StatisticsT | None,
        scheme: Scheme,
        options: OptionsT,
        *,
        names: Sequence[str],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        """Quantise the weights of projections that share an input.

        Args:
            weights: float [N_i, K] each, on one device.
            statistics: statistics of the input that they share; None for a method without calibration.
            scheme: scheme of the result: element, group size, zero points, dtype of the scales.
            options: options of the method.
            names: names of the weights in error messages.

        Returns:
            The quantised weight, on the device of the weights, and the report, for each weight in order.

        Raises:
            NumericsError: a weight or the statistics hold NaN or infinity.
            UnsupportedError: K is not a multiple of the group size, or the shapes don't fit together.
        """

    def solve_many(
        self, inputs: Sequence[Inputs[StatisticsT]], scheme: Scheme, options: OptionsT
    ) -> list[list[tuple[QuantizedWeight, SolveReport]]]:
        """Quantise the weights of several inputs; results equal those of :meth:`solve` up to rounding.

        Methods that can solve many inputs faster together override it.

        Args:
            inputs: inputs whose weights have the same shapes in the same order.
            scheme, options, exceptions: as for :meth:`solve`.
        """
        results = []
        for each in inputs:
            wide = [weight.to(torch.float32) for weight in each.weights]
            results.append(self.solve(wide, each.statistics, scheme, options, names=each.names))
        return results


def real_rows(x: Tensor, mask: Tensor | None, name: str) -> Tensor:
    """The inputs [tokens, K] of one call that belong to real tokens.

    Args:
        x: float [..., K].
        mask: bool [B, T] with true at real tokens, None when all are; x then is [B, T, K] or [B * T, K].
        name: name of the layer in the error message.

    Raises:
        UnsupportedError: there is a mask, but the rows of x are not the batch's tokens in order.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    if mask is None:
        return rows
    if rows.shape[0] != mask.numel():
        raise UnsupportedError(
            f"{name}: expected inputs of {list(mask.shape)} tokens, found {list(x.shape)}; it "
            "does not see every token once, so padding is not recognised; skip it with --override"
        )
    return rows[mask.to(rows.device).flatten()]


def whole_groups(scheme: Scheme, in_features: int, name: str) -> int:
    """Input channels of a group in a weight of ``scheme`` and K = ``in_features``.

    Raises:
        UnsupportedError: K is not a multiple of it, so the last group would be short.
    """
    granularity = scheme.granularity
    # A group larger than K is refused, too; the message has the requested size.
    size = granularity.channels or in_features
    if in_features % size:
        raise UnsupportedError(
            f"{name}: in_features {in_features} is not a multiple of group size {size}; "
            "choose another group size, or skip it, with --override"
        )
    return size


def check_weight(weight: Tensor, scheme: Scheme, name: str) -> None:
    """Refuse a weight that can't be quantised.

    Raises:
        UnsupportedError: it is not a matrix, or K is not a multiple of a sparse scheme's span.
        NumericsError: it holds NaN, infinity, or values whose scale overflows the dtype of scales.
    """
    if weight.dim() != 2:
        raise UnsupportedError(f"{name}: expected a weight [N, K], found shape {list(weight.shape)}")
    if scheme.sparsity is not None and weight.shape[1] % scheme.sparsity.span:
        raise UnsupportedError(
            f"{name}: in_features {weight.shape[1]} is not a multiple of {scheme.sparsity.span}, as "
            f"{scheme.sparsity.describe()} weights need; keep it dense with --override"
        )
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise NumericsError(
            f"{name}: {bad} of {weight.numel()} weights are NaN or infinite; check the source checkpoint"
        )
    largest = float(weight.abs().max())
    if scheme.tensor_scale == "none" and largest > torch.finfo(torch_dtype(scheme.scale_dtype)).max:
        raise NumericsError(
            f"{name}: a weight of magnitude {largest:.3g} is too large for {scheme.scale_dtype} scales; "
            "check the source checkpoint"
        )
