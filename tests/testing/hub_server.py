"""A local server with the part of the Hub's API that downloading a model uses.

Paths and headers are those of https://huggingface.co/docs/hub/api: the commit and files of a revision, and
each file under ``/<id>/resolve/<revision>/<path>`` with its hash as ETag, also from an offset.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """One model on the server.

    Attributes:
        revisions: branch or commit -> path -> content of the file.
        gated: whether access is refused.
    """

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False


@dataclass
class Lie:
    """A wrong answer of the server.

    Attributes:
        status: status code; None for the right one.
        headers: headers that replace the right ones; None removes a header.
        body: body; None for the right one.
        silent: whether the server never answers.
        endless: whether the body never ends.
    """

    status: int | None = None
    headers: dict[str, str | None] = field(default_factory=dict)
    body: bytes | None = None
    silent: bool = False
    endless: bool = False


@dataclass
class Hub:
    """The content of the server, its faults, and a record of requests.

    Attributes:
        repositories: id -> repository.
        endpoint: address of the server.
        break_after: bytes of a file after which the connection is cut; None for never.
        breaks: number of further connections to cut.
        broken: whether every request for a file gets an internal error.
        ranges: (path, offset) of every request for a part of a file.
        sent: path -> number of requests.
        lie: function from a method and a path to a wrong answer, or None for the right one.
        closing: event that ends the server and its endless answers.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    endpoint: str = ""
    break_after: int | None = None
    breaks: int = 0
    broken: bool = False
    ranges: list[tuple[str, int]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    lie: Callable[[str, str], Lie | None] | None = None
    closing: threading.Event = field(default_factory=threading.Event)

    def commit(self, name: str, revision: str) -> str | None:
        """Commit hash of a revision, or None."""
        known = self.repositories[name].revisions
        commits = {branch: hashlib.sha1(f"{name}@{branch}".encode()).hexdigest() for branch in known}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, name: str, commit: str) -> dict[str, bytes]:
        """The files of a commit."""
        revisions = self.repositories[name].revisions
        return next(files for branch, files in revisions.items() if self.commit(name, branch) == commit)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Inside, an empty server runs."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        told = Lie()

        def log_message(self, format: str, *args: object) -> None:
            return

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def send_response(self, code: int, message: str | None = None) -> None:
            super().send_response(self.told.status or code, message)

        def send_header(self, keyword: str, value: str) -> None:
            if keyword not in self.told.headers:
                super().send_header(keyword, value)

        def end_headers(self) -> None:
            for keyword, value in self.told.headers.items():
                if value is not None:
                    super().send_header(keyword, value)
            super().end_headers()

        def _lie(self, lie: Lie, body: bool) -> bool:
            """Sends a wrong answer; returns False if only headers are wrong and the right body follows."""
            if lie.silent:
                hub.closing.wait(60)
                self.close_connection = True
                return True
            if lie.body is None and not lie.endless:
                return False
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if lie.endless:
                self.close_connection = True
            else:
                self.send_header("Content-Length", str(len(lie.body or b"")))
            self.end_headers()
            if body and lie.body is not None:
                self.wfile.write(lie.body)
            while body and lie.endless and not hub.closing.is_set():
                self.wfile.write(b" " * 65_536)
            return True

        def _answer(self, *, body: bool) -> None:
            self.told = (hub.lie and hub.lie(self.command, self.path)) or Lie()
            if self._lie(self.told, body):
                return
            parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
            if not parts:
                self._json(200, {}, body)
            elif parts[:2] == ["api", "models"]:
                self._api("/".join(parts[2:4]), parts[4:], body)
            elif len(parts) > 4 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
            else:
                self._json(404, {}, body)

        def _allowed(self, name: str, body: bool) -> bool:
            repository = hub.repositories.get(name)
            if repository is None:
                self._refuse(404, "RepoNotFound", body)
            elif repository.gated:
                self._refuse(403, "GatedRepo", body)
            return repository is not None and not repository.gated

        def _api(self, name: str, rest: list[str], body: bool) -> None:
            if not self._allowed(name, body):
                return
            kind, revision = rest[0] if rest else "revision", rest[1] if len(rest) > 1 else "main"
            commit = hub.commit(name, revision)
            if commit is None:
                self._refuse(404, "RevisionNotFound", body)
                return
            files = hub.files(name, commit)
            if kind == "tree":
                entries = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in files.items()
                ]
                self._json(200, entries, body)
            else:
                siblings = [{"rfilename": path} for path in files]
                self._json(200, {"id": name, "modelId": name, "sha": commit, "siblings": siblings}, body)

        def _file(self, name: str, revision: str, path: str, body: bool) -> None:
            if not self._allowed(name, body):
                return
            commit = hub.commit(name, revision)
            if commit is None:
                self._refuse(404, "RevisionNotFound", body)
                return
            data = hub.files(name, commit).get(path)
            if data is None:
                self._refuse(404, "EntryNotFound", body)
                return
            if hub.broken and body:
                self._refuse(500, "Internal", body)
                return
            start, stop = 0, len(data) - 1
            wanted = self.headers.get("Range")
            if wanted is not None:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start = int(first)
                stop = min(stop, int(last)) if last else stop
            if body:
                hub.sent[path] += 1
                if start:
                    hub.ranges.append((path, start))
            part = data[start : stop + 1]
            self.send_response(206 if wanted is not None else 200)
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data)
            self.send_header("ETag", f'"{blob.hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(part)))
            if wanted is not None:
                self.send_header("Content-Range", f"bytes {start}-{stop}/{len(data)}")
            self.end_headers()
            if not body:
                return
            if hub.break_after is not None and hub.breaks > 0 and len(part) > hub.break_after:
                hub.breaks -= 1
                self.wfile.write(part[: hub.break_after])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(part)

        def _refuse(self, status: int, code: str, body: bool) -> None:
            self._json(status, {"error": code}, body, {"X-Error-Code": code, "X-Error-Message": code})

        def _json(
            self, status: int, value: object, body: bool, headers: dict[str, str] | None = None
        ) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            for key, header in (headers or {}).items():
                self.send_header(key, header)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if body:
                self.wfile.write(text)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            return  # no traceback for connections that the server cuts or a client gives up

    server = Server(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    # A short poll interval, because shutdown() waits for it (0.5 s by default).
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
