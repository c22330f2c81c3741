"""Choose the forward that decodes a model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marlinq.core.errors import EnvironmentProblem, UnsupportedError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.driver.cache import COMPILING
from marlinq.models.anatomy import Anatomy, Unrecognised
from marlinq.models.classes import predicts_tokens
from marlinq.models.recognise import anatomy_of
from marlinq.runtime.decoding import Decoder
from marlinq.runtime.draft_layer import DraftLayer, load_draft
from marlinq.runtime.sampling import GREEDY, SamplerShape, precompile_sampler
from marlinq.runtime.step.bound import chain_refusal
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.draft_chain import ChainDraft, draft_cost
from marlinq.runtime.step.draft_reference import ReferenceDraft
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.persistent import join_layers
from marlinq.runtime.step.probe import capacity_limit, own_forward_refusal
from marlinq.runtime.step.reference_forward import ReferenceForward
from marlinq.runtime.step.transformers_forward import TransformersForward, holds_keys_and_values

if TYPE_CHECKING:
    from marlinq.runtime.loading import LoadedModel

# Largest relative difference of logits between caches of fixed and of growing size. Another order of sums
# stays below it: where products round to BF16, the least difference grows to 3.4 per cent of a small model's
# logits. A row that sees padding, or a step that misses its cache, changes logits by tens of per cent.
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
    layer: DraftLayer | None = None,
    progress: ReportProgress = no_progress,
) -> Decoder:
    """A kept or new decoder of ``loaded`` (:meth:`marlinq.runtime.decoding.Decoders.take`).

    Args:
        loaded: the model.
        batch: rows.
        tokens: largest number of tokens of a row, prompt included.
        shape: operations of the sampler: random draws, filters, a penalty.
        graphs: False keeps CUDA steps eager.
        layer: draft head for the forward's ``drafter``, where it can have one; or None.
        progress: called while kernels are compiled.

    Raises:
        UnsupportedError: the model has no output head.
    """
    check_head(loaded)

    def make(batch: int, capacity: int) -> Forward:
        with compiled_meanwhile(loaded, shape, progress):
            return choose_forward(loaded, batch, capacity, progress, layer)

    anatomy = _anatomy(loaded)
    limit = None if isinstance(anatomy, Unrecognised) else capacity_limit(loaded.model, anatomy)
    return loaded.decoders.take(
        make,
        batch=batch,
        tokens=tokens,
        # The capacity is not rounded up beyond the positions that the anatomy is right for.
        limit=limit,
        shape=shape,
        graphs=graphs,
        drafts=layer is not None,
    )


def check_head(loaded: LoadedModel) -> None:
    """Raises UnsupportedError where the model has no output head: an embedding model, a classifier."""
    if not predicts_tokens(loaded.model):
        raise UnsupportedError(
            f"{loaded.path}: {type(loaded.model).__name__} has no output head, so it predicts "
            "no tokens; expected a model that writes text"
        )


def draft_layer(loaded: LoadedModel) -> DraftLayer | str:
    """The draft head that the model's checkpoint has, or why it can't be used."""
    anatomy = _anatomy(loaded)
    if isinstance(anatomy, Unrecognised):
        return f"{anatomy.part}: {anatomy.reason}"
    layer = load_draft(loaded, anatomy)
    if isinstance(layer, DraftLayer) and loaded.device.type == "cuda":
        refused = chain_refusal(layer.model, layer.anatomy)
        if refused is not None:
            return f"{refused.part}: {refused.reason}"
    return layer


def choose_forward(
    loaded: LoadedModel,
    batch: int,
    capacity: int,
    progress: ReportProgress = no_progress,
    layer: DraftLayer | None = None,
) -> Forward:
    """The forward that decodes ``batch`` rows of up to ``capacity`` tokens; its ``reason`` says why.

    marlinq's own forward if the model is recognised, the kernels can compute it, and its logits equal those
    of transformers (:func:`marlinq.runtime.step.probe.own_forward_refusal`); else transformers' forward.
    Kernels of the chosen forward are compiled, with calls of ``progress``. marlinq's own gets a ``drafter``
    for the draft head ``layer``.
    """
    own = _own_forward(loaded, batch, capacity, progress, layer)
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


def _own_forward(
    loaded: LoadedModel, batch: int, capacity: int, progress: ReportProgress, layer: DraftLayer | None
) -> Forward | str:
    """marlinq's own forward; or text that says why it can't be used."""
    model = loaded.model
    anatomy = _anatomy(loaded)
    if isinstance(anatomy, Unrecognised):
        return f"{anatomy.part}: {anatomy.reason}"
    on_gpu = loaded.device.type == "cuda"
    if on_gpu and (refused := chain_refusal(model, anatomy)) is not None:
        return f"{refused.part}: {refused.reason}"

    def build(batch: int, capacity: int) -> Forward:
        if on_gpu:
            return ChainForward(model, anatomy, **sizes(batch, capacity), progress=progress)
        return ReferenceForward(model, anatomy, **sizes(batch, capacity), reason="our forward in torch")

    def sizes(batch: int, capacity: int) -> dict[str, Any]:
        # Only a single text is drafted for; comparisons take several.
        return {"batch": batch, "capacity": capacity, "keeps_hidden": layer is not None and batch == 1}

    try:
        executor = "chain" if on_gpu else "reference"
        refusal = own_forward_refusal(
            model, anatomy, build, executor=executor, capacity=capacity, kept=on_gpu
        )
        if refusal:
            return refusal
        forward = build(batch, capacity)
        if isinstance(forward, ChainForward) and (apart := join_layers(forward, progress)) is not None:
            forward.reason += f"; layers as single kernels: {apart}"
        if layer is not None and isinstance(forward, ChainForward):
            most = max(1, forward.most_verified - 1)
            forward.drafter = drafter = ChainDraft(layer, capacity=capacity, most=most, progress=progress)
            drafter.cost = draft_cost(layer, drafter, forward)
            forward.reason += f"; {drafter.reason}"
        elif layer is not None:
            forward.drafter = ReferenceDraft(layer, capacity=capacity)
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
    """Compile the sampling kernel in another thread during the ``with`` block, in which the forward is made.

    Raises:
        EnvironmentProblem: the kernel does not compile.
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
    """Why transformers' cache of fixed size can't be used for this model; empty if it can.

    Tested once for each model: two prompts of different length and some steps must give the logits that each
    prompt gives alone with the model's own growing cache.
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
        compared = (
            (_probe(made(2, fixed=True), rows, _PROBE), torch.cat(alone, dim=1)),
            (_probe(made(1, fixed=True), rows[:1], _PROBE[:1]), alone[0]),
        )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return f"one of fixed size fails ({' '.join(str(error).split())[:120]})"
    for mine, theirs in compared:
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
