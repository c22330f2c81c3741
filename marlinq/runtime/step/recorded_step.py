"""A step recorded once: fixed buffers, and the launches that every later step repeats."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress
from marlinq.kernels import Problem, decide, device_numbers, precompile
from marlinq.kernels import step as kernels
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.whole_rows import Normed, RowWork
from marlinq.kernels.experts import ExpertWeights, routed_experts
from marlinq.kernels.experts.configurations import DirectDecision, ExpertsDecision, ExpertsShape
from marlinq.kernels.experts.experts_decision import decide_experts, decide_with_shared
from marlinq.kernels.experts.steps import placed_steps, shape_of
from marlinq.kernels.experts.workspace import ExpertsWorkspace
from marlinq.kernels.step import Gather, Prepared, RoutedRows, RowNorm
from marlinq.runtime.step.bound import BoundMixture, BoundMLP
from marlinq.runtime.step.bound_forward import BoundForward
from marlinq.runtime.step.links import RowLinks
from marlinq.runtime.step.products import Product, Start
from marlinq.runtime.step.walk import Chosen, Pending, Walk, finish


class RecordedStep(Walk):
    """A step over the whole batch, with fixed buffers and a list of launches.

    Attributes:
        starts: the launches in order.
        normed: hidden states behind the final norm, [B, hidden], until the next step.
    """

    def __init__(self, forward: BoundForward, progress: ReportProgress) -> None:
        tokens = torch.zeros(forward.batch, dtype=torch.int64, device=forward.lengths.device)
        super().__init__(forward, tokens, slice(0, forward.batch), 1)
        products = [product for layer in forward.layers for product in layer.products]
        products += forward.outer_products
        self._activated: dict[Product, Problem] = {}
        if tokens.is_cuda:
            self._activated = self._activated_products()
            problems = [problem for product in products for problem in self._problems(product)]
            precompile(dict.fromkeys(problems), forward.device_index, progress)
        # Buffers are as wide as the widest padded input, since padded products read zeros behind the columns
        # that kernels write.
        self._widest = max(product.inner for product in products)
        self._buffers: dict[tuple[str, int, int], Tensor] = {}
        self._turns: dict[str, int] = {}
        self._whole: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._workspaces: dict[ExpertsShape, ExpertsWorkspace] = {}
        self._with_shared: dict[BoundMixture, ExpertsDecision] = {}
        self._recorded: list[Prepared | Start] = []
        self._links = RowLinks(
            forward.layers,
            forward.hidden,
            forward.batch,
            forward.dtype,
            forward.device_index,
            self._activated,
        )
        self._links.precompile(progress)
        # For norms that have no kernel of their own: the product before the norm with its input, which waits
        # for its launch; and, by the address of a buffer, the norm that its reader has to apply.
        self._held: tuple[Product, Tensor] | None = None
        self._normed: dict[int, Normed] = {}
        x, pending = self.recorded_layers()
        _, self.normed = self.add(x, pending, forward.final_norm, forward.lengths, forward.hidden_states)
        self._before_logits = len(self._recorded)
        logits = self.multiply("logits", forward.head, self.normed)
        self.logits = logits[:, : forward.head.features]
        if forward.anatomy.logit_scale != 1 or forward.anatomy.logit_softcap is not None:
            self._recorded.append(partial(finish, self.logits, forward.anatomy))
        prepared = [item for item in self._recorded if isinstance(item, kernels.Prepared)]
        kernels.precompile_prepared(prepared, forward.device_index, progress)
        self.starts: list[Start] = []
        # Kernels that read the tokens, whose address may change.
        readers: list[Any] = []
        for item in self._recorded:
            if isinstance(item, kernels.Prepared):
                launch = kernels.bind(item, forward.device_index, dependent=bool(self.starts))
                if not self.starts or getattr(item.arguments, "tokens", None):
                    readers.append(launch)
                self.starts.append(launch.start)
            else:
                self.starts.append(item)
        self._readers = tuple(readers)
        # The forward owns this object; a cycle of references would keep the cache until garbage collection.
        del self.forward, self._recorded

    def _activated_products(self) -> dict[Product, Problem]:
        """Products of gate and up that have the activation in their epilogue."""
        forward = self.forward
        problems = {
            mlp.inputs: mlp.inputs.activated_problem(
                forward.batch, mlp.anatomy.activation, forward.device_index
            )
            for layer in forward.layers
            for mlp in (layer.mlp.shared if isinstance(layer.mlp, BoundMixture) else layer.mlp,)
            if mlp is not None and mlp.anatomy.gate_scale == 1
        }
        return {product: problem for product, problem in problems.items() if problem is not None}

    def _problems(self, product: Product) -> list[Problem]:
        """The problems of a product in this step, with its activation where the epilogue has it."""
        activated = self._activated.get(product)
        return product.problems(self.forward.batch) if activated is None else [activated]

    def recorded_layers(self) -> tuple[Tensor, Pending | None]:
        """The residual stream behind the last layer, and what is still to be added to it."""
        return self.layers()

    def record(self, start: Start) -> None:
        """Append a launch that is not made by :meth:`launch`."""
        self._recorded.append(start)

    def read_from(self, tokens: Tensor) -> None:
        """Make further launches read ``tokens``, int64 [B]."""
        for reader in self._readers:
            reader.arguments.tokens = tokens.data_ptr()

    def start(self, tokens: Tensor) -> Tensor:
        """A step; returns logits [B, vocabulary]."""
        self.read_from(tokens)
        for start in self.starts:
            start()
        return self.logits

    def start_without_logits(self, tokens: Tensor) -> None:
        """A step that only appends to the cache, and sets ``normed``."""
        self.read_from(tokens)
        for start in self.starts[: self._before_logits]:
            start()

    def empty(self, name: str, rows: int, columns: int) -> Tensor:
        # Two buffers in turn: the residual stream is read while the next one is written.
        turn = self._turns[name] = 1 - self._turns.get(name, 0)
        buffer = self._buffers.get((name, turn, columns))
        if buffer is None:
            buffer = torch.zeros(
                (rows, max(columns, self._widest)), dtype=self.forward.dtype, device=self.lengths.device
            )
            self._buffers[name, turn, columns] = buffer
        return buffer[:, :columns]

    def launch(self, prepared: Prepared) -> None:
        self._recorded.append(prepared)

    def add(
        self,
        source: Tensor | Gather,
        pending: Pending | None,
        norm: RowNorm | None,
        counter: Tensor | None = None,
        kept: Tensor | None = None,
        further: Sequence[tuple[RowNorm, Tensor]] = (),
    ) -> tuple[Tensor, Tensor]:
        link = self._links.link_of(norm)
        if link is None or pending is None or self._held is None or not isinstance(source, Tensor):
            return super().add(source, pending, norm, counter, kept, further)
        # The product before the norm adds to the stream, and the product behind applies the norm.
        product, x = self._held
        self._held = None
        stored = self.empty("residual", source.shape[0], self.forward.hidden)
        out = self.empty("normed", source.shape[0], self.forward.hidden)
        added, self._normed[out.data_ptr()] = self._links.work(link, source, stored, pending.factor)
        self._recorded.append(product.bind_rows(self._padded(x, product), out, RowWork(added=added)))
        return stored, out

    def multiply(self, name: str, product: Product, x: Tensor) -> Tensor:
        out = self.empty(name, x.shape[0], product.columns)
        if product in self._links.before:
            self._held = product, x
            return out
        self._recorded += self._bind(product, x, out)
        return out

    def _bind(self, product: Product, x: Tensor, out: Tensor, activation: str | None = None) -> list[Start]:
        """Launches of ``out = x @ W``, with an activation if given, and with the norm that ``x`` still
        lacks."""
        normed = self._normed.pop(x.data_ptr(), None)
        x = self._padded(x, product)
        if normed is not None:
            return [product.bind_rows(x, out, RowWork(normed), activation)]
        if activation is not None:
            return [product.bind_activated(x, out, activation)]
        return product.bind(x, out)

    def _padded(self, x: Tensor, product: Product) -> Tensor:
        """``x`` with the zeros behind its rows that a padded product reads."""
        if x.shape[1] >= product.inner:
            return x
        return x.as_strided((x.shape[0], product.inner), x.stride(), x.storage_offset())

    def activated(self, mlp: BoundMLP, normed: Tensor) -> Tensor:
        if mlp.inputs not in self._activated:
            return super().activated(mlp, normed)
        active = self.empty("active", normed.shape[0], mlp.inputs.columns // 2)
        self._recorded += self._bind(mlp.inputs, normed, active, mlp.anatomy.activation)
        return active

    def whole(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        # One buffer for all layers: it is written again only after the layer that reads it has ended.
        key = name, columns, dtype
        if key not in self._whole:
            self._whole[key] = torch.zeros((rows, columns), dtype=dtype, device=self.lengths.device)
        return self._whole[key]

    def shared_experts(self, mixture: BoundMixture, normed: Tensor) -> ExpertWeights | None:
        shared, more = mixture.shared, mixture.shared_experts
        if shared is None or more is None:
            return None
        device = device_numbers(self.forward.device_index) if normed.is_cuda else H200
        ids = normed.new_empty((len(normed), mixture.router.top), dtype=torch.int32)
        problems = (problem for product in shared.products for problem in self._problems(product))
        seconds = sum(decide(problem, device).seconds for problem in problems)
        shape = shape_of(normed, ids, mixture.experts.weights)
        decision = decide_with_shared(shape, more.down.shape[0], seconds, device)
        if decision is None:
            return None
        self._with_shared[mixture] = decision
        return more

    def experts(
        self, mixture: BoundMixture, x: Tensor, chosen: Chosen, *, summed: bool = False
    ) -> Tensor | RoutedRows:
        grouped, ids, weights, more = mixture.experts, chosen.ids, chosen.weights, chosen.shared
        out, held = self.whole("routed", x.shape[0], x.shape[1], x.dtype), grouped.weights
        if not x.is_cuda:
            top, count = mixture.router.top, held.down.shape[0]

            def run() -> None:
                first = ids[:, :top].contiguous(), weights[:, :top].contiguous()
                out.copy_(routed_experts(x, *first, held, grouped.activation))
                if more is not None:
                    others = ids[:, top:] - count, weights[:, top:].contiguous()
                    out.add_(routed_experts(x, *others, more, grouped.activation))

            self._recorded.append(run)
            return out
        shape = shape_of(x, ids, held, more)
        if more is None:
            decision = decide_experts(shape, device_numbers(self.forward.device_index))
        else:
            decision = self._with_shared[mixture]
        if shape not in self._workspaces:
            self._workspaces[shape] = ExpertsWorkspace.of(shape, decision, x.device)
        workspace = self._workspaces[shape]
        steps = placed_steps(
            *(shape, decision, x, ids, weights, held, grouped.activation, None, out, workspace),
            dependent=True,
            summed=summed,
            further=more,
        )
        self._recorded += [
            Prepared(step.instantiation, step.grid, step.threads, step.arguments, step.shared_bytes)
            for step in steps
        ]
        if summed or isinstance(decision, DirectDecision):
            return out
        return RoutedRows(workspace.rows, workspace.places, weights)

    def observed(self, index: int, x: Tensor) -> None:
        pass
