"""Every rule of servers.toml, one layer at a time, and what is built on them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, INT8
from marlinq.core.schemes import SCHEMES, named_scheme
from marlinq.operations.inspect.eligibility import ServerVerdict, Whole, verdicts
from marlinq.operations.inspect.parallel import LinearFacts, Split, fused, split, split_head, unknown_axes
from marlinq.operations.inspect.servers import Server, Vocabulary, built_plain, servers
from marlinq.runtime.kernel_operand import operand_refusal
from tests.testing.layouts import INTEGERS
from tests.testing.quantized_folders import random_tuple
from tests.testing.schemes import quantized, scheme

sized = Granularity.from_group_size

UP = "model.layers.0.mlp.fc1"
PLAIN = LinearFacts("gptq", 512, 512, INT4, Granularity.group(128), declared_symmetric=True, symmetric=True)
AWQ = replace(PLAIN, layout="awq", declared_symmetric=False)
CT = replace(PLAIN, layout="compressed-tensors")
MARLIN = replace(PLAIN, layout="marlin")
VLLM, SGLANG = Vocabulary(64, grows=False), Vocabulary(64, grows=True)


def judge(
    layer: LinearFacts, *, rules: bool = False, tp: int = 1, name: str = UP
) -> dict[str, ServerVerdict]:
    whole = Whole(layer.layout, rules, (), 8, 4)
    return {found.server: found for found in verdicts({name: layer}, whole, tensor_parallel=tp)}


def first(verdict: ServerVerdict) -> str | None:
    """The kernel taken first; None when the checkpoint is not loaded."""
    if not verdict.loads:
        assert verdict.first == ()
        assert verdict.reason
        return None
    return verdict.first[0][0] if verdict.first else ""


VLLM_CASES = {
    "the usual": (PLAIN, "Machete"),
    "v2": (replace(PLAIN, layout="gptq-v2"), "Machete"),
    "AWQ": (AWQ, "Machete"),
    "AWQ with zero points": (replace(AWQ, symmetric=False), "Machete"),
    "CT": (CT, "Machete"),
    "CT asymmetric": (replace(CT, declared_symmetric=False, symmetric=False), "Machete"),
    "int8": (replace(PLAIN, element=INT8), "Machete"),
    "CT int8 asymmetric": (replace(CT, element=INT8, declared_symmetric=False, symmetric=False), "Machete"),
    "one group": (replace(PLAIN, granularity=sized(-1)), "Machete"),
    "group 64": (replace(PLAIN, granularity=sized(64)), "Machete"),
    "group 32: Machete does not": (replace(PLAIN, granularity=sized(32)), "Humming"),
    "N of 64: Machete does not": (replace(PLAIN, out_features=64), "Humming"),
    "K of 32: Machete does not": (replace(PLAIN, in_features=544, granularity=sized(32)), "Humming"),
    "CT of group 256 goes past Marlin's gate": (replace(CT, granularity=sized(256)), "Humming"),
    "GPTQ of group 256 does not": (replace(PLAIN, granularity=sized(256)), None),
    "GPTQ of group 16": (replace(PLAIN, granularity=sized(16)), None),
    "AWQ of group 256": (replace(AWQ, granularity=sized(256)), None),
    "a short last group": (replace(PLAIN, in_features=576), None),
    "N is no whole word": (replace(PLAIN, out_features=516), None),
    "N of 4 slots at 8 bits": (replace(PLAIN, element=INT8, out_features=516), "Humming"),
    "GPTQ asymmetric": (replace(PLAIN, declared_symmetric=False, symmetric=False), None),
    "GPTQ asymmetric by its config alone": (replace(PLAIN, declared_symmetric=False), None),
    "the config lies": (replace(PLAIN, symmetric=False), None),
    "activation order": (replace(PLAIN, in_order=False, declared_act_order=True), None),
    "hidden activation order": (replace(PLAIN, in_order=False), None),
    "desc_act alone": (replace(PLAIN, declared_act_order=True), None),
    "desc_act with one group": (replace(PLAIN, declared_act_order=True, granularity=sized(-1)), "Machete"),
    "unreadable zeros": (replace(PLAIN, symmetric=None, problem="qzeros: ..."), None),
    "Marlin's own layout": (MARLIN, None),
}


@pytest.mark.parametrize("case", VLLM_CASES)
def test_vllm(case: str) -> None:
    layer, kernel = VLLM_CASES[case]
    assert first(judge(layer)["vLLM"]) == kernel


SGLANG_CASES = {
    "the usual": (PLAIN, "Marlin"),
    "AWQ": (AWQ, "Marlin"),
    "CT asymmetric": (replace(CT, declared_symmetric=False, symmetric=False), "Marlin"),
    "int8": (replace(PLAIN, element=INT8), "Marlin"),
    "CT int8 asymmetric is no Marlin type": (replace(CT, element=INT8, declared_symmetric=False), None),
    "K is not padded": (replace(PLAIN, in_features=576, granularity=sized(64)), None),
    "N is not padded": (replace(PLAIN, out_features=544), None),
    "AWQ falls back": (replace(AWQ, out_features=544), "AWQ"),
    "AWQ of group 256 falls back": (replace(AWQ, granularity=sized(256)), "AWQ"),
    "GPTQ of group 256": (replace(PLAIN, granularity=sized(256)), None),
    "declared activation order": (replace(PLAIN, in_order=False, declared_act_order=True), "Marlin"),
    "hidden activation order": (replace(PLAIN, in_order=False), None),
    "GPTQ asymmetric": (replace(PLAIN, declared_symmetric=False, symmetric=False), None),
    "Marlin's own layout": (MARLIN, None),
}


@pytest.mark.parametrize("case", SGLANG_CASES)
def test_sglang(case: str) -> None:
    layer, kernel = SGLANG_CASES[case]
    assert first(judge(layer)["SGLang"]) == kernel


UNEVEN = replace(PLAIN, declared_symmetric=False, symmetric=False)
LIBRARY_CASES = {
    "the usual": (PLAIN, True, True),
    "v1 zero points of GPTQModel": (replace(UNEVEN, zero_writer="gptqmodel"), True, True),
    "v1 zero points of others": (UNEVEN, False, False),
    "v2 zero points": (replace(UNEVEN, layout="gptq-v2"), True, True),
    "AWQ": (AWQ, True, True),
    "CT": (CT, True, False),
    "CT asymmetric": (replace(UNEVEN, layout="compressed-tensors"), False, False),
    "declared activation order": (replace(PLAIN, in_order=False, declared_act_order=True), True, True),
    "CT in activation order": (replace(CT, in_order=False, declared_act_order=True), False, False),
    "Marlin's own layout": (MARLIN, False, False),
}


@pytest.mark.parametrize("case", LIBRARY_CASES)
def test_transformers_and_gptqmodel(case: str) -> None:
    layer, *expected = LIBRARY_CASES[case]
    found = judge(layer)
    assert [found["transformers"].loads, found["GPTQModel"].loads] == expected


def test_transformers_knows_no_rules() -> None:
    assert not judge(PLAIN, rules=True)["transformers"].loads
    assert judge(PLAIN, rules=True)["GPTQModel"].loads


# vLLM, SGLang, transformers, GPTQModel
HEAD_CASES = {
    "GPTQ": (PLAIN, {}, (True, True, False, True)),
    "GPTQ in 8 bits": (replace(PLAIN, element=INT8), {}, (True, True, False, True)),
    "AWQ": (AWQ, {}, (True, False, False, True)),
    "CT": (CT, {}, (True, True, True, False)),
    "CT asymmetric": (replace(CT, declared_symmetric=False, symmetric=False), {}, (True, True, False, False)),
    "GPTQ that calls it tied": (PLAIN, {"tied": True}, (True, False, False, False)),
    "CT that calls it tied": (CT, {"tied": True}, (True, False, False, False)),
    "GPTQ that does not speak of it": (PLAIN, {"says_head": False}, (False, False, False, False)),
    "CT that names its class only": (CT, {"says_head": False}, (False, False, True, False)),
    "Gemma 2": (CT, {"architecture": "Gemma2ForCausalLM"}, (False, False, True, False)),
    "Gemma": (CT, {"architecture": "GemmaForCausalLM"}, (True, False, True, False)),
    "a padded GPTQ vocabulary": (replace(PLAIN, out_features=520), {}, (False, False, False, True)),
    "a padded CT vocabulary": (replace(CT, out_features=520), {}, (True, True, True, False)),
}


@pytest.mark.parametrize("case", HEAD_CASES)
@pytest.mark.parametrize("name", ["lm_head", "language_model.lm_head", "embed_out"])
def test_servers_that_load_a_quantised_head(case: str, name: str) -> None:
    layer, settings, expected = HEAD_CASES[case]
    whole = replace(Whole(layer.layout, False, (), 8, 4, "LlamaForCausalLM"), **settings)
    found = {verdict.server: verdict for verdict in verdicts({name: layer}, whole)}
    peers = [found[server] for server in ("vLLM", "SGLang", "transformers", "GPTQModel")]
    assert tuple(verdict.loads for verdict in peers) == expected
    assert all(verdict.reason.startswith(f"{name}: ") for verdict in peers[:2] if not verdict.loads)
    assert found["marlinq"].loads
    # The same layer in a block is none of these rules' business.
    inside = {verdict.server: verdict for verdict in verdicts({UP: layer}, whole)}
    assert inside["vLLM"].loads


HEAD_SPLITS = {
    # server's rule, vocabulary, GPUs, padding allowed -> N of one GPU, or why not
    "whole": (VLLM, 32000, 4, False, 8000),
    "padded on one GPU": (VLLM, 32003, 1, True, 32064),
    "padded and split": (VLLM, 50257, 8, True, 6288),
    "padding refused": (VLLM, 50257, 1, False, "50257 would be padded to 50304"),
    "vLLM's padding does not divide": (VLLM, 151936, 3, True, "padded to 151936, can't be split over 3 GPUs"),
    "SGLang's grows until it does": (SGLANG, 151936, 3, True, 50688),
    "which its loader can't fill": (SGLANG, 151936, 3, False, "151936 would be padded to 152064"),
    "SGLang's does not grow needlessly": (SGLANG, 50257, 8, True, 6288),
}


@pytest.mark.parametrize("case", HEAD_SPLITS)
def test_how_heads_are_split(case: str) -> None:
    rule, vocabulary, parts, padding, expected = HEAD_SPLITS[case]
    found = split_head(replace(PLAIN, out_features=vocabulary), rule, parts, full=not padding)
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert expected in found
    else:
        assert isinstance(found, LinearFacts)
        assert (found.in_features, found.out_features) == (512, expected)


def test_the_head_takes_part_in_tensor_parallelism() -> None:
    head = replace(CT, out_features=32000)
    assert first(judge(head, tp=4, name="lm_head")["vLLM"]) == "Humming"  # 8000 is no multiple of 128
    assert first(judge(head, tp=2, name="lm_head")["vLLM"]) == "Machete"
    assert first(judge(head, tp=8, name="lm_head")["SGLang"]) is None  # 4000 is no multiple of 64
    assert "can't be split over 3 GPUs" in judge(head, tp=3, name="lm_head")["vLLM"].reason
    wide = replace(PLAIN, element=INT8, granularity=sized(32), out_features=32000)
    assert first(judge(wide, tp=2, name="lm_head")["vLLM"]) == "Humming"  # Machete takes no groups of 32
    assert first(judge(wide, tp=2, name="lm_head")["SGLang"]) == "Marlin"


def judge_experts(layer: LinearFacts, odd: LinearFacts | None = None) -> dict[str, ServerVerdict]:
    parent = "model.layers.0.mlp.experts"
    names = [f"{parent}.{expert}.{part}_proj" for expert in range(3) for part in ("gate", "up", "down")]
    layers = dict.fromkeys(names, layer)
    if odd is not None:
        layers |= dict.fromkeys(names[3:], odd)
    return {found.server: found for found in verdicts(layers, Whole(layer.layout, False, (), None, None))}


def test_experts_of_a_layer_are_quantised_alike() -> None:
    assert judge_experts(CT)["vLLM"].loads
    found = judge_experts(CT, replace(CT, granularity=sized(64)))
    for server in ("vLLM", "SGLang"):
        assert "experts.1.gate_proj: is quantised in another way than" in found[server].reason
    # Each expert is a module of its own where nothing is fused.
    assert found["transformers"].loads
    assert judge_experts(PLAIN, replace(PLAIN, granularity=sized(64)))["GPTQModel"].loads


def test_an_expert_of_as_many_channels_as_a_group_is_quantised_like_the_others() -> None:
    """Its one group is stored as -1 is, whatever the config calls it."""
    down = replace(CT, in_features=CT.granularity.channels, granularity=sized(-1))
    for odd in (down, replace(down, element=INT8), replace(down, in_features=2 * CT.granularity.channels)):
        layers = {}
        for expert in range(2):
            stem = f"model.layers.0.mlp.experts.{expert}"
            layers[f"{stem}.down_proj"] = odd  # perhaps the first of all
            layers |= dict.fromkeys((f"{stem}.gate_proj", f"{stem}.up_proj"), CT)
        found = verdicts(layers, Whole(CT.layout, False, (), None, None))
        for verdict in found:
            if verdict.server in ("vLLM", "SGLang"):
                assert verdict.loads == (odd is down), (verdict.server, verdict.reason)
                assert odd is down or "experts.0.down_proj: is quantised in another way" in verdict.reason


def test_experts_that_are_not_loaded() -> None:
    for layer in (PLAIN, AWQ):
        assert "does not load quantised experts" in judge_experts(layer)["transformers"].reason
        assert judge(layer)["transformers"].loads
    single = replace(AWQ, granularity=sized(-1))
    assert "group size -1 of experts is not one of 32, 64, 128" in judge_experts(single)["vLLM"].reason
    assert judge(single)["vLLM"].loads
    assert judge_experts(replace(PLAIN, granularity=sized(-1)))["vLLM"].loads


def test_experts_one_by_one_are_not_read_where_only_whole_layers_are() -> None:
    """GPT-OSS: every server skips such tensors without a word; Qwen3-VL's MoE: transformers does."""
    one = "model.layers.0.mlp.experts.0.gate_proj"
    for layer in (CT, float_layer("mxfp4", "compressed-tensors")):
        for architecture, skipping in (
            ("GptOssForCausalLM", {"vLLM", "SGLang", "transformers"}),
            ("Qwen3VLMoeForConditionalGeneration", {"transformers"}),
        ):
            whole = Whole(layer.layout, False, (), None, None, architecture)
            found = {v.server: v for v in verdicts({one: layer}, whole)}
            assert found["marlinq"].loads
            for server in ("vLLM", "SGLang", "transformers"):
                assert found[server].loads == (server not in skipping), (server, architecture)
                assert found[server].loads or "mlp.experts: " in found[server].reason
            # Its other linears are read.
            assert all(v.loads for v in verdicts({UP: layer}, whole) if v.server in skipping)
    stacked = Whole("gpt-oss", False, (), None, None, "GptOssForCausalLM")
    found = {v.server: v for v in verdicts({one: float_layer("mxfp4", "gpt-oss")}, stacked)}
    assert found["vLLM"].loads
    assert found["transformers"].loads


