"""Students over the budget, students that fail, and two searches with different budgets."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from isthmus.distill.onnx.footprint import footprint
from isthmus.distill.reports.searchpage import search_page
from isthmus.distill.search.search import JOURNAL, require_fit
from isthmus.features.errors import (
    GateFailed,
)
from isthmus.features.profiles import ServingProfile
from tests.distill.sampletasks import BROKEN, FULL, SICK
from tests.distill.searching import FP32, searched, students

STARTED: list[str] = []
"""Commands of processes that were started."""
sys.addaudithook(lambda event, given: STARTED.append(str(given[1])) if event == "subprocess.Popen" else None)


@pytest.mark.accept
def test_what_the_budget_does_not_allow_is_not_trained(few: pa.Table, tmp_path: Path) -> None:
    notes: list[str] = []
    sizes = {one.shape["units"]: one.bytes for one in students(searched(tmp_path, few, FP32, trials=4))}
    most = sorted(size for size in sizes.values() if size)[1]
    report = searched(tmp_path / "other", few, FP32, trials=4, told=notes.append, of={"most_bytes": most})
    over = [one for one in students(report) if one.status == "over budget"]
    assert {one.shape["units"] for one in over} == {units for units, size in sizes.items() if size and size > most}
    assert over
    for one in over:
        assert (one.score, one.quality, one.difference) == (None, {}, None)
        assert one.bytes
        assert one.over == {"file": one.bytes / most - 1}
        assert one.why == f"file {one.bytes:,} bytes, at most {most:,}"
        assert one.number not in report.data["front"]
    assert sum("step 10 of 40" in note for note in notes) == 4 - len(over)
    assert "isthmus.toml" not in report.data["lines"]


@pytest.mark.accept
def test_a_budget_that_nothing_meets_is_said_with_the_nearest_miss(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, FP32, trials=2, of={"most_bytes": 10, "shape": {"units": (1, 8)}})
    smallest = min(students(report), key=lambda one: one.bytes or 0)
    assert smallest.shape == {"units": 1}
    with pytest.raises(GateFailed, match="none of 2 students fit the budget; nearest is units 1, fp32: file"):
        require_fit(report.data)
    assert "No student fits the budget." in search_page(report.data)


def test_too_slow_and_too_much_memory_are_over_the_budget(few: pa.Table, tmp_path: Path) -> None:
    tight = ServingProfile(
        precision="fp32", latency_objective_ms=1e-4, memory_mb=1, load_ms=1e-3, package_kb=0.01
    )  # fmt: skip
    STARTED.clear()
    (one,) = students(searched(tmp_path, few, tight, trials=1))
    assert one.over.keys() == {"p99", "memory", "load", "package"}
    # What was slow to load once may have been unlucky.
    assert len([command for command in STARTED if "isthmus.distill.onnx.footprint" in command]) == 2
    assert "p99 " in one.why
    assert "ms, at most 0.0001; memory " in one.why


@pytest.mark.accept
def test_what_fails_is_kept_with_its_reason(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, FP32, trials=3, of={"shape": {"units": (2, SICK, BROKEN)}})
    found = {one.shape["units"]: one for one in students(report)}
    assert found[2].status == "trained"
    assert found[SICK].status == found[BROKEN].status == "failed"
    assert found[SICK].why.startswith("term labels: the value is nan")
    assert found[BROKEN].why == "no such student"
    assert "no such student" in search_page(report.data)
    alone = searched(tmp_path, few, FP32, trials=1, of={"shape": {"units": (BROKEN,)}})
    with pytest.raises(GateFailed, match="none of 1 students could be trained; the first: no such student"):
        require_fit(alone.data)


def test_what_is_no_fault_of_a_student_is_not_kept(few: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        searched(tmp_path, few, FP32, trials=1, of={"shape": {"units": (FULL,)}})
    (journal,) = tmp_path.glob(f"search/*/{JOURNAL}")
    assert journal.read_bytes() == b""


@pytest.mark.accept
@pytest.mark.slowest
def test_an_output_that_a_student_does_not_say_is_named(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, FP32, trials=1, task="tests.distill.sampletasks:Silent")
    (one,) = students(report)
    assert one.status == "failed"
    assert (
        "output value of its graph: `expected` only returns other; expected the graph's outputs from `expected`"
        in one.why
    )


def test_a_model_that_no_process_opens_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        GateFailed, match=r"a fresh process with the model: exited with 1: .*ONNX Runtime: cannot open a session"
    ):
        footprint(b"no model", {}, 1, None)


@pytest.mark.accept
def test_two_searches_train_a_student_once(few: pa.Table, tmp_path: Path) -> None:
    searched(tmp_path, few, trials=1)
    (weights,) = tmp_path.glob("search/students/*.safetensors")
    learned = weights.read_bytes()
    weights.unlink()
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.distill.searching import say, searched, training_set\n"
        "searched(Path(sys.argv[1]), training_set(600), trials=1, told=say, of={'most_bytes': 1_000_000})\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with (
        (tmp_path / "runs" / weights.stem / "lock").open("rb") as lock,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert other.stdout
        lines = iter(other.stdout.readline, "")
        told = next(line for line in lines if "waiting for another search" in line or "step 10" in line)
        weights.write_bytes(learned)
        fcntl.flock(lock, fcntl.LOCK_UN)
        rest = other.stdout.read()
    assert "waiting" in told
    assert "step 10" not in rest
    assert other.returncode == 0
