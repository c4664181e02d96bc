"""Searches of students: what is tried, what is measured of it, what is kept, and what is refused."""

import fcntl
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from isthmus.distill.declaration import Search
from isthmus.distill.onnx import host
from isthmus.distill.onnx.footprint import footprint
from isthmus.distill.reports import search_page
from isthmus.distill.restore import create_task, restored
from isthmus.distill.search.pareto import front, front_naively
from isthmus.distill.search.sampler import RANDOM, Known, proposed
from isthmus.distill.search.search import JOURNAL, SearchReport, require_fit
from isthmus.distill.search.trials import Trials, Tried
from isthmus.distill.settings import Settings
from isthmus.distill.tasks.task import student_answers
from isthmus.features.errors import (
    ConfigurationError,
    ContractMismatch,
    DataError,
    DependencyError,
    GateFailed,
)
from isthmus.features.profiles import ServingProfile
from tests.distill.conftest import make_package
from tests.distill.sampletasks import BROKEN, FULL, SICK, Line
from tests.distill.searching import UNITS, searched
from tests.distill.support import declaration, material, run, training_set

FEW = training_set(600)
STARTED: list[str] = []
"""Commands of processes that were started."""
sys.addaudithook(lambda event, given: STARTED.append(str(given[1])) if event == "subprocess.Popen" else None)
AT_ONCE = {"shape": {"units": (BROKEN,)}}
"""Fails before anything is measured."""
FP32 = ServingProfile(precision="fp32", latency_objective_ms=1000, memory_mb=1000)
INT8 = replace(FP32, precision="int8")


@pytest.fixture(scope="module")
def few() -> pa.Table:
    return FEW


@pytest.fixture(scope="module")
def once(few: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchReport, list[str]]:
    """A search of everything there is, and what it said."""
    folder, notes = tmp_path_factory.mktemp("search"), list[str]()
    return folder, searched(folder, few, trials=100, told=notes.append), notes


def students(report: SearchReport) -> list[Tried]:
    lines = (report.path / JOURNAL).read_bytes().splitlines()
    # In the end they are measured side by side.
    assert [{**json.loads(line), "p50_us": None} for line in lines] == [
        {**one, "p50_us": None} for one in report.data["tried"]
    ]
    return [Tried(**one) for one in report.data["tried"]]


# --- the front


@given(hnp.arrays(np.float64, st.tuples(st.integers(0, 30), st.integers(1, 4)), elements=st.integers(-3, 3)))
def test_the_front_is_what_nothing_beats(points: np.ndarray[Any, Any]) -> None:
    assert front(points).tolist() == front_naively(points).tolist()


def test_the_front_of_few_points() -> None:
    points = np.array([[1, 3], [2, 2], [3, 1], [3, 3], [2, 2], [-np.inf, 9]])
    assert front(points).tolist() == [True, True, True, False, True, True]


# --- what is tried next

SIZES = {"width": 6, "depth": 3, "precision": 2}


def cost(place: tuple[int, ...]) -> Known:
    """Wide and deep is good, slow and large; what is wider than the fourth is over the budget."""
    width, depth, precision = place
    if width > 3:
        return Known(place, None, {"bytes": (width - 3) / 3})
    return Known(place, (-width - 0.3 * depth + 0.1 * precision, 1.0 + width * depth, 4.0 * width - precision))


def test_every_place_is_tried_once_and_always_in_the_same_order() -> None:
    orders = []
    for _ in range(2):
        known: list[Known] = []
        while (place := proposed(known, SIZES, 7)) is not None:
            known.append(cost(place))
        orders.append([one.place for one in known])
    assert orders[0] == orders[1]
    assert len(orders[0]) == len(set(orders[0])) == 6 * 3 * 2
    assert proposed([], SIZES, 7) != proposed([], SIZES, 8)


def test_after_the_first_few_the_budget_is_kept_to_more_often() -> None:
    inside = []
    for seed in range(12):
        known: list[Known] = []
        for _ in range(RANDOM + 6):
            place = proposed(known, SIZES, seed)
            assert place is not None
            known.append(cost(place))
        inside.append([one.values is not None for one in known])
    drawn, chosen = np.mean([found[:RANDOM] for found in inside]), np.mean([found[RANDOM:] for found in inside])
    assert drawn == pytest.approx(4 / 6, abs=0.12)
    assert chosen > drawn + 0.15


