from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jinja2 import UndefinedError

from marlinq.cli import main
from marlinq.core.errors import OutputError, UnsupportedError, UsageError
from marlinq.operations.quantize import quantize
from marlinq.operations.report import page, report, tables
from marlinq.operations.report.charts import STEPS, Ramp
from marlinq.operations.report.figures import place
from marlinq.operations.report.markup import tag
from marlinq.operations.report.reading import REPORT_JSON
from marlinq.operations.report.written_report import CSV, HTML
from marlinq.operations.verify import verify
from tests.testing.browser import rendered, screenshot
from tests.testing.layouts import INTEGERS
from tests.testing.original_folders import READ, RECIPE, save_tiny
from tests.testing.quantized_folders import model_tuples, write

ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section", "div", "p",
    "span",
    "b", "h1", "h2", "h3", "ul", "li", "figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td",
    "svg", "rect", "line", "path", "text",
}  # fmt: skip
NASTY = (
    "</title></svg></style><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&\x1b[31m\n"
)


class Reader(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.values: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "marlinq.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**manifest, **changes}))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model after ``marlinq quantize``."""
    home = tmp_path_factory.mktemp("quantized")
    source = save_tiny("llama", home / "model")
    quantize(source, home / "out", recipe=RECIPE, device="cpu")
    return home / "out"


def test_a_run_leaves_its_report(quantized: Path) -> None:
    figures = json.loads((quantized / REPORT_JSON).read_text())["checkpoints"][0]
    manifest = json.loads((quantized / "marlinq.json").read_text())
    assert figures["name"] == "out"
    assert figures["fingerprint"] == manifest["fingerprint"]
    for module in figures["modules"]:
        noted = manifest["run"][f"module {module['name']}"]
        assert (module["error"], module["tokens"]) == (noted["relative_error"], noted["tokens"])
    time = figures["time"]
    assert len(time["blocks"]) == 3
    # Every second is that of exactly one stage.
    assert sum(seconds for _, seconds in time["stages"]) == pytest.approx(time["total"], rel=1e-9)
    assert time["stages"][0][0] == "preparing"
    assert dict(time["stages"])["quantising blocks"] >= sum(time["blocks"]) * (1 - 1e-9)
    assert figures["sampled"] == 1
    assert figures["bytes"] == sum(figures["sizes"].values())
    reader = Reader((quantized / HTML).read_text(encoding="utf-8"))
    assert set(reader.elements) <= ALLOWED
    # One cell for each of 7 projections in 3 blocks has a tooltip, and so has every bar.
    assert all(f"block {block}, mlp.down_proj: " in reader.text for block in range(3))
    with (quantized / CSV).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["module"] for row in rows] == [module["name"] for module in figures["modules"]]
    assert [float(row["error"]) for row in rows] == [module["error"] for module in figures["modules"]]


def test_the_command_repeats_the_report_of_a_run(quantized: Path, tmp_path: Path) -> None:
    written = report(quantized, out=tmp_path / "again")
    for path in written.files:
        assert path.read_bytes() == (quantized / path.name).read_bytes()


def test_a_report_is_no_part_of_the_checkpoint(quantized: Path, tmp_path: Path) -> None:
    found = verify(quantized, device="cpu")
    assert found.ok, found.render()
    assert "report" not in found.render()
    from marlinq.operations.convert import convert

    convert(quantized, tmp_path / "converted", target_format="gptq-v2")
    assert not (tmp_path / "converted" / HTML).exists()
    # The card speaks of the run, which the copy shares.
    assert (tmp_path / "converted" / "README.md").read_bytes() == (quantized / "README.md").read_bytes()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", INTEGERS)
