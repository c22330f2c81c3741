"""Quantisation methods behind one protocol, and their registry.

Solvers take tensors and return tensors; the quantise operation handles files, devices and progress. torch is
imported only when something is computed, so that reading a recipe doesn't import it.
"""

from __future__ import annotations

from typing import Any

from marlinq.methods.gptq import GPTQ, GPTQOptions
from marlinq.methods.imatrix import Imatrix
from marlinq.methods.input_range import StaticRTN
from marlinq.methods.method import Inputs, Method, MethodOptions, SolveReport, Statistics
from marlinq.methods.rtn import RTN, RTNOptions

METHODS: dict[str, Method[Any, Any]] = {}
"""Every method by its name."""


def register_method(method: Method[Any, Any]) -> Method[Any, Any]:
    """Make ``method`` known to recipes and to the command line by its name; returns it."""
    METHODS[method.name] = method
    return method


for _method in (GPTQ(), Imatrix(), RTN(), StaticRTN()):
    register_method(_method)

__all__ = [
    "METHODS",
    "GPTQOptions",
    "Inputs",
    "Method",
    "MethodOptions",
    "RTNOptions",
    "SolveReport",
    "Statistics",
    "register_method",
]