def test_transformers_has_no_rule_for_experts_that_it_skips() -> None:
    """By its own tables of names in files, which may learn one in a later version."""
    (server,) = (each for each in servers() if each.name == "transformers")
    for architecture in server.whole_experts:
        model_type = getattr(transformers, architecture).config_class.model_type
        rules = get_checkpoint_conversion_mapping(model_type) or []
        read = [pattern for rule in rules for pattern in rule.source_patterns]
        assert not any("experts.*." in pattern for pattern in read), architecture
    # Where there is one, it looks like this.
    joining = get_checkpoint_conversion_mapping("qwen3_moe") or []
    assert any("experts.*." in pattern for rule in joining for pattern in rule.source_patterns)


def test_rules_have_to_match_the_fused_name() -> None:
    parent = "model.layers.0.mlp"
    eight = replace(PLAIN, element=INT8)
    layers = {f"{parent}.gate_proj": eight, f"{parent}.up_proj": eight, f"{parent}.down_proj": PLAIN}
    whole = Whole("gptq", True, (), None, None, fused_rules={f"{parent}.gate_up_proj": eight.scheme})
    assert {v.server: v for v in verdicts(layers, whole)}["vLLM"].loads
    for said in (PLAIN.scheme, None):
        missed = replace(whole, fused_rules={f"{parent}.gate_up_proj": said})
        found = {v.server: v for v in verdicts(layers, missed)}
        for server in ("vLLM", "SGLang"):
            assert f"{parent}.gate_up_proj: the dynamic rules" in found[server].reason
        assert found["GPTQModel"].loads


