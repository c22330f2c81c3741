"""Decides which servers load a checkpoint, and which of their kernels multiply its layers.

The facts about servers are in ``servers.toml``; this file compares them with a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.version import __version__
from marlinq.formats import FORMATS
from marlinq.formats.dialects import is_head
from marlinq.operations.inspect.parallel import LinearFacts, Split, experts, fused, split, split_head
from marlinq.operations.inspect.servers import Floats, Kernel, Limits, Loading, Server, servers

OWN = "marlinq"
_OWN_KERNEL = "packed kernels"
_DENSE = "dense product"
_NO_SERVER_MARK = "-"
_UNREADABLE = "its stored values can't be read (see the note)"


@dataclass(frozen=True)
class KernelVerdict:
    """Whether a kernel can run a checkpoint's quantised linears.

    Attributes:
        kernel: name of the kernel.
        eligible: whether it can run all of them.
        modules: number of quantised linears that it can run.
        reason: why it can't run all of them, naming the first; else its other requirements.
    """

    kernel: str
    eligible: bool
    modules: int
    reason: str


@dataclass(frozen=True)
class ServerVerdict:
    """Whether a server loads a checkpoint, and the kernels that it takes for it on Hopper.

    Attributes:
        server, version: name and version of the server.
        loads: whether it loads the checkpoint and computes correct results.
        first: (kernel, number of linears it runs) on compute capability 9.0, most linears first; empty when
            the checkpoint does not load, or when the server leaves the choice to another library.
        reason: why it does not load; else why faster kernels were not taken, and other requirements.
        kernels: every kernel, in the order in which the server tries them.
    """

    server: str
    version: str
    loads: bool
    first: tuple[tuple[str, int], ...]
    reason: str
    kernels: tuple[KernelVerdict, ...] = ()


@dataclass(frozen=True)
class Whole:
    """Facts about the whole checkpoint that servers look at, besides its single layers.

    Attributes:
        layout: name in :data:`marlinq.formats.FORMATS`.
        rules: whether the config has rules for single modules (GPTQ's ``dynamic``).
        unquantized: linears that are stored in floating point.
        heads, kv_heads: number of attention and key-value heads; None where the config does not say.
        architecture: class name in ``config.json``.
        tied: whether ``config.json`` says that the output head is the embedding.
        says_head: whether the config says that the output head is quantised.
        fused_rules: name that a server gives a fused layer -> :attr:`LinearFacts.scheme` by the config's
            rules for single modules, None where they keep it unquantised. Empty for layouts whose rules are
            not looked up by fused names.
        no_linear: sentence about a quantised module that is not a linear of the model; None without one.
    """

    layout: str
    rules: bool
    unquantized: tuple[str, ...]
    heads: int | None
    kv_heads: int | None
    architecture: str = ""
    tied: bool = False
    says_head: bool = True
    fused_rules: Mapping[str, tuple[object, ...] | None] = field(default_factory=dict)
    no_linear: str | None = None


def verdicts(
    layers: Mapping[str, LinearFacts], whole: Whole, *, tensor_parallel: int = 1
) -> tuple[ServerVerdict, ...]:
    """The verdict of every server on a checkpoint, marlinq's own first.

    Args:
        layers: quantised linears of the checkpoint, at least one.
        whole: facts about the whole checkpoint.
        tensor_parallel: GPUs that share each layer; above 1, only servers that can split layers are judged.
    """
    asked = Split(tensor_parallel, whole.heads, whole.kv_heads)
    if tensor_parallel > 1:
        return tuple(_judge(server, layers, whole, asked) for server in servers() if server.parallel)
    return (_own(layers, whole), *(_judge(server, layers, whole, asked) for server in servers()))


def server_named(name: str) -> Server | None:
    """The server or library named ``name`` (a value of ``--for``, lower case); None for marlinq itself.

    Raises:
        ValueError: ``servers.toml`` has no such server.
    """
    if name == OWN:
        return None
    named = next((server for server in servers() if server.name.lower() == name), None)
    if named is None:
        raise ValueError(f"no server is called {name!r}")
    return named


def loading_refusal(server: Server, layers: Mapping[str, LinearFacts], whole: Whole) -> str | None:
    """Why ``server`` does not load or multiply ``layers``, or None.

    Args:
        server: a server of ``servers.toml``.
        layers: linears, with every member of a layer that the server fuses.
        whole: facts about the whole checkpoint.
    """
    verdict = _judge(server, layers, whole, Split(1, whole.heads, whole.kv_heads))
    return None if verdict.loads else verdict.reason


def _judge(server: Server, layers: Mapping[str, LinearFacts], whole: Whole, asked: Split) -> ServerVerdict:
    def refused(reason: str) -> ServerVerdict:
        return ServerVerdict(server.name, server.version, False, (), reason)

    parents = experts(layers)
    if parents and whole.architecture in server.whole_experts and not FORMATS[whole.layout].stacked:
        return refused(
            f"{next(iter(parents))}: {server.name} skips tensors of single experts in {whole.architecture}"
        )
    floats = {name: layer for name, layer in layers.items() if layer.element.table is not None}
    runs = ""
    if floats:
        runs, against = _floats_verdict(server, floats, whole)
        if against:
            return refused(against)
        if reason := _plain_refusal(server, layers, whole):
            return refused(reason)
        # Integers may be fused with floats, so this is judged before they are told apart.
        if broken := fused(layers, server.fused, whole.unquantized)[1] or _unlike_experts(server, layers):
            return refused(broken)
        layers = {name: layer for name, layer in layers.items() if name not in floats}
        if not layers:
            return ServerVerdict(server.name, server.version, True, (), runs)
    loading = server.loading(whole.layout)
    if loading is None:
        return refused(f"does not read the {whole.layout} layout{_after_conversion(server, layers)}")
    if whole.rules and not loading.rules:
        return refused("does not read rules for single modules (dynamic); the modules they name fail to load")
    if reason := _plain_refusal(server, layers, whole):
        return refused(reason)
    heads = [name for name in layers if is_head(name)]
    if heads and (reason := _head_refusal(server, loading, whole)) is not None:
        return refused(f"{heads[0]}: {reason}")
    if reason := _experts_refusal(server, loading, layers):
        return refused(reason)
    judged = {name: _part(server, loading, name, layer, asked) for name, layer in layers.items()}
    if reason := _first_of({n: part for n, part in judged.items() if isinstance(part, str)}):
        return refused(reason)
    parts = {name: part for name, part in judged.items() if isinstance(part, LinearFacts)}
    gates = {name: _gate(server, loading, layer) for name, layer in parts.items()}
    if reason := _first_of(gates):
        return refused(reason)
    units, broken = fused(parts, server.fused, whole.unquantized)
    if broken:
        return refused(broken)
    if reason := _first_of({name: _rule_refusal(name, unit, whole) for name, (unit, _) in units.items()}):
        return refused(reason)
    packages = server.packages.get(whole.layout)
    needs = "; ".join(text for text in (runs, f"needs {packages}" if packages else "", server.note) if text)
    if not server.kernels:
        return ServerVerdict(server.name, server.version, True, (), needs)
    return _choose(server, units, whole.layout, needs)


def _rule_refusal(name: str, unit: LinearFacts, whole: Whole) -> str | None:
    """Why the rules for single modules give a fused layer other settings than its members, or None."""
    if name not in whole.fused_rules:
        return None
    said = whole.fused_rules[name]
    if said == unit.scheme:
        return None
    found = "keep it unquantised" if said is None else "give it other settings"
    return f"the dynamic rules {found}, unlike its members; convert it, which writes rules that match both"


def _floats_verdict(server: Server, layers: Mapping[str, LinearFacts], whole: Whole) -> tuple[str, str]:
    """(kernels that multiply floating-point weights, why the server does not load them); one is empty."""
    kinds: dict[str, Floats] = {}
    for name, layer in layers.items():
        rule = next(
            (each for each in server.floats if whole.layout in each.names and layer.named in each.schemes),
            None,
        )
        if rule is None:
            read = any(each.loading(whole.layout) is not None for each in servers())
            if read and server.loading(whole.layout) is None:
                return "", f"does not read the {whole.layout} layout"
            what = layer.named or f"{layer.element.name} weights of this kind"
            return "", f"not judged: how {server.name} loads {what} in {whole.layout} has not been read yet"
        block = layer.granularity
        ragged = layer.in_features % (block.channels or 1) or layer.out_features % (block.outputs or 1)
        if rule.whole_blocks and block.kind == "block" and ragged:
            return "", f"{name}: {server.name} reads blocks that are cut short wrong"
        kinds[name] = rule
    for parent, members in experts(layers).items():
        if not all(kinds[name].experts for name in members):
            return "", f"{parent}: {server.name} does not load experts of such weights"
    return "; ".join(dict.fromkeys(rule.runs for rule in kinds.values())), ""


def _plain_refusal(server: Server, layers: Iterable[str], whole: Whole) -> str | None:
    """Why the server can't load a quantised linear that it always builds in 16 bits, or None."""
    plain = [name for name in layers if any(each.holds(whole.architecture, name) for each in server.plain)]
    if not plain:
        return None
    more = f" (and {len(plain) - 1} more)" if len(plain) > 1 else ""
    return f"{plain[0]}{more}: {server.name} builds it in 16 bits; leave it out of the quantisation (skip)"


def _head_refusal(server: Server, loading: Loading, whole: Whole) -> str | None:
    """Why the server does not multiply by a quantised output head, or None."""
    if not loading.lm_head:
        return f"{server.name} does not load a quantised output head in this layout"
    if whole.architecture in server.plain_heads:
        return f"{server.name} has no place for a quantised output head in {whole.architecture}"
    if server.asks_head and not whole.says_head:
        return f"the config does not say that it is quantised, so {server.name} looks for a weight in 16 bits"
    if server.ties and whole.tied:
        return (
            f"the config says tie_word_embeddings: true, and {server.name} trusts that instead of using the "
            "packed head; convert it, which writes false"
        )
    return None


def _experts_refusal(server: Server, loading: Loading, layers: Mapping[str, LinearFacts]) -> str | None:
    """Why the server does not load the experts of a mixture, or None."""
    for parent, members in experts(layers).items():
        if not loading.experts:
            return f"{parent}: {server.name} does not load quantised experts in this layout"
        _, first = _typical(members)
        sizes = loading.expert_group_sizes
        if sizes is not None and first.granularity.size not in sizes:
            return f"{parent}: group size {first.granularity.size} of experts is not one of {_listed(sizes)}"
    return _unlike_experts(server, layers)


def _unlike_experts(server: Server, layers: Mapping[str, LinearFacts]) -> str | None:
    """Which expert is quantised in another way than those that the server fuses with it, or None.

    Servers that fuse layers also fuse all experts of a layer.
    """
    for members in experts(layers).values() if server.fused else ():
        first_name, first = _typical(members)
        other = next((name for name, each in members.items() if not each.agrees_with(first)), None)
        if other is not None:
            return f"{other}: is quantised in another way than {first_name}; experts of a layer are fused"
    return None


def _typical(members: Mapping[str, LinearFacts]) -> tuple[str, LinearFacts]:
    """Name and facts of the expert whose group size is taken for the layer's: one with several groups, where
    there is one."""
    several = {name: each for name, each in members.items() if each.granularity != Granularity.channel()}
    return next(iter((several or members).items()))


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _part(server: Server, loading: Loading, name: str, layer: LinearFacts, asked: Split) -> LinearFacts | str:
    """The part of ``layer`` that one GPU multiplies, or why it can't be split."""
    if is_head(name) and server.vocabulary is not None:
        return split_head(layer, server.vocabulary, asked.parts, full=loading.full_vocabulary)
    return layer if asked.parts == 1 else split(name, layer, asked)


def _choose(
    server: Server, units: Mapping[str, tuple[LinearFacts, int]], layout: str, needs: str
) -> ServerVerdict:
    """The verdict from the first kernel that takes each unit.

    Args:
        server: a server of ``servers.toml``.
        units: name -> (layer as the server multiplies it, number of linears fused in it).
        layout: name in :data:`marlinq.formats.FORMATS`.
        needs: other requirements, for the reason.
    """
    total = sum(count for _, count in units.values())
    against = {
        kernel.name: {
            name: reason
            for name, (layer, _) in units.items()
            if (reason := _kernel_refusal(kernel, layer, layout)) is not None
        }
        for kernel in server.order()
    }
    first: Counter[str] = Counter()
    for name, (_, count) in units.items():
        takes = (
            kernel.name
            for kernel in server.order()
            if kernel.optional is None and name not in against[kernel.name]
        )
        first[next(takes, _NO_SERVER_MARK)] += count
    table = []
    for kernel in server.order():
        reasons = against[kernel.name]
        able = total - sum(units[name][1] for name in reasons)
        wanted = f"only with {kernel.optional}" if kernel.optional else ""
        why = _first_of(reasons, len(units)) or "; ".join(text for text in (wanted, kernel.asks) if text)
        table.append(KernelVerdict(kernel.name, not reasons, able, why))
    if first[_NO_SERVER_MARK]:
        usual = [
            kernel.name
            for kernel in server.order()
            if kernel.optional is None and kernel.activations is None and _reads(kernel, layout)
        ]
        left = next(name for name in units if all(name in against[kernel] for kernel in usual))
        told = "; ".join(f"{kernel}: {against[kernel][left]}" for kernel in usual)
        return ServerVerdict(
            server.name, server.version, False, (), f"no kernel takes {left}: {told}", tuple(table)
        )
    chosen = tuple(first.most_common())
    return ServerVerdict(
        server.name, server.version, True, chosen, _why(table, chosen, server, needs), tuple(table)
    )


def _why(
    table: Iterable[KernelVerdict], chosen: tuple[tuple[str, int], ...], server: Server, needs: str
) -> str:
    """Why kernels tried before the last chosen one were not taken, and what the choice requires."""
    optional = {kernel.name for kernel in server.kernels if kernel.optional}
    taken = {name for name, _ in chosen}
    parts = [needs] if needs else []
    for verdict in table:
        if verdict.kernel in taken:
            taken.discard(verdict.kernel)
            if verdict.eligible and verdict.reason:
                parts.append(f"{verdict.kernel}: {verdict.reason}")
            elif not verdict.eligible:
                parts.append(f"not {verdict.kernel} everywhere: {verdict.reason}")
            if not taken:
                break
        elif verdict.kernel not in optional:
            parts.append(f"not {verdict.kernel}: {verdict.reason}")
    return "; ".join(parts)


def _gate(server: Server, loading: Loading, layer: LinearFacts) -> str | None:
    """Why the server does not load ``layer`` or computes wrong results with it, or None."""
    if layer.problem is not None:
        return _UNREADABLE
    if layer.weights not in loading.weights:
        hint = _convert_hint(server, [layer])
        return f"{server.name} does not load {layer.weights} weights in this layout{hint}"
    if layer.declared_symmetric and layer.symmetric is False:
        return "the config says symmetric, but its zero points differ from the middle code"
    if (reason := _order_refusal(server, loading, layer)) is not None:
        return reason
    writer = loading.zero_writer if layer.layout == "gptq" and not layer.declared_symmetric else None
    if writer is not None and layer.zero_writer != writer:
        return f"GPTQ v1 zero points are taken only when {writer} wrote them; convert --to gptq-v2"
    return _limits_refusal(loading, layer)


def _order_refusal(server: Server, loading: Loading, layer: LinearFacts) -> str | None:
    scattered = not layer.in_order
    if loading.act_order == "declared":
        if scattered and not layer.declared_act_order:
            return "its g_idx is out of order, but the config says desc_act: false: it would be ignored"
        return None
    if scattered:
        return f"activation order, which {server.name} refuses or computes wrong"
    if layer.declared_act_order and layer.groups > 1:
        return (
            f"the config says desc_act: true, which {server.name} refuses; convert it (its g_idx is in order)"
        )
    return None


def _kernel_refusal(kernel: Kernel, layer: LinearFacts, layout: str) -> str | None:
    if kernel.activations is not None:
        return f"multiplies {kernel.activations} activations only"
    if not _reads(kernel, layout):
        return f"takes {', '.join(kernel.formats or ())} only"
    if layer.weights not in kernel.weights:
        return f"does not take {layer.weights} weights"
    if not kernel.channelwise and layer.granularity == Granularity.channel():
        return "one group for the whole layer; it needs a positive group size"
    if layer.in_features % kernel.k_multiple or layer.out_features % kernel.n_multiple:
        wanted = [
            f"{axis}={size} is not a multiple of {multiple}"
            for axis, size, multiple in (
                ("K", layer.in_features, kernel.k_multiple),
                ("N", layer.out_features, kernel.n_multiple),
            )
            if size % multiple
        ]
        return " and ".join(wanted)
    return _limits_refusal(kernel, layer)


def _reads(kernel: Kernel, layout: str) -> bool:
    return kernel.formats is None or layout in kernel.formats


def _limits_refusal(limits: Limits, layer: LinearFacts) -> str | None:
    sizes = limits.group_sizes
    size = layer.granularity.size
    if sizes is not None and layer.groups > 1 and size not in sizes:
        return f"group size {size} is not one of {_listed(sizes)}"
    if limits.whole_groups and not layer.granularity.divides(layer.in_features):
        return f"K={layer.in_features} is not a multiple of the group size {size}"
    slots = 32 // layer.element.bits
    if limits.slots_n and layer.out_features % slots:
        return f"N={layer.out_features} is not a multiple of {slots}"
    return None


def _own(layers: Mapping[str, LinearFacts], whole: Whole) -> ServerVerdict:
    """marlinq's own verdict: layers that its kernels can't multiply become dense matrices."""
    if whole.no_linear is not None:
        return refused_by_load(whole.no_linear)
    against = {name: reason for name, layer in layers.items() if (reason := _own_refusal(layer)) is not None}
    unreadable = {name: _UNREADABLE for name, layer in layers.items() if layer.problem is not None}
    if unreadable:
        return ServerVerdict(OWN, __version__, False, (), _first_of(unreadable) or "")
    able = len(layers) - len(against)
    int4 = any(layer.element.name == "int4" for layer in layers.values())
    cpu = "torch's packed INT4 product or a dense one" if int4 else "a dense product"
    asks = f"compute capability 8.0 and above, FP16 or BF16 activations; a CPU runs {cpu}"
    reason = _first_of(against)
    kernels = (
        KernelVerdict(_OWN_KERNEL, not against, able, reason or asks),
        KernelVerdict(_DENSE, True, len(layers), "any device"),
    )
    first = Counter({_OWN_KERNEL: able, _DENSE: len(against)})
    chosen = tuple((name, count) for name, count in first.most_common() if count)
    why = f"not {_OWN_KERNEL} everywhere: {reason}" if reason else asks
    return ServerVerdict(OWN, __version__, True, chosen, why, kernels)


def plain_verdict() -> ServerVerdict:
    """marlinq's own verdict on an unquantised checkpoint that it loads."""
    return ServerVerdict(OWN, __version__, True, (), "dense products on any device")


def refused_by_load(refusal: str) -> ServerVerdict:
    """marlinq's own verdict on a checkpoint that ``load`` refuses for this reason."""
    return ServerVerdict(OWN, __version__, False, (), refusal)


OWN_ELEMENTS = ("int4", "int8", "fp8_e4m3", "fp4_e2m1")
"""Names of the elements that marlinq's kernels multiply; written out here because the kernels' own table
imports torch, which ``inspect`` does without."""


def _own_refusal(layer: LinearFacts) -> str | None:
    """The refusal of :func:`marlinq.runtime.kernel_operand.operand_refusal`, from these facts alone."""
    if layer.element.name not in OWN_ELEMENTS:
        return f"{layer.element.name} weights; kernels multiply {', '.join(OWN_ELEMENTS)}"
    size = layer.granularity.channels_per_group(layer.in_features)
    smallest = 16 if layer.element.name == "fp4_e2m1" else 32
    if layer.groups > 1 and size % smallest:
        return f"group size {size} is neither one group nor a multiple of {smallest}"
    if not layer.sortable:
        return f"activation order: sorting g_idx does not give groups of {size} channels each"
    return None


def _after_conversion(server: Server, layers: Mapping[str, LinearFacts]) -> str:
    """``; convert --to ...``, or why a converted checkpoint would not load either."""
    hint = _convert_hint(server, list(layers.values()))
    if not hint or not server.kernels:
        return hint
    converted = {
        name: (replace(layer, declared_symmetric=layer.symmetric is True), 1)
        for name, layer in layers.items()
    }
    verdict = _choose(server, converted, server.formats[0].names[0], "")
    return hint if verdict.loads else f"; {verdict.reason}"


def _convert_hint(server: Server, layers: Collection[LinearFacts]) -> str:
    """``; convert --to ...`` with the server's layouts that take these weights; empty where none does."""
    fitting = [
        name
        for loading in server.formats
        for name in loading.names
        if all(_stored_as(name, layer) in loading.weights and layer.layout != name for layer in layers)
    ]
    return f"; convert --to {' or '.join(fitting)}" if fitting else ""


def _stored_as(layout: str, layer: LinearFacts) -> str:
    """Name in ``servers.toml`` of the weights of ``layer`` once stored in another layout."""
    zero_point = "stored" if layer.symmetric is False else layer.element.zero_point
    scheme = Scheme(layer.element, layer.granularity, zero_point)
    if FORMATS[layout].scheme_refusal(scheme) is not None:
        return f"{layer.element.name}, not held"
    kind = "asymmetric" if FORMATS[layout].layout_of(scheme).as_stored(scheme).stores_zeros else "symmetric"
    return f"{layer.element.name} {kind}"


def _first_of(reasons: Mapping[str, str | None], everything: int | None = None) -> str | None:
    """``name: reason`` of the first refusal and the number of further ones; None without refusals.

    Args:
        reasons: name -> reason, or None.
        everything: number of judged layers; where one reason holds for all of them, it stands without a name.
    """
    refused = [(name, reason) for name, reason in reasons.items() if reason is not None]
    if not refused:
        return None
    name, reason = refused[0]
    if len(refused) == everything and len({each for _, each in refused}) == 1:
        return reason
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    return f"{name}: {reason}{more}"
