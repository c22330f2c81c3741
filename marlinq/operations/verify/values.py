"""Checks scales, zero points, codes and g_idx without the original.

A check fails where no weights could have been quantised to the stored values. Values that unusual but finite
weights give (one huge weight, a constant row, a pruned channel, weights of one sign) are at most a warning.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marlinq.core.display import counted
from marlinq.core.scheme import Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.formats.stored_values import (
    codes_fault,
    has_coarse_scales,
    order_fault,
    scales_fault,
    typical_weight,
)
from marlinq.operations.verify.verification_report import Check, Findings

_OUTLIER = 2.0**12
"""Ratio of a scale to the typical scale of its channel and of its group above which it is an outlier. A
flipped upper exponent bit makes a float16 below 2 larger by 2**16."""
_LARGE = 2.0**10
"""Typical magnitude of the largest weight under a scale: models have 0.01 to 10."""
_BLANK_SHARE = 0.5
_SAME_SCALE = 1.1
_SUBNORMAL_SHARE = 0.01
_NARROW_SHARE = 0.5


class Values:
    """The checks of values; modules are added one at a time."""

    def __init__(self) -> None:
        self._scales = Findings("scales")
        self._zeros = Findings("zero points")
        self._codes = Findings("codes")
        self._g_idx = Findings("g_idx")
        self._modules = 0
        self._negative = 0
        self._count = 0
        self._scattered = 0

    def module(self, name: str, q: QuantizedWeight, declared: Scheme) -> None:
        """Checks the values of one module; ``declared`` is its scheme in the config."""
        self._modules += 1
        self._check_scales(name, q)
        self._check_zeros(name, q, declared)
        self._check_codes(name, q)
        self._check_g_idx(name, q, declared)

    def _check_scales(self, name: str, q: QuantizedWeight) -> None:
        fault = scales_fault(q, lambda: q.codes)
        if fault is not None:
            self._scales.failures.append(f"{name}: {fault}")
            return
        scales = q.scales.float()
        self._count += scales.numel()
        self._negative += int((scales < 0).sum())
        zero = int((scales == 0).sum())
        if zero:
            self._scales.warnings.append(
                f"{name}: {zero} of {scales.numel()} scales were rounded to zero, and so were their weights"
            )
        subnormal = int((scales.abs() < torch.finfo(q.scales.dtype).tiny).sum()) - zero
        if subnormal > _SUBNORMAL_SHARE * scales.numel():
            self._scales.warnings.append(
                f"{name}: {subnormal} of {scales.numel()} scales are subnormal in {q.scales.dtype}; "
                "kernels may flush them to zero"
            )
        if has_coarse_scales(q):
            self._scales.warnings.append(
                f"{name}: weights are too small for scales in float16, and lost precision"
            )
        typical = typical_weight(q)
        if typical > _LARGE:
            self._scales.warnings.append(
                f"{name}: half of the scales reach weights of {typical:.3g}, expected below {_LARGE:g}; are "
                "they reciprocals, or another module's?"
            )
        self._check_outliers(name, q, scales.abs().log2())

    def _check_outliers(self, name: str, q: QuantizedWeight, logs: Tensor) -> None:
        used = torch.zeros(q.groups, q.out_features, dtype=torch.int32)
        used.index_add_(0, q.g_idx.long(), q.used().to(torch.int32))
        used = torch.zeros(q.scales.shape, dtype=torch.int32).index_add_(1, _columns(q), used)
        # The scale of a group of zeros may be anything.
        logs = torch.where((used > 0) & logs.isfinite(), logs, torch.nan)
        apart = logs - logs.nanmedian(dim=0, keepdim=True).values
        apart = (apart - apart.nanmedian(dim=1, keepdim=True).values).nan_to_num_(0)
        sizes = apart.abs()
        worst = float(sizes.max())
        # Rows of weights 200 times as large as their neighbours occur in sound models, hence the high limit.
        if worst <= math.log2(_OUTLIER):
            return
        group, column = divmod(int(sizes.argmax()), q.scales.shape[1])
        column *= q.granularity.outputs_per_group(q.out_features)
        text = (
            f"{name}: the scale of group {group} of output channel {column} is {2**worst:.3g} times off what "
            "its channel and group have elsewhere"
        )
        # One huge weight gives a large scale and leaves the rest of its group at the zero point; small
        # weights give a small scale. Only a large scale of a group that uses many codes can't be right.
        channels = torch.zeros(q.groups, dtype=torch.int32)
        channels.index_add_(0, q.g_idx.long(), torch.ones_like(q.g_idx))
        weights = channels.unsqueeze(1) * torch.bincount(_columns(q))
        impossible = (apart > math.log2(_OUTLIER)) & (2 * used > weights)
        (self._scales.failures if bool(impossible.any()) else self._scales.warnings).append(text)

    def _check_zeros(self, name: str, q: QuantizedWeight, declared: Scheme) -> None:
        middle = q.element.midpoint
        low, high = int(q.zeros.min()), int(q.zeros.max())
        if declared.stores_zeros and low == high != middle and q.zeros.numel() > 1:
            # Weights of one sign have all zero points at one end, hence a warning. Zero points of another
            # format were refused when the module was read.
            self._zeros.warnings.append(
                f"{name}: every zero point is {low}; a symmetric module has {middle}, an asymmetric one "
                "different ones"
            )

    def _check_codes(self, name: str, q: QuantizedWeight) -> None:
        fault = codes_fault(q)
        if fault is not None:
            self._codes.failures.append(f"{name}: {fault}")
            return
        low, high = _extreme(q, "amin"), _extreme(q, "amax")
        same = (low == high) & (low != q.zeros)
        if bool(same.any()):
            count = f"{int(same.sum())} of {same.numel()}"
            text = f"{name}: {count} groups hold one code only, and not the zero point"
            # A constant row has one code and one scale; different scales come from different weights.
            sizes = q.scales.float().abs()
            largest = sizes.where(same, 0.0).amax(dim=0)
            smallest = sizes.where(same, torch.inf).amin(dim=0)
            differ = same & (largest > _SAME_SCALE * smallest)
            if int(differ.sum()) > _BLANK_SHARE * same.numel():
                self._codes.failures.append(f"{text}; the data is blank or overwritten")
            else:
                self._codes.warnings.append(f"{text}; constant weights, or damage")
        spread = high.short() - low.short()
        narrow = float((spread < q.element.codes // 4).float().mean())
        if narrow > _NARROW_SHARE:
            self._codes.warnings.append(
                f"{name}: {narrow:.0%} of the groups use less than a quarter of the {q.element.codes} codes"
            )

    def _check_g_idx(self, name: str, q: QuantizedWeight, declared: Scheme) -> None:
        fault = order_fault(q)
        if fault is not None:
            self._g_idx.failures.append(f"{name}: {fault}")
        if q.has_trivial_g_idx:
            if declared.act_order and q.groups > 1:
                self._g_idx.warnings.append(
                    f"{name}: desc_act is true, but no activation order is stored; some loaders refuse it "
                    "needlessly"
                )
            return
        self._scattered += 1
        if not declared.act_order:
            self._g_idx.failures.append(
                f"{name}: an activation order is stored, but desc_act is false; loaders would ignore it"
            )

    def results(self) -> list[Check]:
        """The four rows of the report."""
        negative = f", {self._negative / self._count:.0%} negative" if self._negative else ""
        order = f"{self._scattered} with an activation order" if self._scattered else "no activation order"
        return [
            self._scales.result(f"{self._count} scales, finite and not zero{negative}"),
            self._zeros.result(f"as the config says in {counted(self._modules, 'modules')}"),
            self._codes.result(f"{self._modules} modules use their code range"),
            self._g_idx.result(f"in range and in step with the config; {order}"),
        ]


def _columns(q: QuantizedWeight) -> Tensor:
    """int64 [N]: index of the column of scales for each output channel."""
    return torch.arange(q.out_features) // q.granularity.outputs_per_group(q.out_features)


def _extreme(q: QuantizedWeight, which: str) -> Tensor:
    """uint8 [G, P]: the lowest ("amin") or highest ("amax") code of the weights under each scale."""
    start = 255 if which == "amin" else 0
    rows = q.g_idx.long().unsqueeze(1).expand(q.codes.shape)
    by_group = torch.full((q.groups, q.out_features), start, dtype=torch.uint8)
    by_group.scatter_reduce_(0, rows, q.codes, which)
    columns = _columns(q).expand(by_group.shape)
    return torch.full(q.scales.shape, start, dtype=torch.uint8).scatter_reduce_(1, columns, by_group, which)