ORIGINAL_CASES = {
    "the usual": (MARLIN, True),
    "one group": (replace(MARLIN, granularity=sized(-1)), True),
    "group 64": (replace(MARLIN, granularity=sized(64)), False),
    "N": (replace(MARLIN, out_features=640), False),
    "K": (replace(MARLIN, in_features=576, granularity=sized(-1)), False),
    "not in its layout": (PLAIN, False),
}


@pytest.mark.parametrize("case", ORIGINAL_CASES)
def test_the_original_marlin_takes_only_its_own_shapes(case: str) -> None:
    layer, loads = ORIGINAL_CASES[case]
    assert judge(layer)["Marlin (IST-DASLab)"].loads is loads


def test_refusals_say_what_to_convert_to() -> None:
    assert "convert --to awq or compressed-tensors" in judge(UNEVEN)["vLLM"].reason
    assert "convert --to gptq or gptq-v2 or awq or compressed-tensors" in judge(MARLIN)["vLLM"].reason
    assert judge(PLAIN)["Marlin (IST-DASLab)"].reason.endswith("convert --to marlin")
    small = judge(replace(PLAIN, out_features=64))["Marlin (IST-DASLab)"].reason
    assert "N=64 is not a multiple of 256" in small
    assert "convert" not in judge(UNEVEN)["Marlin (IST-DASLab)"].reason


