"""Records one forward pass of a model without weights, whose parts return random numbers.

Every linear, norm, embedding lookup and attention is replaced by a stub that returns new random numbers. The
code between them is the model's own. Where such numbers arrive tells which part feeds which; how they have
changed tells the factor, the activation or the rotation in between.
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
"""tokens of the recorded pass, enough to tell rotations apart"""

_IMPLEMENTATION = "marlinq_recording"
_SIZE = 6.0
"""standard deviation of the random numbers: so large that clamps take effect and activations differ
clearly"""
_POOL = 1 << 20
"""random numbers in the pool"""
_STRIDE = 7_919
"""places between the starts of two draws from the pool; a prime, so that starts don't repeat soon"""
_SEED, _LEAP = 17, 104_729
"""seed of the pool, and places between the first draws of recordings with different seeds; a prime, too"""
# Keyword arguments of attention that don't change its result.
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
# Names in older models of a term that is added to attention's dot products.
_BIASES = {"alibi", "position_bias"}

# Functions that cast a weight to float32 -> their other arguments.
_CASTS: dict[Any, tuple[Any, ...]] = {
    Tensor.type: (torch.float32,),
    Tensor.to: (torch.float32,),
    Tensor.float: (),
}

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Refusal(Exception):
    """Ends recognition, with the part that is not understood and the reason."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a replaced part.

    Attributes:
        kind: kind of the replaced module.
        name: full name of the module or embedding.
        block: index of the running decoder block; -1 outside the blocks.
        input: input of the module; for attention the queries [1, H, T, D].
        output: random numbers that the stub returned.
        wide: whether the weight was cast to float32 first (a router's product).
        bias: full name of the parameter that is added (to a router's product), or None.
    """

    kind: Literal["linear", "norm", "embedding", "attention", "experts", "mixer"]
    name: str
    block: int
    input: Tensor
    output: Tensor
    wide: bool = field(default=False, kw_only=True)
    bias: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class AttentionCall(Call):
    """A call of attention.

    Attributes:
        keys, values: keys and values [1, KV, T, D].
        scale, softcap: arguments, as in :class:`marlinq.models.anatomy.Attention`.
        mask: function visible(batch, head, query, key) of tensors of positions.
        sinks: full name of the parameter [H] of attention sinks, or None.
    """

    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None
    mask: MaskFunction
    sinks: str | None


@dataclass(frozen=True, eq=False)
class ExpertsCall(Call):
    """A call of a module of experts.

    Attributes:
        index: numbers of the chosen experts, [T, top].
        weights: weight of each chosen expert, [T, top].
        count: number of experts.
    """

    index: Tensor
    weights: Tensor
    count: int


@dataclass(eq=False)
class Recording:
    """A recorded forward pass.

    Attributes:
        ids: token ids, int64 [1, T].
        positions: positions of the tokens, int64 [T].
        calls: calls of replaced parts, in order.
        inputs, outputs: inputs and outputs of every block, [1, T, hidden].
        logits: [1, T, vocabulary].
        corrections: full name of a buffer beside experts, [experts], or of a block, [1] -> its random values
            in this pass.
        vectors: further tensors [1, T, channels] that each block is called with.
    """

    ids: Tensor
    positions: Tensor
    calls: list[Call] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    corrections: dict[str, Tensor] = field(default_factory=dict)
    vectors: dict[int, list[Tensor]] = field(default_factory=dict)


def record(
    model: PreTrainedModel,
    blocks: list[nn.Module],
    norms: Mapping[str, int],
    start: int = 0,
    experts: Mapping[str, int] | None = None,
    corrections: Sequence[str] = (),
    seed: int = _SEED,
    mixers: Collection[str] = (),
    vectors: Mapping[str, Sequence[int]] | None = None,
) -> Recording:
    """Runs ``model`` once with stubs and restores it afterwards.

    Args:
        model: model with parameters on any device, also meta, and buffers on the CPU.
        blocks: decoder blocks in order.
        norms: full name of each norm -> its channels.
        start: position of the first token; if it is not 0, the model must take ``position_ids``.
        experts: full name of each module of routed experts -> number of experts. A product with a weight of
        as
            many rows, outside of linears, makes a router's logits.
        corrections: full names of buffers beside experts with one number per expert, and of blocks with one
            number. They get random values for the pass, because a new model's are zeros or ones and would not
            show.
        seed: seed of all random numbers.
        mixers: full names of recognised modules in the place of attention, which are replaced as a whole.
        vectors: full names and shapes of parameters that get random values for the pass, as ``corrections``.

    Raises:
        Refusal: a parameter is used by none of the replaced parts, or attention is computed in another way.
    """
    recorder = _Recorder(model, blocks, start, experts or {}, seed)
    positions = {"position_ids": recorder.recording.positions[None]} if start else {}
    with ExitStack() as stack:
        stack.enter_context(recorder.stubs(norms, mixers))
        stack.enter_context(recorder.attention())
        stack.enter_context(recorder.watched_blocks())
        stack.enter_context(recorder.corrected(corrections))
        stack.enter_context(_Parameters(recorder, recorder.random_vectors(vectors or {})))
        stack.enter_context(torch.no_grad())
        output = model(input_ids=recorder.recording.ids, use_cache=False, **positions)
    recorder.recording.logits = output.logits.float()
    return recorder.recording


