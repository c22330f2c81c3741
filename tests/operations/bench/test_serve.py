"""Both of vLLM's engines timed one after the other, with a stand-in for vLLM in processes of their own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from marlinq.cli import main
from marlinq.core.errors import EnvironmentProblem, UsageError
from marlinq.operations.bench import Workload, bench_serve
from marlinq.operations.bench.serve import ENGINES
from marlinq.operations.bench.serve_engine import requests
from marlinq.operations.bench.serve_plot import save_plot, steps_plot

# Its clock advances by what it is asked to do: 3 s to start, 2 ms a step without the plugin, 1 ms with it,
# and 10 us a token of a prompt. It leaves a process behind, as vLLM's engine does.
VLLM = """
import os, subprocess, sys, time
from types import SimpleNamespace
__version__ = "0.0"
now = 0.0
time.perf_counter = lambda: now
step = 2e-3 if os.environ["MARLINQ_VLLM"] == "off" else 1e-3
class SamplingParams(SimpleNamespace): pass
class LLM:
    def __init__(self, model, **options):
        global now
        now += 3
        if os.path.exists(os.path.join(model, "broken")):
            raise SystemExit("no kernel for this model")
        self.fault = os.path.join(model, "fault") if step < 2e-3 else ""
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.path.join(model, "left"), "a") as file:
            print(left.pid, file=file)
        print("INFO Using " + ("A" if step > 1e-3 else "B") + "Kernel for Something")
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 100))
        self.longest = options["max_model_len"]
    def generate(self, prompts, sampling, use_tqdm):
        global now
        lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        new = [each.max_tokens for each in sampling]
        assert all(a + b <= self.longest for a, b in zip(lengths, new))
        if lengths[0] == 200 and os.path.exists(self.fault):
            with open(self.fault) as file:
                exec(file.read())
        now += step * max(new) + 1e-5 * sum(lengths)
