"""Sources to C++ for the host: every instruction in the kernels is known, and what is not is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulation.build import Builder, CompilerFailure
from emulation.instructions import Operand, UnknownPtx, function_of, ptx_to_cpp
from emulation.translation import translate
from marlinq.kernels import ARCHITECTURES, Device
from tests.emulation.gemm import SOURCES

CAPABILITIES = [Device(architecture, 1, 0).capability for architecture in ARCHITECTURES]


@pytest.mark.parametrize("capability", [min(CAPABILITIES), 90, max(CAPABILITIES)])
def test_every_instruction_of_every_source_is_known(builder: Builder, capability: int) -> None:
    includes = "".join(f'#include "{path.relative_to(SOURCES)}"\n' for path in sorted(SOURCES.rglob("*.cuh")))
    text = builder.preprocess(includes, "every.cu", SOURCES, capability)
    assert "asm" not in translate(text, "every").replace("emulation::", "")


def test_statements_keep_their_lines() -> None:
    statement = '    asm volatile("bar.sync %0, %1;"\n        ::"r"(1),\n        "r"(32));'
    source = f'# 1 "a.cu"\nint f() {{\n{statement}\n}}\n'
    translated = translate(source, "f").splitlines()
    assert translated[3].strip().startswith("{ emulation::block_barrier(")
    assert translated[6] == "}"


def test_operands_come_in_the_order_of_the_text() -> None:
    operands = [Operand("=r", "x.y"), Operand("r", "a[0]"), Operand("n", "N")]
    assert ptx_to_cpp("prmt.b32 %0, %1, 0, %2;", operands, 0) == (
        "{ emulation::permute_bytes(emulation::output<emulation::u32>(x.y), "
        "emulation::input<emulation::u32>(a[0]), 0, (N)); }"
    )


def test_blocks_declare_label_and_branch() -> None:
    text = "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
    found = ptx_to_cpp(text, [Operand("r", "a"), Operand("r", "b")], 7)
    assert found.startswith("{ bool p; again_7: emulation::barrier_try_wait<false>(p, ")
    assert found.endswith("if (!p) goto again_7; }")


def test_families_of_instructions() -> None:
    wgmma = "wgmma.mma_async.sync.aligned.m64n{}k16.f32.{}.{}"
    assert function_of(wgmma.format(96, "bf16", "bf16")) == (
        "emulation::multiply_warpgroup<96, emulation::Element::BFLOAT16>"
    )
    with pytest.raises(UnknownPtx):
        function_of(wgmma.format(96, "bf16", "f16"))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ('asm("add.s32 %0, %1, %1;" : "=r"(a) : "r"(b));', r"b.cuh:12: the emulation lacks 'add.s32'"),
        ('asm("mov.b64 %0, %1;" : "=q"(a) : "r"(b));', r"b.cuh:12: "),
        ('asm("bar.sync %0, %1;" :: "q"(a), "r"(b));', r"b.cuh:12: the constraint 'q'"),
        ('asm("bar.sync %0, [%1+4];" :: "r"(a), "r"(b));', r"b.cuh:12: the operand '%1\+4'"),
        ('asm("{ .reg .v4 a; }");', r"b.cuh:12: a register of type 'v4'"),
        ("__shared__ Type variable(3);", "__shared__ declaration"),
    ],
)
def test_unknown_statements_are_named(statement: str, message: str) -> None:
    with pytest.raises(UnknownPtx, match=message):
        translate(f'# 1 "/x/a.cu"\n# 11 "/x/b.cuh" 1\n\n{statement}\n', "f")


def test_the_compiler_that_is_asked_for(builder: Builder, tmp_path: Path) -> None:
    with pytest.raises(CompilerFailure, match="broken.cu:1"):
        builder.kernel("this is no C++", "broken", tmp_path)
