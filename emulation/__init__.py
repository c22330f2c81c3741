"""An emulated GPU: it runs CUDA C++ kernels on the CPU and reports their faults (README.md)."""

from emulation.build import Builder, CompilerFailure, find_compiler
from emulation.faults import Planted, UnknownSite, sites
from emulation.instructions import UnknownPtx
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart, encode_tensor_map

__all__ = [
    "Builder",
    "CompilerFailure",
    "EmulatedKernel",
    "KernelFault",
    "Memory",
    "Planted",
    "UnknownPtx",
    "UnknownSite",
    "apart",
    "encode_tensor_map",
    "find_compiler",
    "sites",
]