def test_reasons_name_the_kernels_that_were_passed_over() -> None:
    found = judge(replace(PLAIN, granularity=sized(32)))["vLLM"]
    assert "not CutlassW4A8: multiplies FP8 activations only" in found.reason
    assert "not Machete: group size 32 is not one of -1, 64, 128" in found.reason
    assert [kernel.kernel for kernel in found.kernels][:4] == ["CutlassW4A8", "Machete", "Humming", "Marlin"]


OPERANDS = {
    "usual": {},
    "group 32": {"group_size": 32},
    "group 96": {"k": 192, "group_size": 96},
    "group 16": {"group_size": 16},
    "one group": {"group_size": -1},
    "scattered": {"scattered": True},
    "int8": {"bits": 8},
    "zero points": {"zeros": "any"},
}


@pytest.mark.parametrize("case", [*OPERANDS, "unsortable"])
def test_our_own_verdict_is_the_operands(case: str) -> None:
    settings = dict(OPERANDS.get(case, {}))
    q = random_tuple(settings.pop("k", 256), 64, 1, **settings)
    if case == "unsortable":
        g_idx = q.g_idx.clone()
        g_idx[0] = 1
        q = quantized(q.codes, q.scales, q.zeros, g_idx, q.channels_per_group, q.element)
    layer = LinearFacts(
        "gptq", q.in_features, q.out_features, q.element, q.scheme.granularity,
        declared_symmetric=True, symmetric=True, in_order=q.has_trivial_g_idx, sortable=case != "unsortable",
    )  # fmt: skip
    able = operand_refusal(q) is None
    assert judge(layer)["marlinq"].first == ((("packed kernels" if able else "dense product"), 1),)


