"""Check every response of a Hub endpoint before ``huggingface_hub`` sees it.

The library makes paths out of a server's words: a file's ETag names its place in the cache, a commit names a
folder, and a listing names the files. A server of ``HF_ENDPOINT``, a proxy, or the login page of a network
may send anything, nothing, or data without end. Here names, hashes and sizes are checked, and time and bytes
are bounded.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urljoin, urlsplit

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.plain_values import load_json

SILENCE_SECONDS = 30.0
"""Seconds that a server may stay silent."""

ANSWER_SECONDS = 60.0
"""Seconds for a whole answer that is no file; and seconds after which a file's rate is checked."""

LEAST_RATE = 1_000.0
"""Bytes per second of a file at least, on average."""

MAX_ANSWER_BYTES = 64 << 20
"""Bytes of an answer that is no file, at most."""

MAX_FILE_BYTES = 1 << 40
"""Bytes of a file at most."""

MAX_UNANNOUNCED_BYTES = 1 << 30
"""Bytes at most of a file whose length the server does not give; such files are texts."""

MAX_ANSWERS = 1_000
"""Pages of listings and other answers than files, at most, of one download; a page lists 1,000 files."""

MAX_ATTEMPTS = 100
"""Requests at most for one file; a download that broke off continues where it stopped."""

MAX_NAME = 1_000
"""Characters of a file's path at most."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r'(?:W/)?"?(?!\.{1,2}"?\Z)[A-Za-z0-9._-]{1,128}"?')
_SIZE = re.compile(r"[0-9]{1,16}")
_LONGEST_WAIT = re.compile(r"(?:^|t=)\s*([0-9]+)")


def is_plain_path(name: object) -> bool:
    """Whether ``name`` is a relative path without empty, ``.`` or ``..`` parts."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        return False
    if "\\" in name or ":" in name:
        return False
    parts = name.split("/")
    return all(part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) <= 255 for part in parts)


