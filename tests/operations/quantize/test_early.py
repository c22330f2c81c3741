from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from marlinq.core.errors import UnsupportedError
from marlinq.operations.quantize.early import refuse_by_config
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe

FOLDER = Path("model")


@pytest.mark.parametrize(
    ("config", "recipe", "message"),
    [
        (
            {"hidden_size": 576},
            Recipe(group_size=128),
            "hidden_size 576 is not a multiple of group size 128; --group-size auto takes 64",
        ),
        (
            {"text_config": {"hidden_size": 80}},
            Recipe(group_size=32),
            "hidden_size 80 .* no group size divides it",
        ),
    ],
)
def test_config_alone_refuses_unsuitable_group_sizes(
    config: dict[str, Any], recipe: Recipe, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        refuse_by_config(FOLDER, config, recipe)


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        ({"hidden_size": 576}, Recipe()),
        ({"hidden_size": 576}, Recipe(group_size=64)),
        ({"hidden_size": 576}, Recipe(group_size=-1)),
        ({"hidden_size": 576}, Recipe(group_size=128, overrides=(Override("attn", skip=True),))),
        ({"hidden_size": "576"}, Recipe(group_size=128)),
        ({"text_config": 1}, Recipe(group_size=128)),
    ],
)
def test_cases_that_config_does_not_decide_pass(config: dict[str, Any], recipe: Recipe) -> None:
    refuse_by_config(FOLDER, config, recipe)


def test_the_command_refuses_before_it_imports_transformers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"hidden_size": 576}))
    code = (
        "import sys\n"
        "from marlinq.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    arguments = ["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--group-size", "128"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=False, capture_output=True, text=True
    )
    assert done.stdout.split() == ["4", "False", "False"], done.stderr
    assert "hidden_size 576 is not a multiple of group size 128" in done.stderr
