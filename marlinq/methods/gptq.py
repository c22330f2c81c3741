"""GPTQ: quantise one input channel after the other, and let later channels compensate for its error.

With the Hessian H = X^T X of a layer's inputs, the loss of a quantised weight Q is tr(D H D^T), D = W - Q.
Written with the upper triangular root H = R R^T it is ||D R||^2, and column k of D R depends on the
channels up to k alone. So the loss that channels 0..k fix is known once they are quantised, and each next
channel is rounded to where its own term is smallest: the same solution as Frantar et al. 2023 (GPTQ,
algorithm 1, on the inverse's Cholesky factor), reached without inverting H.

As in MARLIN (Frantar et al. 2024), a group's scales are chosen when its first channel is processed, from
weights with the updates of all channels before, by a search over shrunken ranges. The search weights errors
as the loss does: a rounding error of channel k costs R[k, k]**2, the part that later channels can't
compensate for. Once the group's codes are known, its scales are fitted to them by least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.core.scheme import Scheme
from marlinq.core.settings import Choice, Flag, Fraction, ProperShare, Share, setting
from marlinq.core.weight import QuantizedWeight
from marlinq.methods.drift import PairedHessian, make_up_for_drift, trusted_share
from marlinq.methods.factor import Factor, channel_order, factorise
from marlinq.methods.hessian import HessianAccumulator, tensor_cores
from marlinq.methods.method import Inputs, Method, MethodOptions, SolveReport, check_weight, whole_groups
from marlinq.methods.outputs import solve_in_parts
from marlinq.methods.panel_kernel import has_panel_kernel
from marlinq.methods.rtn import round_to_nearest
from marlinq.methods.second_level import first_level, searched_second_level
from marlinq.methods.slices import solve_slices
from marlinq.methods.solution import Solution

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


@dataclass(frozen=True)
class GPTQOptions(MethodOptions):
    """Options of GPTQ.

    Attributes:
        clip_search: search each group's scales (see the module's text) instead of spanning its range.
        damp: share of the mean of H's diagonal that is added to it; raised tenfold, up to 1, while H can't be
            factorised.
        shrinkage: share by which entries off H's diagonal are lowered
            (:meth:`~marlinq.methods.hessian.HessianAccumulator.hessian`).
        act_order: ``none``, or ``static``: groups by falling mean of H's diagonal, and channels by falling
            diagonal within their group. Groups keep their channels, so g_idx stays trivial.
        drift_correction: share of the errors of earlier quantised blocks that is compensated for
            (:mod:`marlinq.methods.drift`). It takes another forward pass, of the original.
        output_hessian: also weight errors of a layer's outputs by the loss's gradients there
            (:mod:`marlinq.methods.outputs`). It takes a backward pass of the original.
    """

    clip_search: bool = setting(True, Flag(), "Search each group's scale for the least output error.")
    damp: float = setting(
        0.01, Fraction(), "Share of the Hessian's mean diagonal that is added to its diagonal."
    )
    shrinkage: float = setting(
        0.35, ProperShare(), "Share by which off-diagonal entries of the Hessian are reduced."
    )
    act_order: str = setting(
        "static",
        Choice(("none", "static")),
        "static quantises channels with the largest activations first; groups keep their channels.",
    )
    drift_correction: float = setting(
        0.25, Share(), "Share of the error of earlier layers that a layer's weights correct."
    )
    output_hessian: bool = setting(
        False,
        Flag(),
        "Let errors of a layer's outputs cancel each other, weighted by gradients of the loss (a backward "
        "pass of the original).",
    )


class GPTQ(Method[GPTQOptions, HessianAccumulator]):
    """GPTQ with the choice of scales of MARLIN (Frantar et al. 2024)."""

    name = "gptq"
    options = GPTQOptions
    per_output = False
    prunes = True

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        if scheme.granularity.kind not in ("group", "channel"):
            return f"{scheme.granularity.describe()}; {self.name} solves each output channel alone"
        if scheme.activations is not None and not scheme.activations.dynamic:
            return f"{scheme.activations.describe()}; {self.name} makes no scale for them"
        return super().scheme_refusal(scheme)

    def takes_unasked(self, scheme: Scheme) -> bool:
        return scheme.element.table is None or scheme.element.bits <= _MOST_FLOAT_BITS

    def statistics(
        self, in_features: int, options: GPTQOptions, *, device: torch.device, name: str
    ) -> HessianAccumulator:
        kind = PairedHessian if self.paired(options) else HessianAccumulator
        return kind(in_features, device=device, name=name)

    def paired(self, options: GPTQOptions) -> bool:
        return options.drift_correction > 0

    def uses_output_gradients(self, options: GPTQOptions) -> bool:
        return options.output_hessian

    def solve(
        self,
        weights: Sequence[Tensor],
        statistics: HessianAccumulator | None,
        scheme: Scheme,
        options: GPTQOptions,
        *,
        names: Sequence[str],
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        statistics = _known(statistics)
        hessian = statistics.hessian(options.shrinkage)
        outputs = [statistics.outputs.get(name) for name in names]
        corrected = None
        if isinstance(statistics, PairedHessian) and (drift := statistics.drift()) is not None:
            corrected = partial(
                make_up_for_drift,
                weights,
                drift=drift,
                share=trusted_share(options.drift_correction, statistics.pairs, len(hessian)),
                limits=[
                    float((weight - round_to_nearest(weight, scheme, name=name).dequantize()).norm())
                    for weight, name in zip(weights, names, strict=True)
                ],
                of_stream=statistics.of_stream,
            )
        return solve_gptq_shared(
            weights, hessian, scheme, options, names=names, outputs=outputs, corrected=corrected
        )

    def solve_many(
        self, inputs: Sequence[Inputs[HessianAccumulator]], scheme: Scheme, options: GPTQOptions
    ) -> list[list[tuple[QuantizedWeight, SolveReport]]]:
        device, k = inputs[0].weights[0].device, inputs[0].weights[0].shape[1]
        g = whole_groups(scheme, k, inputs[0].names[0])
        together = _together(inputs[0].weights)
        drifts = any(isinstance(each.statistics, PairedHessian) and each.statistics.pairs for each in inputs)
        plain = scheme.sparsity is None and scheme.element.table is None
        if together == 1 or drifts or not plain or not has_panel_kernel(device):
            return super().solve_many(inputs, scheme, options)
        from marlinq.kernels.solve import PANEL_ROWS
        from marlinq.methods.batched_layers import JointWeights, solve_many

        if g > PANEL_ROWS:
            return super().solve_many(inputs, scheme, options)
        results: list[list[tuple[QuantizedWeight, SolveReport]]] = []
        for start in range(0, len(inputs), together):
            part = inputs[start : start + together]
            solutions = solve_many(
                [
                    JointWeights(each.weights, _known(each.statistics).hessian(options.shrinkage))
                    for each in part
                ],
                together,
                g,
                scheme,
                damp=options.damp,
                act_order=options.act_order == "static",
                clip_search=options.clip_search,
            )
            for each, mine in zip(part, solutions, strict=True):
                results += [mine] if mine else super().solve_many([each], scheme, options)
        return results


def solve_gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    options: GPTQOptions | None = None,
    *,
    name: str = "weight",
) -> tuple[QuantizedWeight, SolveReport]:
    """Quantise one weight; see :func:`solve_gptq_shared`."""
    return solve_gptq_shared([weight], hessian, scheme, options, names=[name])[0]


def solve_gptq_shared(
    weights: Sequence[Tensor],
    hessian: Tensor,
    scheme: Scheme,
    options: GPTQOptions | None = None,
    *,
    names: Sequence[str] | None = None,
    outputs: Sequence[HessianAccumulator | None] = (),
    corrected: Callable[[Factor], Sequence[Tensor] | None] | None = None,
) -> list[tuple[QuantizedWeight, SolveReport]]:
    """Quantise the weights that read the same input, in one solve.

    Output channels don't influence each other, so each weight's result is that of a solve by itself, up to
    the rounding of matrix products.

    Args:
        weights: float [N_i, K] each, on the Hessian's device.
        hessian: float [K, K], the symmetric sum (or mean) of x x^T over the calibration's inputs x.
        scheme: element, group size (a divisor of K, or -1), zero points, dtype of the scales.
        options: the defaults when None.
        names: names of the weights in error messages.
        outputs: for each weight the Hessian of the loss's gradients at its outputs, or None. If empty, no
            output channel influences another.
        corrected: function of the Hessian's factor that returns the weights to solve for instead of
            ``weights``, or None if they can't be corrected, which the report notes.

    Returns:
        The quantised weight, on the device of the weights, and the report, for each weight in order. The
        report's relative error is taken with the Hessian that the solve used: its diagonal or the identity
        in a fallback. Its figures are ``damp``, above what was asked for when the factorisation needed more,
        and ``dead_channels``, input channels that were zero in all of the calibration.

    Raises:
        NumericsError: a weight or the Hessian holds NaN or infinity.
        UnsupportedError: K is not a multiple of the group size, or the shapes don't fit together.
    """
    options = options or GPTQOptions()
    names = names or [f"weight {i}" for i in range(len(weights))]
    k = hessian.shape[0]
    for weight, name in zip(weights, names, strict=True):
        check_weight(weight, scheme, name)
        if tuple(hessian.shape) != (weight.shape[1],) * 2:
            raise UnsupportedError(
                f"{name}: the weight {list(weight.shape)} needs a Hessian [K, K] of its K, "
                f"found {list(hessian.shape)}"
            )
    if not bool(torch.isfinite(hessian).all()):
        raise NumericsError(
            f"{names[0]}: the Hessian of its input holds NaN or infinity; check the source checkpoint and "
            "the calibration text"
        )
    g = whole_groups(scheme, k, names[0])
    hessian = hessian.to(torch.float32)
    span = 1 if scheme.sparsity is None else scheme.sparsity.span
    order = channel_order(hessian, g, options.act_order, span)
    factor = factorise(hessian, order, options.damp)
    wanted = weights if corrected is None else corrected(factor)
    uncorrected = "no drift correction: it is not finite" if wanted is None else None
    wanted = wanted or weights
    power = factor.root.diagonal().square()[torch.argsort(order)]
    seconds = [searched_second_level(weight, power, g, scheme) for weight in wanted]
    w = torch.cat(
        [
            first_level(weight.t().to(torch.float32), second, scheme)
            for weight, second in zip(wanted, seconds, strict=True)
        ],
        dim=1,
    )
    norms = _norms(w, hessian, factor)
    widths = [weight.shape[0] for weight in weights]
    solve_columns = _solver(factor, g, scheme, options, w.device)
    if any(outputs):
        solution, difference, reasons = solve_in_parts(
            w[order], widths, outputs, g, scheme.element, solve_columns
        )
        losses = _norms(difference[torch.argsort(order)], hessian, factor).clamp_(min=0)
    else:
        solution, reasons = solve_columns(w[order]), [None] * len(weights)
        losses = solution.loss.clamp_(min=0)

    quantized = solution.weights(order, widths, g, scheme, seconds)
    results = []
    for solved, loss, norm, reason, second in zip(
        quantized, torch.split(losses, widths), torch.split(norms, widths), reasons, seconds, strict=True
    ):
        # Both are in units of the first level.
        unit = 1.0 if second is None else float(first_level(torch.ones(()), second.cpu(), scheme)) ** -2
        error, whole = float(loss.sum()) * unit, float(norm.sum()) * unit
        report = SolveReport(
            relative_error=error / whole if whole > 0 else 0.0,
            quantity=factor.quantity,
            fallback=factor.fallback or reason or uncorrected,
            figures={"damp": factor.damp, "dead_channels": factor.dead_channels},
            norm=whole,
        )
        results.append((solved, report))
    return results


# Bits of the widest float that it takes unasked. Errors of outputs become a quarter for wider ones, too, but
# those are small (docs/lab-notes/quality.md).
_MOST_FLOAT_BITS = 4

# Bytes of a batched solve, about: weights, carried errors, codes and results (16 bytes a weight), and three
# copies of a Hessian (12 bytes an entry).
_TOGETHER_BYTES = 1 << 30
_OF_WEIGHTS, _OF_HESSIANS = 16, 12
_MOST_TOGETHER = 5  # at most 2**5 inputs


def _together(weights: Sequence[Tensor]) -> int:
    """Number of inputs, with weights of these shapes, that are solved at once.

    A power of two, which divides usual numbers of experts. It depends on the shapes alone, since products of
    batches of another size may round differently.
    """
    n, k = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    most = _TOGETHER_BYTES // (_OF_WEIGHTS * n * k + _OF_HESSIANS * k * k)
    return 1 << min(most.bit_length() - 1, _MOST_TOGETHER) if most else 1


def _known(statistics: HessianAccumulator | None) -> HessianAccumulator:
    if statistics is None:
        raise ValueError("GPTQ needs the Hessian of the weights' input")
    return statistics


def _solver(
    factor: Factor, g: int, scheme: Scheme, options: GPTQOptions, device: torch.device
) -> Callable[[Tensor], Solution]:
    """A function that solves columns, float32 [K, n] in processing order, on a device."""
    plain = scheme.sparsity is None and scheme.element.table is None
    if not plain or not has_panel_kernel(device):
        return lambda w: solve_slices(w, factor, g, scheme, clip_search=options.clip_search)
    # Imported late: it imports torch, which reading a recipe must not do.
    from marlinq.methods.panels import cut, solve_panels

    blocks = cut(factor.root, g)
    return lambda w: solve_panels(w, factor, g, scheme, clip_search=options.clip_search, blocks=blocks)


def _norms(w: Tensor, hessian: Tensor, factor: Factor) -> Tensor:
    """w^T H w for each output channel of w [K, N], float64 [N], with the Hessian that the solve uses."""
    if factor.diagonal is not None:
        product = factor.diagonal.unsqueeze(1) * w
    elif hessian.is_cuda:
        with tensor_cores():
            product = hessian @ w
    else:
        product = hessian @ w
    return product.mul_(w).sum(dim=0).to(torch.float64)
