from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from marlinq.checkpoint.reader import locate
from marlinq.core import hub
from marlinq.core.errors import CheckpointError, EnvironmentProblem


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nobody switched the network off, no proxy is in the way, and the cache is empty."""
    hub._probe.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A socket that listens on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def endpoint(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def answer_once(listening: socket.socket, status: str) -> threading.Thread:
    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "nonsense"])
def test_any_answer_will_do_and_is_asked_for_once(
    online: pytest.MonkeyPatch, server: socket.socket, scheme: str, status: str
) -> None:
    # Plain text in answer to TLS stands for all that is wrong with certificates, which is not judged here.
    thread = answer_once(server, status)
    online.setattr(constants, "ENDPOINT", endpoint(server).replace("http", scheme))
    assert hub.why_unreachable() == ""
    thread.join()
    server.close()
    assert hub.why_unreachable() == ""


def test_a_host_that_refuses(online: pytest.MonkeyPatch, server: socket.socket) -> None:
    online.setattr(constants, "ENDPOINT", endpoint(server))
    server.close()
    assert hub.why_unreachable() == f"{constants.ENDPOINT} can't be reached: Connection refused"


def test_a_host_that_keeps_silent(online: pytest.MonkeyPatch, server: socket.socket) -> None:
    online.setattr(constants, "ENDPOINT", endpoint(server))
    online.setattr(hub, "PATIENCE", 0.2)
    start = time.monotonic()
    assert constants.ENDPOINT in hub.why_unreachable()
    # Nobody will ever answer; ten times the bound is for a busy machine.
    assert time.monotonic() - start < 2


def test_a_name_that_takes_for_ever_to_look_up(online: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    online.setattr(socket, "getaddrinfo", lambda *_, **__: done.wait(5) and [])
    online.setattr(hub, "PATIENCE", 0.2)
    online.setattr(constants, "ENDPOINT", "https://slow.invalid")
    start = time.monotonic()
    assert hub.why_unreachable() == "https://slow.invalid did not answer within 0.2 s"
    assert time.monotonic() - start < 2
    done.set()


def test_offline_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_probe", None)
    assert hub.why_unreachable() == "HF_HUB_OFFLINE is set"


def snapshot(cache: Path, name: str, *files: str) -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    for file in files:
        path = folder / "snapshots" / "abc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("abc")
    return folder / "snapshots" / "abc"


def test_a_model_that_is_nowhere(online: pytest.MonkeyPatch, server: socket.socket, tmp_path: Path) -> None:
    online.setattr(constants, "ENDPOINT", endpoint(server))
    server.close()
    with pytest.raises(EnvironmentProblem, match=r"org/name: not a local .*refused.*no models in the cache"):
        locate("org/name")
    kept = snapshot(tmp_path / "cache", "org/kept", "config.json", "model.safetensors")
    snapshot(tmp_path / "cache", "org/readme-only", "README.md")
    with pytest.raises(EnvironmentProblem, match=r"models in the cache: org/kept$"):
        locate("org/name")
    with pytest.warns(UserWarning, match="org/kept: read from the Hub's cache, for http.*refused"):
        assert locate("org/kept") == kept


@pytest.mark.parametrize("name", ["./nosuch", "../nosuch", "a/b/c", "nosuch", "/nosuch", "a--b/c", "a..b/c"])
def test_names_that_are_no_model_are_refused_without_the_network(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_probe", lambda endpoint: "")
    with pytest.raises(CheckpointError, match="not a folder, and not a Hub id|neither a local folder"):
        locate(name)


def test_long_lists_are_cut() -> None:
    assert hub.listed("models", []) == "there are no models in the cache"
    assert hub.listed("models", [f"m{n}" for n in range(10)]).endswith("m6, m7 and 2 more")
