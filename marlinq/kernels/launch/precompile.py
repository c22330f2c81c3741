"""Compile the kernels of a model's products before the first of them runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from marlinq.core.granularity import Granularity
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.choose.decision import buckets, decide
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.demands import demands
from marlinq.kernels.contract.device import Device
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.compiled_notes import is_complete, note_complete
from marlinq.kernels.driver.gpu_rates import device_numbers


def precompile(
    problems: Iterable[Problem], device_index: int = 0, progress: ReportProgress = no_progress
) -> int:
    """Compile in parallel every kernel that ``problems`` need on a device and the cache lacks.

    ``progress`` is called after each kernel.

    Returns:
        Number of kernels compiled.

    Raises:
        EnvironmentProblem: a kernel does not compile, or the cache can't be written.
    """
    device = device_numbers(device_index)
    return compile_missing(device.architecture, _instantiations(problems, device), progress)


class LayerShape(NamedTuple):
    """Shape and format of a weight, on which the choice of its kernels depends.

    Attributes:
        n: columns of the stored weight, padding included: a multiple of 64.
        k: channels, a multiple of 64.
        granularity: one of :data:`marlinq.kernels.contract.problem.GRANULARITIES`.
        zeros: whether zero points are stored.
        format: weight format of the words.
    """

    n: int
    k: int
    granularity: Granularity
    zeros: bool
    format: WeightFormat

    @classmethod
    def of(cls, operand: Operand) -> LayerShape:
        """The shape of an operand."""
        k, n = operand.padded_shape
        return cls(n, k, operand.granularity.for_channels(k), operand.zeros is not None, operand.format)


def precompile_model(
    layers: Iterable[LayerShape],
    dtype: torch.dtype,
    device_index: int = 0,
    *,
    most_rows: int = 8192,
    progress: ReportProgress = no_progress,
) -> int:
    """Compile in parallel the kernels of a model's products, for all batches of up to ``most_rows`` rows.

    A model has about 40 kernels. Choosing them takes half a second; later calls read a note in the cache
    instead (:mod:`marlinq.kernels.driver.compiled_notes`). Call it inside :func:`dependent_launches` or
    :func:`batch_invariant` if the products will run inside of it.

    Args:
        layers: shapes of all weights; equal ones count once.
        dtype: float16 or bfloat16, of activations and results.
        device_index: index of the GPU.
        most_rows: rows of the largest batch.
        progress: called after each kernel that is compiled.

    Returns:
        Number of kernels compiled.

    Raises:
        EnvironmentProblem: a kernel does not compile, or the cache can't be written.
        UnsupportedError: no kernel multiplies a layer of this shape.
    """
    bfloat16 = dtype == torch.bfloat16
    wanted = sorted(set(layers), key=repr)
    device = device_numbers(device_index)
    premises = wanted, bfloat16, most_rows, demands(), device
    if is_complete(premises):
        return 0
    problems = (
        Problem(m, layer.n, layer.k, layer.granularity, layer.zeros, bfloat16, layer.format)
        for layer in wanted
        for m in buckets(most_rows)
    )
    instantiations = _instantiations(problems, device)
    compiled = compile_missing(device.architecture, instantiations, progress)
    note_complete(premises, instantiations, device.architecture)
    return compiled


def _instantiations(problems: Iterable[Problem], device: Device) -> list[Instantiation]:
    """The kernels chosen for ``problems``, without those whose weight is dequantised."""
    decisions = ((problem, decide(problem, device).config) for problem in problems)
    return list(
        dict.fromkeys(config.instantiation(problem) for problem, config in decisions if config is not None)
    )


def precompile_instantiations(
    wanted: Iterable[Instantiation], device_index: int = 0, progress: ReportProgress = no_progress
) -> int:
    """Compile in parallel those of ``wanted`` that the cache lacks; returns their number."""
    return compile_missing(device_numbers(device_index).architecture, list(dict.fromkeys(wanted)), progress)


def precompile_variants(variants: Iterable[tuple[Problem, Configuration]], device_index: int = 0) -> int:
    """Compile in parallel the kernels of given configurations; returns the number of kernels compiled."""
    wanted = dict.fromkeys(config.instantiation(problem) for problem, config in variants)
    return compile_missing(device_numbers(device_index).architecture, list(wanted))
