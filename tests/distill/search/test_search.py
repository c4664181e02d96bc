"""A search from end to end: which students, what is measured of each, and its report."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from isthmus.distill.onnx import host
from isthmus.distill.reports.searchpage import search_page
from isthmus.distill.restore import create_task
from isthmus.distill.search.search import JOURNAL, SearchReport, require_fit
from isthmus.distill.settings import Settings
from isthmus.distill.tasks.answers import student_answers
from tests.distill.sampletasks import Line
from tests.distill.searching import AT_ONCE, FP32, UNITS, front_naively, searched, students
from tests.distill.support import material


@pytest.fixture(scope="module")
def once(few: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchReport, list[str]]:
    """A search of everything there is, and what it said."""
    folder, notes = tmp_path_factory.mktemp("search"), list[str]()
    return folder, searched(folder, few, trials=100, told=notes.append), notes


@pytest.mark.accept
def test_all_students_are_tried_and_measured(once: tuple[Path, SearchReport, list[str]]) -> None:
    _, report, notes = once
    tried = students(report)
    assert {(one.shape["units"], one.precision) for one in tried} == {(n, p) for n in UNITS for p in ("fp32", "int8")}
    assert "all 8 possible students have been measured" in notes
    for one in tried:
        assert one.status == "trained", one.why
        assert one.bytes
        assert one.p50_us
        assert one.p99_us
        assert one.parameters == sum(weights.numel() for weights in Line(one.shape["units"]).parameters())
        assert one.difference is not None
        assert one.difference <= (1e-5 if one.precision == "fp32" else 0.5)
        assert one.score == one.quality["error"]
        assert one.difference == report.data["tried"][one.number]["apart"]
    # A student of two precisions is trained once.
    assert sum("step 10 of 40" in note for note in notes) == len(UNITS)


@pytest.mark.accept
@pytest.mark.slowest
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
    assert "8 students, 8 fit the budget" in page


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


@pytest.mark.accept
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
    said = f"earlier figures are from {first.data['host']}, not from this host, {other.data['host']}: all"
    assert [note.startswith(said) for note in notes].count(True) == 1
    assert students(other)[0].number == 0
    assert not any("epoch" in note for note in notes)
    again, notes = noted()
    assert again.path == first.path
    assert not any("whose figures" in note for note in notes)