def test_codes_and_scales_of_every_layout(tmp_path: Path, layout: str, bits: int) -> None:
    if f"int{bits}" not in INTEGERS[layout].elements:
        pytest.skip(f"{layout} holds no int{bits}")
    modules = model_tuples(bits=bits)
    folder = write(tmp_path / "model", layout, modules)
    written = report(folder, out=tmp_path)
    assert written.checkpoints[0].notes == ("No marlinq.json: errors, tokens and the recipe are unknown.",)
    for figures in written.checkpoints[0].modules:
        weight = modules[figures.name]
        assert (
            list(figures.codes) == torch.bincount(weight.codes.flatten().long(), minlength=1 << bits).tolist()
        )
        magnitudes = weight.scales.float().abs().flatten()
        assert figures.scales.counted == magnitudes.numel()
        assert figures.scales.smallest == magnitudes.min()
        assert figures.scales.largest == magnitudes.max()
        # A quantile is one of the values, the nearest in rank.
        assert figures.scales.middle == magnitudes.sort()[0][round(0.5 * (magnitudes.numel() - 1))]
        assert figures.scales.negative == pytest.approx(float((weight.scales < 0).float().mean()), rel=1e-6)
        assert sum(figures.scales.bins) == magnitudes.numel()


def test_large_tensors_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = model_tuples()
    folder = write(tmp_path / "model", "gptq", modules)
    monkeypatch.setattr("marlinq.operations.report.reading._LEAST_SAMPLE", 4096)
    monkeypatch.setattr("marlinq.operations.report.reading._SAMPLE_BYTES", 4096)
    figures = report(folder, out=tmp_path).checkpoints[0]
    largest = next(module for module in figures.modules if module.name.endswith("0.mlp.up_proj"))
    assert sum(largest.codes) == 2 * 4096
    assert figures.sampled < 0.6
    whole = (
        np.bincount(modules[largest.name].codes.flatten(), minlength=16) / modules[largest.name].codes.numel()
    )
    # 8192 codes, each with probability 1/16: six standard deviations of a share are 6 * 0.0027.
    assert np.abs(np.array(largest.codes) / 8192 - whole).max() < 0.016


def test_damaged_scales_are_counted_and_told(tmp_path: Path) -> None:
    modules = model_tuples()
    name, first = next(iter(modules.items()))
    first.scales[0, 0], first.scales[0, 1], first.scales[0, 2] = float("nan"), float("inf"), 0.0
    folder = write(tmp_path / "model", "gptq", modules)
    figures = {module.name: module for module in report(folder, out=tmp_path).checkpoints[0].modules}
    assert figures[name].scales.bad == 2
    assert figures[name].scales.smallest == 0
    assert sum(module.scales.bad for module in figures.values()) == 2
    assert "2 scales are NaN or infinite" in Reader((tmp_path / HTML).read_text()).text


def hostile(folder: Path) -> Path:
    """A checkpoint whose manifest and config say whatever they like."""
    write(folder, "gptq", model_tuples(), config={"architectures": [NASTY]})
    names = [f"model.layers.{block}.self_attn.{part}_proj" for block in (0, 1) for part in "qkvo"]
    odd: list[Any] = [NASTY, 1e308, -1, True, None, [1], {"a": NASTY}, 0.25]
    run = {
        f"module {name}": {"relative_error": value, "tokens": value}
        for name, value in zip(names, odd, strict=True)
    }
    run["module model.layers.0.mlp.up_proj"] = {"relative_error": 0.5, "fallback": NASTY, "reason": NASTY}
    run["calibration"] = {"tokens": NASTY, "documents": {"x": NASTY}, NASTY: 1}
    edit_manifest(
        folder,
        operation="quantize",
        fingerprint=NASTY,
        recipe={NASTY: NASTY, "quality": NASTY, "deep": [[[NASTY]]]},
        environment=[NASTY],
        kept={NASTY: NASTY, "lm_head": NASTY},
        run=run,
    )
    time = {"total": 1, "device": NASTY, "stages": [[NASTY, 1]], "blocks": [NASTY, 1]}
    entry = {"fingerprint": NASTY, "time": time}
    (folder / REPORT_JSON).write_text(json.dumps({"made_by": "marlinq", "checkpoints": [entry]}))
    return folder


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "  \uff1d"])
def test_no_text_of_a_table_is_a_formula(start: str) -> None:
    assert tables._cell(f"{start}1+1").startswith("'")
    assert tables._cell(f"a{start}1") == f"a{start}1"


def test_ramps_take_any_figure() -> None:
    for low, high in ((1e-30, 1e30), (1e30, 1e30 * (1 + 2**-52)), (0.0, 1e30)):
        ramp = Ramp(low, high)
        assert ramp.step(high).startswith("s")
        assert Ramp.around_one([low, high]).step(high).startswith("d")