def test_members_of_a_fused_layer_are_judged_together() -> None:
    parent = "model.layers.0.self_attn"
    narrow = {
        f"{parent}.{name}": replace(PLAIN, out_features=n) for name, n in
              (("q_proj", 512), ("k_proj", 64), ("v_proj", 64))}  # fmt: skip
    found = {v.server: v for v in verdicts(narrow, Whole("gptq", False, (), 8, 1))}
    # 64 alone is too narrow for Machete; 512 + 64 + 64 is not.
    assert found["vLLM"].first == (("Machete", 3),)
    assert found["marlinq"].first == (("packed kernels", 3),)
    other = narrow | {f"{parent}.v_proj": replace(PLAIN, out_features=64, granularity=sized(64))}
    found = {v.server: v for v in verdicts(other, Whole("gptq", False, (), 8, 1))}
    assert "quantised in another way than" in found["vLLM"].reason
    assert found["GPTQModel"].loads
    missing = {name: layer for name, layer in narrow.items() if not name.endswith("v_proj")}
    found = {v.server: v for v in verdicts(missing, Whole("gptq", False, (f"{parent}.v_proj",), 8, 1))}
    assert "which is fused with it, is not" in found["SGLang"].reason


def test_fused_members_count_as_several_linears() -> None:
    layers = {"a.gate_proj": PLAIN, "a.up_proj": PLAIN, "a.down_proj": replace(PLAIN, out_features=64)}
    units, broken = fused(layers, {"gate_up_proj": ("gate_proj", "up_proj")}, ())
    assert broken is None
    assert {name: (layer.out_features, count) for name, (layer, count) in units.items()} == {
        "a.gate_up_proj": (1024, 2),
        "a.down_proj": (64, 1),
    }
    found = {v.server: v for v in verdicts(layers, Whole("gptq", False, (), None, None))}
    assert found["vLLM"].first == (("Machete", 2), ("Humming", 1))
    assert "not Machete everywhere: a.down_proj: N=64" in found["vLLM"].reason


