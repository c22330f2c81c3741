"""Renders pages with a real browser without a window."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60


def browser() -> str:
    """Path of a Chromium; skips the test if there is none."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(_NAMES)} is on the PATH")
    return found


def screenshot(
    page: Path, folder: Path, *, dark: bool = False, size: tuple[int, int] = (1200, 1400)
) -> NDArray[np.uint8]:
    """The pixels [height, width, RGB] of a page."""
    picture = folder / f"{page.stem}-{'dark' if dark else 'light'}-{size[0]}.png"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _run(
        [f"--window-size={size[0]},{size[1]}", "--hide-scrollbars", *scheme, f"--screenshot={picture}"],
        page,
        folder,
    )
    return _decoded(picture.read_bytes())


def rendered(page: Path, folder: Path) -> str:
    """The HTML of the document after the browser has loaded it."""
    return _run(["--dump-dom"], page, folder)


def _run(options: list[str], page: Path, folder: Path) -> str:
    profile = folder / "profile"
    finished = subprocess.run(
        [
            browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            f"--user-data-dir={profile}", *options, page.absolute().as_uri(),
        ],
        check=True, capture_output=True, text=True, timeout=_SECONDS,
    )  # fmt: skip
    return finished.stdout


def _decoded(data: bytes) -> NDArray[np.uint8]:
    """The pixels of a PNG with 8 bits per channel, not interlaced (https://www.w3.org/TR/png-3/)."""
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    channels = {2: 3, 6: 4}[colour]
    assert depth == 8
    packed, place = b"", 8
    while place < len(data):
        (count,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + count]
        place += count + 12
    raw = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    rows = np.zeros((height + 1, width + 1, channels), np.uint8)
    for y in range(height):
        kind, line = raw[y, 0], raw[y, 1:].reshape(width, channels)
        above = rows[y, 1:]
        if kind == 0:
            rows[y + 1, 1:] = line
        elif kind == 2:
            rows[y + 1, 1:] = line + above
        elif kind == 1:
            rows[y + 1, 1:] = np.cumsum(line, axis=0, dtype=np.uint8)
        else:
            for x in range(width):
                left, up, corner = (
                    rows[y + 1, x].astype(int), rows[y, x + 1].astype(int), rows[y, x].astype(int)
                )  # fmt: skip
                if kind == 3:
                    guess = (left + up) // 2
                else:
                    base = left + up - corner
                    far = np.stack([abs(base - left), abs(base - up), abs(base - corner)])
                    guess = np.choose(far.argmin(axis=0), [left, up, corner])
                rows[y + 1, x + 1] = line[x] + guess.astype(np.uint8)
    return rows[1:, 1:, :3]