"""
# The engines' processes ask torch for its version and the device; the real one takes seconds to import.
TORCH = """
from types import SimpleNamespace
__version__ = "0.0"
cuda = SimpleNamespace(is_available=lambda: False)
"""
WORK = {"batches": (1, 4), "prompts": (1, 2), "prompt_tokens": 200, "requests": 3, "repeats": 2}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of this process and its children that holds the stand-ins."""
    room = tmp_path / "packages"
    (room / "vllm").mkdir(parents=True)
    (room / "vllm" / "__init__.py").write_text(VLLM)
    (room / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(str(room))
    monkeypatch.setenv("PYTHONPATH", f"{room}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return room


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    return folder


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where pytest's workers ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    # A killed process whose parent has not asked for it yet is a zombie.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("vllm")
def test_times_are_the_engines_own(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The engines import nothing from the current folder, which may be the checkpoint.
    (checkpoint / "torch.py").write_text("raise SystemExit('the current folder was imported from')")
    monkeypatch.chdir(checkpoint)
    report = bench_serve(Workload(str(checkpoint), **WORK))
    own, plugin = report.engines.values()
    assert own.step_seconds == pytest.approx({"1": 2e-3, "4": 2e-3})
    assert plugin.step_seconds == pytest.approx({"1": 1e-3, "4": 1e-3})
    assert own.first_token_seconds == pytest.approx({"1": 4e-3, "2": 6e-3})
    lengths, new = requests(3)
    assert own.tokens_per_second == pytest.approx(sum(new) / (2e-3 * max(new) + 1e-5 * sum(lengths)))
    assert (own.said, plugin.said) == (("Using AKernel for Something",), ("Using BKernel for Something",))
    ratios = [round(row[3], 2) for row in report.rows()[:2]]
    assert ratios == [0.5, 0.5]
    assert report.render().count("0.50") >= 2
    assert json.loads(json.dumps(report.to_dict()))["engines"]["vLLM"]["step_seconds"]["4"] == pytest.approx(
        2e-3
    )
    # Nothing that an engine left behind runs on.
    left = [int(line) for line in (checkpoint / "left").read_text().split()]
    assert len(left) == len(ENGINES)
    assert not [pid for pid in left if alive(pid)]
    save_plot(report, tmp_path / "steps.svg")
    drawn = ElementTree.fromstring((tmp_path / "steps.svg").read_text())
    bars = [float(bar.attrib["width"]) for bar in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert bars == pytest.approx([165, 330, 165, 330])


FAULTS = {
    "error": ("raise SystemExit('out of memory')", EnvironmentProblem.exit_code, "out of memory"),
    "Ctrl-C": ("import signal; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)", 130, "interrupted"),
    "end": ("import signal; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", 130, "interrupted"),
}


@pytest.mark.usefixtures("vllm", "interruptible")
@pytest.mark.parametrize("fault", FAULTS)
def test_measurements_before_a_fault_are_kept(
    fault: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The second engine ends at its first prompts, after its steps.
    code, status, words = FAULTS[fault]
    (checkpoint / "fault").write_text(code)
    kept, plot = tmp_path / "kept.json", tmp_path / "steps.svg"
    options = f"--batch 1,4 --prompts 1,2 --prompt-tokens 200 --requests 3 --repeats 2 --out {kept}"
    command = ["bench", "serve", str(checkpoint), *options.split(), "--plot", str(plot)]

    def run() -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(command)
        return int(str(ended.value.code)), capsys.readouterr().out

    found, text = run()
    assert found == status
    rows = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
    assert rows["ms a step, batch 4"] == ["2.00", "1.00", "0.50"]
    assert rows["ms to first tokens, prompts 2"] == ["6.00", "-", "-"]
    assert "incomplete: " in text
    assert words in text
    assert not plot.exists()
    partial = json.loads(kept.read_text())
    assert words in partial["unfinished"]
    assert [each["complete"] for each in partial["engines"].values()] == [True, False]
    assert partial["engines"]["vLLM with marlinq"]["step_seconds"] == pytest.approx({"1": 1e-3, "4": 1e-3})
    left = [int(line) for line in (checkpoint / "left").read_text().split()]
    assert not [pid for pid in left if alive(pid)]
    if fault != "error":
        return
    (checkpoint / "fault").unlink()
    assert run()[0] == 0
    assert plot.exists()
    whole = json.loads(kept.read_text())
    assert whole["unfinished"] is None
    assert whole["engines"]["vLLM"] == partial["engines"]["vLLM"]
    assert whole["engines"]["vLLM with marlinq"]["complete"]
    # The first engine ran once, the second twice.
    assert len((checkpoint / "left").read_text().split()) == 3


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("text", ["", "[]", '{"workload": {}, "engines": {}, "marlinq": "0"}'])
def test_another_file_is_not_written_over(text: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text(text)
    with pytest.raises(UsageError, match="notes: expected measurements of the same checkpoint"):
        bench_serve(Workload(str(checkpoint)), out=tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == text


def test_a_name_in_a_plot_is_text() -> None:
    drawn = steps_plot({"<a & b>": {"1": 2.0}, "c": {"1": 1.0}}, ("<", "&"))
    words = "".join(ElementTree.fromstring(drawn).itertext())
    assert "<a & b>" in words


@pytest.mark.usefixtures("vllm")
def test_an_engine_that_fails_shows_its_log(checkpoint: Path) -> None:
    (checkpoint / "broken").touch()
    with pytest.raises(
        EnvironmentProblem, match="vLLM ended with 1; the end of its log: no kernel for this model"
    ):
        bench_serve(Workload(str(checkpoint), **WORK))


@pytest.mark.usefixtures("vllm")
def test_unsuitable_workloads_are_refused(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="--context 80: expected more than 80"):
        bench_serve(Workload(str(checkpoint), context=80))
    with pytest.raises(UsageError, match="not a folder"):
        bench_serve(Workload(str(checkpoint / "absent")))


def test_without_vllm(checkpoint: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="pip install vllm"):
        bench_serve(Workload(str(checkpoint)))