@pytest.mark.parametrize("pair", [False, True])
def test_a_hostile_checkpoint_injects_nothing(tmp_path: Path, pair: bool) -> None:
    folder = hostile(tmp_path / "=cmd|'<script>")
    other = write(tmp_path / "other", "awq", model_tuples()) if pair else None
    written = report(folder, other, out=tmp_path / "out")
    figures = written.checkpoints[0]
    assert figures.errors == [0.25, 0.5]
    assert figures.time is not None
    text = (tmp_path / "out" / HTML).read_text(encoding="utf-8")
    reader = Reader(text)
    assert set(reader.elements) <= ALLOWED
    assert reader.elements["script"] == reader.elements["img"] == 0
    assert not {name for name in reader.attributes if name.startswith("on") or name in ("src", "href")}
    assert not any(ord(character) < 32 and character != "\n" for character in text)
    # Shown as text, with the escape code in letters.
    assert "<script>document.title='owned'</script>" in reader.text
    assert "\\x1b[31m" in reader.text
    with (tmp_path / "out" / CSV).open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not any(
        cell.startswith(("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")) for cell in cells
    )
    assert "'=cmd|'<script>" in cells
    json.loads((tmp_path / "out" / REPORT_JSON).read_text())


def test_names_of_modules_are_only_text(tmp_path: Path) -> None:
    name = "model.layers.0.<b>&\"'"
    modules = {name: next(iter(model_tuples().values()))}
    folder = write(tmp_path / "model", "gptq", modules)
    edit_manifest(
        folder, operation="quantize", run={f"module {name}": {"relative_error": 0.125, "tokens": 3}}
    )
    report(folder, out=tmp_path)
    reader = Reader((tmp_path / HTML).read_text())
    assert set(reader.elements) <= ALLOWED
    assert name in reader.text
    assert "block 0, <b>&\"': 12.5 %" in reader.text


def test_two_checkpoints_are_reported_side_by_side(tmp_path: Path) -> None:
    folders = []
    for number, (layout, error) in enumerate((("gptq", 0.02), ("awq", 0.01))):
        (tmp_path / str(number)).mkdir()
        folder = write(tmp_path / str(number) / "same", layout, model_tuples())
        names = [f"model.layers.{block}.mlp.up_proj" for block in (0, 1)]
        run = {
            f"module {name}": {"relative_error": error * (1 + i), "tokens": 5} for i, name in enumerate(names)
        }
        edit_manifest(
            folder, operation="quantize", run=run, recipe={"format": layout, "seed": 0, "method": "gptq"}
        )
        folders.append(folder)
    written = report(*folders, out=tmp_path / "out")
    assert [figures.format for figures in written.checkpoints] == ["gptq", "awq"]
    reader = Reader((tmp_path / "out" / HTML).read_text())
    assert "same (1) and same (2)" in reader.text
    assert "smaller in 2 of 2 places, median 0.50×" in reader.text
    assert "block 1, mlp.up_proj: 0.50×" in reader.text
    with (tmp_path / "out" / CSV).open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 14
    assert "checkpoint    same" in written.render()


def run_of(folder: Path, method: str | None, **notes: dict[str, Any]) -> Path:
    """A checkpoint whose manifest notes these reports, of modules of its first two blocks."""
    write(folder, "gptq", model_tuples())
    run = {f"module model.layers.{name.replace('_', '.', 1)}": note for name, note in notes.items()}
    edit_manifest(folder, operation="quantize", run=run, recipe={"method": method})
    return folder


UP0, UP1, DOWN0 = "0_mlp.up_proj", "1_mlp.up_proj", "0_mlp.down_proj"


def test_two_quantities_never_share_a_column(tmp_path: Path) -> None:
    ours = run_of(tmp_path / "ours", "gptq", **{UP0: {"relative_error": 2e-5}, UP1: {"relative_error": 3e-5}})
    rounded = run_of(tmp_path / "rounded", "rtn", **{UP0: {"relative_error": 0.04}})
    written = report(ours, rounded, out=tmp_path)
    text = Reader((tmp_path / HTML).read_text()).text
    assert "×" not in text.split("Scales")[0].replace("K × N", "")
    assert "divided by" not in text
    assert "The two runs report different quantities" in text
    for label in ("output error", "weight error"):
        assert f"median {label}" in text
        assert f"{label}  median" in written.render()
    with (tmp_path / CSV).open(newline="") as file:
        assert {row["error_of"] for row in csv.DictReader(file) if row["error"]} == {"outputs", "weights"}


