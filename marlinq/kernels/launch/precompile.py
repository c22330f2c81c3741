"""Compile what products will need before the first of them runs."""

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
from marlinq.kernels.driver.gpu import device_numbers
from marlinq.kernels.driver.notes import is_complete, note_complete


def precompile(
    problems: Iterable[Problem], device_index: int = 0, progress: ReportProgress = no_progress
) -> int:
    """Compile every variant that ``problems`` need on a device and the cache lacks, in parallel.

    ``progress`` is called after each that is compiled.

    Returns:
        How many variants were compiled.

    Raises:
        EnvironmentProblem: a variant does not compile, or the cache can't be written.
    """
    device = device_numbers(device_index)
    return compile_missing(device.architecture, _instantiations(problems, device), progress)


class LayerShape(NamedTuple):
    """What decides which variants a weight needs.

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
        """The shape of a weight that is there already."""
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
    """Compile what a model's products need for any batch of up to ``most_rows`` rows, in parallel.

    A model has about 40 variants. To decide which takes half a second, the first time; a note in the cache
    (:mod:`marlinq.kernels.driver.notes`) saves later calls the trouble. Contexts count: call it inside
    :func:`dependent_launches` or :func:`batch_invariant` where the products will run inside, too.

    Args:
        layers: layers of all weights; equal ones count once.
        dtype: float16 or bfloat16, of activations and results.
        device_index: index of the GPU.
        most_rows: rows of the largest batch.
        progress: called after each variant that is compiled.

    Returns:
        How many variants were compiled.

    Raises:
        EnvironmentProblem: a variant does not compile, or the cache can't be written.
        UnsupportedError: a layer that no kernel takes.
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
    """What the decisions for ``problems`` launch; nothing where a weight is dequantised."""
    decisions = ((problem, decide(problem, device).config) for problem in problems)
    return list(
        dict.fromkeys(config.instantiation(problem) for problem, config in decisions if config is not None)
    )


def precompile_instantiations(
    wanted: Iterable[Instantiation], device_index: int = 0, progress: ReportProgress = no_progress
) -> int:
    """As :func:`precompile`, for kernels as they are compiled."""
    return compile_missing(device_numbers(device_index).architecture, list(dict.fromkeys(wanted)), progress)


def precompile_variants(variants: Iterable[tuple[Problem, Configuration]], device_index: int = 0) -> int:
    """As :func:`precompile`, for chosen configurations."""
    wanted = dict.fromkeys(config.instantiation(problem) for problem, config in variants)
    return compile_missing(device_numbers(device_index).architecture, list(wanted))