SPLITS = {
    "column": ("fc1", 4, (512, 128)),
    "row": ("down_proj", 4, (128, 512)),
    "row below a group": (
        "down_proj",
        8,
        "K=64 of each of 8 GPUs is not a multiple of the group size 128; groups of 64 or 32 would be",
    ),
    "row that does not divide": ("o_proj", 3, "K=512 can't be split over 3 GPUs"),
    "column that does not divide": ("up_proj", 3, "N=512 can't be split over 3 GPUs"),
    "heads": ("q_proj", 16, "8 heads can't be split over 16 GPUs"),
    "key-value heads": ("k_proj", 4, (512, 128)),
    "key-value heads, repeated": ("k_proj", 8, (512, 128)),
    "key-value heads that don't divide": ("v_proj", 3, "4 heads can't be split over 3 GPUs"),
    "key-value heads that can't be repeated": ("v_proj", 6, "4 key-value heads can't be shared by 6 GPUs"),
    "an unknown name": ("frob", 8, (512, 512)),
}


@pytest.mark.parametrize(("k", "size"), [(512, "64 or 32"), (768, "32"), (1536, "64 or 32")])
def test_experts_of_usual_sizes_need_smaller_groups_on_eight_gpus(k: int, size: str) -> None:
    """Qwen3-Next's 512, Qwen3-30B-A3B's 768 and MiniMax-M2's 1536 intermediate channels."""
    layer = replace(PLAIN, in_features=k, granularity=sized(128))
    for name in ("down_proj", "w2"):
        found = split(f"model.layers.0.mlp.experts.3.{name}", layer, Split(8))
        assert isinstance(found, str)
        assert found.endswith(f"group size 128; groups of {size} would be")
        smallest = split(f"experts.3.{name}", replace(layer, granularity=sized(32)), Split(8))
        assert isinstance(smallest, LinearFacts)
        assert smallest.in_features == k // 8


@pytest.mark.parametrize("case", SPLITS)
def test_splits(case: str) -> None:
    last, parts, expected = SPLITS[case]
    found = split(f"model.layers.0.{last}", PLAIN, Split(parts, 8, 4))
    assert (found if isinstance(found, str) else (found.in_features, found.out_features)) == expected


def test_one_group_is_kept_on_every_gpu() -> None:
    found = split("a.down_proj", replace(PLAIN, granularity=sized(-1)), Split(8))
    assert isinstance(found, LinearFacts)
    assert (found.in_features, found.granularity) == (64, Granularity.channel())


