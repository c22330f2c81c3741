from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from marlinq.operations.verify.tuned import too_far, tuned_vectors

NORM = torch.tensor([1.0, -1.0, 1.0, -1.0])


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (NORM + 0.2, None),
        (NORM + torch.tensor([0.0, 0.0, 1.5, 0.0]), "an element moved by 1.50 of the vector's size"),
        (torch.full((4,), float("nan")), "holds NaN or infinity"),
        (torch.ones(2, 2), r"expected a vector, found shape [2, 2]"),
    ],
)
def test_a_tuned_vector_is_near_the_originals(found: torch.Tensor, reason: str | None) -> None:
    judged = too_far(found, NORM)
    assert (judged is None) if reason is None else (judged is not None and judged.startswith(reason))


@pytest.mark.parametrize(
    "run", [None, [], {"tuning": 3}, {"tuning": {"vectors": 3}}, {"tuning": {"vectors": [3]}}]
)
def test_a_manifest_that_says_nothing_of_it(tmp_path: Path, run: object) -> None:
    (tmp_path / "marlinq.json").write_text(json.dumps({"run": run}))
    assert tuned_vectors(tmp_path) == set()


def test_names_of_this_folder_and_of_its_sources(tmp_path: Path) -> None:
    inner = {"run": {"tuning": {"vectors": ["a"]}}}
    (tmp_path / "marlinq.json").write_text(json.dumps({"operation": "convert", "source": inner}))
    assert tuned_vectors(tmp_path) == {"a"}