def test_where_nothing_keeps_to_the_budget_less_is_tried() -> None:
    known: list[Known] = []
    for _ in range(RANDOM + 12):
        place = proposed(known, SIZES, 3)
        assert place is not None
        known.append(Known(place, None, {"p99": place[0] + 1.0}))
    widths = [one.place[0] for one in known]
    assert np.mean(widths[RANDOM:]) < np.mean(range(6)) - 0.5


def test_where_something_failed_says_nothing_of_what_is_beside_it() -> None:
    places = [(width, depth, 0) for width in (0, 2, 3) for depth in range(3)]
    for seed in range(5):
        told = {
            proposed([*map(cost, places), *(Known((at, 1, 1), None) for at in failed)], SIZES, seed)
            for failed in ((0, 1), (2, 3), (4, 5))
        }
        assert len(told) == 1


@given(st.lists(st.sampled_from(["good", "over", "failed"]), max_size=14), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_whatever_came_of_it_something_new_is_proposed(states: list[str], seed: int) -> None:
    known: list[Known] = []
    for state in states:
        place = proposed(known, SIZES, seed)
        assert place is not None
        assert all(0 <= at < size for at, size in zip(place, SIZES.values(), strict=True))
        assert place not in {one.place for one in known}
        over = {"p99": 0.5} if state == "over" else {}
        known.append(Known(place, (0.0, 1.0, float(len(known))) if state == "good" else None, over))
    assert proposed(known, SIZES, seed) == proposed(known, SIZES, seed)


# --- a search


@pytest.mark.accept
def test_all_students_are_tried_and_measured(once: tuple[Path, SearchReport, list[str]]) -> None:
    _, report, notes = once
    tried = students(report)
    assert {(one.shape["units"], one.precision) for one in tried} == {(n, p) for n in UNITS for p in ("fp32", "int8")}
    assert "all 8 students that there are have been tried" in notes
    for one in tried:
        assert one.status == "trained", one.why
        assert one.bytes
        assert one.p50_us
        assert one.p99_us
        assert one.parameters == sum(weights.numel() for weights in Line(one.shape["units"]).parameters())
        assert one.apart is not None
        assert one.apart <= (1e-5 if one.precision == "fp32" else 0.5)
        assert one.score == one.quality["error"]
    # A student of two precisions is trained once.
    assert sum("step 10 of 40" in note for note in notes) == len(UNITS)


def test_what_counts_is_what_the_exported_graph_says_of_the_validation_part(
    once: tuple[Path, SearchReport, list[str]], few: pa.Table
) -> None:
    folder, report, _ = once
    task = create_task(material(few, task="tests.distill.sampletasks:Shaped"))
    kept = [load_file(file) for file in (folder / "search" / "students").iterdir()]
    for one in (one for one in students(report) if one.precision == "fp32"):
        (weights,) = [found for found in kept if len(found["layers.0.bias"]) == one.shape["units"]]
        student = Line(one.shape["units"]).eval().requires_grad_(requires_grad=False)
        student.load_state_dict(weights)
        rows = task.material.parts.validation
        answers = student_answers(task, student, rows, torch.device("cpu"))
        assert one.score == pytest.approx(task.quality(answers, rows, answers)["error"], rel=1e-5)
    # Eight bits answer otherwise.
    scores = {(one.shape["units"], one.precision): one.score for one in students(report)}
    assert all(scores[units, "fp32"] != scores[units, "int8"] for units in UNITS)


def test_the_front_and_the_best_of_it_are_told(once: tuple[Path, SearchReport, list[str]]) -> None:
    _, report, _ = once
    tried = students(report)
    points = np.array([[one.score, one.p50_us, one.bytes] for one in tried], float)
    assert report.data["front"] == np.flatnonzero(front_naively(points)).tolist()
    best = tried[report.data["recommended"]]
    assert best.score == min(one.score for one in tried if one.score is not None)
    assert report.data["lines"] == {
        "definitions.py": f"shape={{'units': {best.shape['units']}, 'layers': (1,)}}",
        "isthmus.toml": f'[profiles.serving]\nprecision = "{best.precision}"',
    }
    require_fit(report.data)
    page = search_page(report.data)
    assert f"Recommended: {best.name}" in page
    assert page.count("<svg") == 3
    assert "8 students 8 keep to the budget" in page


def test_nothing_is_done_twice(once: tuple[Path, SearchReport, list[str]], few: pa.Table) -> None:
    folder, report, _ = once
    before, notes = (report.path / JOURNAL).read_bytes(), list[str]()
    again = searched(folder, few, trials=3, told=notes.append)
    assert again.as_dict() == report.as_dict()
    assert (report.path / JOURNAL).read_bytes() == before
    # The budget is another: all are measured again, and none is trained again.
    other = searched(folder, few, trials=2, told=notes.append, of={"most_bytes": 1_000_000})
    assert other.path != report.path
    assert len(students(other)) == 2
    assert not any("step" in note or "rows a second" in note for note in notes)


@pytest.mark.parametrize(
    "changes",
    [{"contract": "d" * 64}, {"training_set": "set-2"}, {"split": (0.6, 0.2, 0.2)}, {"of": {"seed": 1}},
     {"of": {"settings": Settings(steps=41, batch=64)}}, {"shape": {"layers": (2,)}}],
)  # fmt: skip
def test_what_is_searched_for_is_part_of_the_search(
    once: tuple[Path, SearchReport, list[str]], few: pa.Table, changes: dict[str, Any]
) -> None:
    folder, _, _ = once
    unlike = {**changes, "of": {**AT_ONCE, **changes.get("of", {})}}
    first = searched(folder, few, trials=1, of=AT_ONCE)
    assert searched(folder, few, trials=1, of=AT_ONCE).path == first.path
    assert searched(folder, few, trials=1, **unlike).path != first.path


def test_another_machine_measures_for_itself(few: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted() -> tuple[SearchReport, list[str]]:
        notes: list[str] = []
        return searched(tmp_path, few, FP32, trials=1, told=notes.append), notes

    first, _ = noted()
    cpus = tmp_path / "cpuinfo"
    cpus.write_text("processor\t: 0\nmodel name\t: Another of 3 GHz\n")
    with monkeypatch.context() as there:
        there.setattr(host, "_CPUS", cpus)
        other, notes = noted()
        assert noted()[0].path == other.path
    assert other.path != first.path
    assert "Another of 3 GHz" in other.data["host"] != first.data["host"]
    said = f"was searched on {first.data['host']}, whose figures are not those of this host, {other.data['host']}: all"
    assert [note.startswith(said) for note in notes].count(True) == 1
    assert students(other)[0].number == 0
    assert not any("epoch" in note for note in notes)
    again, notes = noted()
    assert again.path == first.path
    assert not any("whose figures" in note for note in notes)


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
        assert (one.score, one.quality, one.apart) == (None, {}, None)
        assert one.bytes
        assert one.over == {"file": one.bytes / most - 1}
        assert one.why == f"file {one.bytes:,} bytes, at most {most:,}"
        assert one.number not in report.data["front"]
    assert sum("step 10 of 40" in note for note in notes) == 4 - len(over)
    assert "isthmus.toml" not in report.data["lines"]


def test_a_budget_that_nothing_meets_is_said_with_the_nearest_miss(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, FP32, trials=2, of={"most_bytes": 10, "shape": {"units": (1, 8)}})
    smallest = min(students(report), key=lambda one: one.bytes or 0)
    assert smallest.shape == {"units": 1}
    with pytest.raises(GateFailed, match="none of 2 students keeps to the budget; nearest is units 1, fp32: file"):
        require_fit(report.data)
    assert "No student keeps to the budget." in search_page(report.data)


def test_a_student_no_smaller_than_its_teacher_is_not_trained(few: pa.Table, tmp_path: Path) -> None:
    (one,) = students(searched(tmp_path, few, FP32, trials=1, of={"shape": {"units": (64,)}}))
    assert one.status == "over budget"
    assert one.why.startswith("weights 1,028 bytes, at most 1,027")


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


def test_an_output_that_a_student_does_not_say_is_named(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, FP32, trials=1, task="tests.distill.sampletasks:Silent")
    (one,) = students(report)
    assert one.status == "failed"
    assert "output value of its graph: the student says other; expected what `expected` says" in one.why


def test_a_report_that_is_none_is_written_again(few: pa.Table, tmp_path: Path) -> None:
    file = searched(tmp_path, few, trials=1, of=AT_ONCE).path / "search.json"
    before = file.read_bytes()
    for damaged in (b"", b"[]", b"{}", b'{"tried": null}', b'{"tried": [1]}'):
        file.write_bytes(damaged)
        searched(tmp_path, few, trials=1, of=AT_ONCE)
        assert file.read_bytes() == before


def test_a_model_that_no_process_opens_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GateFailed, match=r"a fresh process with the model: ended with 1: .*onnxruntime"):
        footprint(b"no model", {}, 1, None)


def test_a_table_is_searched_by_width_and_depth(few: pa.Table, tmp_path: Path) -> None:
    shape = {"width": (4, 8), "depth": (1, 2)}
    # The student's weights and its texts' embeddings are less than ten trees.
    changes: dict[str, Any] = {"task": declaration(teacher_rounds=60).task, "of": {"shape": shape}}
    report = searched(tmp_path, few, FP32, trials=4, **changes)
    tried = students(report)
    assert [one.status for one in tried] == ["trained"] * 4, [one.why for one in tried]
    best = tried[report.data["recommended"]]
    hidden = {(4, 1): "(4,)", (4, 2): "(4, 2)", (8, 1): "(8,)", (8, 2): "(8, 4)"}
    chosen = hidden[best.shape["width"], best.shape["depth"]]
    assert report.data["lines"] == {"definitions.py": f"task=Tabular(hidden={chosen})"}
    assert len({one.parameters for one in tried}) == 4


# --- killed


@pytest.mark.accept
@pytest.mark.timeout(600)
def test_a_search_that_is_killed_goes_on(few: pa.Table, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = students(searched(whole, few, trials=5))
    units = [one.shape["units"] for one in expected]
    last = max(units.index(one) for one in units)  # that is trained
    with subprocess.Popen(
        [sys.executable, "-m", "tests.distill.searching", str(killed), "5"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        for line in child.stdout:
            if line.startswith(f"student {last + 1} of 5, step 10"):
                child.kill()
                break
    (journal,) = (killed / "search").glob(f"*/{JOURNAL}")
    before = journal.read_bytes()
    assert len(before.splitlines()) == last
    found = students(searched(killed, few, trials=5))
    assert journal.read_bytes().startswith(before)
    (searched(killed, few, trials=5).path / "graphs" / "4.ort").unlink()
    with pytest.raises(DataError, match=r"4\.ort: cannot be read: .*Remove .* to search anew"):
        searched(killed, few, trials=6)
    assert [(one.shape, one.precision, one.score, one.bytes) for one in found] == [
        (one.shape, one.precision, one.score, one.bytes) for one in expected
    ]


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
        told = next(line for line in lines if "waits for another search" in line or "step 10" in line)
        weights.write_bytes(learned)
        fcntl.flock(lock, fcntl.LOCK_UN)
        rest = other.stdout.read()
    assert "waits" in told
    assert "step 10" not in rest
    assert other.returncode == 0


def test_a_line_that_was_not_finished_is_tried_again(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, trials=2, of=AT_ONCE)
    file, (first, second) = report.path / JOURNAL, students(report)
    whole = file.read_bytes()
    for cut in (1, 20, len(whole) - len(whole.splitlines()[0]) - 1):
        file.write_bytes(whole[:-cut])
        again = students(searched(tmp_path, few, trials=2, of=AT_ONCE))
        assert again[0] == first
        assert (again[1].shape, again[1].precision, again[1].why) == (second.shape, second.precision, second.why)


@pytest.mark.parametrize(("old", "new", "words"), [
    (b'"number":0', b'"number":1', r"line 1: is student 1; expected student 0\. Remove the file"),
    (b'"number":0', b'"number"0', r"line 1: cannot be read: JSON is malformed"),
    (b'"failed"', b'"untrue"', r"line 1: cannot be read: Invalid enum value 'untrue'"),
])  # fmt: skip
def test_a_damaged_file_is_said(few: pa.Table, tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    file = searched(tmp_path, few, trials=1, of=AT_ONCE).path / JOURNAL
    file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(DataError, match=words):
        searched(tmp_path, few, trials=1, of=AT_ONCE)


def test_two_do_not_search_at_the_same_place(few: pa.Table, tmp_path: Path) -> None:
    report = searched(tmp_path, few, trials=1, of=AT_ONCE)
    with Trials(report.path / JOURNAL).locked(), pytest.raises(DependencyError, match="another process is searching"):
        searched(tmp_path, few, trials=2, of=AT_ONCE)


# --- what is declared


@pytest.mark.parametrize(
    ("task", "of", "words"),
    [
        ("a:B", {"shape": {}}, "search: shape: {}; expected at least one name with values"),
        ("a:B", {"trials": 0}, "search: trials: 0; expected at least 1"),
        ("a:B", {"most_bytes": 0}, "search: most_bytes: 0; expected at least 1"),
        ("a:B", {"seed": -1}, "search: seed: -1; expected 0 to"),
        ("a:B", {"shape": {"units": 3}}, "search: shape 'units': 3; expected a sequence of values"),
        ("a:B", {"shape": {"units": "12"}}, "search: shape 'units': '12'; expected a sequence of values"),
        ("a:B", {"shape": {"units": ()}}, r"search: shape 'units': \(\); expected a sequence of values"),
        ("a:B", {"shape": {"units": (float("nan"),)}}, r"shape 'units': \(nan,\); expected numbers, truth values"),
        ("a:B", {"shape": {"units": ({1},)}}, r"shape 'units': \(\{1\},\); expected numbers, truth values"),
        ("a:B", {"shape": {"units": ((1,), [1])}}, r"shape 'units': \(\(1,\), \[1\]\); expected each value once"),
        (
            "a:B",
            {"shape": {"precision": (1, 2)}},
            r"shape 'precision': is what \[profiles.serving\] says; expected another",
        ),
        ("a:B", {"shape": {"units": (1, 2, 1)}}, r"shape 'units': \(1, 2, 1\); expected each value once"),
        ("a:B", {"settings": Settings(batch=0)}, "search: batch: 0; expected at least 1"),
        ("a:B", {"settings": Settings(steps=1, gate="auc")}, "search: gate: 'auc'; expected None: the task's"),
        (None, {"shape": {"hidden": (1,)}}, "shape 'hidden': is no part of a Tabular's student; expected one of"),
        (None, {"shape": {"width": (0,)}}, r"shape 'width': \(0,\); expected whole numbers of at least 1"),
        (None, {"shape": {"depth": (1.5,)}}, r"shape 'depth': \(1.5,\); expected whole numbers of at least 1"),
    ],
)
def test_what_is_wrong_in_a_search_is_said(task: str | None, of: dict[str, Any], words: str) -> None:
    declared = Search(**{"shape": {"width": range(1, 4)}, **of})
    problems = declaration(search=declared, **({} if task is None else {"task": task})).problems()
    assert any(re.search(words, str(problem)) for problem in problems), list(map(str, problems))


def test_a_search_is_right() -> None:
    declared = Search(shape={"width": range(8, 65, 8), "depth": [1, 2]}, most_bytes=100_000)
    assert declaration(search=declared).problems() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"of": {"shape": {"width": (1, 2)}}}, "shape 'width': the student is not made with it; expected one of"),
        (
            {"task": "tests.distill.sampletasks:Exact"},
            "serving: precision: int8; expected a precision that the task has: fp32",
        ),
        ({"search": None}, r"search: is not declared; expected Distillation\(search"),
        ({"trials": 0}, "trials: 0; expected at least 1"),
        (
            {"task": "tests.distill.sampletasks:Lines"},
            "'units': the student is not made with it; expected a task that has",
        ),
        ({"shape": {"width": 3}}, "distillation late: shape 'width': the student is not made with it; expected one of"),
    ],
)
def test_what_cannot_be_searched_is_said_before_a_teacher_is_asked(
    few: pa.Table, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    notes: list[str] = []
    with pytest.raises(ConfigurationError, match=words):
        searched(tmp_path, few, INT8, told=notes.append, **changes)
    assert notes == []


def test_the_layers_of_a_table_are_declared_in_one_place() -> None:
    (problem,) = declaration(shape={"width": 3}).problems()
    assert str(problem).endswith("shape: {'width': 3}; expected nothing: the layers of a Tabular are its `hidden`")


def test_what_was_found_is_declared_and_trained(few: pa.Table, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"task": "tests.distill.sampletasks:Shaped", "seeds": 1, "epochs": 1}
    report = run(tmp_path, few, shape={"units": 5}, **changes)
    assert report.data["models"]["student"]["parameters"] == sum(one.numel() for one in Line(5).parameters())
    again = restored(material(few, shape={"units": 5}, **changes), report.path)
    assert again.task.shape == {"units": 5, "layers": (1,)}
    with pytest.raises(ContractMismatch, match="what is declared of it has changed"):
        restored(material(few, **changes), report.path)


def test_a_precision_that_a_task_lacks_is_said(few: pa.Table, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"task": "tests.distill.sampletasks:Exact", "seeds": 1, "epochs": 1}
    trained = run(tmp_path, few, **changes)
    with pytest.raises(ConfigurationError, match="precision: int8; expected a precision that the task has: fp32"):
        make_package(trained.path, few, tmp_path / "packages", INT8, **changes)


def test_a_page_is_of_a_search() -> None:
    with pytest.raises(DataError, match="format None; expected format 1"):
        search_page({})
    with pytest.raises(DataError, match="missing required field"):
        search_page({"format": 1})
