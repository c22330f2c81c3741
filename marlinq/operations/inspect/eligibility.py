"""Which kernels can run a quantised linear, and why not: every such decision is made here.

Judged are the original Marlin kernel (IST-DASLab), vLLM 0.33's Marlin, Machete and ExLlama together with the
checks that vLLM makes before it picks one, and marlinq's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from marlinq.core.weight import Grid
from marlinq.formats import ModuleSpec
from marlinq.formats.layouts.marlin import GROUP_SIZES, Marlin

_MARLIN = Marlin()


@dataclass(frozen=True)
class Eligibility:
    """Whether a kernel can run a checkpoint's quantised linears.

    Attributes:
        kernel: its name.
        eligible: True when it can run all of them.
        reason: why not, naming the first module; or what it asks for besides.
        modules: how many of them it can run.
    """

    kernel: str
    eligible: bool
    reason: str
    modules: int


@dataclass(frozen=True)
class Candidate:
    """What the rules look at for one module.

    Attributes:
        layout: a name in :data:`marlinq.formats.LAYOUTS`.
        spec: shape, group size and width.
        grid: its zeros and g_idx (and scales, which no rule reads); None where they can't be decoded.
        declared_group_size: as the config writes it.
        declared_act_order: the config says ``desc_act: true``.
        declared_symmetric: the config says ``sym: true`` or ``symmetric: true``; None where it can't say.
    """

    layout: str
    spec: ModuleSpec
    grid: Grid | None
    declared_group_size: int
    declared_act_order: bool
    declared_symmetric: bool | None


_Rule = Callable[[Candidate], str | None]


def eligibilities(candidates: Mapping[str, Candidate]) -> tuple[Eligibility, ...]:
    """The decision of every kernel over all modules of a checkpoint, at least one."""
    results = []
    for kernel, (rule, asks) in _RULES.items():
        reasons = {name: rule(candidate) for name, candidate in candidates.items()}
        against = [(name, reason) for name, reason in reasons.items() if reason is not None]
        able = len(reasons) - len(against)
        if against:
            name, reason = against[0]
            more = f" (and {len(against) - 1} more modules)" if len(against) > 1 else ""
            results.append(Eligibility(kernel, False, f"{name}: {reason}{more}", able))
        else:
            results.append(Eligibility(kernel, True, asks, able))
    return tuple(results)


def _original_marlin(candidate: Candidate) -> str | None:
    if candidate.grid is None:
        return "its zeros are ambiguous"
    return _MARLIN.strict_refusal(candidate.spec) or _MARLIN.value_refusal(candidate.grid)


def _own(candidate: Candidate) -> str | None:
    from marlinq.runtime.operand import operand_refusal

    return "its zeros are ambiguous" if candidate.grid is None else operand_refusal(candidate.grid)


def _vllm_marlin(candidate: Candidate) -> str | None:
    spec = candidate.spec
    if (reason := _vllm_loads(candidate)) is not None:
        return reason
    if not _symmetric(candidate) and spec.scheme.element.bits != 4:
        return f"{spec.scheme.element.bits} bits with zero points; Marlin takes zero points with 4 bits only"
    return _group_reason(spec, GROUP_SIZES)


def _machete(candidate: Candidate) -> str | None:
    spec = candidate.spec
    if (reason := _vllm_loads(candidate)) is not None:
        return reason
    if spec.in_features % 64 or spec.out_features % 128:
        return f"K={spec.in_features} must be a multiple of 64 and N={spec.out_features} of 128"
    return _group_reason(spec, (64, 128, -1))


def _exllama(candidate: Candidate) -> str | None:
    spec = candidate.spec
    if (reason := _vllm_loads(candidate)) is not None:
        return reason
    if not _symmetric(candidate):
        return "asymmetric; vLLM's ExLlama kernel regenerates symmetric zero points"
    if candidate.declared_group_size == -1:
        return "one group for the whole layer; ExLlama needs a positive group size"
    if spec.in_features % spec.channels_per_group:
        return f"K={spec.in_features} is not a multiple of the group size {spec.scheme.group_size}"
    slots = 32 // spec.scheme.element.bits
    if spec.out_features % slots:
        return f"N={spec.out_features} is not a multiple of {slots}"
    return None


def _vllm_loads(candidate: Candidate) -> str | None:
    """Why vLLM refuses the module before it looks for a kernel, or would load it wrong."""
    grid, layout = candidate.grid, candidate.layout
    if layout == "marlin":
        return "vLLM does not read Marlin checkpoints; convert marlin-to-gptq (it repacks at load)"
    if grid is None:
        return "its zeros are ambiguous"
    if not grid.has_trivial_g_idx:
        return "activation order, which vLLM refuses since 0.30"
    if layout in ("gptq", "gptq-v2"):
        if candidate.declared_act_order and candidate.spec.groups > 1:
            return "the config says desc_act: true, which vLLM refuses; convert it (its g_idx is in order)"
        if candidate.declared_symmetric is not True:
            return "vLLM refuses GPTQ with sym: false; convert gptq-to-awq or gptq-to-compressed-tensors"
    return None


def _symmetric(candidate: Candidate) -> bool:
    """Whether a loader treats the module as symmetric: by the config, not by what the zeros happen to be."""
    return candidate.declared_symmetric is True


def _group_reason(spec: ModuleSpec, sizes: tuple[int, ...]) -> str | None:
    if spec.groups > 1 and spec.scheme.group_size not in sizes:
        return f"group size {spec.scheme.group_size} is not one of {', '.join(map(str, sizes))}"
    if spec.in_features % spec.channels_per_group:
        return f"K={spec.in_features} is not a multiple of the group size {spec.scheme.group_size}"
    return None


_RULES: dict[str, tuple[_Rule, str]] = {
    "marlin (original)": (
        _original_marlin,
        "compute capability 8.0 and above, FP16 activations; stored in or convertible to the marlin layout",
    ),
    "marlin (vLLM)": (_vllm_marlin, "compute capability 7.5 and above"),
    "machete": (_machete, "compute capability 9.0 exactly; vLLM's first choice there"),
    "exllama": (_exllama, "compute capability 6.0 and above, FP16 activations only"),
    "marlinq": (_own, "FP16 and BF16 activations; a CPU runs the reference"),
}

KERNELS = tuple(_RULES)
"""The kernels that ``inspect`` judges."""
