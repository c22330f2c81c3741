"""Which forward decodes a model, decided in one place."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.driver.cache import COMPILING
from marlinq.models.anatomy import Anatomy, Unrecognised
from marlinq.models.recognise import anatomy_of
from marlinq.runtime.decoding import Decoder
from marlinq.runtime.sampling import GREEDY, SamplerShape, precompile_sampler
from marlinq.runtime.step.bound import chain_refusal
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.persistent import join_layers
from marlinq.runtime.step.probe import capacity_limit, own_forward_refusal
from marlinq.runtime.step.reference import ReferenceForward
from marlinq.runtime.step.transformers_forward import TransformersForward, holds_keys_and_values

if TYPE_CHECKING:
    from marlinq.runtime.loading import LoadedModel

# Another order of sums in 16 bits stays below it: products that round to BF16 turn the least difference into
# their own rounding's, 3.4 percent of a small model's logits. A row that sees padding, or a step that misses
# its cache, changes logits by tens of percent.
_TOLERANCE = 0.1
_PROBE = (5, 3)
"""Tokens of the probe's two prompts."""
_PROBE_STEPS = 2

_anatomies: WeakKeyDictionary[PreTrainedModel, Anatomy | Unrecognised] = WeakKeyDictionary()
_fixed_cache_refusals: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def take_decoder(
    loaded: LoadedModel,
    *,
    batch: int,
    tokens: int,
    shape: SamplerShape = GREEDY.shape,
    graphs: bool = True,
    progress: ReportProgress = no_progress,
) -> Decoder:
    """A decoder of ``loaded`` that is kept, or a new one; see :meth:`marlinq.runtime.decoding.Decoders.take`.

    Args:
        loaded: the model.
        batch: rows.
        tokens: largest number of tokens of a row, prompt included.
        shape: kinds of work of the sampler.
        graphs: False keeps CUDA steps eager.
        progress: called while kernels are compiled.
    """

    def make(batch: int, capacity: int) -> Forward:
        with compiled_meanwhile(loaded, shape, progress):
            return choose_forward(loaded, batch, capacity, progress)

    found = _anatomy(loaded)
    limit = None if isinstance(found, Unrecognised) else capacity_limit(loaded.model, found)
    return loaded.decoders.take(
        make,
        batch=batch,
        tokens=tokens,
        # Where a few tokens more would be computed in another way, they are not asked for.
        limit=limit,
        shape=shape,
        graphs=graphs,
    )


def choose_forward(
    loaded: LoadedModel, batch: int, capacity: int, progress: ReportProgress = no_progress
) -> Forward:
    """The forward that decodes ``batch`` rows of up to ``capacity`` tokens; its ``reason`` says why.

    A forward of ours, if the model is recognised, its kernels can compute it, and its logits are those of
    transformers (:func:`marlinq.runtime.step.probe.own_forward_refusal`); else transformers' own. Kernels are
    compiled here for the forward that is taken, of which ``progress`` is told.
    """
    own = _own_forward(loaded, batch, capacity, progress)
    if isinstance(own, Forward):
        return own
    if loaded.device.type == "cuda":
        loaded.compile_kernels(progress)
    model = loaded.model
    refusal = fixed_cache_refusal(model)
    kind = f"transformers' modules with a growing cache ({refusal})" if refusal else "transformers' modules"
    return TransformersForward(
        model, batch=batch, capacity=capacity, reason=f"{kind}: {own}", fixed=not refusal
    )