@contextmanager
def checked_answers() -> Iterator[None]:
    """Check every answer that ``huggingface_hub`` gets inside.

    Raises:
        EnvironmentProblem: an answer is not what a Hub gives, too large, or too slow.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import _http as hub

    guard = _Guard(constants.ENDPOINT)
    before, with_xet = hub._GLOBAL_CLIENT_FACTORY, constants.HF_HUB_DISABLE_XET

    def client() -> Any:
        made = before()
        library = import_module(type(made).__module__.partition(".")[0])
        guard.stream = type("BoundedStream", (_Bounded, library.SyncByteStream), {})
        hooks = made.event_hooks
        made.event_hooks = {
            "request": [*hooks["request"], guard.request],
            "response": [guard.response, *hooks["response"]],
        }
        return made

    hub.set_client_factory(client)
    # Xet downloads don't pass through this client, so other endpoints than the Hub's may not use them.
    constants.HF_HUB_DISABLE_XET = with_xet or constants.ENDPOINT != constants._HF_DEFAULT_ENDPOINT
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = with_xet
        hub.set_client_factory(before)


class _Guard:
    """Hooks of an HTTP client that check requests and responses."""

    def __init__(self, endpoint: str) -> None:
        path = urlsplit(endpoint).path.rstrip("/")
        self._api, self._small_files = f"{path}/api/", f"{path}/api/resolve-cache/"
        self._asked: Counter[str] = Counter()
        self._answers = 0
        # Clock at the first request since the last response; None after a response.
        self._asked_at: float | None = None
        self.stream: type[_Bounded] = _Bounded

    def _is_listing(self, path: str) -> bool:
        """Whether a URL's path is that of the Hub's API, and not of a file."""
        return path.startswith(self._api) and not path.startswith(self._small_files)

    def refuse(self, url: Any, problem: str) -> EnvironmentProblem:
        host = f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}"
        return EnvironmentProblem(
            f"{host}: {problem}, which is no answer of a Hub; check HF_ENDPOINT, proxies, and whether this "
            "network asks for a login, or set HF_HUB_OFFLINE=1 to use what is in the cache"
        )

    def heard(self) -> None:
        """Note that bytes have arrived."""
        self._asked_at = None

    def request(self, request: Any) -> None:
        """Set the time limit of a request, and forbid compression.

        The library retries many times; a server that has been silent for too long is given up.
        """
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > 2 * SILENCE_SECONDS:
            host = f"{request.url.scheme}://{request.url.host}"
            raise EnvironmentProblem(
                f"{host}: nothing came for {now - self._asked_at:.0f} s (timed out); run the command again "
                "later, or set HF_HUB_OFFLINE=1 to use what is in the cache"
            )
        limits = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            key: min(limits.get(key) or SILENCE_SECONDS, SILENCE_SECONDS)
            for key in ("connect", "read", "write", "pool")
        }
        # A compressed answer may expand to a thousand times its stated length.
        request.headers["Accept-Encoding"] = "identity"

    def response(self, response: Any) -> None:
        """Check the headers, and the whole text of a listing; bound time and bytes of everything else."""
        self.heard()
        url, headers, status = response.request.url, response.headers, response.status_code
        if headers.get("Content-Encoding", "identity") != "identity":
            raise self.refuse(url, "it sends compressed bytes that were not asked for")
        for name in ("Content-Length", "X-Linked-Size"):
            value = headers.get(name)
            if value is not None and (not _SIZE.fullmatch(value) or int(value) > MAX_FILE_BYTES):
                raise self.refuse(url, f"it says {name} {value[:40]!r}")
        for name in ("Retry-After", "RateLimit"):
            waits = _LONGEST_WAIT.findall(headers.get(name, "").replace('"', "").replace(";", " "))
            if any(len(wait) > 9 or int(wait) > ANSWER_SECONDS for wait in waits):
                raise EnvironmentProblem(
                    f"{url.scheme}://{url.host}: asks to wait for longer than {ANSWER_SECONDS:.0f} s "
                    f"({name}: {headers[name][:40]}); run the command again later"
                )
        listing = self._is_listing(url.path)
        limit = MAX_ANSWER_BYTES
        if listing:
            self._answers += 1
            if self._answers > MAX_ANSWERS:
                raise self.refuse(url, f"its listing has more than {MAX_ANSWERS} pages")
        else:
            length = headers.get("Content-Length")
            limit = MAX_UNANNOUNCED_BYTES if length is None else int(length)
            self._asked[str(url)] += 1
            if self._asked[str(url)] > MAX_ATTEMPTS:
                raise self.refuse(url, f"it broke off {MAX_ATTEMPTS} times")
        targets = [headers["Location"]] if "Location" in headers else []
        targets += [link["url"] for link in response.links.values() if listing and "url" in link]
        for target in targets:
            self._check_target(url, target, listing=listing)
        response.stream = self.stream(response.stream, self, url, limit, is_file=not listing)
        if response.request.method == "HEAD" and status < 400:
            self._check_file(url, headers)
        elif listing and status < 400:
            if status == 200:
                self._check_listing(url, response.read())
            elif not response.has_redirect_location:
                raise self.refuse(url, f"it answers with status {status}")

    def _check_target(self, url: Any, location: str, *, listing: bool) -> None:
        """Refuse redirects to places whose answers would not be checked."""
        try:
            target = urlsplit(urljoin(str(url), location))
            known = target.scheme in ("http", "https") and bool(target.hostname) and target.port != 0
        except ValueError:
            known = False
        if not known or not location.isprintable() or (listing and not self._is_listing(target.path)):
            raise self.refuse(url, f"it redirects to {location[:80]!r}")

    def _check_file(self, url: Any, headers: Any) -> None:
        commit = headers.get("X-Repo-Commit")
        if commit is not None and not _COMMIT.fullmatch(commit):
            raise self.refuse(url, f"it says X-Repo-Commit {commit[:80]!r}, expected 40 hexadecimal digits")
        for name in ("ETag", "X-Linked-ETag"):
            etag = headers.get(name)
            if etag is not None and not _ETAG.fullmatch(etag):
                raise self.refuse(url, f"it says {name} {etag[:80]!r}, expected a hash")
        xet = headers.get("X-Xet-Hash")
        if xet is not None and not _SHA256.fullmatch(xet):
            raise self.refuse(url, f"it says X-Xet-Hash {xet[:80]!r}, expected 64 hexadecimal digits")

    def _check_listing(self, url: Any, text: bytes) -> None:
        try:
            value = load_json(text)
        except ValueError:
            raise self.refuse(url, f"it answers {text[:40]!r}, expected JSON") from None
        if "/tree/" in url.path and not isinstance(value, list):
            raise self.refuse(url, "it lists no files")
        if "/revision/" in url.path and not isinstance(value, dict):
            raise self.refuse(url, "it describes no revision")
        if isinstance(value, dict) and "/revision/" in url.path:
            sha, siblings = value.get("sha"), value.get("siblings") or []
            if not isinstance(sha, str) or not _COMMIT.fullmatch(sha):
                raise self.refuse(url, f"it says sha {str(sha)[:80]!r}, expected 40 hexadecimal digits")
            if not isinstance(siblings, list):
                raise self.refuse(url, "it lists no files")
            self._check_entries(url, siblings, "rfilename")
        if isinstance(value, list):
            self._check_entries(url, value, "path")

    def _check_entries(self, url: Any, entries: list[Any], key: str) -> None:
        for entry in entries:
            if not isinstance(entry, dict):
                raise self.refuse(url, f"it lists {str(entry)[:80]!r}, expected a file")
            name = entry.get(key)
            if not is_plain_path(name):
                raise self.refuse(url, f"it lists a file {str(name)[:80]!r}, expected a relative path")
            lfs = entry.get("lfs")
            if lfs is not None and not isinstance(lfs, dict):
                raise self.refuse(url, f"it lists {name} with lfs {str(lfs)[:80]!r}")
            hashes = {"oid": (entry.get("oid"), _COMMIT), "xetHash": (entry.get("xetHash"), _SHA256)}
            hashes["lfs.oid"] = ((lfs or {}).get("oid"), _SHA256)
            for field, (digest, pattern) in hashes.items():
                if digest is not None and not (isinstance(digest, str) and pattern.fullmatch(digest)):
                    raise self.refuse(url, f"it lists {name} with {field} {str(digest)[:80]!r}")
            for size in (entry.get("size"), (lfs or {}).get("size")):
                if size is not None and not (type(size) is int and 0 <= size <= MAX_FILE_BYTES):
                    raise self.refuse(url, f"it lists {name} with size {str(size)[:40]}")


class _Bounded:
    """The bytes of one answer, up to a limit and at a least rate."""

    def __init__(self, stream: Any, guard: _Guard, url: Any, limit: int, *, is_file: bool) -> None:
        self._stream, self._guard, self._url = stream, guard, url
        self._limit, self._is_file = limit, is_file

    def __iter__(self) -> Iterator[bytes]:
        waited, come = 0.0, 0
        pieces = iter(self._stream)
        while True:
            began = time.monotonic()
            piece = next(pieces, None)
            # Only the server's time counts, not that of the reader between two pieces.
            waited += time.monotonic() - began
            if piece is None:
                return
            come += len(piece)
            self._guard.heard()
            if come > self._limit:
                raise self._guard.refuse(self._url, f"it sends more than {self._limit} bytes")
            if waited > ANSWER_SECONDS and (not self._is_file or come < waited * LEAST_RATE):
                raise EnvironmentProblem(
                    f"{self._url.scheme}://{self._url.host}: sent {come} bytes in {waited:.0f} s; try again "
                    "later, or over another network"
                )
            yield piece

    def close(self) -> None:
        self._stream.close()
