"""The rotate operation."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from marlinq.checkpoint import (
    DEFAULT_MAX_SHARD_BYTES,
    Checkpoint,
    CheckpointWriter,
    QuantizedCheckpoint,
    TensorPlan,
    check_place,
    says_tied,
    untied_config,
)
from marlinq.checkpoint.manifest import fingerprint_of, manifest_of, source_of
from marlinq.core.devices import resolve_device
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import CheckpointError, NumericsError, UnsupportedError
from marlinq.core.progress import Progress, shows_progress
from marlinq.models import (
    BlockReplay,
    Blueprint,
    ModelInstance,
    TensorNames,
    build_blueprint,
    converted,
    find_conversions,
    without_false_ties,
)
from marlinq.operations.little_memory import tells_of_little_memory
from marlinq.operations.rotate.rotation import (
    StreamPlan,
    plan_stream,
    rotated_reader,
    rotated_writer,
    rotation_matrix,
)
from marlinq.operations.rotate.rotation_report import RotationReport
from marlinq.runtime.loading import match_tensors

if TYPE_CHECKING:
    import torch
else:
    from marlinq.core.lazy import torch

_COMMIT_BYTES = 1 << 30
_PROBE_TOKENS = 32
"""tokens on which the original and the rotated first block are compared"""
_PROBE_ROWS = 4096
"""output channels of the head that are compared"""
_TOLERANCE = 1e-4
"""Largest relative difference from rounding in float32: thousands of roundings of 2**-24 add up like a random
walk over a few layers. A different function differs by 0.1 and more."""


@shows_progress
@tells_of_little_memory("choose another device")
def rotate(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
    progress: Progress = True,
) -> RotationReport:
    """Rotates the residual stream of an unquantised checkpoint: other weights for the same function.

    The result has the same architecture and dtypes; a head that is tied to the embedding gets a weight of its
    own. Before anything is written, the first block and the head are run with both weights and compared. The
    only difference is one rounding of every rotated weight to its dtype. An interrupted run continues when
    the same call is repeated.

    Args:
        source: checkpoint folder or Hub id.
        out: folder to make; it must not exist, unless it holds an interrupted run.
        seed: seed of the rotation.
        device: device that multiplies.
        revision: branch, tag or commit of a Hub id; the main branch when None.
        trust_remote_code: run model code that the checkpoint brings.
        max_shard_size: bytes of the largest shard.
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).

    Raises:
        UnsupportedError: the model is quantised, or its structure is not Llama's.
        NumericsError: the rotated model computes other values, or a weight is not finite in its dtype.
        CheckpointError: the source is damaged, or has a tensor that the model does not have.
        OutputError: ``out`` exists or can't be written.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    started = time.monotonic()
    chosen = resolve_device(device)
    checkpoint = Checkpoint.open(source, revision=revision, progress=progress)
    name = str(checkpoint.path)
    place = Path(out)
    check_place(place, resume=True, source=checkpoint.path)
    if QuantizedCheckpoint.of(checkpoint) is not None:
        raise UnsupportedError(f"{name}: is quantised already; rotate the original and quantise the result")
    blueprint = build_blueprint(
        checkpoint.config, source=name, tensors=checkpoint.tensors, trust_remote_code=trust_remote_code
    )
    # Rotated tensors are written with the names and shapes that the model has.
    checkpoint = converted(checkpoint, find_conversions(blueprint, checkpoint.tensors, source=name))
    blueprint = without_false_ties(blueprint, checkpoint)
    plan = plan_stream(blueprint, name)
    turn = rotation_matrix(blueprint.parameters[plan.embedding][1], seed).to(chosen, torch.float32)
    errors = _compare(checkpoint, blueprint, plan, turn)
    names = TensorNames(blueprint, checkpoint.tensors.keys(), source=name)
    owners = _owners(checkpoint, blueprint, plan, names)
    # A tensor that the model does not have may read the stream, and would not be rotated.
    match_tensors(blueprint, checkpoint, None)
    tensors = [TensorPlan(info.name, info.dtype, info.shape) for info in checkpoint.tensors.values()]
    if plan.head not in owners.values():
        table = checkpoint.tensors[names.require(plan.embedding)]
        tensors.append(TensorPlan(plan.head, table.dtype, table.shape))
        owners[plan.head] = plan.head
    manifest = manifest_of("rotate", source=source_of(checkpoint), seed=seed)
    with CheckpointWriter(
        place,
        tensors,
        fingerprint=fingerprint_of(checkpoint, manifest, chosen.type, max_shard_size),
        max_shard_bytes=max_shard_size,
        resume=True,
    ) as writer:
        resumed = len(writer.written)
        waiting = 0
        for number, planned in enumerate(tensors):
            if planned.name not in writer.written:
                parameter = owners.get(planned.name)
                value = _value(checkpoint, names, plan, turn, planned, parameter)
                if parameter is not None and not bool(torch.isfinite(value).all()):
                    raise NumericsError(
                        f"{name}: {planned.name}, rotated, is not finite in {planned.dtype}; check the "
                        "source, and the range of its dtype"
                    )
                writer.write(planned.name, value)
                waiting += planned.nbytes
                if waiting > _COMMIT_BYTES:
                    writer.commit()
                    waiting = 0
            progress("rotating", number + 1, len(tensors))
        checkpoint.check_unchanged()
        writer.finish(
            config=untied_config(checkpoint.config)
            if plan.tied or says_tied(checkpoint.config)
            else checkpoint.config,
            manifest=manifest,
            side_files_from=checkpoint,
        )
    folded = sum(parameter in plan.norms for parameter in owners.values())
    return RotationReport(
        source=name,
        out=str(place),
        rotated=len(owners) - folded,
        folded=folded,
        carried=len(tensors) - len(owners),
        untied=plan.tied,
        block_error=errors[0],
        logits_error=errors[1],
        resumed=resumed,
        source_bytes=checkpoint.nbytes,
        out_bytes=sum(tensor.nbytes for tensor in tensors),
        seconds=time.monotonic() - started,
    )


