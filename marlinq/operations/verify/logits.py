"""Compares the hidden states and logits of a checkpoint with those of its original or another conversion."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from marlinq.core import boundaries
from marlinq.core.errors import MarlinqError
from marlinq.core.progress import ReportProgress
from marlinq.core.scheme import Scheme
from marlinq.methods.rtn import round_to_nearest
from marlinq.models import Projection
from marlinq.models.classes import predicts_tokens
from marlinq.operations.verify.comparison import FAR_ABOVE_RTN
from marlinq.operations.verify.verification_report import Check, Findings
from marlinq.runtime import load

TOKENS = 128
_SEED = 0

_SAME = 1e-3
"""Largest relative difference between two conversions of one checkpoint, which only round scales of different
dtypes differently."""
_LEAST_KL = 1e-4
"""Mean KL in nats that is always allowed: GPTQ moves even weights that round-to-nearest holds exactly."""
_FAR_BEYOND_BLIND = 4.0
"""Multiple of round-to-nearest's mean KL that is always allowed: about twice its error of the logits."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Results of one model.

    Attributes:
        hidden: float32 [T, hidden] after the embedding and after each block.
        logits: float32 [T, vocabulary]; [0, 0] of a model without an output head.
    """

    hidden: list[Tensor]
    logits: Tensor
    dtype: torch.dtype

    @property
    def shapes(self) -> list[torch.Size]:
        return [*(state.shape for state in self.hidden), self.logits.shape]


def check_logits(
    checkpoint: Path,
    against: Path,
    *,
    schemes: Mapping[Projection, Scheme] | None,
    device: torch.device,
    trust_remote_code: bool,
    progress: ReportProgress,
) -> list[Check]:
    """Runs both models, one after the other, on the same seeded random tokens.

    Two conversions must agree. Against an unquantised model the rows report the change by quantisation, and
    fail for NaN, for infinity, for a block whose error is larger than its signal, and for a divergence that
    quantisation does not explain (:func:`_largest_divergence`). A third run, of the original with its weights
    rounded to nearest, gives the scale for that divergence.

    Args:
        checkpoint, against: the two folders.
        schemes: scheme of each quantised linear of the model; None if ``against`` is another conversion.
        device, trust_remote_code, progress: as in :func:`marlinq.operations.verify.verify`.
    """
    layers, logits = Findings("layers"), Findings("logits")
    try:
        mine = _run(checkpoint, device, None, trust_remote_code, progress)
        theirs = _run(against, device, mine.dtype, trust_remote_code, progress)
        rounded = theirs
        if schemes is not None and mine.shapes == theirs.shapes:
            rounded = _run(against, device, mine.dtype, trust_remote_code, progress, schemes)
    except MarlinqError as error:
        layers.failures.append(str(error))
        logits.skipped = "a model could not be run"
        return [layers.result(""), logits.result("")]
    if mine.shapes != theirs.shapes:
        layers.failures.append(
            f"{checkpoint}: {_describe(mine)}, but {against} has {_describe(theirs)}: not the same model"
        )
        logits.skipped = "the models can't be compared"
        return [layers.result(""), logits.result("")]
    bound = _SAME if schemes is None else 1.0
    differences = [_relative(a, b) for a, b in zip(mine.hidden, theirs.hidden, strict=True)]
    for index, difference in enumerate(differences):
        where = "embedding" if index == 0 else f"block {index - 1}"
        if not difference <= bound:
            layers.failures.append(f"{where}: relative error {difference:.3g}, at most {bound:g} expected")
    text = f"relative error {differences[0]:.2g} at first, {differences[-1]:.2g} after the last block"
    layers_result = layers.result(f"{text}, worst {max(differences):.2g}")
    if not mine.logits.numel():
        logits.skipped = "the model has no output head"
        return [layers_result, logits.result("")]
    kl = _kl(theirs.logits, mine.logits)
    largest = float((mine.logits - theirs.logits).abs().max())
    agreement = float((mine.logits.argmax(-1) == theirs.logits.argmax(-1)).float().mean())
    figures = f"KL {kl:.4g}, largest difference {largest:.3g}, same top token {agreement:.1%}"
    if not bool(torch.isfinite(mine.logits).all()):
        logits.failures.append("NaN or infinity in the logits")
    elif schemes is None and _relative(mine.logits, theirs.logits) > bound:
        logits.failures.append(f"two conversions of one model differ: {figures}")
    elif schemes is not None:
        usual = _kl(theirs.logits, rounded.logits)
        largest_kl = _largest_divergence(theirs.logits, usual)
        figures += f"; round-to-nearest has KL {usual:.4g}"
        if not kl <= largest_kl:
            logits.failures.append(f"{figures}, at most {largest_kl:.4g} expected of these weights")
    return [
        layers_result,
        logits.result(f"{figures}, on {TOKENS} random tokens (seed {_SEED})"),
    ]


def _run(
    path: Path,
    device: torch.device,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    progress: ReportProgress,
    schemes: Mapping[Projection, Scheme] | None = None,
) -> _Run:
    """Runs the model in ``path`` with the linears in ``schemes`` rounded to nearest."""
    loaded = load(
        path,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        exact=True,
        compile_kernels=False,  # one batch needs a few of them
        progress=progress,
    )
    if schemes is not None:
        _round(loaded.model, schemes)
    positions = getattr(loaded.model.config, "max_position_embeddings", None) or TOKENS
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad(), boundaries.forward(path):
        # Some models embed tokens in a module of their own, which holds the table.
        embedding = loaded.model.get_input_embeddings()
        table = next(module for module in embedding.modules() if isinstance(module, nn.Embedding))
        shape = (1, min(TOKENS, positions))
        ids = torch.randint(table.num_embeddings, shape, generator=generator)
        output = loaded.model(ids.to(loaded.device), output_hidden_states=True, use_cache=False)
        hidden = [state[0].float().cpu() for state in output.hidden_states]
    logits = output.logits[0].float().cpu() if predicts_tokens(loaded.model) else torch.empty(0, 0)
    run = _Run(hidden, logits, loaded.dtype)
    del loaded, output
    gc.collect()
    return run


def _round(model: nn.Module, schemes: Mapping[Projection, Scheme]) -> None:
    for projection, scheme in schemes.items():
        if not scheme.granularity.divides(projection.in_features):
            continue
        owner, key = model.get_submodule(projection.module), projection.parameter.rpartition(".")[2]
        if projection.whole:
            # A copy, so that a head tied to the embedding does not change the embedding.
            owner._parameters[key] = nn.Parameter(owner.get_parameter(key).clone(), requires_grad=False)
        weight = projection.view(owner.get_parameter(key).data)
        rounded = round_to_nearest(weight.float(), scheme.for_channels(projection.in_features))
        weight.copy_(rounded.dequantize())


def _largest_divergence(original: Tensor, usual: float) -> float:
    """The largest mean KL in nats that an undamaged checkpoint with these schemes may have to the original.

    The KL grows with the square of small weight errors, and no module may have more than FAR_ABOVE_RTN times
    round-to-nearest's. For large errors, a model that is worse than a prediction that ignores the input is
    broken, unless round-to-nearest is nearly as bad.

    Args:
        original: the original's logits, float32 [T, V].
        usual: mean KL of the original with weights rounded to nearest.
    """
    probabilities = original.log_softmax(-1).exp()
    blind = _kl(original, probabilities.mean(dim=0).clamp(min=torch.finfo(torch.float32).tiny).log())
    return max(_LEAST_KL, min(FAR_ABOVE_RTN**2 * usual, max(blind, _FAR_BEYOND_BLIND * usual)))


def _describe(run: _Run) -> str:
    width, vocabulary = run.hidden[0].shape[1], run.logits.shape[1]
    return f"{len(run.hidden) - 1} blocks of width {width} and a vocabulary of {vocabulary}"


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float32).tiny))


def _kl(p: Tensor, q: Tensor) -> float:
    """Mean KL(p || q) in nats of two sets of logits [T, V]."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
