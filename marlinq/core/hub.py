"""The Hugging Face Hub: whether it can be reached, and which models and datasets are in its cache.

The Hub's libraries retry for half a minute before they report that there is no network. Here it is asked
once, for at most two seconds.
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import cache
from pathlib import Path

HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
"""Names of repositories: ``organisation/name``, or a dataset's ``name`` alone."""

PATIENCE = 2.0
"""Seconds to wait for the Hub's first answer."""

_SHOWN = 8


def why_unreachable() -> str:
    """Why the Hub can't be asked, in a few words; empty when it can.

    Asks the Hub's host (``HF_ENDPOINT``, through the environment's proxies) at most once in a process and for
    at most :data:`PATIENCE` seconds; not at all with ``HF_HUB_OFFLINE``.
    """
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _probe(constants.ENDPOINT)


@cache
def _probe(endpoint: str) -> str:
    answers: list[str] = []
    # Looking up a host's name can't be given a time limit, so the request runs in a thread that may outlive
    # it.
    asking = threading.Thread(target=lambda: answers.append(_ask(endpoint)), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answers[0] if answers else f"{endpoint} did not answer within {PATIENCE:g} s"


def _ask(endpoint: str) -> str:
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PATIENCE).close()
    except (urllib.error.HTTPError, http.client.HTTPException):
        return ""  # any answer is one
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        # The Hub's library may trust other certificates than this module, so it decides.
        if isinstance(reason, ssl.SSLError):
            return ""
        return f"{endpoint} can't be reached: {getattr(reason, 'strerror', None) or reason}"
    return ""


def cached_models() -> list[str]:
    """Names of the models in the Hub's cache that have a config, sorted."""
    from huggingface_hub import constants

    return sorted(
        folder.name.removeprefix("models--").replace("--", "/")
        for folder in _glob(Path(constants.HF_HUB_CACHE), "models--*")
        if _glob(folder, "snapshots/*/config.json")
    )


def cached_datasets() -> list[str]:
    """Names of datasets that ``datasets`` can load from its cache without a network, sorted."""
    import datasets

    # <cache>/organisation___name/<config>/<version>/<fingerprint>
    return sorted(
        folder.name.replace("___", "/")
        for folder in _glob(Path(datasets.config.HF_DATASETS_CACHE), "*")
        if _glob(folder, "*/*/*/dataset_info.json")
    )


def listed(kind: str, names: Sequence[str]) -> str:
    """Phrase for an error message that lists the first of ``names``, of ``kind``, in the cache."""
    if not names:
        return f"there are no {kind} in the cache"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{kind} in the cache: {', '.join(names[:_SHOWN])}{more}"


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []  # a cache that can't be listed has nothing to offer