@cache
def _pool() -> Tensor:
    """The pool of random numbers, shared by all recordings because drawing takes longer than recording.

    They are multiples of 1/8 with 8 significant bits, which a cast to a narrow dtype does not change.
    """
    generator = torch.Generator().manual_seed(_SEED)
    # dtype and device are given because transformers may have changed the defaults.
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
        """A part of the pool that starts at another place in each call, so that no two calls return the same
        numbers."""
        count = math.prod(shape)
        if count > _POOL:
            self._numbers = self._numbers.repeat(-(-count // len(self._numbers)))
        self._start = (self._start + _STRIDE) % (len(self._numbers) - count + 1)
        return self._numbers[self._start : self._start + count].reshape(shape).clone()

    def call(self, kind: Any, name: str, x: Tensor, width: int) -> Tensor:
        output = self.random((*x.shape, width) if kind == "embedding" else (*x.shape[:-1], width))
        given, kept = x.detach().clone(), output.clone()
        if x.dim() == 2 and kind in ("linear", "norm"):
            # Tokens without a batch axis, as in OPT's MLP.
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
            # ``given`` is 0 for a norm without a weight, which takes any number of channels.
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
                    count=self.experts[name],
                )
            )
            return output

        return stub

    def logits(self, name: str, x: Tensor, experts: int, *, wide: bool, bias: str | None) -> Tensor:
        """Logits of a router: different for all experts of a token, and with no score near zero."""
        order = torch.stack([self.random((experts,)).argsort(stable=True) for _ in range(x[..., 0].numel())])
        # Scaled by row, because otherwise the chosen scores would have the same sum for every token.
        sizes = torch.linspace(0.6, 1.4, len(order))[:, None]
        values = (sizes * torch.linspace(-2.0, 2.0, experts)[order]).reshape(*x.shape[:-1], experts)
        given, kept = x.detach().clone(), values.clone()
        if x.dim() == 2:
            given, kept = given[None], kept[None]
        call = Call("linear", name, self._block, given, kept, wide=wide, bias=bias)
        self.recording.calls.append(call)
        return values

    @contextmanager
    def corrected(self, names: Sequence[str]) -> Iterator[None]:
        """Inside, corrections have random values about as large as differences between scores, exact in every
        dtype. For odd seeds they are so low that ``score + correction`` is negative everywhere, which shows
        whether excluded experts take part with 0."""
        before: list[tuple[Tensor, Tensor]] = []
        try:
            for name in names:
                buffer = self.model.get_buffer(name)
                before.append((buffer, buffer.clone()))
                lowest, spread = (-2.0 if self.seed % 2 else -0.5), self._spread()
                if buffer.numel() == 1:
                    # A factor on the residual stream; a large one would leave fewer digits of what is added.
                    lowest, spread = 0.5, 1.0
                values = self._sixty_fourths((buffer.numel(),)) * spread + lowest
                buffer.copy_(values)
                self.recording.corrections[name] = values
            yield
        finally:
            for buffer, values in before:
                buffer.copy_(values)

    def random_vectors(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Random values in the place of parameters with these names, noted as corrections are."""
        spread = self._spread()
        made = {name: self._sixty_fourths(tuple(shape)) * spread + 0.5 for name, shape in shapes.items()}
        self.recording.corrections |= {name: values.flatten() for name, values in made.items()}
        return made

    def _spread(self) -> float:
        """Factor on corrections: 4 for every other even seed, so that distant logits change places."""
        return 4.0 if self.seed % 4 == 2 else 1.0

    def _sixty_fourths(self, shape: tuple[int, ...]) -> Tensor:
        """Random multiples of 1/64 below one, exact in every dtype."""
        return (self.random(shape) * 8).remainder(64) / 64

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
            self.recording.vectors[index] = [
                value.detach().clone()
                for value in (*args[1:], *kwargs.values())
                if isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == hidden.shape[:2]
            ]

        return hook

    def _leave(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]
            self.recording.outputs[index] = hidden.detach().clone()
            self._block = -1

        return hook

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Inside, every attention of the model calls :meth:`_attend` through transformers' interface."""
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
        """A tensor in the place of a mask, filled with the number under which the mask function is stored."""
        self._masks.append(mask_function)
        shape = (rest["batch_size"], 1, int(rest["q_length"]), int(rest["kv_length"]))
        return torch.full(shape, float(len(self._masks) - 1))

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **told: Any
    ) -> tuple[Tensor, None]:
        name, mask = self.names[id(module)], attention_mask
        for key, value in told.items():
            if key not in _HARMLESS and key != "s_aux" and value is not None:
                raise Refusal(name, f"its attention has an argument {key!r}")
        sinks = told.get("s_aux")
        if sinks is not None and (id(sinks) not in self.parameters or sinks.shape != (q.shape[1],)):
            raise Refusal(name, "its attention has sinks that are no parameter of one number a head")
        if mask is None or int(mask.flatten()[0]) >= len(self._masks):
            raise Refusal(name, "its mask does not come from transformers' mask functions")
        if k.shape[-1] != q.shape[-1]:
            raise Refusal(name, f"queries of {q.shape[-1]} channels and keys of {k.shape[-1]}")
        scale = told.get("scaling")
        output = self.random((1, q.shape[2], q.shape[1], v.shape[3]))
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
            sinks=None if sinks is None else self.parameters[id(sinks)],
        )
        self.recording.calls.append(call)
        return output.clone(), None


