"""The verify operation: one pass over the modules, one report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch

from marlinq.checkpoint import (
    Checkpoint,
    QuantizedCheckpoint,
    with_dense_weights,
)
from marlinq.checkpoint.reader import locate
from marlinq.core.devices import resolve_device
from marlinq.core.display import counted
from marlinq.core.errors import CheckpointError, MarlinqError, UsageError
from marlinq.core.progress import Progress, ReportProgress, shows_progress
from marlinq.models import Blueprint
from marlinq.operations.little_memory import tells_of_little_memory
from marlinq.operations.verify.comparison import Comparison
from marlinq.operations.verify.kernel_check import check_kernels
from marlinq.operations.verify.logits import check_logits
from marlinq.operations.verify.masks import Masks
from marlinq.operations.verify.round_trip import RoundTrip
from marlinq.operations.verify.settings import check_settings
from marlinq.operations.verify.structure import (
    check_config,
    check_coverage,
    check_finite,
    check_loads,
    check_safetensors,
    check_tensors,
    model_blueprint,
)
from marlinq.operations.verify.tensor_hashes import check_manifest
from marlinq.operations.verify.values import Values
from marlinq.operations.verify.verification_report import Check, ModuleResult, VerificationReport


@shows_progress
@tells_of_little_memory("choose another device")
def verify(
    checkpoint: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    logits: bool = False,
    revision: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = True,
) -> VerificationReport:
    """Checks a quantised checkpoint: structure, hashes, round trips, values, the original, kernels, logits.

    Damage is reported and not raised: a file that can't be opened becomes a failed row. Modules are read one
    at a time; on a CPU several small ones are judged at a time, one per thread.

    Args:
        checkpoint: folder or Hub id.
        against: model it was made from, or another conversion of it, to compare every tensor with.
        logits: also run both and compare hidden states and logits; needs ``against``.
        revision: branch, tag or commit of ``checkpoint``, where that is a Hub id; its main branch when None.
        device: ``auto`` or None (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``; weights are
            compared on it, and a GPU also runs the kernels.
        trust_remote_code: run model code that the checkpoint brings.
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).

    Raises:
        CheckpointError: there is no such folder, or ``against`` is damaged.
        UsageError: ``logits`` without ``against``, or ``against`` is the checkpoint itself.
        EnvironmentProblem: the machine does not have the device.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    if logits and against is None:
        raise UsageError("--logits compares with an original; name it with --against")
    folder = locate(checkpoint, revision=revision, progress=progress)
    chosen = resolve_device(device)
    original = None if against is None else with_dense_weights(Checkpoint.open(against, progress=progress))
    if original is not None and original.path.resolve() == folder.resolve():
        raise UsageError(
            f"--against {folder}: is the checkpoint itself, so nothing can differ; name the original"
        )
    run = _Run(folder, original, chosen, trust_remote_code, progress)
    checks: list[Check] = []
    try:
        checks.extend(run.checks())
    except CheckpointError as error:
        # Rows made before the error are kept.
        checks.append(Check("readable", "failed", str(error)))
    if logits and original is not None:
        checks += run.logits()
    checks += run.changes()
    return VerificationReport(
        checkpoint=str(folder),
        against=None if original is None else str(original.path),
        format=None if run.view is None else run.view.format.name,
        checks=tuple(checks),
        modules=tuple(run.modules(checks)),
    )


