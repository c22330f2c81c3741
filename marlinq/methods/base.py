"""What every quantisation method offers, and the values it works with."""

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
    """What is gathered of an input that projections share, over the tokens of the calibration."""

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        ...

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Count the inputs of one call.

        Args:
            x: float [..., K].
            mask: bool [B, T], true at tokens that are no padding; None when none is.
        """
        ...

    def merge(self, other: Any) -> None:
        """Count what ``other``, of the same class and K, has seen: another shard of the calibration."""
        ...

    def blend(self, other: Any, share: float) -> None:
        """Let ``other``, of the same class and K, have a ``share`` (0 to 1) in what is known of the input,
        however many tokens it has seen; an input that saw none has no part in the result."""
        ...

    def as_share(self, tokens: int) -> Sequence[Tensor]:
        """Become the share of one shard in ``tokens`` in all.

        Returns:
            The tensors whose sums over all shards are the whole's; they are added up in place.
        """
        ...


@dataclass(frozen=True)
class SolveReport:
    """What happened to one weight.

    Attributes:
        relative_error: tr(D H D^T) / tr(W H W^T) with D = W - Q.
        quantity: an :class:`~marlinq.methods.quantity.ErrorQuantity`; says which H that is.
        fallback: measure taken instead of the method, and why; None when nothing was.
        figures: further figures of the method, by name.
        norm: tr(W H W^T), which the error is relative to; 1 where the method does not say.
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
        statistics: statistics of the input; None for a method that is not calibrated.
        names: names of the weights in error messages.
    """

    weights: Sequence[Tensor]
    statistics: StatisticsT | None
    names: Sequence[str]


OptionsT = TypeVar("OptionsT", bound=MethodOptions)


class Method(ABC, Generic[OptionsT, StatisticsT]):
    """One way to quantise weights: tensors in, quantised weights out.

    Files, devices, progress and the order of blocks are the quantise operation's; it knows no method by name.
    """

    name: str
    """The name in recipes and on the command line."""
    options: type[OptionsT]
    """Its options."""
    calibrated: bool = True
    """Whether it needs statistics of the inputs. Without them no text is read and no block is run."""
    sequential: bool = True
    """Whether statistics are of what the quantised blocks before make of the text. Otherwise they are of what
    the original makes of it, and a block runs once."""
    enough_tokens: int | None = None
    """Tokens of text that tell it as much as more would; None where more are of use."""
    per_output: bool = True
    """Whether it makes only schemes whose output channels share nothing (:attr:`Scheme.per_output`)."""
    prunes: bool = False
    """Whether it makes sparse schemes (:attr:`Scheme.sparsity`)."""

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        """Why the method can't make weights of this scheme, or None."""
        if scheme.element.table is not None and scheme.stores_zeros:
            return f"asymmetric {scheme.element.name} weights; values of a table have no zero points"
        if self.per_output and not scheme.per_output:
            return f"{scheme.describe()}; {self.name} solves each output channel alone"
        if scheme.sparsity is not None and not self.prunes:
            return f"{scheme.sparsity.describe()} weights; {self.name} does not prune"
        return None

    def statistics(
        self, in_features: int, options: OptionsT, *, device: torch.device, name: str
    ) -> StatisticsT:
        """Empty statistics of an input of K = ``in_features`` channels; called when :attr:`calibrated`.

        Args:
            in_features: K.
            options: options of the first projection that reads the input.
            device: where they are kept.
            name: name of the input in error messages.
        """
        raise NotImplementedError(f"{self.name} gathers no statistics")

    def paired(self, options: OptionsT) -> bool:
        """Whether the method compares inputs with the original's: statistics then have ``add_pair``, which is
        called with both where both are known, and ``write_to_stream`` and ``add_stream`` for projections
        that write to the residual stream (:class:`~marlinq.methods.drift.PairedHessian`)."""
        return False

    def uses_output_gradients(self, options: OptionsT) -> bool:
        """Whether the method takes the loss's gradients at a projection's outputs: statistics then have a
        dictionary ``outputs``, in which it finds them (:mod:`marlinq.methods.outputs`)."""
        return False

    def transform(self, block: nn.Module, options: OptionsT) -> None:
        """Change weights of a materialised decoder block, in place, before statistics are gathered.

        What the block computes has to stay the same up to rounding. Parameters that are not quantised have to
        stay as they are: the output holds a copy of the source's.
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
            statistics: statistics of the input that they share; None for a method that is not calibrated.
            scheme: scheme of the result: element, group size, zero points, dtype of the scales.
            options: how.
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
        """Quantise what reads several inputs: for each what :meth:`solve` returns, up to rounding.

        A method that can do it faster in one go than one after the other has its own.

        Args:
            inputs: whose weights have the same shapes in the same order.
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
            "does not see every token once, so padding can't be told apart; skip it with an override"
        )
    return rows[mask.to(rows.device).flatten()]


def whole_groups(scheme: Scheme, in_features: int, name: str) -> int:
    """Input channels that share a scale in a weight of ``scheme`` and K = ``in_features``.

    Raises:
        UnsupportedError: K is not a multiple of it, so the last group would be short.
    """
    granularity = scheme.granularity
    # A group that is larger than K is refused too, by the size that was asked for.
    size = granularity.channels or in_features
    if in_features % size:
        raise UnsupportedError(
            f"{name}: in_features {in_features} is not a multiple of group size {size}; "
            "choose another group size for it, or skip it"
        )
    return size


def check_weight(weight: Tensor, scheme: Scheme, name: str) -> None:
    """Refuse a weight that no grid can hold.

    Raises:
        UnsupportedError: it is not a matrix, or K is not a multiple of a sparse scheme's span.
        NumericsError: it holds NaN, infinity, or values whose scale overflows the dtype of scales.
    """
    if weight.dim() != 2:
        raise UnsupportedError(f"{name}: expected a weight [N, K], found shape {list(weight.shape)}")
    if scheme.sparsity is not None and weight.shape[1] % scheme.sparsity.span:
        raise UnsupportedError(
            f"{name}: in_features {weight.shape[1]} is not a multiple of {scheme.sparsity.span}, as "
            f"{scheme.sparsity.describe()} weights need; keep it dense with an override"
        )
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise NumericsError(
            f"{name}: {bad} of {weight.numel()} weights are NaN or infinite; check the source checkpoint"
        )
    largest = float(weight.abs().max())
    if scheme.tensor_scale == "none" and largest > torch.finfo(torch_dtype(scheme.scale_dtype)).max:
        raise NumericsError(
            f"{name}: a weight of magnitude {largest:.3g} is beyond what {scheme.scale_dtype} scales are "
            "meant for; check the source checkpoint"
        )
