"""Examines packages, GPU, compiler, folders and disk, then says which parts of marlinq work."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from marlinq.core.display import counted
from marlinq.core.errors import EnvironmentProblem
from marlinq.core.kept import check_folder, kept_path
from marlinq.operations.doctor import gpu
from marlinq.operations.doctor.diagnosis import Capability, Diagnosis, Finding, State
from marlinq.operations.doctor.packages import package_findings, run_apart

_WORKING_SPACE = 2 * 2**30


def examine() -> Diagnosis:
    """Look at packages, GPU, compiler, folders and disk.

    Takes some seconds, because torch and transformers are imported, each in a process of its own.

    Returns:
        The findings, each with its fix, and the parts of marlinq that work or don't.
    """
    packages = package_findings()
    libraries = [_importable("torch"), _importable("transformers")]
    driver, driver_finding = gpu.find_driver()
    devices = [*gpu.device_findings(driver), _torch_sees_gpu()] if driver else []
    toolchain = [gpu.cupy_finding(driver), gpu.bindings_finding(driver), gpu.nvrtc_finding(driver)]
    folders = [_kernel_cache(), _disk()]
    cpu = Capability(
        "quantize, convert, verify, inspect, eval, generate on the CPU",
        *_verdict([*packages, *libraries], "everything they need is here"),
    )
    accelerated = Capability(
        "the GPU kernel", *_gpu_verdict([driver_finding, *devices, *toolchain, folders[0]], cpu.works)
    )
    return Diagnosis(
        findings=(*packages, *libraries, driver_finding, *devices, *toolchain, *folders),
        capabilities=(cpu, accelerated),
        ok=cpu.works,
    )


def _verdict(findings: list[Finding], reason_if_ok: str) -> tuple[bool, str]:
    wrong = [finding for finding in findings if finding.state is State.PROBLEM]
    if wrong:
        return False, "; ".join(f"{finding.subject}: {finding.found}" for finding in wrong)
    return True, reason_if_ok


def _gpu_verdict(findings: list[Finding], cpu_works: bool) -> tuple[bool, str]:
    missing = [finding for finding in findings if finding.state is not State.OK]
    if missing:
        return False, f"{missing[0].subject}: {missing[0].found}; generate and bench use the CPU reference"
    if not cpu_works:
        return False, "fix the packages above first"
    return True, "driver, device, CuPy and NVRTC fit together"


def _importable(module: str) -> Finding:
    _, problem = run_apart(f"import {module}")
    if problem is None:
        return Finding(f"import {module}", State.OK, "works")
    return Finding(f"import {module}", State.PROBLEM, problem, f"pip install --force-reinstall {module}")


def _torch_sees_gpu() -> Finding:
    answer, problem = run_apart("import torch; print(torch.version.cuda, torch.cuda.is_available())")
    built_for, _, sees = answer.partition(" ")
    if problem is not None or sees != "True":
        found = (
            problem or f"built for CUDA {built_for}" if built_for != "None" else "a build for the CPU only"
        )
        fix = "install a CUDA build of torch that the driver can run"
        return Finding("torch and the GPU", State.PROBLEM, f"torch sees no GPU: {found}", fix)
    return Finding("torch and the GPU", State.OK, f"torch is built for CUDA {built_for} and sees the GPU")


def _kernel_cache() -> Finding:
    try:
        folder = kept_path("").absolute()
        check_folder(folder)
    except EnvironmentProblem as problem:
        found, _, fix = str(problem).rpartition("; ")
        return Finding("kernel cache", State.PROBLEM, found, fix)
    if not _writable(folder):
        fix = "set MARLINQ_CACHE to a folder that can be written"
        return Finding("kernel cache", State.PROBLEM, f"{folder} can't be written", fix)
    sizes = [file.stat().st_size for file in folder.glob("*") if file.is_file()]
    return Finding(
        "kernel cache",
        State.OK,
        f"{folder.parent}: {counted(len(sizes), 'files')}, {sum(sizes) / 1e6:.1f} MB",
    )


def _disk() -> Finding:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    found = f"{free / 1e9:.0f} GB free in {here}"
    if free < _WORKING_SPACE:
        return Finding(
            "disk", State.PROBLEM, found, "free some space: a 4-bit model takes about a third of the original"
        )
    return Finding("disk", State.OK, found)


def _writable(folder: Path) -> bool:
    """Whether a file can be made in ``folder``, or in its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return False
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