class _Run:
    """One verification.

    Attributes:
        view: the opened checkpoint; None if it can't be opened.
        comparison: the checks against the original; None without one, or if it can't be opened.
    """

    def __init__(
        self,
        folder: Path,
        original: Checkpoint | None,
        device: torch.device,
        trust_remote_code: bool,
        progress: ReportProgress,
    ) -> None:
        self._folder = folder
        self._original = original
        self._device = device
        self._trust_remote_code = trust_remote_code
        self._progress = progress
        self._checkpoint: Checkpoint | None = None
        self.view: QuantizedCheckpoint | None = None
        self._comparison: Comparison | None = None

    def checks(self) -> Iterable[Check]:
        """The rows in order; ends early where a failure makes the remaining checks impossible."""
        try:
            checkpoint = Checkpoint.open(self._folder)
        except MarlinqError as error:
            yield Check("files", "failed", str(error))
            yield Check("all other checks", "skipped", "the folder can't be opened")
            return
        self._checkpoint = checkpoint
        shards = len(checkpoint.shards)
        files = "1 file" if shards == 1 else f"{shards} files"
        text = f"{counted(len(checkpoint.tensors), 'tensors')} in {files}, whole and indexed"
        yield Check("files", "passed", text)
        yield check_safetensors(checkpoint)
        manifest = check_manifest(checkpoint, self._progress)
        yield manifest
        try:
            self.view = QuantizedCheckpoint.of(checkpoint)
            reason = "config.json has no quantization_config: not a quantised checkpoint"
        except MarlinqError as error:
            reason = str(error)
        if self.view is None:
            yield Check("config", "failed", reason)
            yield Check("all other checks", "skipped", "config and tensors don't say what is quantised")
            return
        blueprint = model_blueprint(self.view.checkpoint, self._trust_remote_code)
        yield check_config(self.view)
        yield check_tensors(self.view, blueprint)
        yield check_coverage(self.view, blueprint)
        yield check_loads(self.view, blueprint, self._trust_remote_code)
        if self._original is not None:
            yield check_settings(self.view.checkpoint, self._original, self._trust_remote_code)
            self._comparison = Comparison(self.view, self._original, blueprint, self._device)
        elif manifest.status != "passed":
            yield Check(
                "original",
                "skipped",
                "codes and scales were compared with nothing: wrong ones that a quantiser could have written "
                "pass; compare with the original by --against MODEL",
            )
        yield from self._module_checks(self.view, blueprint)
        yield self._kernels(self.view)

    def _module_checks(self, view: QuantizedCheckpoint, blueprint: Blueprint | str) -> Iterable[Check]:
        round_trip, values, unreadable = RoundTrip(view), Values(), []
        masks = Masks(view.checkpoint)
        background = nullcontext() if self._comparison is None else self._comparison.background
        with background:
            for done, (name, spec) in enumerate(view.modules.items()):
                self._progress("checking modules", done, len(view.modules))
                try:
                    # Values that reading refuses get rows of their own, of the same rules.
                    q = view.load(name, refuse_faults=False)
                except MarlinqError as error:
                    unreadable.append(str(error))
                    continue
                names = view.tensor_names(name)
                stored = {suffix: view.checkpoint.tensor(full) for suffix, full in names.items()}
                declared = view.config.rules.scheme(name)
                q = masks.module(name, q)
                round_trip.module(name, spec, stored, q)
                if declared is not None:
                    values.module(name, q, declared)
                if self._comparison is not None:
                    self._comparison.module(name, spec, stored, q)
        self._progress("checking modules", len(view.modules), len(view.modules))
        if unreadable:
            detail = unreadable[0] if len(unreadable) == 1 else f"{len(unreadable)}; first: {unreadable[0]}"
            yield Check("readable", "failed", detail, tuple(unreadable))
        yield from round_trip.results()
        yield from values.results()
        yield from masks.results()
        yield check_finite(view, blueprint, self._progress)
        if self._comparison is not None:
            self._comparison.passthrough()
            yield from self._comparison.results()

    def _kernels(self, view: QuantizedCheckpoint) -> Check:
        return check_kernels(view, self._device, self._progress)

    def logits(self) -> Iterable[Check]:
        """The rows of the comparison by running both models."""
        if self.view is None or self._original is None or self._comparison is None:
            return [Check("logits", "skipped", "the checkpoint can't be run")]
        return check_logits(
            self._folder,
            self._original.path,
            schemes=self._comparison.schemes,
            device=self._device,
            trust_remote_code=self._trust_remote_code,
            progress=self._progress,
        )

    def changes(self) -> Iterable[Check]:
        """A failed row if a folder changed since it was opened, because the other rows then mix two
        states."""
        for checkpoint in (self._checkpoint, self._original):
            try:
                if checkpoint is not None:
                    checkpoint.check_unchanged()
            except MarlinqError as error:
                yield Check("unchanged", "failed", str(error))

    def modules(self, checks: Iterable[Check]) -> list[ModuleResult]:
        """Every quantised module with its errors and problems, worst first."""
        if self.view is None:
            return []
        problems: dict[str, list[str]] = {name: [] for name in self.view.modules}
        for check in checks:
            for problem in check.problems or ((check.detail,) if check.status == "failed" else ()):
                subject = problem.partition(":")[0]
                owner = subject if subject in problems else subject.rpartition(".")[0]
                if owner in problems:
                    problems[owner].append(f"{check.name}: {problem}")
        errors = {} if self._comparison is None else self._comparison.errors
        results = []
        for name, spec in self.view.modules.items():
            error, rtn = errors.get(name, (None, None))
            results.append(
                ModuleResult(
                    name=name,
                    in_features=spec.in_features,
                    out_features=spec.out_features,
                    group_size=spec.granularity.size,
                    symmetric=not spec.scheme.stores_zeros,
                    relative_error=error,
                    rtn_error=rtn,
                    problems=tuple(problems[name]),
                )
            )
        return sorted(results, key=lambda m: (-len(m.problems), -(m.ratio or 0), -(m.relative_error or 0)))
