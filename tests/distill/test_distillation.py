import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from isthmus.distill.distillation import UNCHANGED, DistillationReport
from isthmus.distill.evaluation.metrics import auc, sigmoid
from isthmus.distill.gates import Gate
from isthmus.distill.reports.modelcard import model_card
from isthmus.distill.reports.page import page
from isthmus.distill.restore import restore
from isthmus.distill.tabular.student import Student, read_record
from isthmus.distill.tabular.teacher import Boosting
from isthmus.distill.tabular.tensors import tensors
from isthmus.distill.tasks.split import binary_labels, split_table
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError
from tests.distill.support import PROFILE, STUDENT, TEACHER, material, run, training_set


@pytest.mark.accept
def test_all_four_stand_side_by_side(trained: DistillationReport) -> None:
    models = trained.data["models"]
    assert [*models] == ["teacher", "reference", "student", "control"]
    for told in models.values():
        assert told["quality"].keys() == {"auc", "log_loss", "ece", "brier"}
        assert told.keys() == {"about", "quality", "intervals", "parameters", "bytes", "p50_us", "p99_us", "runtime"}
        assert 0.5 < told["quality"]["auc"] < 1
    assert models["teacher"]["quality"]["auc"] > models["reference"]["quality"]["auc"] + 0.05
    assert trained.data["measures"]["lift_kept"] > 0.8
    assert trained.data["pipeline"] == "tabular-classification"
    assert trained.data["agreement"].keys() == {"student", "control"}
    assert all(one["rows"] >= 200 for one in trained.data["slices"])
    assert sum(trained.data["rows"].values()) <= 2000


def test_the_folder_holds_the_student(trained: DistillationReport, table: pa.Table) -> None:
    names = {file.name for file in trained.path.iterdir()}
    assert names == {"student.safetensors", "control.safetensors", "preparation.onnx", "student.json", "report.json"}
    assert json.loads((trained.path / "report.json").read_bytes()) == trained.data
    record = read_record(trained.path)
    assert record.inputs == tuple((item.name, item.dtype.name) for item in STUDENT)
    parts = split_table(table, record.split)
    labels = binary_labels(table, record.label, parts)
    for one in trained.data["runs"]:
        if one["seed"] == trained.data["shipped"]:
            student = restore(material(table), trained.path, one["model"]).student
            assert isinstance(student, Student)
            logits = student.logits(tensors(table, STUDENT)[parts.test])
            assert auc(labels[parts.test], sigmoid(logits)) == one["quality"]["auc"]


def test_the_same_input_gives_the_same_student(trained: DistillationReport, tmp_path: Path) -> None:
    notes: list[str] = []
    first = run(tmp_path, training_set(), notes=notes)
    weights = (first.path / "student.safetensors").read_bytes()
    assert first.id == trained.id
    assert weights == (trained.path / "student.safetensors").read_bytes()
    assert not any("cached outputs" in note for note in notes)
    again = run(tmp_path, training_set(), notes=notes, again=True)
    assert again.trained
    assert sum("cached outputs" in note for note in notes) == 2
    assert (again.path / "student.safetensors").read_bytes() == weights
    assert again.data["models"]["teacher"] == first.data["models"]["teacher"]
    assert [folder.name for folder in (tmp_path / "models").iterdir()] == [first.id]


def test_student_and_control_stop_early_and_the_report_says_where(tmp_path: Path, table: pa.Table) -> None:
    notes: list[str] = []
    found = run(tmp_path, table, notes=notes, seeds=1, steps=200, patience=2, evaluate_every=5)
    for one in found.data["runs"]:
        best = max(range(len(one["history"])), key=lambda n: one["history"][n]["validation_auc"])
        assert one["planned"] == 200
        assert one["steps"] == 5 * (best + 3)
        assert one["steps"] < 200
        stop = f"{one['model']} of seed 0 at step {one['steps']} of 200"
        assert stop in model_card(found.data)
        assert stop in page(found.data)
        assert any(f"stopped early at step {one['steps']} of 200: no better validation_auc" in note for note in notes)


def test_nothing_changed_means_nothing_trained(trained: DistillationReport, table: pa.Table) -> None:
    folder, files = trained.path.parents[1], {file: file.read_bytes() for file in trained.path.iterdir()}

    def noted(**changes: Any) -> tuple[DistillationReport, list[str]]:
        notes: list[str] = []
        return run(folder, table, notes=notes, **changes), notes

    found, notes = noted()
    assert (found.id, found.data, found.trained) == (trained.id, trained.data, False)
    assert notes[1:] == [f"student {trained.id}: {UNCHANGED}"]
    assert {file: file.read_bytes() for file in trained.path.iterdir()} == files
    # A gate is of no student; nor is the cache of what the teacher said.
    (folder / "cache").rename(folder / "elsewhere")
    assert not noted(gates=[Gate("taught", at_least=2)])[0].trained
    assert not any((folder / "cache").glob("*/*.npy"))
    shutil.rmtree(folder / "cache")
    (folder / "elsewhere").rename(folder / "cache")


