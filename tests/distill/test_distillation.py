import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from isthmus.distill.dataset import tensors
from isthmus.distill.distillation import MODELS, DistillationReport
from isthmus.distill.evaluate import auc, sigmoid
from isthmus.distill.split import split_table
from isthmus.distill.student import load_student, read_record
from isthmus.distill.teacher import boost
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Stopped
from tests.distill.support import PROFILE, STUDENT, TEACHER, run, training_set


def test_all_four_stand_side_by_side(trained: DistillationReport) -> None:
    assert tuple(trained.models) == MODELS
    for measured in trained.models.values():
        assert measured.keys() == {"auc", "log_loss", "brier", "ece", "parameters", "bytes", "p50_us", "p99_us"}
        assert 0.5 < measured["auc"] < 1
    assert trained.models["teacher"]["auc"] > trained.models["reference"]["auc"] + 0.05
    assert trained.lift_kept is not None
    assert trained.lift_kept > 0.8
    assert sum(trained.rows.values()) <= 2000


def test_the_folder_holds_the_student(trained: DistillationReport, table: pa.Table) -> None:
    names = {file.name for file in trained.path.iterdir()}
    assert names == {"student.safetensors", "control.safetensors", "preparation.onnx", "student.json", "report.json"}
    assert json.loads((trained.path / "report.json").read_text(encoding="utf-8")) == trained.as_dict()
    record = read_record(trained.path)
    assert record.model_inputs == STUDENT
    parts, labels = split_table(table, record.label, record.split)
    for name in ("student", "control"):
        logits = load_student(trained.path, name).logits(tensors(table, STUDENT)[parts.test])
        assert auc(labels[parts.test], sigmoid(logits)) == trained.models[name]["auc"]


def test_the_same_input_gives_the_same_student(trained: DistillationReport, tmp_path: Path) -> None:
    notes: list[str] = []
    first = run(tmp_path, training_set(), notes=notes)
    weights = (first.path / "student.safetensors").read_bytes()
    assert first.id == trained.id
    assert weights == (trained.path / "student.safetensors").read_bytes()
    assert not any("kept outputs" in note for note in notes)
    again = run(tmp_path, training_set(), notes=notes)
    assert sum("kept outputs" in note for note in notes) == 2
    assert (again.path / "student.safetensors").read_bytes() == weights
    assert again.models["teacher"] == first.models["teacher"]
    assert [folder.name for folder in (tmp_path / "models").iterdir()] == [first.id]


@pytest.mark.parametrize(
    ("moment", "step"), [("student, epoch 2", 44), ("control, epoch 1", 22), ("student, epoch 4", 88)]
)
def test_stopped_and_begun_again_it_is_the_same_student(
    trained: DistillationReport, tmp_path: Path, moment: str, step: int
) -> None:
    def stopping(text: str) -> None:
        if text.startswith(moment):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(
        Stopped, match=rf"distillation late: stopped by SIGTERM after step {step} of 88\. The same command"
    ):
        run(tmp_path, training_set(), told=stopping)
    assert not (tmp_path / "models").exists()
    notes: list[str] = []
    again = run(tmp_path, training_set(), notes=notes)
    assert [note for note in notes if "goes on" in note][
        -1
    ] == f"{moment.split(',')[0]}, goes on after step {step} of 88"
    assert again.epochs == trained.epochs
    for name in ("student", "control"):
        file = f"{name}.safetensors"
        assert (again.path / file).read_bytes() == (trained.path / file).read_bytes()
    left = [file.relative_to(tmp_path / "runs") for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert {file.parts[:2] for file in left} == {(again.id, "student"), (again.id, "control")}
    assert all(file.name.startswith("events.out.tfevents.") for file in left)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DependencyError, match=r"was started as 2 processes.*expected one process"):
        run(tmp_path, training_set())


def test_another_setting_is_another_student(trained: DistillationReport, tmp_path: Path) -> None:
    ids = {
        run(tmp_path, training_set(), temperature=3.0).id,
        run(tmp_path, training_set(), replace(PROFILE, epochs=1)).id,
    }
    assert len(ids | {trained.id}) == 3


def test_the_teacher_does_not_depend_on_the_threads(table: pa.Table) -> None:
    data, (parts, labels) = tensors(table, TEACHER), split_table(table, "late", (0.7, 0.1, 0.2))
    one, two = (
        boost(data, labels, parts.train, rounds=5, learning_rate=0.1, threads=threads).logits for threads in (1, 2)
    )
    np.testing.assert_array_equal(one, two)


def test_the_teacher_learns_nothing_from_later_rows(table: pa.Table) -> None:
    data, (parts, labels) = tensors(table, TEACHER), split_table(table, "late", (0.7, 0.1, 0.2))
    outputs = boost(data, labels, parts.train, rounds=5, learning_rate=0.1, threads=1)
    changed = labels.copy()
    changed[parts.test] = 1 - changed[parts.test]
    again = boost(data, changed, parts.train, rounds=5, learning_rate=0.1, threads=1)
    np.testing.assert_array_equal(outputs.logits, again.logits)
    assert outputs.parameters > 0
    assert outputs.bytes > outputs.parameters


def test_nothing_is_written_when_the_input_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"distillation late: temperature: 0; expected more than 0"):
        run(tmp_path, training_set(), temperature=0)
    with pytest.raises(DataError, match="no column secret"):
        run(tmp_path, training_set().drop_columns("secret"))
    assert not (tmp_path / "models").exists()


def test_a_damaged_student_is_named(trained: DistillationReport, tmp_path: Path) -> None:
    (tmp_path / "student.json").write_bytes((trained.path / "student.json").read_bytes())
    weights = (trained.path / "student.safetensors").read_bytes()
    (tmp_path / "student.safetensors").write_bytes(weights[:-10])
    with pytest.raises(DataError, match=r"student.safetensors: cannot be read.*Run distill again"):
        load_student(tmp_path)
    (tmp_path / "student.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"student.json: cannot be read"):
        load_student(tmp_path)