def test_a_page_names_what_an_error_is_of(tmp_path: Path) -> None:
    errors = {UP0: {"relative_error": 0.01}, UP1: {"relative_error": 0.02}}
    for method, label in (
        ("gptq", "output error"),
        ("imatrix", "input-weighted weight error"),
        ("rtn", "weight error"),
        ("other", "error"),
        (None, "error"),
    ):
        folder = run_of(tmp_path / str(method), method, **errors)
        figures = report(folder, out=tmp_path).checkpoints[0]
        assert (figures.error_label, figures.median_error) == (label, 0.015)
        text = Reader((tmp_path / HTML).read_text()).text
        assert f"median {label}, squared" in text
        assert ("on the calibration text" in text) == (method in ("gptq", "imatrix"))


def test_a_module_with_another_quantity_is_named_apart(tmp_path: Path) -> None:
    notes = {
        UP0: {"relative_error": 0.01, "quantity": "outputs"},
        UP1: {"relative_error": 0.02, "quantity": "outputs"},
        DOWN0: {"relative_error": 0.9, "quantity": "weights", "fallback": "round-to-nearest: not reached"},
    }
    figures = report(run_of(tmp_path / "model", "gptq", **notes), out=tmp_path).checkpoints[0]
    assert figures.errors == [0.01, 0.02]
    assert figures.worst[0].name == "model.layers.1.mlp.up_proj"
    assert ("mlp.down_proj", 0) not in figures.cells()
    text = Reader((tmp_path / HTML).read_text()).text
    assert "model.layers.0.mlp.down_proj, whose weight error is 90 %" in text
    # A manifest that does not name the quantity tells nothing of a module with a fallback.
    for note in notes.values():
        note.pop("quantity")
    figures = report(run_of(tmp_path / "old", "gptq", **notes), out=tmp_path).checkpoints[0]
    assert figures.errors == [0.01, 0.02]


def test_no_temporary_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_of(tmp_path / "model", "gptq", **{UP0: {"relative_error": 0.01}})
    out = tmp_path / "out"
    # Leftovers of a killed process are gone with the next report.
    out.mkdir()
    (out / f".{HTML}.partial").write_text("half")
    report(folder, out=out)
    assert {path.name for path in out.iterdir()} == {HTML, CSV, REPORT_JSON}

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="No space left"):
        report(folder, out=out)
    assert {path.name for path in out.iterdir()} == {HTML, CSV, REPORT_JSON}


def test_experts_share_a_cell() -> None:
    assert place("model.layers.12.mlp.experts.7.up_proj") == (12, "mlp.experts.*.up_proj")
    assert place("transformer.h.0.attn.c_attn") == (0, "attn.c_attn")
    assert place("lm_head") == (None, "lm_head")
    assert place("a.0") == (None, "a.0")
    # A number that no model has is a name like any other; so is a digit that int() would not read.
    assert place("a.99999999.b") == (None, "a.99999999.b")
    assert place("a.²." + "b") == (None, "a.².b")


def test_values_take_steps_of_a_ramp() -> None:
    ramp = Ramp(1e-4, 1e-2)
    assert [ramp.step(value) for value in (0, 1e-5, 1e-4, 1e-3, 1e-2, 1)] == [
        "s0",
        "s0",
        "s0",
        "s4",
        "s8",
        "s8",
    ]
    around = Ramp.around_one([0.5, 1, 2])
    assert [around.step(value) for value in (0.5, 1, 2)] == ["d0", f"d{STEPS // 2}", "d8"]
    assert Ramp.over([]).step(1.0) == "s4"


def test_the_template_escapes_every_value() -> None:
    assert not re.search(
        r"\|\s*safe\b|autoescape", (Path(page.__file__).parent / "page.html.jinja").read_text()
    )
    template = page._template().environment.from_string("{{ text }} {{ drawing }}")
    assert template.render(text="<b>\x1b&", drawing=tag("b", "<")) == "&lt;b&gt;\\x1b&amp; <b>&lt;</b>"
    with pytest.raises(UndefinedError):
        template.render(text="")


