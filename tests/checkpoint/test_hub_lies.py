"""An endpoint that lies, never answers or never stops: one line says so, and nothing is written elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from marlinq.checkpoint.hub_download import download
from marlinq.core import hub as core_hub
from marlinq.core import hub_answers
from marlinq.core.errors import CheckpointError, EnvironmentProblem, MarlinqError
from marlinq.core.hub_answers import is_plain_path
from tests.testing.hub_server import Hub, Lie, Repository, hub_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ELSEWHERE = ("../x", "/etc/x", "a/../../x")
TARGETS = ("/login", "file:///etc/passwd", "http://[", "http://:0/api/", "gopher://x/api/models/")
HTML = b"<!doctype html><title>Log in to this network</title>"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with hub_server() as server:
        server.repositories["org/tiny"] = Repository({"main": {"config.json": b"{}", "a/b.json": b"[1, 2]"}})
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(core_hub, "_probe", lambda endpoint: "")
        monkeypatch.setattr(hub_answers, "SILENCE_SECONDS", 0.3)
        monkeypatch.setattr(hub_answers, "ANSWER_SECONDS", 1.0)
        yield server


def telling(part: str, lie: Lie, method: str = "") -> Callable[[str, str], Lie | None]:
    """The lie, to what asks for a path with ``part``."""
    return lambda asked, path: lie if part in path and method in asked else None


def body(value: Any) -> Lie:
    return Lie(body=json.dumps(value).encode())


def listed(path: Any, **more: Any) -> Lie:
    return body([{"type": "file", "path": path, "size": 2, "oid": COMMIT, **more}])


def test_the_truth_is_believed(hub: Hub) -> None:
    folder = download("org/tiny", progress=lambda *stage: None)
    assert (folder / "a" / "b.json").read_bytes() == b"[1, 2]"


@pytest.mark.parametrize("length", ["0", "1"])
def test_a_file_cut_short_with_a_length_to_match_is_noticed(hub: Hub, length: str) -> None:
    hub.lie = telling("/resolve/", Lie(headers={"Content-Length": length}))
    # The bytes behind the announced ones stay in the connection: a second try on it may find no answer there.
    with pytest.raises(EnvironmentProblem, match="came with other bytes than its hash|nothing came for 1 s"):
        download("org/tiny", progress=lambda *stage: None)
    # Nothing of it is believed by the next command.
    hub.lie = None
    folder = download("org/tiny", progress=lambda *stage: None)
    assert (folder / "a" / "b.json").read_bytes() == b"[1, 2]"
    assert (folder / "config.json").read_bytes() == b"{}"


LIES: dict[str, tuple[Callable[[str, str], Lie | None], str]] = {
    **{
        f"listing {path!r}": (telling("/tree/", listed(path)), "lists a file")
        for path in (*ELSEWHERE, "a\\b", "", ".", "a//b", "a\n", "C:x", "x" * 300, None, 3, ["a"])
    },
    **{
        f"sha {sha!r}": (telling("/revision/", body({"id": "org/tiny", "sha": sha, "siblings": []})), "sha")
        for sha in (None, "", "main", "../../x", "/x", COMMIT[:-1], 3, [])
    },
    **{
        f"etag {etag!r}": (telling("/resolve/", Lie(headers={"ETag": etag}), "HEAD"), "ETag")
        for etag in ("/tmp/x", '"/tmp/x"', "../../x", '".."', "a/b", '""', "x" * 200, 'W/"a b"')
    },
    "linked etag": (telling("/resolve/", Lie(headers={"X-Linked-ETag": "/tmp/x"}), "HEAD"), "X-Linked-ETag"),
    "commit": (telling("/resolve/", Lie(headers={"X-Repo-Commit": "../x"}), "HEAD"), "X-Repo-Commit"),
    "no commit": (telling("/resolve/", Lie(headers={"X-Repo-Commit": None}), "HEAD"), "X-Repo-Commit"),
    "no etag": (telling("/resolve/", Lie(headers={"ETag": None}), "HEAD"), "ETag"),
    "linked size": (telling("/resolve/", Lie(headers={"X-Linked-Size": "9" * 30})), "X-Linked-Size"),
    "word as size": (telling("/resolve/", Lie(headers={"X-Linked-Size": "many"})), "X-Linked-Size"),
    "other size": (telling("/resolve/", Lie(headers={"X-Linked-Size": "7"})), "should be of size 7"),
    "listed oid": (telling("/tree/", listed("a", lfs={"oid": "/tmp/x", "size": 1})), "lfs.oid"),
    "listed size": (telling("/tree/", listed("a", lfs={"oid": "0" * 64, "size": 10**30})), "size"),
    "listed lfs": (telling("/tree/", listed("a", lfs=[])), "lfs"),
    "listed hash": (telling("/tree/", listed("a", xetHash="../x")), "xetHash"),
    "list for a revision": (telling("/revision/", body([])), "describes no revision"),
    "object for a list": (telling("/tree/", body({})), "lists no files"),
    "names for files": (telling("/tree/", body(["a"])), "expected a file"),
    "siblings": (telling("/revision/", body({"sha": COMMIT, "siblings": 3})), "lists no files"),
    "html": (telling("/api/", Lie(body=HTML)), "expected JSON"),
    "nothing": (telling("/api/", Lie(body=b"")), "expected JSON"),
    "depth": (telling("/api/", Lie(body=b"[" * 100_000)), "expected JSON"),
    **{
        f"status {status}": (telling("/api/", Lie(status=status, body=b"")), f"status {status}")
        for status in (204, 206, 304)
    },
    **{
        f"to {target!r}": (
            telling("/api/", Lie(status=302, headers={"Location": target}, body=b"")), "redirects to"
        )
        for target in TARGETS
    },
    "next page elsewhere": (
        telling("/tree/", Lie(headers={"Link": '<http://127.0.0.1:1/x>; rel="next"'})), "redirects to"
    ),
    "file elsewhere": (
        telling("/resolve/", Lie(status=302, headers={"Location": "file:///etc/passwd"})), "redirects to"
    ),
    "compressed": (telling("/api/", Lie(headers={"Content-Encoding": "gzip"})), "compressed"),
    "waiting": (telling("/api/", Lie(status=429, headers={"Retry-After": "999999999"})), "asks to wait"),
    "rate": (telling("/api/", Lie(status=429, headers={"RateLimit": '"api";r=0;t=99999'})), "asks to wait"),
    "silent api": (telling("/api/", Lie(silent=True)), "timed out"),
    "silent head": (telling("/resolve/", Lie(silent=True), "HEAD"), "timed out"),
    "endless api": (telling("/api/", Lie(endless=True)), "more than"),
    "endless file": (telling("/resolve/", Lie(endless=True), "GET"), "more than"),
}  # fmt: skip


@pytest.mark.parametrize(("lie", "problem"), LIES.values(), ids=LIES)
def test_a_lie_is_one_line(
    hub: Hub,
    tmp_path: Path,
    lie: Callable[[str, str], Lie | None],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_answers, "MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(hub_answers, "MAX_UNANNOUNCED_BYTES", 1 << 20)
    hub.lie = lie
    start = time.monotonic()
    with pytest.raises(MarlinqError) as caught:
        download("org/tiny", progress=lambda *stage: None)
    assert isinstance(caught.value, (EnvironmentProblem, CheckpointError))
    assert problem in str(caught.value)
    assert str(caught.value).startswith("org/tiny: ")
    assert time.monotonic() - start < 20
    outside = {path.name for path in tmp_path.iterdir()} - {"cache"}
    assert not outside
    assert constants.HF_HUB_DISABLE_XET is False


def test_a_listing_without_end_is_cut(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_answers, "MAX_ANSWERS", 20)
    following = (
        f'<{hub.endpoint}/api/models/org/tiny/tree/{hub.commit("org/tiny", "main")}?cursor=x>; rel="next"'
    )
    hub.lie = telling("/tree/", Lie(headers={"Link": following}))
    with pytest.raises(EnvironmentProblem, match="more than 20 pages"):
        download("org/tiny")


@pytest.mark.parametrize("revision", ["../x", "/x", "a\nb", "", "x" * 2_000])
def test_a_revision_is_a_name(hub: Hub, revision: str) -> None:
    with pytest.raises(CheckpointError, match="is no revision"):
        download("org/tiny", revision=revision)


def test_plain_paths() -> None:
    assert is_plain_path("a/b-c_d.e/..f")
    assert not is_plain_path("a/./b")
