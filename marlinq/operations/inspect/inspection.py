"""The report of an inspection."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from marlinq.core.display import Block, Facts, Shown, Table, lines
from marlinq.operations.inspect.eligibility import OWN, ServerVerdict


@dataclass(frozen=True)
class ModuleFacts:
    """One quantised linear.

    Attributes:
        name: name of the module.
        in_features, out_features: K and N.
        bits: bits of a code.
        group_size: input channels that share a scale; -1 for one scale per output channel, ``128x128`` for
            blocks, ``tensor`` for one scale.
        symmetric: whether every stored zero point is the middle code; None where they can't be decoded.
        g_idx: ``in order``, ``activation order``, or ``unknown``.
        bias: whether it has a bias.
        scale_dtype: dtype of the stored scales.
        nbytes: bytes of its codes, scales, zeros and g_idx.
        effective_bits: 8 * ``nbytes`` per weight.
        problem: reason why the zeros can't be decoded, or None.
    """

    name: str
    in_features: int
    out_features: int
    bits: int
    group_size: int | str
    symmetric: bool | None
    g_idx: str
    bias: bool
    scale_dtype: str
    nbytes: int
    effective_bits: float
    problem: str | None = None


@dataclass(frozen=True)
class Inspection(Shown):
    """The outcome of :func:`marlinq.operations.inspect.inspect`.

    Attributes:
        checkpoint: path of the folder.
        format: name in :data:`marlinq.formats.FORMATS`; None for an unquantised checkpoint.
        architecture: class name in ``config.json``.
        dtype: dtype of most bytes of the unquantised tensors.
        bits, group_sizes: distinct values over the quantised linears, the most frequent first.
        symmetry: ``symmetric``, ``asymmetric``, ``mixed`` or ``unknown``, from the stored zeros.
        g_idx: ``none`` (the layout has none), ``in order``, ``activation order`` or ``mixed``.
        quantized_modules: number of quantised linears.
        schemes: scheme in words -> number of quantised linears, most linears first.
        head: scheme of the output head in words; None where it is not quantised.
        unquantized_modules: linears that are stored in floating point.
        shards: number of weight files.
        bytes_on_disk: bytes of the weight files.
        parameters: number of parameters of the model; a quantised weight counts as K * N.
        quantized_parameters: number of parameters in quantised linears.
        linear_bits, model_bits: stored bits per weight, of the quantised linears and of the whole model.
        tensor_parallel: GPUs that share each layer in the verdicts.
        servers: verdict of every server, marlinq's own first; on several GPUs of those that split layers.
            Of an unquantised checkpoint marlinq's own only, where the model was built.
        undivided: names of the servers that split no layer, where ``tensor_parallel`` is above 1.
        unjudged: of an unquantised checkpoint, names of the servers whose rules are known for quantised ones
            only; marlinq's own where the model was not built.
        notes: sentences about contradictions in the checkpoint.
        modules: one entry per quantised linear; None where it was not asked for.
        undeclared: whether tensors look quantised although no config says so.
    """

    checkpoint: str
    format: str | None
    architecture: str
    dtype: str
    bits: tuple[int, ...]
    group_sizes: tuple[int | str, ...]
    symmetry: str | None
    g_idx: str | None
    quantized_modules: int
    schemes: dict[str, int]
    head: str | None
    unquantized_modules: tuple[str, ...]
    shards: int
    bytes_on_disk: int
    parameters: int
    quantized_parameters: int
    linear_bits: float | None
    model_bits: float
    tensor_parallel: int
    servers: tuple[ServerVerdict, ...]
    notes: tuple[str, ...]
    undivided: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    modules: tuple[ModuleFacts, ...] | None = None
    undeclared: bool = False

    def only(self, server: str) -> Inspection:
        """The same about one server alone, named in lower case."""
        return replace(
            self,
            servers=tuple(each for each in self.servers if each.server.lower() == server),
            undivided=tuple(name for name in self.undivided if name.lower() == server),
            unjudged=tuple(name for name in self.unjudged if name.lower() == server),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def display(self) -> list[Block]:
        """The facts, the servers' verdicts, and the modules where asked for."""
        rows = [
            ("checkpoint", self.checkpoint),
            ("architecture", self.architecture),
            ("format", self.format or ("not declared" if self.undeclared else "not quantised")),
        ]
        if self.format is not None:
            rows += [
                ("bits", ", ".join(map(str, self.bits))),
                ("group size", ", ".join(map(str, self.group_sizes))),
                ("zero points", str(self.symmetry)),
                ("g_idx", str(self.g_idx)),
                ("quantised", _count(self.quantized_modules, "linear")),
                *(("", f"{number} as {scheme}") for scheme, number in self.schemes.items()),
            ]
        if self.head is not None:
            rows.append(("output head", self.head))
        unquantized = len(self.unquantized_modules)
        parameters = f"{self.parameters / 1e6:.1f} M, {self.quantized_parameters / 1e6:.1f} M quantised"
        rows += [
            ("unquantised", f"{_count(unquantized, 'linear')}; tensors mostly {self.dtype}"),
            ("parameters", parameters),
            ("size", f"{self.bytes_on_disk / 1e6:.1f} MB in {_count(self.shards, 'file')}"),
            ("bits per weight", _bits_line(self.linear_bits, self.model_bits)),
        ]
        blocks: list[Block] = [Facts(tuple(rows))]
        if self.servers:
            blocks.append(_server_table(self.servers, self.quantized_modules, self.tensor_parallel))
        if self.undivided:
            blocks.append(lines(f"not judged, as they split no layer: {', '.join(self.undivided)}"))
        if OWN in self.unjudged:
            blocks.append(lines(f"not judged (--for {OWN} builds the model, which takes seconds): {OWN}"))
        if others := [name for name in self.unjudged if name != OWN]:
            blocks.append(lines(f"not judged (no rules for unquantised checkpoints): {', '.join(others)}"))
        if self.notes:
            blocks.append(lines(*(f"note: {note}" for note in self.notes)))
        if self.modules is not None:
            blocks.append(_module_table(self.modules))
            blocks.append(lines(*(f"unquantised  {name}" for name in self.unquantized_modules)))
        return blocks


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bits_line(linear: float | None, model: float) -> str:
    whole = f"{model:.3f} in the whole model"
    return whole if linear is None else f"{linear:.3f} in quantised linears, {whole}"