class _Parameters(TorchFunctionMode):
    """Handles embedding lookups, exchanges vectors for random ones, and refuses every other use of a
    parameter."""

    def __init__(self, recorder: _Recorder, vectors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._recorder = recorder
        self._vectors = vectors
        # Weights that were cast to float32, kept alive because they are found by id.
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        wide = func is F.linear and len(args) == 2 and id(args[1]) in self._casts
        if wide:
            args = (args[0], self._casts[id(args[1])][1])
        names = self._recorder.parameters
        if func is not F.linear:
            args = tuple(self._vectors.get(names.get(id(value), ""), value) for value in args)
        parameters = [value for value in (*args, *kwargs.values()) if id(value) in names]
        # Reading an attribute (weight.dtype) does not use the values.
        if not parameters or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        name = self._recorder.parameters[id(parameters[0])]
        if func is F.embedding and parameters[0].dim() == 2:
            module = name.rpartition(".")[0]
            return self._recorder.call("embedding", module, args[0], int(parameters[0].shape[1]))
        if func is Tensor.__getitem__ and parameters[0] is args[0] and self._is_table(name):
            # The embedding of a token in the place of images. No token of a recording is one.
            shape = torch.empty(parameters[0].shape, device="meta")[args[1]].shape
            return self._recorder.random(tuple(shape))
        rows = int(parameters[0].shape[0])
        if func in _CASTS and not kwargs and tuple(args[1:]) == _CASTS[func]:
            cast = torch.empty_like(parameters[0], dtype=torch.float32, device="meta")
            self._casts[id(cast)] = cast, parameters[0]
            return cast
        if func is F.linear and len(args) in (2, 3) and not kwargs and rows in self._recorder.routed:
            module, _, key = name.rpartition(".")
            bias = None
            if len(args) == 3 and args[2] is not None:
                bias = self._recorder.parameters.get(id(args[2]))
                if bias is None:
                    raise Refusal(name, "is multiplied with a bias that is no parameter")
            if key == "weight" and parameters[0].dim() == 2:
                return self._recorder.logits(module, args[0], rows, wide=wide, bias=bias)
        raise Refusal(name, "is used by neither a linear, a norm nor an embedding")

    def _is_table(self, name: str) -> bool:
        """Whether the parameter ``name`` is the weight of an embedding."""
        return isinstance(self._recorder.model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