def test_only_text_and_elements_make_a_drawing() -> None:
    assert tag("p", "<&>", tag("b", "x"), title='"').markup == '<p title="&quot;">&lt;&amp;&gt;<b>x</b></p>'
    with pytest.raises(ValueError, match="not the name of an attribute"):
        tag("p", **{"x onload=": "1"})
    with pytest.raises(ValueError, match="not the name of an element"):
        tag("p><script")
    with pytest.raises(TypeError):
        tag("p", 3)


def test_folders_that_cannot_be_reported_are_refused(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    with pytest.raises(UnsupportedError, match="is not quantised; pass the output of marlinq quantize"):
        report(source, out=tmp_path)
    folder = write(tmp_path / "gptq", "gptq", model_tuples())
    with pytest.raises(UsageError, match="named twice"):
        report(folder, folder, out=tmp_path)
    (tmp_path / CSV).write_text("my,own,table\n")
    with pytest.raises(OutputError, match=r"report\.csv: is no report of marlinq's"):
        report(folder, out=tmp_path)
    assert (tmp_path / CSV).read_text() == "my,own,table\n"
    (tmp_path / CSV).unlink()
    (tmp_path / HTML).symlink_to(source / "config.json")
    with pytest.raises(OutputError, match=r"report\.html: is no report"):
        report(folder, out=tmp_path)
    (tmp_path / HTML).unlink()
    report(folder, out=tmp_path)
    report(folder, out=tmp_path)
    with pytest.raises(OutputError, match=r"9999.*can't be created \(File name too long\)"):
        report(folder, out=tmp_path / ("9" * 5000))
    with pytest.raises(OutputError, match="is not a folder"):
        report(folder, out=tmp_path / CSV)


def test_a_report_that_fails_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")

    def refuse(*args: Any) -> None:
        raise OutputError("no room")

    monkeypatch.setattr("marlinq.operations.quantize.finish.write_report", refuse)
    with pytest.warns(
        UserWarning, match=r"no report was written \(no room\); marlinq report .*out makes one"
    ):
        quantize(source, tmp_path / "out", recipe=READ, device="cpu")
    assert (tmp_path / "out" / "config.json").exists()


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "gptq", "gptq", model_tuples())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"][0]["name"] == "gptq"
    assert (tmp_path / HTML).exists()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "absent")])
    assert ended.value.code == 3


def test_no_torch_is_needed(tmp_path: Path) -> None:
    folder = write(tmp_path / "gptq", "gptq", model_tuples())
    script = (
        "import sys\nfrom marlinq.operations.report import report\n"
        f"report({str(folder)!r}, out={str(tmp_path)!r})\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def colour(text: str) -> list[int]:
    return [int(text[index : index + 2], 16) for index in (1, 3, 5)]


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_it(quantized: Path, tmp_path: Path, dark: bool) -> None:
    from marlinq.operations.report.style import _DARK, _LIGHT

    picture = screenshot(quantized / HTML, tmp_path, dark=dark)
    colours = _DARK if dark else _LIGHT
    assert picture[0, 0].tolist() == colour(colours["page"])
    drawn = {tuple(pixel) for pixel in picture.reshape(-1, 3)[::3].tolist()}
    # The map's extremes, the bars and the cards are there, in this scheme's colours.
    for name in ("card", "s0", "s8", "p0"):
        assert tuple(colour(colours[name])) in drawn, name


def test_a_narrow_window_cuts_nothing_off(quantized: Path, tmp_path: Path) -> None:
    picture = screenshot(quantized / HTML, tmp_path, size=(560, 1600))
    # The page keeps its margin of 20 pixels: nothing reaches out of a card to the right.
    assert (picture[:, -16:] == picture[0, 0]).all()


def test_a_browser_runs_nothing_that_a_checkpoint_says(tmp_path: Path) -> None:
    report(hostile(tmp_path / "model"), out=tmp_path / "out")
    document = rendered(tmp_path / "out" / HTML, tmp_path)
    assert "<title>model: quantisation report</title>" in document
    assert "<script" not in document
    assert "<img" not in document
