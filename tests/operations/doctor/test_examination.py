"""``marlinq doctor`` on machines of every kind, made by replacing what it looks at."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from marlinq.cli import main
from marlinq.operations.doctor import Finding, State, examination, gpu, packages
from tests.testing import forks

HOPPER = gpu.DriverDevice("a Hopper", (9, 0), 140 * 2**30)
TURING = gpu.DriverDevice("a Turing", (7, 5), 15 * 2**30)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that says which distributions are installed."""

    def pretend(**versions: str) -> None:
        by_name = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(gpu, "installed_version", by_name.get)
        monkeypatch.setattr(packages, "installed_version", by_name.get)

    return pretend


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that doctor runs in a process of its own runs in this one, which has imported everything."""

    def run(code: str) -> tuple[str, None]:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, {})
        return printed.getvalue().strip(), None

    monkeypatch.setattr(examination, "run_apart", run)


def driver(major: int, *devices: gpu.DriverDevice) -> gpu.Driver:
    return gpu.Driver((major, 0), devices)


def test_two_cupy_builds_shadow_each_other(installed: Callable) -> None:
    installed(cupy_cuda12x="13.6.0", cupy_cuda13x="14.2.0")
    finding = gpu.cupy_finding(driver(13, HOPPER))
    assert finding.state is State.PROBLEM
    assert "shadow" in finding.found
    assert finding.fix.endswith("pip install cupy-cuda13x")
    assert gpu.cupy_finding(driver(12, HOPPER)).fix.endswith("pip install cupy-cuda12x")


def test_cupy_newer_than_the_driver(installed: Callable) -> None:
    installed(cupy_cuda13x="14.2.0")
    finding = gpu.cupy_finding(driver(12, HOPPER))
    assert finding.state is State.PROBLEM
    assert "cuda12" in finding.fix
    assert gpu.cupy_finding(driver(13, HOPPER)).state is State.OK


def test_older_cupy_runs_on_a_newer_driver(installed: Callable) -> None:
    installed(cupy_cuda12x="13.6.0")
    assert gpu.cupy_finding(driver(13, HOPPER)).state is State.OK


def test_missing_cupy_matters_only_with_a_gpu(installed: Callable) -> None:
    installed()
    assert gpu.cupy_finding(None).state is State.ABSENT
    with_gpu = gpu.cupy_finding(driver(12, HOPPER))
    assert with_gpu.state is State.PROBLEM
    assert '".[cuda12]"' in with_gpu.fix


def test_bindings_of_another_cuda(installed: Callable) -> None:
    installed(cupy_cuda12x="13.6.0", cuda_bindings="13.0.1")
    finding = gpu.bindings_finding(driver(13, HOPPER))
    assert finding.state is State.PROBLEM
    assert '".[cuda12]"' in finding.fix
    installed(cupy_cuda12x="13.6.0", cuda_bindings="12.9.1")
    assert gpu.bindings_finding(driver(13, HOPPER)).state is State.OK


def test_devices_that_are_too_old_or_hidden() -> None:
    assert [finding.state for finding in gpu.device_findings(driver(13, HOPPER, TURING))] == [
        State.OK,
        State.PROBLEM,
    ]
    (hidden,) = gpu.device_findings(driver(13))
    assert (hidden.state, "CUDA_VISIBLE_DEVICES" in hidden.fix) == (State.PROBLEM, True)


def test_nvrtc_compiles_for_the_first_device() -> None:
    finding = gpu.nvrtc_finding(driver(13, HOPPER))
    assert finding.state is State.OK
    assert "sm_90" in finding.found


def test_nvrtc_that_does_not_know_the_device() -> None:
    unknown = gpu.DriverDevice("from the future", (77, 7), 2**30)
    finding = gpu.nvrtc_finding(driver(13, unknown))
    assert finding.state is State.PROBLEM
    assert "sm_777" in finding.found
    assert finding.fix


@pytest.mark.parametrize(
    ("version", "state"),
    [("3.0", State.OK), ("2.9.9", State.PROBLEM), ("3.1rc1", State.OK), (None, State.PROBLEM)],
)
def test_required_versions(installed: Callable, version: str | None, state: State) -> None:
    installed(**({"thing": version} if version else {}))
    finding = packages.check(Requirement("thing>=3.0"))
    assert finding.state is state
    assert bool(finding.fix) == (state is State.PROBLEM)


def test_code_in_a_process_of_its_own_reports_its_last_line() -> None:
    assert packages.run_apart("print(1 + 1)") == ("2", None)
    assert packages.run_apart("import no_such_module_at_all") == (
        "",
        "ModuleNotFoundError: No module named 'no_such_module_at_all'",
    )
    assert packages.run_apart("import os; os._exit(3)") == ("", "exit code 3")


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_info:
        main(["doctor", *arguments])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code, capsys.readouterr().out


def test_doctor_passes_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(code: str) -> tuple[str, str | None]:
        done = forks.run(code, modules=forks.TORCH)
        return done.stdout.strip(), done.stderr.strip().splitlines()[-1] if done.returncode else None

    # Apart from this process, in one that has imported torch.
    monkeypatch.setattr(examination, "run_apart", run)
    code, out = doctor(capsys, "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (0, True)
    assert {finding["state"] for finding in report["findings"]} <= {"ok", "absent", "problem"}
    problems = [finding for finding in report["findings"] if finding["state"] == "problem"]
    assert all(finding["fix"] for finding in problems)


@pytest.mark.usefixtures("run_here")
def test_doctor_fails_when_a_package_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Finding("transformers", State.PROBLEM, "not installed", "pip install transformers")
    monkeypatch.setattr("marlinq.operations.doctor.examination.package_findings", lambda: [broken])
    code, out = doctor(capsys)
    assert code == 8
    assert "fix: pip install transformers" in out
    assert "\nno  quantize" in out


def test_doctor_fails_when_torch_does_not_import(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "marlinq.operations.doctor.examination.run_apart", lambda code: ("", "OSError: libc10.so")
    )
    code, out = doctor(capsys)
    assert code == 8
    assert "OSError: libc10.so" in out


@pytest.mark.parametrize("relative", ["", "folder"], ids=["from an empty entry", "from a path entry"])
def test_nothing_of_the_current_folder_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("torch", "marlinq", "json", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(f"open('ran {name}', 'w')")
    monkeypatch.syspath_prepend(str(tmp_path) if relative else "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert packages.run_apart("import json, sys; print(json.__name__)") == ("json", None)
    _, problem = packages.run_apart("import marlinq.core.errors")
    assert problem is None
    assert not list(tmp_path.glob("ran *"))


def test_a_module_run_by_name_imports_nothing_of_the_current_folder(tmp_path: Path) -> None:
    for name in ("click", "torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"open('ran {name}', 'w')")
    environment = {**os.environ, "PYTHONPATH": str(Path(packages.__file__).parents[3])}
    command = [sys.executable, "-m", "marlinq", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("marlinq ")
    assert not list(tmp_path.glob("ran *"))


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_TIMEOUT", 0.2)
    assert packages.run_apart("while True: pass") == ("", "did not end within 0.2 s")


@pytest.mark.usefixtures("run_here")
@pytest.mark.parametrize("exists", [True, False])
def test_cache_folder_is_where_the_kernels_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exists: bool
) -> None:
    folder = tmp_path / "cache"
    if exists:
        (folder / "kernels").mkdir(parents=True)
        (folder / "kernels" / "some.cubin").write_bytes(bytes(1_000_000))
    monkeypatch.setenv("MARLINQ_CACHE", str(folder))
    finding = examination._kernel_cache()
    assert finding.state is State.OK
    assert finding.found == f"{folder}: {'1 file, 1.0' if exists else '0 files, 0.0'} MB"


@pytest.mark.usefixtures("run_here")
def test_cache_folder_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "file"))
    finding = examination._kernel_cache()
    assert finding.state is State.PROBLEM
    assert "MARLINQ_CACHE" in finding.fix


@pytest.mark.usefixtures("run_here")
def test_cache_folder_that_others_can_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "cache"))
    finding = examination._kernel_cache()
    assert finding.state is State.PROBLEM
    assert finding.found.startswith(f"{tmp_path / 'cache'}: others can write there")
    assert finding.fix.startswith(f"run chmod go-w {tmp_path / 'cache'}")


def test_little_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination, "_WORKING_SPACE", 2**60)
    assert examination._disk().state is State.PROBLEM
