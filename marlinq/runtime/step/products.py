"""The products of a step: launches prepared once for fixed buffers, or calls of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.core.errors import UnsupportedError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels import LayerShape, Problem, decide, device_numbers, precompile_model
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.whole_rows import RowVariant, RowWork
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.launch.call import Call, dequantizes, prepare
from marlinq.kernels.launch.dequantized_product import dequantized_gemm
from marlinq.kernels.launch.gather import Gathered, gathering
from marlinq.models.anatomy import Slices
from marlinq.runtime.quant_linear import QuantLinear
from marlinq.runtime.step.join import JoinedLinear, JoinedSlice, join_modules

Start = Callable[[], object]
"""Function that launches a kernel, or calls a module, on the current stream."""


# Seconds that a separate activation kernel between two products costs (docs/lab-notes/decode.md, "The
# chain").
_ACTIVATION_SECONDS = 2e-6


@dataclass(frozen=True, eq=False)
class Product:
    """One product, or several with the same input, whose results lie side by side.

    Attributes:
        modules: modules that multiply; one, or as many as there are parts.
        widths: columns of each module's result.
        tiles: whether tiles of 64 columns of the parts alternate.
        inner: columns of the activations that the kernels read, padding included.
    """

    modules: tuple[nn.Module, ...]
    widths: tuple[int, ...]
    tiles: bool
    inner: int

    @property
    def columns(self) -> int:
        """Columns of the result, padding included."""
        last = self.modules[-1]
        padded = last.padded_shape[1] if isinstance(last, QuantLinear) else self.widths[-1]
        return sum(self.widths[:-1]) + padded

    @property
    def features(self) -> int:
        """Columns of the result without the padding at its end."""
        return sum(self.widths)

    def followed_by(self, other: Product) -> Product:
        """Both products, with the columns of ``other`` behind these."""
        inner = max(self.inner, other.inner)
        return Product((*self.modules, *other.modules), (*self.widths, *other.widths), False, inner)

    def problems(self, rows: int) -> list[Problem]:
        """The problems to decide and compile for ``rows`` rows of activations."""
        return [module.operand.problem(rows) for module in self.modules if isinstance(module, QuantLinear)]

    def bind(self, x: Tensor, out: Tensor) -> list[Start]:
        """Launches of ``out = x @ W + bias`` for tensors with fixed addresses; loads the kernels.

        Args:
            x: [M, inner]; columns beyond the input are zero.
            out: [M, columns].
        """
        starts, begin = [], 0
        for module, width in zip(self.modules, self.widths, strict=True):
            last = begin + width == self.features
            # Written in place only if padding of the part's last tile does not overlap the next part.
            if isinstance(module, QuantLinear) and x.is_cuda and (last or module.padded_shape[1] == width):
                target = out[:, begin : begin + module.padded_shape[1]]
                starts.append(_bind_packed(module, x, target))
            else:
                starts.append(_bind_module(module, x, out[:, begin : begin + width]))
            begin += width
        return starts

    def activated_problem(self, rows: int, activation: str, device_index: int) -> Problem | None:
        """The product with the activation in its epilogue, if gate and up alternate and that is faster than a
        separate kernel; else None."""
        module = self.modules[0]
        if not self.tiles or not isinstance(module, QuantLinear):
            return None
        plain = self.problems(rows)[0]
        device = device_numbers(device_index)
        apart = decide(plain, device)
        if apart.config is None:
            return None
        activated = replace(plain, activation=activation)
        try:
            together = decide(activated, device)
        except UnsupportedError:
            return None  # no variant has pairs of tiles
        return activated if together.seconds <= apart.seconds + _ACTIVATION_SECONDS else None

    def bind_activated(self, x: Tensor, out: Tensor, activation: str) -> Start:
        """The launch of ``out = activation(gate) * up`` for tensors with fixed addresses.

        Args:
            x: [M, inner]; columns beyond the input are zero.
            out: [M, columns / 2].
            activation: for which there is an :meth:`activated_problem`.
        """
        module = self.modules[0]
        assert isinstance(module, QuantLinear)
        return _bind_packed(module, x, out, activation)

    def row_variant(
        self, problem: Problem, device_index: int, *, normed: bool, adds: bool
    ) -> RowVariant | None:
        """The kernel that also normalises its input or adds to the residual stream
        (:mod:`marlinq.kernels.contract.whole_rows`); None if there is none, if there are several modules, or
        with an activation order."""
        module = self.modules[0]
        if len(self.modules) > 1 or not isinstance(module, QuantLinear) or module.order is not None:
            return None
        if not module.words.is_cuda:
            return None
        config = decide(problem, device_numbers(device_index)).config
        return None if config is None else config.row_variant(problem, normed=normed, adds=adds)

    def bind_rows(self, x: Tensor, out: Tensor, work: RowWork, activation: str | None = None) -> Start:
        """The launch of :meth:`bind` or :meth:`bind_activated` with a norm or residual stream.

        Args:
            x: [M, inner].
            out: [M, columns]; [M, columns / 2] with an activation.
            work: norm and residual stream, for which there is a :meth:`row_variant`.
            activation: name of an activation with an :meth:`activated_problem`; or None.
        """
        module = self.modules[0]
        assert isinstance(module, QuantLinear)
        return _bind_packed(module, x, out, activation, work)

    def run(self, x: Tensor) -> Tensor:
        """The result for any number of rows, in new memory: x [M, K] to [M, columns without padding].

        Parts whose tiles alternate keep their padding.
        """
        results = [_call(module, x) for module in self.modules]
        return results[0] if len(results) == 1 else torch.cat(results, -1)


def find_product(model: nn.Module, slices: Slices, *, interleave: bool) -> tuple[Product, str | None]:
    """The product of projections with the same input, joined if possible; and why they could not be joined,
    or None.

    Joining replaces modules of ``model`` (:func:`marlinq.runtime.step.join.join_modules`).
    """
    reason = None
    modules = [model.get_submodule(name) for name in slices.modules]
    if len(modules) > 1 and all(isinstance(module, QuantLinear | JoinedSlice) for module in modules):
        joined = join_modules(model, slices.modules, interleave=interleave)
        if isinstance(joined, JoinedLinear):
            return _product([joined], [joined.out_features], tiles=interleave), None
        reason = joined
    if len(modules) == 1:
        return _product(modules, [sum(slices.widths)], tiles=False), None
    widths = list(slices.widths)
    if len(modules) != len(widths):
        # The model itself has several parts in one module.
        widths = [single_product(model, name).widths[0] for name in slices.modules]
    return _product(modules, widths, tiles=False), reason


def single_product(model: nn.Module, name: str) -> Product:
    """The product of one module.

    Raises:
        ValueError: the module has no number of output columns.
    """
    module = model.get_submodule(name)
    # GPT-2's Conv1D calls them nf.
    columns = getattr(module, "out_features", None) or getattr(module, "nf", None)
    if not isinstance(columns, int):
        raise ValueError(f"{name}: a {type(module).__name__} is no linear")
    return _product([module], [columns], tiles=False)


def _product(modules: Sequence[nn.Module], widths: Sequence[int], *, tiles: bool) -> Product:
    inner = [
        module.padded_shape[0]
        for module in modules
        if isinstance(module, QuantLinear) and module.order is None
    ]
    return Product(tuple(modules), tuple(widths), tiles, max(inner, default=0))


def precompile_prompts(
    products: Sequence[Product],
    dtype: torch.dtype,
    device_index: int,
    most_rows: int,
    progress: ReportProgress = no_progress,
) -> int:
    """Compile the kernels of :meth:`Product.run` for up to ``most_rows`` rows; returns their number."""
    linears = [
        module for product in products for module in product.modules if isinstance(module, QuantLinear)
    ]
    rounding = dict.fromkeys(one for linear in linears for one in linear.rounding_instantiations())
    compiled = compile_missing(device_numbers(device_index).architecture, list(rounding)) if rounding else 0
    shapes = {LayerShape.of(linear.operand) for linear in linears}
    return compiled + precompile_model(shapes, dtype, device_index, most_rows=most_rows, progress=progress)


def _bind_packed(
    linear: QuantLinear,
    x: Tensor,
    out: Tensor,
    activation: str | None = None,
    work: RowWork | None = None,
) -> Start:
    weight = linear.operand
    k, n = weight.padded_shape
    rows = x.shape[0]
    order = weight.order
    bias = linear.bias
    if bias is not None and bias.shape[0] != n:
        bias = F.pad(bias, (0, n - bias.shape[0]))
    taken = x[:, :k] if order is None else x.new_empty((rows, k))
    operands = ProductTensors(taken, weight, bias, out)
    plain = activation is None and work is None
    if plain and dequantizes(operands.problem(), x.get_device()):
        if order is None:
            return lambda: dequantized_gemm(operands)
        return _bind_module(linear, x, out)
    call = prepare(operands, behind_own=order is not None, activation=activation, work=work)
    if order is not None:
        gathered = Gathered(gathering(x, order), order.data_ptr(), rows, k, x.dtype, call)
        return partial(_start, gathered, operands, x.data_ptr())
    return partial(_start, call, operands, taken.data_ptr())


def _start(call: Call | Gathered, operands: ProductTensors, x: int) -> None:
    """Launch a prepared call; ``operands`` are passed to keep their tensors alive."""
    call.start(x, operands.out.data_ptr())


def _bind_module(module: nn.Module, x: Tensor, out: Tensor) -> Start:
    if type(module) is nn.Linear:
        given = x[:, : module.in_features]
        weight = module.weight.detach().t()
        bias: Tensor | None = module.bias
        if bias is None:
            return partial(torch.mm, given, weight, out=out)
        return partial(torch.addmm, bias.detach(), given, weight, out=out)
    return lambda: out.copy_(_call(module, x))


def _call(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)`` without the padding of ``x``."""
    features = getattr(module, "in_features", None) or getattr(module, "nx", None)
    return module(x if features is None else x[:, :features])  # type: ignore[no-any-return]
