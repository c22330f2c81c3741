"""One forward pass of a model without weights, whose parts return random numbers that are recognised later.

Every linear, norm, embedding lookup and attention is replaced by a source of fresh random numbers. What lies
between them runs as the model does it. Where a number arrives tells who feeds whom; how it arrives changed
tells the factor, the activation or the rotation on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from marlinq.models.linears import is_linear, linear_shape

TOKENS = 4
"""Positions of the recorded pass: enough to tell rotations apart, few enough to be cheap."""

_IMPLEMENTATION = "marlinq_recording"
# Several times a usual activation: a clamp on the way is met, and two activation functions differ visibly.
_SIZE = 6.0
_POOL = 1 << 20
# A prime: starts in the pool repeat after as many calls as it has places.
_STRIDE = 7_919
# Recordings of other seeds begin elsewhere in the pool, this number of places on for each: a prime, too.
_SEED, _LEAP = 17, 104_729
# Keyword arguments of attention that change nothing here.
_HARMLESS = {
    "dropout",
    "scaling",
    "softcap",
    "sliding_window",
    "is_causal",
    "position_ids",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "use_cache",
    "logits_to_keep",
    "layer_idx",
}
# What older models call a term that is added to attention's dot products.
_BIASES = {"alibi", "position_bias"}

# How a weight is cast to float32: function -> what it is called with besides.
_CASTS: dict[Any, tuple[Any, ...]] = {
    Tensor.type: (torch.float32,),
    Tensor.to: (torch.float32,),
    Tensor.float: (),
}

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Refusal(Exception):
    """Recognition ends: the part and the reason."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a replaced part.

    Attributes:
        kind: kind of the module that was replaced.
        name: full name of the module, of an embedding too.
        block: index of the decoder block that was running; -1 before the first and between blocks.
        input: input of the module; of attention the queries [1, H, T, D].
        output: the random numbers that it returned.
        wide: of a router's product, that its weight was cast to float32 before.
    """

    kind: Literal["linear", "norm", "embedding", "attention", "experts", "mixer"]
    name: str
    block: int
    input: Tensor
    output: Tensor
    wide: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class AttentionCall(Call):
    """Attention: besides queries its keys and values [1, KV, T, D], and what it was told.

    Attributes:
        keys, values: as above.
        scale, softcap: as in :class:`marlinq.models.anatomy.Attention`.
        mask: visible(batch, head, query, key) of tensors of positions.
    """

    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None
    mask: MaskFunction


@dataclass(frozen=True, eq=False)
class ExpertsCall(Call):
    """A module of experts: besides the hidden states, where they go.

    Attributes:
        index: the chosen experts' numbers [T, top].
        weights: factor of each expert, [T, top].
    """

    index: Tensor
    weights: Tensor


@dataclass(eq=False)
class Recording:
    """What one forward pass did.

    Attributes:
        ids: the token ids, int64 [1, T].
        positions: positions of the tokens, int64 [T].
        calls: in order.
        inputs, outputs: of every block, [1, T, hidden].
        logits: [1, T, vocabulary].
        corrections: full name of a buffer beside experts -> the numbers that it held meanwhile, [experts].
    """

    ids: Tensor
    positions: Tensor
    calls: list[Call] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    corrections: dict[str, Tensor] = field(default_factory=dict)


def record(
    model: PreTrainedModel,
    blocks: list[nn.Module],
    norms: Mapping[str, int],
    start: int = 0,
    experts: Mapping[str, int] | None = None,
    corrections: Sequence[str] = (),
    seed: int = _SEED,
    mixers: Collection[str] = (),
) -> Recording:
    """Runs ``model`` once, as described above, and leaves it as it was.

    Args:
        model: its parameters may be on the meta device; its buffers are on the CPU.
        blocks: the decoder blocks in order.
        norms: full names of the modules that normalise -> channels.
        start: position of the first token; the model takes ``position_ids`` where it is not 0.
        experts: full names of the modules of routed experts -> how many they are. A weight of as many rows
            that is multiplied outside of linears makes a router's logits.
        corrections: full names of buffers beside experts, each with one number an expert. They hold random
            numbers meanwhile: those of a new model are all zero, and would show nothing.
        seed: seed of all random numbers.
        mixers: full names of modules in the place of attention that are known already, as a whole.

    Raises:
        Refusal: a parameter is used in another way, or attention is computed in another way.
    """
    recorder = _Recorder(model, blocks, start, experts or {}, seed)
    positions = {"position_ids": recorder.recording.positions[None]} if start else {}
    with ExitStack() as stack:
        stack.enter_context(recorder.stubs(norms, mixers))
        stack.enter_context(recorder.attention())
        stack.enter_context(recorder.watched_blocks())
        stack.enter_context(recorder.corrected(corrections))
        stack.enter_context(_Parameters(recorder))
        stack.enter_context(torch.no_grad())
        output = model(input_ids=recorder.recording.ids, use_cache=False, **positions)
    recorder.recording.logits = output.logits.float()
    return recorder.recording


@cache
def _pool() -> Tensor:
    """Random numbers, the same in every recording: they take longer to draw than a small model to record.

    Multiples of 1/8 with 8 significant bits: a cast to a narrow dtype on the way does not change them.
    """
    generator = torch.Generator().manual_seed(_SEED)
    # Whatever the default dtype is at the first call.
    numbers = _SIZE * torch.randn(_POOL, generator=generator, dtype=torch.float32, device="cpu")
    return (8 * numbers).round().clamp(-255, 255) / 8


class _Recorder:
    def __init__(
        self,
        model: PreTrainedModel,
        blocks: list[nn.Module],
        start: int,
        experts: Mapping[str, int],
        seed: int,
    ) -> None:
        self.model = model
        self.seed = seed
        self.experts = experts
        self.routed = set(experts.values())
        self.blocks = blocks
        self.names = {id(module): name for name, module in model.named_modules()}
        self.parameters = {id(value): name for name, value in model.named_parameters()}
        self.recording = Recording(torch.arange(3, 3 + TOKENS)[None], torch.arange(start, start + TOKENS))
        self._numbers = _pool()
        self._start = (seed - _SEED) * _LEAP % _POOL
        self._block = -1
        self._masks: list[MaskFunction] = []

    def random(self, shape: tuple[int, ...]) -> Tensor:
        """Part of the pool, from another place each time: no two calls return the same numbers in order."""
        count = math.prod(shape)
        if count > _POOL:
            self._numbers = self._numbers.repeat(-(-count // len(self._numbers)))
        self._start = (self._start + _STRIDE) % (len(self._numbers) - count + 1)
        return self._numbers[self._start : self._start + count].reshape(shape).clone()

    def call(self, kind: Any, name: str, x: Tensor, width: int) -> Tensor:
        output = self.random((*x.shape, width) if kind == "embedding" else (*x.shape[:-1], width))
        given, kept = x.detach().clone(), output.clone()
        if x.dim() == 2 and kind in ("linear", "norm"):
            # Tokens without their batch, as OPT's MLP has them.
            given, kept = given[None], kept[None]
        self.recording.calls.append(Call(kind, name, self._block, given, kept))
        return output

    @contextmanager
    def stubs(self, norms: Mapping[str, int], mixers: Collection[str]) -> Iterator[None]:
        replaced: list[tuple[nn.Module, Any]] = []
        try:
            for name, module in self.model.named_modules():
                before = vars(module).get("forward")
                if is_linear(module):
                    module.forward = self._stub("linear", name, *linear_shape(module))
                elif name in norms:
                    module.forward = self._stub("norm", name, norms[name], norms[name])
                elif name in self.experts:
                    module.forward = self._routed_stub(name)
                elif name in mixers:
                    module.forward = self._mixer_stub(name)
                else:
                    continue
                replaced.append((module, before))
            yield
        finally:
            for module, before in replaced:
                del module.forward
                if before is not None:
                    module.forward = before

    def _stub(self, kind: str, name: str, given: int, width: int) -> Callable[..., Tensor]:
        def stub(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # A norm without a weight takes any number of channels.
            if given and x.shape[-1] != given:
                raise Refusal(name, f"reads {x.shape[-1]} channels and has weights for {given}")
            if args or any(value is not None for value in kwargs.values()):
                raise Refusal(name, "is called with more than its input")
            return self.call(kind, name, x, width or x.shape[-1])

        return stub

    def _mixer_stub(self, name: str) -> Callable[..., Tensor]:
        def stub(hidden_states: Tensor, **told: Any) -> Tensor:
            return self.call("mixer", name, hidden_states, hidden_states.shape[-1])

        return stub

    def _routed_stub(self, name: str) -> Callable[..., Tensor]:
        def stub(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if hidden.dim() != 2 or index.dim() != 2 or weights.shape != index.shape:
                raise Refusal(name, "is not called with hidden states [T, H], numbers and weights [T, top]")
            output = self.random(tuple(hidden.shape))
            self.recording.calls.append(
                ExpertsCall(
                    "experts",
                    name,
                    self._block,
                    hidden.detach().clone()[None],
                    output.clone()[None],
                    index=index.detach().clone(),
                    weights=weights.detach().clone(),
                )
            )
            return output

        return stub

    def logits(self, name: str, x: Tensor, experts: int, *, wide: bool) -> Tensor:
        """A router's: no two of a token are equal, and a softmax leaves something for each."""
        order = torch.stack([self.random((experts,)).argsort(stable=True) for _ in range(x[..., 0].numel())])
        # Rows of different size: else the scores taken would have the same sum everywhere.
        sizes = torch.linspace(0.6, 1.4, len(order))[:, None]
        values = (sizes * torch.linspace(-2.0, 2.0, experts)[order]).reshape(*x.shape[:-1], experts)
        given, kept = x.detach().clone(), values.clone()
        if x.dim() == 2:
            given, kept = given[None], kept[None]
        self.recording.calls.append(Call("linear", name, self._block, given, kept, wide=wide))
        return values

    @contextmanager
    def corrected(self, names: Sequence[str]) -> Iterator[None]:
        """As large as the differences of sigmoids of :meth:`logits`; exact in every dtype.

        Of odd seeds they are so low that no sum with a score is positive, which tells whether what is left
        out of a choice is still in it with zero."""
        before: list[tuple[Tensor, Tensor]] = []
        try:
            for name in names:
                buffer = self.model.get_buffer(name)
                before.append((buffer, buffer.clone()))
                lowest = -2.0 if self.seed % 2 else -0.5
                values = (self.random((buffer.numel(),)) * 8).remainder(64) / 64 + lowest
                buffer.copy_(values)
                self.recording.corrections[name] = values
            yield
        finally:
            for buffer, values in before:
                buffer.copy_(values)

    @contextmanager
    def watched_blocks(self) -> Iterator[None]:
        handles = []
        for index, block in enumerate(self.blocks):
            handles += [
                block.register_forward_pre_hook(self._enter(index), with_kwargs=True),
                block.register_forward_hook(self._leave(index)),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            name = self.names[id(module)]
            if not isinstance(hidden, Tensor) or hidden.dim() != 3:
                raise Refusal(name, "is not called with hidden states [batch, tokens, channels]")
            for key in _BIASES & kwargs.keys():
                if kwargs[key] is not None:
                    raise Refusal(name, f"its attention is biased by distance ({key})")
            if index != len(self.recording.inputs):
                raise Refusal(name, "does not run once, in order")
            self._block = index
            self.recording.inputs[index] = hidden.detach().clone()

        return hook

    def _leave(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]
            self.recording.outputs[index] = hidden.detach().clone()
            self._block = -1

        return hook

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Every attention of the model goes through transformers' interface to :meth:`_attend`."""
        configs = {
            id(module.config): module.config for module in self.model.modules() if hasattr(module, "config")
        }
        before = {key: config._attn_implementation for key, config in configs.items()}
        AttentionInterface.register(_IMPLEMENTATION, self._attend)
        AttentionMaskInterface.register(_IMPLEMENTATION, self._mask)
        try:
            for config in configs.values():
                config._attn_implementation = _IMPLEMENTATION
            yield
        finally:
            for key, config in configs.items():
                config._attn_implementation = before[key]
            del AttentionInterface._global_mapping[_IMPLEMENTATION]
            del AttentionMaskInterface._global_mapping[_IMPLEMENTATION]

    def _mask(self, *, mask_function: MaskFunction, **rest: Any) -> Tensor:
        """Stands for a mask: full of the number under which its function is kept."""
        self._masks.append(mask_function)
        shape = (rest["batch_size"], 1, int(rest["q_length"]), int(rest["kv_length"]))
        return torch.full(shape, float(len(self._masks) - 1))

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **told: Any
    ) -> tuple[Tensor, None]:
        name = self.names[id(module)]
        for key, value in told.items():
            if key not in _HARMLESS and value is not None:
                kind = "attention sinks" if key == "s_aux" else f"an argument {key!r}"
                raise Refusal(name, f"its attention has {kind}")
        if mask is None or int(mask.flatten()[0]) >= len(self._masks):
            raise Refusal(name, "its mask does not come from transformers' mask functions")
        if v.shape[-1] != q.shape[-1] or k.shape[-1] != q.shape[-1]:
            raise Refusal(name, f"keys of {k.shape[-1]} channels and values of {v.shape[-1]}")
        scale = told.get("scaling")
        output = self.random((1, q.shape[2], q.shape[1], q.shape[3]))
        call = AttentionCall(
            "attention",
            name,
            self._block,
            q.detach().clone(),
            output,
            keys=k.detach().clone(),
            values=v.detach().clone(),
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=None if told.get("softcap") is None else float(told["softcap"]),
            mask=self._masks[int(mask.flatten()[0])],
        )
        self.recording.calls.append(call)
        return output.clone(), None


