"""Compares installed packages with the versions that marlinq's metadata requires."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from marlinq.operations.doctor.diagnosis import Finding, State

_TIMEOUT = 300
"""seconds that an import in another process may take"""


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[Requirement]:
    """marlinq's required packages, without extras; empty when marlinq is not installed as a package."""
    try:
        lines = metadata.requires("marlinq") or []
    except metadata.PackageNotFoundError:
        return []
    declared = [Requirement(line) for line in lines]
    return [r for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]


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
    """Compare one requirement with the installed version."""
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
    """Absolute folders of ``sys.path``, without the current folder."""
    here = os.path.realpath("")
    return [each for each in sys.path if Path(each).is_absolute() and os.path.realpath(each) != here]


def run_apart(code: str) -> tuple[str, str | None]:
    """Run Python code in a new process, because importing a broken binary can crash the process.

    Nothing is imported from the current folder, whose files may have the names of packages (a downloaded
    model's, for example).

    Returns:
        The printed text, and the error in one line, or None.
    """
    start = f"import sys; sys.path[:] = {search_path()!r}\n"
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-c", start + code],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return "", f"did not end within {_TIMEOUT} s"
    if run.returncode == 0:
        return run.stdout.strip(), None
    lines = run.stderr.strip().splitlines()
    return "", lines[-1] if lines else f"exit code {run.returncode}"
