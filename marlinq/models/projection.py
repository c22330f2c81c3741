"""Projection: one weight matrix that can be quantised, in any kind of module.

An ``nn.Linear``, GPT-2's ``Conv1D`` and one expert of a fused 3-D parameter all are a weight [N, K] that can
be read and replaced, and whose inputs can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Receive = Callable[[str, Tensor], None]
"""Function of the name of a projection and its input, float [..., K]."""


@dataclass(frozen=True)
class Projection:
    """The place of one weight [N, K] in a model.

    Attributes:
        name: full name of the module, such as ``model.layers.0.self_attn.q_proj``; for an expert, its name in
            checkpoints with one module per expert. Rules are matched against it.
        parameter: full name of the parameter that holds the weight.
        in_features: K.
        out_features: N.
        bias: whether a bias [N] is added.
        transposed: whether the parameter is [K, N], as in GPT-2's ``Conv1D`` and some fused experts.
        expert: index along the first axis of a 3-D parameter; None where the parameter is the weight.
        part, parts: index and number of the weights of N rows each in one matrix, such as gate and up of an
            expert.
        interleaved: whether the rows of these weights alternate and don't follow each other.
    """

    name: str
    parameter: str
    in_features: int
    out_features: int
    bias: bool = False
    transposed: bool = False
    expert: int | None = None
    part: int = 0
    parts: int = 1
    interleaved: bool = False

    @property
    def module(self) -> str:
        """Full name of the module that owns the parameter."""
        return self.parameter.rpartition(".")[0]

    @property
    def whole(self) -> bool:
        """Whether the parameter holds this weight and nothing else."""
        return self.expert is None and self.parts == 1

    def view(self, parameter: Tensor) -> Tensor:
        """The weight [N, K] inside its parameter; writing to it writes to the parameter."""
        matrix = parameter if self.expert is None else parameter[self.expert]
        if self.transposed:
            matrix = matrix.t()
        if self.parts == 1:
            return matrix
        if self.interleaved:
            return matrix[self.part :: self.parts]
        return matrix[self.part * self.out_features : (self.part + 1) * self.out_features]

    def as_parameter(self, weight: Tensor) -> Tensor:
        """``weight`` [N, K] in the layout of the parameter of a :attr:`whole` projection."""
        return weight.t().contiguous() if self.transposed else weight


def fused_experts(
    parameter: str,
    shape: Sequence[int],
    parts: Sequence[str],
    *,
    transposed: bool = False,
    interleaved: bool = False,
    bias: bool = False,
) -> tuple[Projection, ...]:
    """The projections of a fused parameter, expert by expert.

    Args:
        parameter: full name, such as ``model.layers.0.mlp.experts.gate_up_proj``.
        shape: [experts, parts * N, K], or [experts, K, parts * N] if ``transposed``.
        parts: names of the parts as modules, such as ``gate_proj`` and ``up_proj``.
        transposed, interleaved, bias: as in :class:`Projection`.
    """
    experts, rows, columns = shape
    k, n = (rows, columns) if transposed else (columns, rows)
    stem = parameter[: parameter.rfind(".") + 1]
    return tuple(
        Projection(
            name=f"{stem}{expert}.{part}",
            parameter=parameter,
            in_features=k,
            out_features=n // len(parts),
            bias=bias,
            transposed=transposed,
            expert=expert,
            part=index,
            parts=len(parts),
            interleaved=interleaved,
        )
        for expert in range(experts)
        for index, part in enumerate(parts)
    )


@contextmanager
def tapped(model: nn.Module, projections: Iterable[Projection], receive: Receive) -> Iterator[None]:
    """Inside, ``receive`` is called with the input of each projection whenever the projection runs.

    Args:
        model: module from which the projections' names start; their weights must be in memory.
        projections: projections that are modules; for experts of a fused parameter see
            :func:`marlinq.models.fused_experts.expert_inputs`.
        receive: function that gets each input.
    """
    with ExitStack() as stack:
        for projection in projections:
            hook = _forward_hook(projection.name, receive)
            handle = model.get_submodule(projection.module).register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        yield


def shared_inputs(
    model: nn.Module,
    projections: Iterable[Projection],
    run: Callable[[], object],
    receive: Receive | None = None,
) -> list[tuple[str, ...]]:
    """Groups of projections that read the same input tensor, in the order of their first use.

    Projections that did not run (experts that no token chose) follow, each as a group of its own.

    Args:
        model: module from which names start.
        projections: projections of one block, whose weights are in memory.
        run: function that runs the block once.
        receive: called with each group's first projection and its input whenever that projection runs.
    """
    wanted = list(projections)
    groups: dict[tuple[object, ...], list[str]] = {}
    # Keeps every tensor alive, so that no two inputs have the same memory address.
    alive: list[Tensor] = []

    def note(name: str, x: Tensor) -> None:
        alive.append(x)
        if not any(name in members for members in groups.values()):
            key = (x.data_ptr(), x.numel(), x.shape[-1], x.dtype, x._version)
            groups.setdefault(key, []).append(name)
        if receive is not None and any(members[0] == name for members in groups.values()):
            receive(name, x)

    with tapped(model, wanted, note):
        run()
    used = {name for members in groups.values() for name in members}
    idle = [(projection.name,) for projection in wanted if projection.name not in used]
    return [tuple(members) for members in groups.values()] + idle


def _forward_hook(name: str, receive: Receive) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        receive(name, args[0])

    return before