class _Parameters(TorchFunctionMode):
    """Answers lookups in embeddings, and refuses every other use of a parameter."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        # Of weights that were cast to float32: held, since an id is that of a living tensor.
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        wide = func is F.linear and len(args) == 2 and id(args[1]) in self._casts
        if wide:
            args = (args[0], self._casts[id(args[1])][1])
        parameters = [value for value in (*args, *kwargs.values()) if id(value) in self._recorder.parameters]
        # What reads an attribute (weight.dtype) is no use of its values.
        if not parameters or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        name = self._recorder.parameters[id(parameters[0])]
        if func is F.embedding and parameters[0].dim() == 2:
            module = name.rpartition(".")[0]
            return self._recorder.call("embedding", module, args[0], int(parameters[0].shape[1]))
        rows = int(parameters[0].shape[0])
        if func in _CASTS and not kwargs and tuple(args[1:]) == _CASTS[func]:
            cast = torch.empty_like(parameters[0], dtype=torch.float32, device="meta")
            self._casts[id(cast)] = cast, parameters[0]
            return cast
        if func is F.linear and len(args) == 2 and not kwargs and rows in self._recorder.routed:
            module, _, key = name.rpartition(".")
            if key == "weight" and parameters[0].dim() == 2:
                return self._recorder.logits(module, args[0], rows, wide=wide)
        raise Refusal(name, "is used by neither a linear, a norm nor an embedding")