def test_shape_rules_hold_after_the_split() -> None:
    wide = replace(PLAIN, out_features=256)
    assert first(judge(wide, tp=1)["vLLM"]) == "Machete"
    assert first(judge(wide, tp=4)["vLLM"]) == "Humming"
    assert first(judge(wide, tp=4)["SGLang"]) == "Marlin"
    assert first(judge(wide, tp=8)["SGLang"]) is None
    assert "K=64 of each of 8 GPUs" in judge(PLAIN, tp=8, name="a.down_proj")["vLLM"].reason
    assert set(judge(wide, tp=2)) == {"vLLM", "SGLang"}
    assert unknown_axes(["a.frob", "a.fc1", "lm_head"]) == ["a.frob"]


def test_the_file_is_coherent() -> None:
    for server in servers():
        assert server.version
        assert server.read
        names = [kernel.name for kernel in server.kernels]
        assert sorted(names) == sorted(server.hopper)
        assert all(plain.families and plain.read for plain in server.plain)
        layouts = [name for loading in server.formats for name in loading.names]
        assert len(layouts) == len(set(layouts))
        assert set(layouts) <= set(INTEGERS)
        for limits in (*server.formats, *server.kernels):
            for weights in limits.weights:
                element, kind = weights.split()
                assert element in ("int4", "int8")
                assert kind in ("symmetric", "asymmetric")
        for loading in server.formats:
            assert loading.act_order in ("refused", "declared")
            for name in loading.names:
                holds_zeros = INTEGERS[name].as_stored(scheme()).stores_zeros
                assert not holds_zeros or all("asymmetric" in weights for weights in loading.weights)


def test_the_versions_are_those_that_the_file_says() -> None:
    file = Path(__file__).parents[3] / "marlinq" / "operations" / "inspect" / "servers.toml"
    written = {entry["name"]: entry["version"] for entry in tomllib.loads(file.read_text())["servers"]}
    found = {v.server: v.version for v in judge(PLAIN).values()}
    assert {name: found[name] for name in written} == written
    assert {"vLLM", "SGLang", "transformers", "GPTQModel"} <= set(written)
    assert all(isinstance(server, Server) for server in servers())


def test_a_linear_that_a_server_builds_plain_is_refused_there() -> None:
    mixer = "model.layers.0.mixer.in_proj"
    for architecture, loads in (("FalconMambaForCausalLM", False), ("NemotronHForCausalLM", True)):
        whole = Whole("compressed-tensors", False, (), None, None, architecture)
        found = {verdict.server: verdict for verdict in verdicts({mixer: CT}, whole)}
        assert found["vLLM"].loads == loads
        assert found["SGLang"].loads
        assert loads or "vLLM builds it in 16 bits" in found["vLLM"].reason


@pytest.mark.parametrize(
    ("architecture", "module", "names"),
    [
        ("DeepseekV4ForCausalLM", "layers.0.attn.indexer.compressor.wgate", {"vLLM"}),
        ("DeepseekV4ForCausalLM", "model.layers.0.self_attn.compressor.indexer.gate_proj", {"vLLM"}),
        ("DeepseekV4ForCausalLM", "model.layers.0.self_attn.kv_proj", set()),
        ("GlmMoeDsaForCausalLM", "model.layers.0.self_attn.indexer.weights_proj", {"vLLM", "SGLang"}),
        (
            "Qwen4ExpForCausalLM",
            "model.layers.0.mlp_hyper_connection.input_mix_weight_up",
            {"vLLM", "SGLang"},
        ),
        ("Glm4MoeForCausalLM", "model.layers.46.eh_proj", {"vLLM", "SGLang"}),
        ("Lfm2ForCausalLM", "model.layers.0.conv.in_proj", set()),
        ("JambaForCausalLM", "model.layers.0.mamba.x_proj", {"vLLM"}),
    ],
)
def test_servers_that_build_a_linear_in_16_bits(architecture: str, module: str, names: set[str]) -> None:
    """As the model files of vLLM 0.33 and SGLang 0.5.23 have it."""
    found = {
        server.name for server in servers() if any(each.holds(architecture, module) for each in server.plain)
    }
    assert found == names
    assert (built_plain(architecture, module) is not None) == bool(names)


