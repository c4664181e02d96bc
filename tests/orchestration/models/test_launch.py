"""`isthmus distill --processes 2`: the processes, what they print and what ends them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from isthmus.features.errors import (
    ConfigurationError,
    DependencyError,
    LostProcessError,
    Problem,
    RequestError,
    Stopped,
)
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.cli.cli import app
from isthmus.orchestration.fleet.files import files
from isthmus.orchestration.models.launch import _cause, write_error
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from tests.orchestration.conftest import once
from tests.orchestration.shop import learnable, write
from tests.processes import end, orphans

TWO = ("--processes", "2")
SETTINGS = "settings=Settings(steps=STEPS, batch=256, evaluate_every=50, checkpoint_steps=50)"


@pytest.fixture
def shop(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A shop with a training set."""

    def make(folder: Path) -> None:
        project = Project(learnable(write(folder)).root)
        for step in (apply, build, training_set):
            step(project)

    folder = Path(shutil.copytree(once(tmp_path_factory, "prepared-shop", make), tmp_path / "shop"))
    yield folder
    end(folder)


def distilled(shop: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "isthmus", "distill", "--project", str(shop), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.mark.accept
def test_two_processes_print_one_report(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = distilled(shop, "--json", *TWO).communicate(timeout=200)
    report = json.loads(out)
    assert report["id"].endswith("-p2")
    assert report["training"]["processes"] == [2]
    assert sum("prepare done" in line for line in err.splitlines()) == 1
    (model,) = shop.glob("*/models/*/*-p2")
    assert {"MODEL_CARD.md", "BOUNDARY.md", "report.html"} <= {file.name for file in model.iterdir()}
    assert "| processes | 2 |" in (model / "BOUNDARY.md").read_text()
    assert (model.parent / "latest").read_text() == report["id"]
    # An error is that of one process, too.
    monkeypatch.setenv("ISTHMUS_PROFILES__TRAINING__BATCH", "255")
    process = distilled(shop, "--json", *TWO)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 2
    assert json.loads(out)["error"] == "ConfigurationError"
    assert err.splitlines()[-1].count("255 rows cannot be divided among 2 processes; expected a multiple of 2") == 1


@pytest.mark.accept
def test_models_trained_side_by_side_are_the_same_to_the_bit(shop: Path) -> None:
    reports: list[Any] = []
    for options in (["--parallel", "2"], ["--again"]):
        process = distilled(shop, "--json", *options)
        out, err = process.communicate(timeout=200)
        report = json.loads(out)
        (model,) = shop.glob("*/models/*/*/student.safetensors")
        weights = [(model.parent / f"{name}.safetensors").read_bytes() for name in ("student", "control")]
        figures = [report[part] for part in ("id", "taught", "gap_closed", "measures", "agreement", "slices")]
        runs = [(run["quality"], run["history"], run["processes"]) for run in report["runs"]]
        reports.append([weights, figures, runs])
        assert ("is trained already" in err) == ("--parallel" in options)
    assert reports[0] == reports[1]


@pytest.mark.accept
def test_pods_of_a_fleet_train_side_by_side_and_the_last_one_reports(shop: Path) -> None:
    """The command of the Job, with the indexes as Kubernetes would fill them in."""
    settings = shop / "isthmus.toml"
    text = settings.read_text()
    assert text.count("[profiles.training]\n") == 1
    settings.write_text(text.replace("[profiles.training]\n", "[profiles.training]\nparallel = 2\n"))
    job = yaml.safe_load(files(Project(shop))["base/training/job.yaml"])["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["isthmus", "distill"]
    words = [" ".join(command[2:]).replace("/project", str(shop)).replace("$(JOB_COMPLETION_INDEX)", n) for n in "01"]
    pods = [distilled(shop, *given.split(), "--json") for given in words]
    said = [pod.communicate(timeout=300) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    (report,) = [json.loads(out) for out, _ in said if out]
    (silent,) = [err for out, err in said if not out]
    assert "the last part reports" in silent
    figures = [report[part] for part in ("id", "taught", "gap_closed", "measures", "agreement", "slices")]
    (model,) = shop.glob("*/models/*/*/student.safetensors")
    weights = [(model.parent / f"{name}.safetensors").read_bytes() for name in ("student", "control")]
    out, _ = distilled(shop, "--json", "--again").communicate(timeout=200)
    alone = json.loads(out)
    assert figures == [alone[part] for part in ("id", "taught", "gap_closed", "measures", "agreement", "slices")]
    assert weights == [(model.parent / f"{name}.safetensors").read_bytes() for name in ("student", "control")]


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.parametrize(("number", "ended", "code"), [
    (signal.SIGINT, "launcher", 130), (signal.SIGTERM, "launcher", 143), (signal.SIGKILL, "launcher", -9),
    (signal.SIGKILL, "0", 3), (signal.SIGKILL, "1", 3),
])  # fmt: skip
def test_a_signal_ends_all_processes_and_the_training_goes_on(
    shop: Path, number: signal.Signals, ended: str, code: int
) -> None:
    definitions = shop / "definitions.py"
    text = definitions.read_text()
    assert text.count("seeds=1") == 1
    text = text.replace("seeds=1", "seeds=1, " + SETTINGS.replace("STEPS", "3000"))
    definitions.write_text(
        text.replace("from isthmus import (", "from isthmus import Settings\nfrom isthmus import (", 1)
    )
    process = distilled(shop, *TWO)
    assert process.stderr is not None
    next(line for line in process.stderr if "student-0, step 200 of" in line)
    ranks = {child.environ()["RANK"]: child for child in psutil.Process(process.pid).children()}
    ranks.get(ended, process).send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code
    assert orphans(shop, 30) == []
    if code == 3:
        assert f"rank {ended} of 2: was ended by SIGKILL" in err.splitlines()[-1]
    elif code > 0:
        assert f"stopped by {number.name}" in err.splitlines()[-1]
    _, err = distilled(shop, *TWO).communicate(timeout=200)
    assert "student-0, goes on after step" in err
    assert "100% student " in err


def test_processes_are_asked_for_once(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="--processes, --parallel and --part cannot be combined"):
        app(["distill", "--project", str(shop), *TWO, "--parallel", "2"], standalone_mode=False)
    for part in ("2/2", "1", "-1/2", "0/0"):
        with pytest.raises(RequestError, match="expected K/N with K from 0 to N - 1"):
            app(["distill", "--project", str(shop), f"--part={part}"], standalone_mode=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RequestError, match="asks for 2 processes in one of 4"):
        app(["distill", "--project", str(shop), *TWO], standalone_mode=False)


def test_the_cause_comes_before_what_it_caused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    write_error(tmp_path, LostProcessError("here", "rank 1 of 3 failed"))
    assert isinstance(_cause(tmp_path, {0: 3, 1: -15}, 3), LostProcessError)
    killed = _cause(tmp_path, {0: 3, 1: -9, 2: -15}, 3)
    assert type(killed) is DependencyError
    assert str(killed).startswith("rank 1 of 3: was ended by SIGKILL. Check the memory")
    log = tmp_path / "attempt_0" / "2" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("Traceback ...\nZeroDivisionError: division by zero\n")
    assert "ZeroDivisionError" in _cause(tmp_path, {0: 3, 2: 1}, 3).found
    time.sleep(0.01)
    wrong = ConfigurationError("there", [Problem("batch", "7"), Problem("steps", "0")], remedy="change them")
    monkeypatch.setenv("RANK", "1")
    write_error(tmp_path, wrong)
    cause = _cause(tmp_path, {0: 3, 1: 2, 2: -9}, 3)
    assert (type(cause), str(cause), cause.as_dict()) == (ConfigurationError, str(wrong), wrong.as_dict())
    write_error(tmp_path, Stopped("there", "stopped", 2))
    stopped = _cause(tmp_path, {1: 130}, 3)
    assert isinstance(stopped, Stopped | LostProcessError)
