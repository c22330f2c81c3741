"""The kernels of weights that follow a gradient, on the emulation, against torch's operations."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, KernelFault, Memory
from marlinq.kernels.solve import TunedTensors
from marlinq.kernels.solve.panel import THREADS, PreparedPanel
from marlinq.kernels.solve.trained_weight import GradientArguments
from marlinq.methods.rtn import round_to_nearest
from marlinq.methods.tuning import TunableWeight, fused_dense
from tests.emulation.gemm import SOURCES
from tests.testing.schemes import scheme

EPS = 2.0**-24


def emulated(
    builder: Builder, tensors: TunedTensors, planted: Planted | None = None
) -> Callable[[PreparedPanel, int], None]:
    """A stand-in for :func:`marlinq.kernels.solve.launch`; what is written is found by its address."""

    def launch(prepared: PreparedPanel, device: int) -> None:
        assert device == -1
        given = prepared.arguments
        k, n = tensors.given.shape
        memory = [
            Memory(name, tensor.detach(), untracked=tensor.dtype == torch.uint8)
            for name, tensor in zip(("given", "change", "scales", "zeros"), tensors[:4], strict=True)
        ]
        wide = 2 if "Bfloat16 Weight" in prepared.instantiation.text() else 4
        fields = {"out": (k * n * wide, True)}
        if isinstance(given, GradientArguments):
            fields = {"d_weight": (k * n * wide, False), "by_change": (4 * tensors.change.numel(), True)}
            if tensors.latent:
                fields["by_latent"] = (4 * k * n, True)
        for name, (size, writable) in fields.items():
            memory.append(Memory(name, at_address(getattr(given, name), size), writable=writable))
        library = builder.kernel(
            prepared.instantiation.text(), prepared.instantiation.function, SOURCES, planted=planted
        )
        EmulatedKernel(library).launch(
            prepared.grid, THREADS, prepared.shared_bytes, given, memory, resident=2
        )

    return launch


def at_address(address: int, size: int) -> Tensor:
    """The bytes there, which torch holds."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def tunable(k: int, n: int, group: int, *, symmetric: bool, codes: bool, dtype: str) -> TunableWeight:
    """A weight whose codes and scales have moved, some of them beyond where they may."""
    generator = torch.Generator().manual_seed(k + n)
    weight = torch.randn(n, k, generator=generator)
    wanted = scheme(group_size=group, symmetric=symmetric, scale_dtype=dtype)
    made = TunableWeight(round_to_nearest(weight, wanted), weight if codes else None)
    with torch.no_grad():
        made.change += 0.1 * torch.randn(made.change.shape, generator=generator)
        made.change[0, 0] = -1.0  # a scale of zero, which is stored as one
        made.change[0, 1] = -1.5  # another sign
        if made.latent is not None:
            made.latent += 2 * torch.randn(made.latent.shape, generator=generator)
    return made


CASES = (
    (64, 24, 32, True, True, "float16", torch.float32),
    (96, 130, 96, False, True, "bfloat16", torch.bfloat16),
    (48, 40, 24, False, False, "float32", torch.bfloat16),
    (64, 129, 64, True, False, "float16", torch.float32),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_and_gradients_are_those_of_torch(builder: Builder, case: tuple[Any, ...]) -> None:
    k, n, group, symmetric, codes, dtype, out = case
    made = tunable(k, n, group, symmetric=symmetric, codes=codes, dtype=dtype)
    direction = torch.randn(n, k, generator=torch.Generator().manual_seed(1)).to(out)
    plain = made.dense(out)
    plain.backward(direction)
    expected = {name: leaf.grad for name, leaf in made.parameters().items()}
    for leaf in made.parameters().values():
        leaf.grad = None
    fused = fused_dense(made.tensors(), out, emulated(builder, made.tensors()))
    assert torch.equal(fused, plain)
    fused.backward(direction)
    assert made.change.grad is not None
    assert expected["change"] is not None
    # A group's products added in another order, and once more by the old scale: its share of the largest sum.
    sums = direction.float().abs().t() * 16
    most = float(sums.reshape(k // group, group, n).sum(1).max() * made.tensors().scales.abs().max())
    torch.testing.assert_close(made.change.grad, expected["change"], rtol=0, atol=group * EPS * most)
    if made.latent is not None:
        assert made.latent.grad is not None
        assert expected["latent"] is not None
        assert torch.equal(made.latent.grad, expected["latent"])
        assert (made.latent.grad == 0).any(), "no latent was out of bounds"


FAULTS = {
    "a change with the other sign": Planted("changed_scale", "1.f - change"),
    "latents out of bounds": Planted("latent_bounds", "latent"),
    "another group's scale": Planted("group_of_part", "part * N"),
    "columns past N": Planted("columns_past_end"),
    "gradients of latents that are out of bounds": Planted("gradient_bounds", "true"),
    "the last warp's sums left out": Planted(
        "gradient_of_change", "((sums[0][lane] + sums[1][lane]) + sums[2][lane]) * scales[place]"
    ),
    "sums read before they are there": Planted("sums_of_block"),
    "gradients without their scale": Planted(
        "gradient_of_change", "(sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane])"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(builder: Builder, name: str) -> None:
    made = tunable(96, 40, 48, symmetric=False, codes=True, dtype="float16")
    direction = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    plain = made.dense()
    plain.backward(direction)
    expected = {name: leaf.grad for name, leaf in made.parameters().items()}
    for leaf in made.parameters().values():
        leaf.grad = None
    try:
        fused = fused_dense(made.tensors(), torch.float32, emulated(builder, made.tensors(), FAULTS[name]))
        fused.backward(direction)
    except KernelFault:
        return
    same = [torch.equal(fused, plain)]
    for name, leaf in made.parameters().items():
        assert leaf.grad is not None
        assert expected[name] is not None
        same.append(torch.allclose(leaf.grad, expected[name], rtol=1e-4, atol=1e-4))
    assert not all(same)
