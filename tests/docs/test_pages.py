"""Links and anchors resolve, sources cite pages that exist, every script of the lab is named somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from marlinq.operations.quantize.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ]
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CITED = re.compile(r"docs/[\w/.-]+\.md")
SECTION = re.compile(r'(docs/[\w/.-]+\.md), "([^"]+)"')
SOURCE = re.compile(r"[\w./-]+\.(?:py|cuh|cu|toml|yaml)\b")
MOST_WORDS, MOST_WORDS_OF_RESULTS = 40_000, 3_000


def text_outside_code(page: Path) -> str:
    """A page without its code blocks and code spans, in which brackets mean other things."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda span: "x" * len(span[0]), text)


def headings(page: Path) -> list[str]:
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"^#+ +(.+?) *$", text, flags=re.M)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading: lower case, punctuation gone, a hyphen for each space."""
    plain = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(text_outside_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (fragment and fragment not in map(anchor, headings(file))):
            broken.append(target)
    return broken


def sources() -> list[Path]:
    """Every text file that may cite a page, this test apart."""
    folders = ("marlinq", "lab", "scripts", "tests", "emulation")
    kinds = ("*.py", "*.cuh", "*.cu", "*.toml", "*.md")
    found = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    return [*(path for path in found if path != Path(__file__)), ROOT / "Makefile"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_begin_their_line(page: Path) -> None:
    assert re.findall(r"^[^|#\n]*\S +#{2,} .*$", text_outside_code(page), flags=re.M) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `word`: two\n[a](#a-word-two) [b](#b) [c](c.md) [d](https://example.org) `[e](e.md)`\n"
    )
    assert broken_links(page) == ["#b", "c.md"]


def test_pages_that_sources_cite_exist() -> None:
    missing = {}
    for path in sources():
        text = re.sub(r"\n\s*(//|#)? ?", " ", path.read_text(encoding="utf-8"))
        # Quoted paths may be a test's own files.
        gone = [cited for cited in CITED.findall(text) if not (ROOT / cited).is_file()]
        gone += [
            f'{cited}, "{section}"'
            for cited, section in SECTION.findall(text)
            if (ROOT / cited).is_file() and section not in headings(ROOT / cited)
        ]
        if gone:
            missing[str(path.relative_to(ROOT))] = gone
    assert missing == {}


def test_files_that_pages_name_exist() -> None:
    files = {str(path.relative_to(ROOT)) for path in (*sources(), ROOT / "pyproject.toml")}
    elsewhere = {"recipe.yaml", "file_download.py"}  # an example's, and huggingface_hub's
    gone = {}
    for page in PAGES:
        named = {name.lstrip("./") for name in SOURCE.findall(page.read_text(encoding="utf-8"))} - elsewhere
        lost = {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)}
        if lost and page.name != "CHANGELOG.md":
            gone[page.name] = sorted(lost)
    assert gone == {}


def test_the_guides_recipe_is_one() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", guide, flags=re.S)
    assert Recipe.from_dict(yaml.safe_load(text)).group_size == 64


def test_every_script_of_the_lab_is_named_somewhere() -> None:
    """By a page, the Makefile or another script: one that nothing names is not found, nor repaired."""
    texts = {path: path.read_text(encoding="utf-8") for path in (*PAGES, *sources())}
    forgotten = []
    for script in sorted((ROOT / "lab").rglob("*.py")):
        if script.name == "__init__.py":
            continue
        named = re.compile(
            rf"\b{script.stem}(\.py\b|$)|lab\.(\w+\.)*{script.stem}\b|import {script.stem}\b", re.M
        )
        tests = ROOT / "tests"
        if not any(
            named.search(text)
            for path, text in texts.items()
            if path != script and not path.is_relative_to(tests)
        ):
            forgotten.append(str(script.relative_to(ROOT)))
    assert forgotten == []


def test_the_documentation_stays_short() -> None:
    """Words as ``wc -w`` counts them, bars of tables included."""
    words = {page: len(page.read_text("utf-8").split()) for page in PAGES if page.name != "CHANGELOG.md"}
    assert sum(words.values()) <= MOST_WORDS
    assert words[ROOT / "docs" / "results.md"] <= MOST_WORDS_OF_RESULTS