def _server_table(servers: tuple[ServerVerdict, ...], linears: int, tensor_parallel: int) -> Table:
    def kernels(verdict: ServerVerdict) -> str:
        if len(verdict.first) == 1 and verdict.first[0][1] == linears:
            return verdict.first[0][0]
        return ", ".join(f"{name} ({count})" for name, count in verdict.first) or "-"

    rows = tuple(
        (f"{each.server} {each.version}", "yes" if each.loads else "no", kernels(each), each.reason)
        for each in servers
    )
    split = f" over {tensor_parallel} GPUs" if tensor_parallel > 1 else ""
    title = f"who loads it{split}, and the kernel each takes first on Hopper"
    return Table(("server", "loads", "kernel", "why"), rows, status=1, title=title)


def _module_table(modules: tuple[ModuleFacts, ...]) -> Table:
    zeros = {True: "symmetric", False: "asymmetric", None: "unknown"}
    header = ("module", "K", "N", "bits", "group", "zeros", "g_idx", "bias", "bits per weight")
    rows = tuple(
        (
            module.name,
            str(module.in_features),
            str(module.out_features),
            str(module.bits),
            str(module.group_size),
            zeros[module.symmetric],
            module.g_idx,
            "yes" if module.bias else "no",
            f"{module.effective_bits:.3f}",
        )
        for module in modules
    )
    return Table(header, rows, numbers=(1, 2, 3, 4, 8))
