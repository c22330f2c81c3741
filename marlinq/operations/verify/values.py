"""What can be said about scales, zero points, codes and g_idx without the original."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.scheme import Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.operations.verify.report import Check, Findings

# A scale this many times its channel's and its group's typical one: exponents of float16 damaged in their
# upper three bits are off by 2**4 or more; weights of trained models stay far below.
_OUTLIER = 2.0**12
_ODD = 2.0**6
_SUBNORMAL_SHARE = 0.01
_NARROW_SHARE = 0.5


class Values:
    """Collects the checks, a module at a time."""

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
        """Check one module against its values and what the config says about it."""
        self._modules += 1
        self._check_scales(name, q)
        self._check_zeros(name, q, declared)
        self._check_codes(name, q)
        self._check_g_idx(name, q, declared)

    def _check_scales(self, name: str, q: QuantizedWeight) -> None:
        scales = q.scales.float()
        finite = torch.isfinite(scales)
        if not bool(finite.all()):
            self._scales.failures.append(
                f"{name}: {int((~finite).sum())} of {scales.numel()} scales are NaN or infinite"
            )
            return
        self._count += scales.numel()
        self._negative += int((scales < 0).sum())
        zero = int((scales == 0).sum())
        if zero:
            self._scales.failures.append(f"{name}: {zero} of {scales.numel()} scales are zero")
            return
        subnormal = int((scales.abs() < torch.finfo(q.scales.dtype).tiny).sum())
        if subnormal > _SUBNORMAL_SHARE * scales.numel():
            self._scales.warnings.append(
                f"{name}: {subnormal} of {scales.numel()} scales are subnormal in {q.scales.dtype}; "
                "kernels may flush them to zero"
            )
        self._check_outliers(name, q, scales.abs().log2())

    def _check_outliers(self, name: str, q: QuantizedWeight, logs: Tensor) -> None:
        # A group of zeros alone is stored with whatever scale; it says nothing.
        used = torch.zeros(q.scales.shape, dtype=torch.int32)
        level = (q.codes != q.zeros[q.g_idx.long()]).to(torch.int32)
        used.index_add_(0, q.g_idx.long(), level)
        apart = logs - logs.median(dim=0, keepdim=True).values
        apart = apart - apart.median(dim=1, keepdim=True).values
        apart = torch.where(used > 0, apart.abs(), 0)
        worst = float(apart.max())
        if worst <= torch.tensor(_ODD).log2():
            return
        group, column = divmod(int(apart.argmax()), q.out_features)
        text = (
            f"{name}: the scale of group {group} of output channel {column} is {2**worst:.3g} times off what "
            "its channel and group have elsewhere"
        )
        (self._scales.failures if 2**worst > _OUTLIER else self._scales.warnings).append(text)

    def _check_zeros(self, name: str, q: QuantizedWeight, declared: Scheme) -> None:
        middle = q.element.midpoint
        if not declared.stores_zeros and q.scheme.stores_zeros:
            count = int((q.zeros != middle).sum())
            self._zeros.failures.append(
                f"{name}: the config says symmetric, but {count} of {q.zeros.numel()} zero points are "
                f"not {middle}"
            )
        low, high = int(q.zeros.min()), int(q.zeros.max())
        if declared.stores_zeros and low == high != middle and q.zeros.numel() > 1:
            self._zeros.failures.append(
                f"{name}: every zero point is {low}; a symmetric module has {middle}, an asymmetric one "
                "different ones"
            )

    def _check_codes(self, name: str, q: QuantizedWeight) -> None:
        grid = q.g_idx.long().unsqueeze(1).expand(q.codes.shape)
        low = torch.full(q.scales.shape, 255, dtype=torch.uint8).scatter_reduce_(0, grid, q.codes, "amin")
        high = torch.zeros(q.scales.shape, dtype=torch.uint8).scatter_reduce_(0, grid, q.codes, "amax")
        same = (low == high) & (low != q.zeros)
        if bool(same.any()):
            self._codes.failures.append(
                f"{name}: {int(same.sum())} of {same.numel()} groups hold one code only, and not the zero "
                "point; the data is blank or overwritten"
            )
        spread = high.short() - low.short()
        narrow = float((spread < q.element.codes // 4).float().mean())
        if narrow > _NARROW_SHARE:
            self._codes.warnings.append(
                f"{name}: {narrow:.0%} of the groups use less than a quarter of the {q.element.codes} codes"
            )

    def _check_g_idx(self, name: str, q: QuantizedWeight, declared: Scheme) -> None:
        counts = torch.bincount(q.g_idx.long(), minlength=q.groups)
        expected = torch.full_like(counts, q.group_size)
        expected[-1] = q.in_features - q.group_size * (q.groups - 1)
        if not torch.equal(counts, expected):
            group = int((counts != expected).nonzero()[0])
            self._g_idx.failures.append(
                f"{name}: group {group} has {int(counts[group])} channels, expected {int(expected[group])}"
            )
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
        """The four rows."""
        negative = f", {self._negative / self._count:.0%} negative" if self._negative else ""
        order = f"{self._scattered} with an activation order" if self._scattered else "no activation order"
        return [
            self._scales.result(f"{self._count} scales, finite and not zero{negative}"),
            self._zeros.result(f"as the config says in {self._modules} modules"),
            self._codes.result(f"{self._modules} modules use their code range"),
            self._g_idx.result(f"in range and in step with the config; {order}"),
        ]