@pytest.mark.parametrize(
    "changes", [{"training_set": "set-2"}, {"batch": 65}, {"seeds": 1}, {"contract": "d" * 64}, {"hidden": (9,)}]
)
def test_what_changed_is_trained(trained: DistillationReport, table: pa.Table, changes: dict[str, Any]) -> None:
    def stopped(text: str) -> None:
        if "student-0" in text:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(trained.path.parents[1], table, told=stopped, **changes)


@pytest.mark.parametrize("name", ["control.safetensors", "student.json", "preparation.onnx", "report.json"])
def test_a_damaged_student_is_written_again_and_not_trained(
    trained: DistillationReport, table: pa.Table, tmp_path: Path, name: str
) -> None:
    copied = Path(shutil.copytree(trained.path.parents[1], tmp_path / "all"))
    file = copied / "models" / trained.id / name
    content = file.read_bytes()
    if name == "preparation.onnx":
        file.unlink()
    else:
        file.write_bytes(content[:-9])
    notes: list[str] = []
    again = run(copied, table, notes=notes)
    assert any(note.startswith(f"student {trained.id} is written again: ") and name in note for note in notes)
    assert sum("is trained already" in note for note in notes) == len(trained.data["runs"])
    assert (again.id, again.data["shipped"]) == (trained.id, trained.data["shipped"])
    if name != "report.json":  # which has times
        assert file.read_bytes() == content


@pytest.mark.accept
def test_another_setting_is_another_student(trained: DistillationReport, tmp_path: Path) -> None:
    ids = {
        run(tmp_path, training_set(), temperature=3.0).id,
        run(tmp_path, training_set(), replace(PROFILE, epochs=1)).id,
    }
    assert len(ids | {trained.id}) == 3


def boosting(table: pa.Table, labels: Array, threads: int = 1) -> Boosting:
    parts = split_table(table, (0.7, 0.1, 0.2))
    return Boosting(
        "boosting", lambda: tensors(table, TEACHER), labels, parts.train, rounds=5, learning_rate=0.1, threads=threads,
        recipe={},
    )  # fmt: skip


def test_the_teacher_does_not_depend_on_the_threads(table: pa.Table) -> None:
    rows, labels = np.arange(table.num_rows), table["late"].to_numpy()
    one, two = (boosting(table, labels, threads).ask(rows)["logits"].numpy() for threads in (1, 2))
    np.testing.assert_array_equal(one, two)


def test_the_teacher_learns_nothing_from_later_rows(table: pa.Table) -> None:
    rows, labels = np.arange(table.num_rows), table["late"].to_numpy()
    test, changed = split_table(table, (0.7, 0.1, 0.2)).test, labels.copy()
    changed[test] = 1 - changed[test]
    first, again = boosting(table, labels), boosting(table, changed)
    torch.testing.assert_close(first.ask(rows), again.ask(rows), rtol=0, atol=0)
    parameters, size = first.size()
    assert 0 < parameters < size


def test_nothing_is_written_when_the_input_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"distillation late: temperature: 0; expected more than 0"):
        run(tmp_path, training_set(), temperature=0)
    with pytest.raises(DataError, match="no column secret"):
        run(tmp_path, training_set().drop_columns("secret"))
    assert not (tmp_path / "models").exists()


def test_a_damaged_student_is_named(trained: DistillationReport, table: pa.Table, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes((trained.path / "report.json").read_bytes())
    (tmp_path / "student.json").write_bytes((trained.path / "student.json").read_bytes())
    weights = (trained.path / "student.safetensors").read_bytes()
    (tmp_path / "student.safetensors").write_bytes(weights[:-10])
    with pytest.raises(DataError, match=r"student.safetensors: cannot be read.*Run distill again"):
        restore(material(table), tmp_path)
    (tmp_path / "student.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"student.json: cannot be read"):
        restore(material(table), tmp_path)
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"report.json: cannot be read"):
        restore(material(table), tmp_path)


def test_parts_train_side_by_side_and_the_one_that_ends_last_reports(tmp_path: Path) -> None:
    table, notes = training_set(400), list[str]()
    second = run(tmp_path / "parts", table, part=(1, 2), notes=notes)
    assert not second.leads
    assert notes[-1] == "part 1 of 2 is trained; the last part reports (student-0, control-0 left)"
    assert not (tmp_path / "parts" / "models").exists()
    first = run(tmp_path / "parts", table, part=(0, 2), notes=notes)
    assert (first.leads, first.trained) == (True, True)
    assert not any("teacher outputs" in note for note in notes[notes.index("prepare done", 1) :])
    alone = run(tmp_path / "alone", table)
    for name in ("student", "control"):
        file = f"{name}.safetensors"
        assert (first.path / file).read_bytes() == (alone.path / file).read_bytes()
    assert [first.data[of] for of in ("id", "gap_closed", "measures", "slices")] == [
        alone.data[of] for of in ("id", "gap_closed", "measures", "slices")
    ]
    repeated = run(tmp_path / "parts", table, part=(1, 2))
    assert (repeated.leads, repeated.trained) == (True, False)
