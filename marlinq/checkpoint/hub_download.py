"""Download a model from the Hugging Face Hub into its cache, or find it there.

``huggingface_hub`` downloads: it resumes a file whose connection broke, and keeps complete files for the next
command. Here its errors become one line that says what to do, its progress is reported like marlinq's own,
and servers' responses are checked first (:mod:`marlinq.core.hub_answers`).
"""

from __future__ import annotations

import hashlib
import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from marlinq.core.boundaries import reason
from marlinq.core.errors import CheckpointError, EnvironmentProblem
from marlinq.core.hub import cached_models, listed, why_unreachable
from marlinq.core.hub_answers import checked_answers, is_plain_path
from marlinq.core.progress import ReportProgress

WANTED = (
    "*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md", "LICENSE*", "*.tiktoken"
)  # fmt: skip
# Second copies of the weights, for their makers' own programs.
_UNWANTED = ("consolidated*.safetensors", "original/*")
_MB = 1_000_000
# Libraries that transfer the files; their exceptions are not OSErrors.
_CARRIERS = ("httpx", "httpcore", "requests", "urllib3", "hf_xet")


def download(
    name: str,
    *,
    revision: str | None = None,
    progress: ReportProgress | None = None,
    wanted: Sequence[str] = WANTED,
) -> Path:
    """The folder of the Hub model ``name`` in the cache: safetensors, configs and text files only.

    Args:
        name: ``organisation/name``.
        revision: a branch, tag or commit; None is the main branch.
        progress: called with megabytes received; None lets the library draw bars.
        wanted: patterns of the files to fetch.

    Raises:
        CheckpointError: there is no such model, or not in this revision.
        EnvironmentProblem: access is not granted, the Hub can't be reached and the cache has no whole copy,
            or the download broke off.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if revision is not None and not is_plain_path(revision):
        raise CheckpointError(f"{name}: {revision!r} is no revision; pass a branch, a tag or a commit hash")
    unreachable = why_unreachable()
    begun = time.time()
    shown = name if revision is None else f"{name} at {revision}"
    try:
        with checked_answers():
            snapshot = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=list(wanted),
                    ignore_patterns=list(_UNWANTED),
                    local_files_only=bool(unreachable),
                    tqdm_class=None if progress is None else cast(Any, _bars(name, progress)),
                )
            )
        _check_hashes(snapshot, since=begun)
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(f"{shown}: {problem}") from None
    except GatedRepoError:
        raise EnvironmentProblem(
            f"{name}: is gated and you have no access; ask for it at {constants.ENDPOINT}/{name}, then log "
            "in with 'hf auth login' or set HF_TOKEN"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise CheckpointError(
            f"{name}: neither a local folder nor a repository on the Hub that you may read"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(
            f"{name}: the Hub has no revision {revision!r} of it; pass a branch, a tag or a whole commit hash"
        ) from None
    except LocalEntryNotFoundError as error:
        obstacle = unreachable or reason(error.__cause__ or error)
        raise EnvironmentProblem(
            f"{shown}: not a local folder, and not to be had from the Hub ({obstacle}); pass a folder, or "
            f"go online; {listed('models', cached_models())}"
        ) from None
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith(_CARRIERS):
            raise EnvironmentProblem(
                f"{shown}: {constants.ENDPOINT} answers what huggingface_hub can't use ({reason(error)}); "
                "check HF_ENDPOINT and proxies"
            ) from error
        raise EnvironmentProblem(
            f"{shown}: the download broke off ({reason(error)}); run the command again, files that came "
            "whole are kept"
        ) from None
    if unreachable:
        warnings.warn(f"{shown}: read from the Hub's cache, for {unreachable}", stacklevel=4)
    return snapshot


def _check_hashes(folder: Path, *, since: float) -> None:
    """Compare the files downloaded ``since`` a time with their hashes, which are their names in the cache.

    The cache names a file by its ETag: the SHA-256 of a large file, git's SHA-1 of a small one. The library
    compares only lengths, and a proxy that truncates an answer may change its stated length, too.

    Raises:
        EnvironmentProblem: the hash of a file differs; all such files are removed from the cache.
    """
    wrong = []
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() or not path.is_file():
            continue
        blob = path.resolve()
        # Half a second of tolerance, for file systems that round times.
        if blob.stat().st_mtime < since - 0.5 or _digest(blob) in (None, blob.name):
            continue
        wrong.append((path, blob.name))
        path.unlink()
        blob.unlink()
    if wrong:
        path, digest = wrong[0]
        raise EnvironmentProblem(
            f"{path.relative_to(folder)} came with other bytes than its hash {digest[:12]}... says; check "
            "HF_ENDPOINT and proxies, and run the command again"
        )


def _digest(blob: Path) -> str | None:
    """Hash of a file's content, SHA-256 or git's SHA-1 by the form of its name; None for other names."""
    if re.fullmatch("[0-9a-f]{64}", blob.name):
        digest = hashlib.sha256()
    elif re.fullmatch("[0-9a-f]{40}", blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return None
    with blob.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _bars(name: str, progress: ReportProgress) -> type[tqdm[Any]]:
    """A class of progress bars that draw nothing and report the bytes received."""
    bars: list[_Bar] = []

    class _Bar(tqdm):  # type: ignore[type-arg]  # generic only for the type checker
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.come = int(kwargs.get("initial") or 0)
            if kwargs.get("unit") == "B":
                # Only bars of bytes; the library's other bars count files.
                bars.append(self)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.come += int(n or 0)
            if self in bars:
                # Several bars count the same bytes, when received and when written: take the largest.
                most = max(bars, key=lambda bar: bar.come)
                total = max(int(most.total or 0), most.come)
                progress(f"downloading {name}, MB", most.come // _MB, max(1, -(-total // _MB)))
            return None

        def __hash__(self) -> int:
            return id(self)

        def __eq__(self, other: object) -> bool:
            return self is other

    return _Bar