def _own_forward(loaded: LoadedModel, batch: int, capacity: int, progress: ReportProgress) -> Forward | str:
    """Our forward, or why there is none."""
    model = loaded.model
    found = _anatomy(loaded)
    if isinstance(found, Unrecognised):
        return f"{found.part}: {found.reason}"
    on_gpu = loaded.device.type == "cuda"
    if on_gpu and (refused := chain_refusal(model, found)) is not None:
        return f"{refused.part}: {refused.reason}"

    def build(batch: int, capacity: int) -> Forward:
        if on_gpu:
            return ChainForward(model, found, batch=batch, capacity=capacity, progress=progress)
        return ReferenceForward(model, found, batch=batch, capacity=capacity, reason="our forward in torch")

    try:
        executor = "chain" if on_gpu else "reference"
        refusal = own_forward_refusal(model, found, build, executor=executor, capacity=capacity, kept=on_gpu)
        if refusal:
            return refusal
        forward = build(batch, capacity)
        if isinstance(forward, ChainForward) and (apart := join_layers(forward, progress)) is not None:
            forward.reason += f"; layers as single kernels: {apart}"
        return forward
    except EnvironmentProblem as problem:
        return f"our kernels can't be used ({problem})"


def _anatomy(loaded: LoadedModel) -> Anatomy | Unrecognised:
    if loaded.anatomy is not None:
        return loaded.anatomy
    model = loaded.model
    if model not in _anatomies:
        _anatomies[model] = anatomy_of(model)
    return _anatomies[model]


@contextmanager
def compiled_meanwhile(loaded: LoadedModel, shape: SamplerShape, progress: ReportProgress) -> Iterator[None]:
    """The kernel that chooses tokens is compiled on another thread while the forward is made.

    Raises:
        EnvironmentProblem: it does not compile.
    """
    vocabulary = loaded.model.config.get_text_config().vocab_size
    if loaded.device.type != "cuda" or not isinstance(vocabulary, int):
        yield
        return
    index = loaded.device.index or 0
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(precompile_sampler, shape, loaded.dtype, vocabulary, index)
        yield
        if not compiling.done():
            progress(COMPILING, 0, 1)
            compiling.result()
            progress(COMPILING, 1, 1)
        compiling.result()


def fixed_cache_refusal(model: PreTrainedModel) -> str:
    """Why the library's cache of fixed size does not serve this model; empty where it does.

    Found out once for each model: two prompts of different length, and some steps, have to give the logits
    that each prompt has alone with the model's own growing cache.
    """
    if model not in _fixed_cache_refusals:
        _fixed_cache_refusals[model] = _try_fixed_cache(model)
    return _fixed_cache_refusals[model]


def _try_fixed_cache(model: PreTrainedModel) -> str:
    if not holds_keys_and_values(model):
        return "the model has layers without an ordinary key-value cache"
    vocabulary = model.config.get_text_config().vocab_size
    rows = torch.arange(2 * (max(_PROBE) + _PROBE_STEPS)).view(2, -1) % vocabulary

    def made(batch: int, *, fixed: bool) -> Forward:
        return TransformersForward(model, batch=batch, capacity=64, reason="a probe", fixed=fixed)

    alone = [_probe(made(1, fixed=False), rows[i : i + 1], _PROBE[i : i + 1]) for i in range(2)]
    try:
        found = (
            (_probe(made(2, fixed=True), rows, _PROBE), torch.cat(alone, dim=1)),
            (_probe(made(1, fixed=True), rows[:1], _PROBE[:1]), alone[0]),
        )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return f"one of fixed size fails ({' '.join(str(error).split())[:120]})"
    for mine, theirs in found:
        difference = float((mine - theirs).norm() / theirs.norm())
        if not difference <= _TOLERANCE:
            return f"one of fixed size gives other logits (relative error {difference:.2g})"
    return ""


def _probe(forward: Forward, rows: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Logits, float32 [1 + steps, B, vocabulary], behind the prompts and after each step."""
    rows = rows.to(forward.device())
    logits = [
        forward.prefill(rows[:, : max(lengths)], torch.tensor(lengths, dtype=torch.int32)).float().clone()
    ]
    steps = rows[:, max(_PROBE) :].T.contiguous()
    logits += [forward.step(tokens).float().clone() for tokens in steps]
    return torch.stack(logits)
