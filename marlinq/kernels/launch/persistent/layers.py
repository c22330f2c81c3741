"""All layers of a decode step as one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.cuda_driver import Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel
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
    """All layers of a decode step of one row as one launch, which may be repeated and captured in a graph.

    Args:
        layers: every layer, in order; their tensors are kept alive.
        model: sizes and features that the layers share.
        hidden: [1, H] in the activations' dtype; a launch replaces it by the last layer's output.
        lengths: int32 [1], positions in the cache; the launch appends at that position and doesn't change it.
        grid: blocks, a multiple of four; by default as many as the GPU has multiprocessors.
        config: the configuration; by default the one that :func:`choose_for` gives.
        progress: called after each kernel that is compiled.

    Attributes:
        config: the configuration that is launched.
        grid: blocks of a launch.
        arguments: parameter of the persistent kernel.
        prepare_arguments: parameters of the kernel that writes the first messages.
        descriptors: uint8, the ``StepLayer`` structures of all layers, on the device.
        messages: int32, memory through which blocks exchange activations and sums.

    Raises:
        ValueError: no configuration fits the shared memory.
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
        chosen = config or choose_for(
            first,
            model,
            bfloat16=hidden.dtype == torch.bfloat16,
            shared_bytes=numbers.shared_bytes if numbers else 0,
        )
        if chosen is None:
            raise ValueError("no persistent kernel of these layers fits the shared memory")
        self.config = chosen
        self.grid = grid or (numbers.multiprocessors // PARTS * PARTS if numbers else PARTS)
        self._kept = (tuple(layers), hidden, lengths)
        self.descriptors = layer_descriptors(layers, chosen, device)
        self.messages, places = make_messages(first, model, hidden, self.grid)
        self.arguments = step_arguments(
            layers,
            model,
            chosen,
            places,
            hidden=hidden,
            lengths=lengths,
            descriptors=self.descriptors,
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
        """Replace ``hidden`` by the last layer's output, on the current stream.

        Raises:
            RuntimeError: the driver refused a launch.
        """
        with on_device(self._device.index):
            for launches in self._launches:
                launch = launches.take()
                launch.start()
                launches.give(launch)
