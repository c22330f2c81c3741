"""Which packages are installed, against the versions that marlinq's own metadata asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from marlinq.operations.doctor.diagnosis import Finding, State

_SECONDS = 300


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[Requirement]:
    """What marlinq needs on every machine, from its metadata; empty when it is not installed as a package."""
    try:
        lines = metadata.requires("marlinq") or []
    except metadata.PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def package_findings() -> list[Finding]:
    """One finding for Python and for each required package."""
    findings = [Finding("python", State.OK, ".".join(map(str, sys.version_info[:3])))]
    wanted = requirements()
    if not wanted:
        found = "runs from its folder without being installed; versions of packages are not checked"
        findings.append(Finding("marlinq", State.ABSENT, found, "pip install -e . in that folder"))
    findings.extend(check(requirement) for requirement in wanted)
    return findings


def check(requirement: Requirement) -> Finding:
    """Compare one requirement with what is installed."""
    version = installed_version(requirement.name)
    if version is None:
        return Finding(
            requirement.name,
            State.PROBLEM,
            f"not installed, needs {requirement}",
            f"pip install '{requirement}'",
        )
    if not requirement.specifier.contains(version, prereleases=True):
        found = f"{version}, needs {requirement.specifier}"
        return Finding(requirement.name, State.PROBLEM, found, f"pip install '{requirement}'")
    return Finding(requirement.name, State.OK, version)


def search_path() -> list[str]:
    """Where this process finds packages, without the current folder."""
    here = os.path.realpath("")
    return [each for each in sys.path if Path(each).is_absolute() and os.path.realpath(each) != here]


def run_apart(code: str) -> tuple[str, str | None]:
    """Run Python code in a process of its own, since importing a broken binary can crash.

    Nothing is imported from the current folder: files that lie there, in a downloaded model for one, may be
    called as packages are.

    Returns:
        What it printed, and why it failed or None.
    """
    start = f"import sys; sys.path[:] = {search_path()!r}\n"
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-c", start + code],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", f"did not end within {_SECONDS} s"
    if run.returncode == 0:
        return run.stdout.strip(), None
    lines = run.stderr.strip().splitlines()
    return "", lines[-1] if lines else f"exit code {run.returncode}"