def _owners(
    checkpoint: Checkpoint, blueprint: Blueprint, plan: StreamPlan, names: TensorNames
) -> dict[str, str]:
    """Stored tensor -> parameter that it holds, for all tensors that the rotation changes.

    Raises:
        CheckpointError: a parameter is not stored, or has another shape.
    """
    changed = {*plan.readers, *plan.writers, *plan.biases, *plan.norms, plan.embedding}
    if plan.tied:
        changed.discard(plan.head)
    owners = {names.require(parameter): parameter for parameter in changed}
    if plan.tied and (stored := names.own(plan.head)) is not None:
        # Some checkpoints store a tied head, too.
        owners[stored] = plan.head
    for stored, parameter in owners.items():
        expected = blueprint.parameters[plan.embedding if parameter == plan.head else parameter]
        info = checkpoint.tensors[stored]
        if tuple(info.shape) != tuple(expected) or not torch_dtype(info.dtype).is_floating_point:
            raise CheckpointError(
                f"{checkpoint.path}: {stored}: expected floating point {list(expected)}, found {info.dtype} "
                f"{list(info.shape)}"
            )
    return owners


def _value(
    checkpoint: Checkpoint,
    names: TensorNames,
    plan: StreamPlan,
    turn: torch.Tensor,
    planned: TensorPlan,
    parameter: str | None,
) -> torch.Tensor:
    """The output tensor of a name, rotated or unchanged."""
    if parameter is None:
        return checkpoint.tensor(planned.name)

    def stored(owner: str) -> torch.Tensor:
        return checkpoint.tensor(names.require(owner))

    dtype = torch_dtype(planned.dtype)
    if parameter in plan.norms:
        return torch.ones(planned.shape, dtype=dtype)
    if parameter == plan.head:
        weight = stored(plan.embedding if plan.tied else plan.head)
        return rotated_reader(weight, stored(plan.readers[plan.head]), turn, dtype)
    if parameter == plan.embedding:
        return rotated_reader(stored(parameter), None, turn, dtype)
    if parameter in plan.readers:
        return rotated_reader(stored(parameter), stored(plan.readers[parameter]), turn, dtype)
    return rotated_writer(stored(parameter), turn).to(dtype)


def _compare(
    checkpoint: Checkpoint, blueprint: Blueprint, plan: StreamPlan, turn: torch.Tensor
) -> tuple[float, float]:
    """Runs the first block and the head with the original and with the rotated weights.

    Returns:
        relative differences of the block's output and of the logits.

    Raises:
        NumericsError: a difference is larger than rounding explains.
    """
    instance = ModelInstance(blueprint, checkpoint, device=turn.device, dtype=torch.float32)
    replay = BlockReplay(instance)
    vocabulary = blueprint.parameters[plan.embedding][0]
    ids = torch.randint(0, vocabulary, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    hidden = next(iter(list(replay.record([ids]))))
    with torch.no_grad():
        instance.block(0)
        before = replay.run(0, 0, hidden)
        _rotate_live(instance, plan, f"{blueprint.blocks[0].name}.", turn)
        block_error = _relative(replay.run(0, 0, hidden @ turn) @ turn.t(), before)
        instance.release_block(0)
        with instance.outer(whole=True):
            head = blueprint.by_name[blueprint.head or ""]
            if plan.tied:
                instance.materialise(head.module, skip={head.parameter})
                weight = instance.model.get_parameter(plan.embedding)
            else:
                instance.materialise(head.module)
                weight = instance.model.get_parameter(plan.head)
            norm = instance.model.get_parameter(plan.readers[plan.head])
            # A part of the output channels is enough, since all are computed alike.
            weight = weight[:_PROBE_ROWS]
            logits = replay.logits(before[0], {plan.head: weight})
            own = rotated_reader(weight, norm, turn, weight.dtype)
            parameters = {plan.head: own, plan.readers[plan.head]: torch.ones_like(norm)}
            logits_error = _relative(replay.logits(before[0] @ turn, parameters), logits)
    for what, error in (("its first block", block_error), ("its output head", logits_error)):
        if not error <= _TOLERANCE:
            raise NumericsError(
                f"{checkpoint.path}: rotated, {what} gives values that differ by {error:.1e}, where rounding "
                f"makes less than {_TOLERANCE:.0e}; {blueprint.architecture} can't be rotated, quantise it "
                "as it is"
            )
    return block_error, logits_error


def _rotate_live(instance: ModelInstance, plan: StreamPlan, prefix: str, turn: torch.Tensor) -> None:
    model = instance.model
    for reader, norm in plan.readers.items():
        if reader.startswith(prefix):
            weight = model.get_parameter(reader)
            weight.copy_(rotated_reader(weight, model.get_parameter(norm), turn, weight.dtype))
    for names, change in (
        (plan.writers | plan.biases, lambda value: rotated_writer(value, turn)),
        (plan.norms, torch.ones_like),
    ):
        for name in names:
            if name.startswith(prefix):
                parameter = model.get_parameter(name)
                parameter.copy_(change(parameter))


def _relative(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given - expected).norm() / expected.norm())
