"""The launch of a decode step's layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.jit.cache import compile_missing
from marlinq.kernels.launch.driver import Launches, on_device
from marlinq.kernels.launch.launch import device_numbers
from marlinq.kernels.launch.loading import load_kernel
from marlinq.kernels.launch.persistent.config import PARTS, StepConfig, choose_for, prepare_instantiation
from marlinq.kernels.launch.persistent.memory import (
    PrepareArguments,
    layer_descriptors,
    make_messages,
    step_arguments,
)
from marlinq.kernels.launch.persistent.operands import LayerOperands, Model

_PREPARE_THREADS = 256
_PREPARE_GRID = 264


class PersistentLayers:
    """The layers of a decode step as one launch, to be repeated and captured.

    Args:
        layers: in order; tensors are kept alive.
        model: what they have in common.
        hidden: [M, H] in the activations' dtype; a launch replaces it by what leaves the last layer.
        lengths: int32 [M], positions in the cache; the launch appends at that position and changes no length.
        grid: blocks, a multiple of four; by default as many as the GPU has multiprocessors.
        config: the variant; chosen by default.
        progress: called after each kernel that is compiled.

    Attributes:
        config, grid: as above.
        arguments, prepare_arguments: the parameters of the two kernels of a launch.
        descriptors: all layers', on the device.
        messages: what blocks hand each other.
        trace: marks of the lab's variants.

    Raises:
        ValueError: no variant fits.
        EnvironmentProblem: CuPy or NVRTC is missing.
    """

    def __init__(
        self,
        layers: Sequence[LayerOperands],
        model: Model,
        hidden: Tensor,
        lengths: Tensor,
        *,
        grid: int | None = None,
        config: StepConfig | None = None,
        progress: ReportProgress = no_progress,
    ) -> None:
        device = hidden.device
        numbers = device_numbers(device.index) if device.type == "cuda" else None
        first = layers[0]
        rows = hidden.shape[0]
        chosen = config or choose_for(
            first,
            model,
            rows,
            bfloat16=hidden.dtype == torch.bfloat16,
            shared_bytes=numbers.shared_bytes if numbers else 0,
        )
        if chosen is None:
            raise ValueError(f"no persistent kernel of {rows} rows fits the shared memory")
        self.config = chosen
        self.grid = grid or (numbers.multiprocessors // PARTS * PARTS if numbers else PARTS)
        self._kept = (tuple(layers), hidden, lengths)
        self.descriptors = layer_descriptors(layers, chosen, device)
        self.messages, places = make_messages(first, model, hidden, self.grid)
        self.trace = torch.zeros(self.grid, 5, 64, dtype=torch.int64, device=device)
        self.arguments = step_arguments(
            layers,
            model,
            chosen,
            places,
            hidden=hidden,
            lengths=lengths,
            descriptors=self.descriptors,
            trace=self.trace,
        )
        self.prepare_arguments = PrepareArguments(
            hidden.data_ptr(),
            self.messages.data_ptr(),
            hidden.numel(),
            self.messages.numel() - hidden.numel(),
        )
        self._device = device
        if numbers is None:
            return
        prepare = prepare_instantiation(chosen.bfloat16)
        compile_missing(numbers.architecture, [prepare, chosen.instantiation], progress)
        self._launches = (
            Launches(
                load_kernel(prepare, numbers.architecture, device.index),
                _PREPARE_GRID,
                _PREPARE_THREADS,
                0,
                self.prepare_arguments,
            ),
            Launches(
                load_kernel(chosen.instantiation, numbers.architecture, device.index, chosen.shared_bytes),
                self.grid,
                chosen.threads,
                chosen.shared_bytes,
                self.arguments,
                cooperative=True,
            ),
        )

    def launch(self) -> None:
        """Replace ``hidden`` by what leaves the last layer, on the current stream.

        Raises:
            RuntimeError: the driver refused a launch.
        """
        with on_device(self._device.index):
            for launches in self._launches:
                launch = launches.take()
                launch.start()
                launches.give(launch)