FLOAT_CASES = {
    # scheme, layout: who loads it
    ("fp8-block", "fp8"): {"vLLM", "SGLang", "transformers"},
    ("fp8", "compressed-tensors"): {"vLLM", "SGLang", "transformers"},
    ("nvfp4", "modelopt"): {"vLLM", "SGLang"},
    ("mxfp4", "compressed-tensors"): {"vLLM", "SGLang", "transformers"},
    ("mxfp8", "compressed-tensors"): {"transformers"},
    ("fp8-static", "fp8"): set(),
}


def float_layer(name: str, layout: str) -> LinearFacts:
    named = SCHEMES[name]
    sized = named.granularity or Granularity.channel()
    return replace(PLAIN, layout=layout, element=named.element, granularity=sized, named=name)


@pytest.mark.parametrize(("name", "layout"), FLOAT_CASES)
def test_weights_in_floating_point_are_judged_by_their_scheme(name: str, layout: str) -> None:
    layer = float_layer(name, layout)
    assert named_scheme(SCHEMES[name].example(scheme(32))) == name
    found = {
        verdict.server: verdict for verdict in verdicts({UP: layer}, Whole(layout, False, (), None, None))
    }
    loads = {server for server, verdict in found.items() if verdict.loads} - {"marlinq"}
    assert loads == FLOAT_CASES[name, layout]
    for server, verdict in found.items():
        if server not in loads | {"marlinq"}:
            # Layouts of integers were read for every server, those of floats for some.
            unread = layout == "compressed-tensors" and server in {"GPTQModel", "Marlin (IST-DASLab)"}
            assert ("does not read" if unread else "not judged") in verdict.reason
        assert verdict.reason


def test_what_is_fused_is_quantised_alike_in_floats_too() -> None:
    """vLLM and SGLang look at one member of a joined layer, and at one expert, for all."""
    block = "model.layers.0"
    fp8, nvfp4 = (float_layer(name, "compressed-tensors") for name in ("fp8", "nvfp4"))
    whole = Whole("compressed-tensors", False, (), None, None)
    q, k, v = (f"{block}.self_attn.{part}_proj" for part in "qkv")
    for unlike in ({q: fp8, k: nvfp4, v: fp8}, {q: fp8, k: fp8, v: CT}, {q: CT, k: nvfp4, v: CT}):
        for verdict in verdicts(unlike, whole):
            if verdict.server in ("vLLM", "SGLang"):
                assert not verdict.loads
                assert "which is fused with it" in verdict.reason
    half = {found.server: found for found in verdicts({q: fp8, k: fp8}, replace(whole, unquantized=(v,)))}
    assert f"{v}, which is fused with it, is not" in half["vLLM"].reason
    gate, other = (f"{block}.mlp.experts.{expert}.gate_proj" for expert in range(2))
    mixed = {found.server: found for found in verdicts({gate: nvfp4, other: CT}, whole)}
    assert "experts of a layer are fused" in mixed["SGLang"].reason
    # Whole layers may differ.
    apart = {found.server: found for found in verdicts({q: fp8, k: fp8, v: fp8, UP: nvfp4}, whole)}
    assert apart["vLLM"].loads
    assert apart["SGLang"].loads


def test_experts_and_ragged_blocks_of_floats_are_refused_where_they_go_wrong() -> None:
    expert = "model.layers.0.mlp.experts.0.up_proj"
    whole = Whole("compressed-tensors", False, (), None, None)
    for name, refusing in (("fp8", "vLLM"), ("nvfp4", "transformers")):
        layer = float_layer(name, "compressed-tensors")
        found = {verdict.server: verdict for verdict in verdicts({expert: layer}, whole)}
        assert "does not load experts of such weights" in found[refusing].reason
        assert found["SGLang"].loads
    ragged = replace(float_layer("fp8-block", "fp8"), out_features=576)
    found = {verdict.server: verdict for verdict in verdicts({UP: ragged}, replace(whole, layout="fp8"))}
    assert "blocks that are cut short" in found["transformers"].reason
    assert found["vLLM"].loads


def test_integers_beside_floats_are_judged_too() -> None:
    layers = {UP: float_layer("fp8", "compressed-tensors"), "model.layers.0.mlp.fc2": CT}
    found = {v.server: v for v in verdicts(layers, Whole("compressed-tensors", False, (), None, None))}
    assert found["vLLM"].first
    assert "Humming, then Marlin" in found["vLLM"].reason
