"""A task of one's own, from its declaration to the student's folder."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from isthmus.distill import distillation
from isthmus.distill.accelerator import resolve
from isthmus.distill.distillation import DistillationReport, distill
from isthmus.distill.gates import Gate
from isthmus.distill.preflight import rehearse
from isthmus.distill.restore import create_task
from isthmus.distill.throttle import policy
from isthmus.distill.training import loop
from isthmus.distill.training.checkpoint import Checkpoints
from isthmus.distill.training.teacheroutputs import open_outputs
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, GateFailed, Stopped
from tests.distill import sampletasks
from tests.distill.pausing import CALM, STRAINED, Spent
from tests.distill.sampletasks import Line
from tests.distill.support import PROFILE, material, run, training_set


@pytest.fixture(scope="module")
def lines(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> DistillationReport:
    return trained(tmp_path_factory.mktemp("lines"), table)


def trained(folder: Path, table: pa.Table, kind: str = "Lines", **changes: Any) -> DistillationReport:
    return run(folder, table, task=f"tests.distill.sampletasks:{kind}", seeds=3, **changes)


def test_models_stand_side_by_side_over_all_seeds(lines: DistillationReport) -> None:
    report = lines.data
    assert [*report["models"]] == ["teacher", "student", "control"]
    assert (report["metric"], report["more"], report["seeds"]) == ("error", False, [0, 1, 2])
    assert {(one["model"], one["seed"]) for one in report["runs"]} == {
        (name, seed) for name in ("student", "control") for seed in range(3)
    }
    for name in ("student", "control"):
        errors = [one["quality"]["error"] for one in report["runs"] if one["model"] == name]
        assert len(set(errors)) == 3
        assert report["models"][name]["quality"]["error"] == pytest.approx(sum(errors) / 3)
        low, high = report["models"][name]["intervals"]["error"]
        assert low < sum(errors) / 3 < high
    # The teacher knows nothing here: what it adds is a loss, and there is no way to it that could be closed.
    assert report["taught"]["value"] < 0
    assert report["gap_closed"] is None
    assert report["measures"].keys() == {"halved"}
    assert report["agreement"]["student"]["difference"] < report["agreement"]["control"]["difference"]
    assert report["training"]["steps"] == sum(one["steps"] for one in report["runs"])
    # Of a row: a product of 2 and 3 numbers and one of 3 and 1, forward and twice backward, without that for the input.
    assert report["training"]["flops"] == report["training"]["rows"] * 2 * (3 * 9 - 6)
    assert 0 < report["training"]["seconds"] < sum(report["seconds"].values())


def test_the_best_seed_is_shipped(lines: DistillationReport) -> None:
    best = {
        one["seed"]: min(entry["validation_error"] for entry in one["history"])
        for one in lines.data["runs"]
        if one["model"] == "student"
    }
    assert lines.data["shipped"] == min(best, key=lambda seed: best[seed])
    assert {file.name for file in lines.path.iterdir()} == {"student.safetensors", "control.safetensors", "report.json"}
    assert json.loads((lines.path / "report.json").read_bytes()) == lines.data
    Line(3).load_state_dict(load_file(lines.path / "student.safetensors"))


def test_seeds_do_not_depend_on_what_ran_before(lines: DistillationReport, table: pa.Table, tmp_path: Path) -> None:
    torch.rand(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    again = trained(tmp_path, table)
    assert (torch.get_num_threads(), torch.equal(torch.get_rng_state(), state)) == (threads, True)
    assert again.id == lines.id
    for name in ("student", "control"):
        file = f"{name}.safetensors"
        assert (again.path / file).read_bytes() == (lines.path / file).read_bytes()
    alone = run(tmp_path / "alone", table, task="tests.distill.sampletasks:Lines", seeds=1, seed=2)
    wanted = {one["model"]: one for one in lines.data["runs"] if one["seed"] == 2}
    for one in alone.data["runs"]:
        assert one["history"] == wanted[one["model"]]["history"]
    assert alone.data["models"]["student"]["intervals"] == {}
    assert alone.data["taught"]["low"] is None


def needed(folder: Path, peak: int) -> None:
    """Lets both checkpoints of a run say that it needed so much memory."""
    record = json.loads(next(folder.glob("checkpoint-*/record.json")).read_bytes())
    kept = Checkpoints(folder, record["identity"], lambda _text: None)
    found = kept.latest()
    assert found
    standing, tensors = found
    assert 1 << 20 < standing.peak < peak
    for _ in range(2):
        kept.write(structs.replace(standing, peak=peak), tensors)


@pytest.mark.accept
@pytest.mark.parametrize("moment", ["student-0, epoch 2", "control-1, epoch 1", "student-2, epoch 4"])
def test_stopped_anywhere_it_goes_on(lines: DistillationReport, table: pa.Table, tmp_path: Path, moment: str) -> None:
    def stopping(text: str) -> None:
        if text.startswith(moment):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="distillation late: stopped by SIGTERM after step"):
        trained(tmp_path, table, told=stopping)
    assert not (tmp_path / "models").exists()
    place = moment.split(",")[0]
    needed(next((tmp_path / "runs").glob(f"*/{place}")), 1 << 50)
    notes: list[str] = []
    again = trained(tmp_path, table, notes=notes)
    assert any(note.startswith((f"{place}, goes on after step", f"{place}, is trained already")) for note in notes)
    assert again.data["training"]["peak_mb"] == 1 << 30
    for name in ("student", "control"):
        file = f"{name}.safetensors"
        assert (again.path / file).read_bytes() == (lines.path / file).read_bytes()


def test_pauses_are_no_part_of_any_stage(table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses = Spent(), list[str]()
    for module in (policy, loop, distillation):
        monkeypatch.setattr(module, "time", clock)

    def told(text: str) -> None:
        clock.now += 20
        if text.endswith(": paused"):
            pauses.append(text.split(",")[0])

    given = replace(
        material(table, task="tests.distill.sampletasks:Lines", seeds=1, evaluate_every=2),
        latency=lambda: STRAINED if clock.now % 400 < 100 else CALM,
    )
    found = distill(
        given, folder=tmp_path / "models", cache=tmp_path / "cache", runs=tmp_path / "runs",
        progress=lambda text, _done: told(text),
    ).data  # fmt: skip
    paused = found["paused"]
    assert {"teacher", "student-0"} <= paused.keys() <= set(pauses)
    assert min(paused.values()) > 30
    assert found["training"]["paused_seconds"] == pytest.approx(sum(paused.values()) - paused["teacher"])
    assert sum(found["seconds"].values()) + sum(found["paused"].values()) == pytest.approx(clock.now, abs=45)


@pytest.mark.accept
def test_outputs_are_computed_once(table: pa.Table, tmp_path: Path) -> None:
    notes: list[str] = []
    trained(tmp_path, table, notes=notes)
    assert any("2,000 of 2,000 rows" in note for note in notes)
    notes.clear()
    # Other rows of the same content have the same outputs; new ones are computed alone.
    trained(tmp_path, pa.concat_tables([table, table.slice(0, 10)]), training_set="set-2", notes=notes)
    assert any(note.startswith("teacher, cached outputs") for note in notes)
    trained(tmp_path, pa.concat_tables([table, training_set(30, seed=1)]), training_set="set-3", notes=notes)
    assert [note for note in notes if "of 2,030 rows" in note] == [
        note for note in notes if note.startswith("teacher, teacher outputs: 2,030 of 2,030 rows")
    ]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "Dropping",
            r"output value: two answers to the same rows differ by [\s\S]*write dropout\(x, p, training=",
        ),
        ("Masking", r"output value: two answers to the same rows differ by [\s\S]*write dropout\(x, p, training="),
        ("Crowded", r"answers to two rows beside others and alone differ by [\s\S]*write batch_norm\(..., training="),
        ("Queued", r"answers to the same rows in another order differ by [\s\S]*depends on its row alone"),
        ("Nameless", r"output value: names of classes, such as 'long'; [\s\S]*\(\"logits\",\), labels=CLASSES"),
        (
            "Wrong",
            r"term labels: outputs: input: student has value; expected logits[\s\S]*teacher has value",
        ),
        ("Bare", r"task: its teacher: a Line; expected a Teacher of [\s\S]*Wrap it: NetworkTeacher"),
        (
            "Wrong",
            r"distillation late: the first 64 rows: objective: 2 problems[\s\S]*for these rows were computed",
        ),
        (
            "Deep",
            r"the first 64 rows: objective: term taught: hidden states: teacher: 2 states; expected 4\. Correct the",
        ),
        (
            "Misfit",
            r"term taught: the loss raises RuntimeError: .*a loss that takes student.value \(64,\), teacher",
        ),
        ("Stiff", r"the first 64 rows: student and loss: raise RuntimeError: element 0 of tensors does not require"),
        ("Renamed", r"teacher sorted: labels: 3 labels without 'middling' and with 'fair'; expected the student's 3"),
        ("Unnamed", r"teacher sorted: labels: unknown; expected labels= passed to the teacher"),
        ("Reworded", r"teacher sorted: [\s\S]*tokens of 'The quick brown fox': 19 ids, from position 0 on \[84"),
        ("Drawing", r"teacher drawing: output value: two answers to the same batch differ; expected the same"),
        ("NOTHING", r"tests.distill.sampletasks:NOTHING: is 3; expected a subclass of isthmus.distill.tasks.task.Task"),
        ("None_", r"is None"),
    ],
)
def test_what_does_not_fit_is_said_before_a_step(table: pa.Table, tmp_path: Path, kind: str, words: str) -> None:
    notes: list[str] = []
    with pytest.raises(ConfigurationError, match=words):
        trained(tmp_path, table, kind, notes=notes)
    assert not any("epoch" in note or "teacher outputs" in note for note in notes)
    assert not (tmp_path / "models").exists()


def test_an_objective_without_labels_has_the_untrained_student_as_its_control(table: pa.Table, tmp_path: Path) -> None:
    notes: list[str] = []
    report = run(tmp_path, table, task="tests.distill.sampletasks:Obedient", seeds=1, notes=notes).data
    assert "no control is trained: every term of the objective needs the teacher (teacher)" in notes
    control, student = (report["models"][name] for name in ("control", "student"))
    assert control["about"].startswith("the untrained student")
    assert control["quality"]["from_teacher"] > student["quality"]["from_teacher"]
    assert [(one["model"], one["steps"]) for one in report["runs"]] == [("student", 88), ("control", 0)]


def test_a_student_that_is_not_smaller_learns_too(table: pa.Table, tmp_path: Path) -> None:
    for kind, weights in (("Equal", 257), ("Half", 257), ("Large", 261)):
        task = create_task(material(table, task=f"tests.distill.sampletasks:{kind}"))
        teacher, notes = task.teacher(), list[str]()
        outputs = open_outputs(task, teacher, np.arange(table.num_rows), tmp_path, lambda _text, _done: None)
        rehearse(
            task, teacher, outputs, task.material.declaration.training_settings(PROFILE, table.num_rows), notes.append
        )
        assert notes == [f"the student is not smaller than its teacher: {weights} and 257 weights"]


@pytest.mark.accept
def test_a_remote_teacher_is_asked_as_announced_and_never_twice(table: pa.Table, tmp_path: Path) -> None:
    sampletasks.CALLS.clear()
    notes: list[str] = []
    sampletasks.REMOTE["fails_at"] = 7
    with pytest.raises(DependencyError, match=r"raised ConnectionError: 429.*only missing rows are computed"):
        run(tmp_path, table, task="tests.distill.sampletasks:Remote", seeds=1, notes=notes)
    sampletasks.REMOTE["fails_at"] = -1
    first, announced = len(sampletasks.CALLS), [note for note in notes if "runs in" in note]
    assert announced == [
        "teacher remote runs in 24 calls: 21 for 2,000 rows, 2 to check that outputs repeat, 1 to time a row"
    ]
    notes.clear()
    run(tmp_path, table, task="tests.distill.sampletasks:Remote", seeds=1, notes=notes)
    (again,) = (note for note in notes if "runs in" in note)
    assert len(sampletasks.CALLS) - first == int(again.split(" runs in ")[1].split()[0])
    # Two of each call are to check that outputs repeat, and one is for its time.
    assert sum(sampletasks.CALLS) == 2000 + 2 * 2 * 2 + 1


def test_a_teacher_with_its_classes_in_another_order_is_mapped(table: pa.Table, tmp_path: Path) -> None:
    task = create_task(material(table, task="tests.distill.sampletasks:Sorted"))
    teacher, rows = task.teacher(), np.arange(table.num_rows)
    outputs = open_outputs(task, teacher, rows, tmp_path, lambda _text, _done: None)
    theirs, some = teacher.ask(task.asked(rows[:50]))["logits"], rows[:50]
    torch.testing.assert_close(outputs[some]["logits"].float(), theirs[:, [1, 2, 0]], atol=1e-3, rtol=1e-3)
    rehearse(task, teacher, outputs, task.material.declaration.training_settings(PROFILE, 1000), pytest.fail)


def test_a_tokenizer_is_held_against_the_teachers_where_all_it_says_is_kept(table: pa.Table, tmp_path: Path) -> None:
    task = create_task(material(table, task="tests.distill.sampletasks:Reworded"))
    with open_outputs(task, task.teacher(), np.arange(table.num_rows), tmp_path, lambda _text, _done: None) as outputs:
        outputs.fill()
    with pytest.raises(ConfigurationError, match="tokens of 'The quick brown fox'"):
        rehearse(task, task.teacher(), outputs, task.material.declaration.training_settings(PROFILE, 1000), pytest.fail)


def test_a_gate_about_nothing_is_said_before_anything_is_asked(table: pa.Table, tmp_path: Path) -> None:
    notes: list[str] = []
    expected = "one of gap_closed, halved, taught, or a model and its figure, such as student.p99_us"
    with pytest.raises(ConfigurationError, match=f"distillation late: gate: 'tuaght'; expected {expected}"):
        trained(tmp_path, table, gates=[Gate("tuaght", at_least=0), Gate("halved", at_least=0)], notes=notes)
    assert not [*(tmp_path / "cache").glob("*/*.npy")]
    assert not any("teacher" in note for note in notes)


def test_a_module_that_cannot_be_imported_is_named(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere:Task: cannot be imported \(No module named 'nowhere'\)"):
        run(tmp_path, table, task="nowhere:Task")


def test_rows_without_times_are_split_by_a_column(table: pa.Table, tmp_path: Path) -> None:
    timeless = table.set_column(0, "event_timestamp", pa.array([0] * table.num_rows, pa.timestamp("us", tz="UTC")))
    with pytest.raises(DataError, match="train part: no rows"):
        trained(tmp_path, timeless)
    shares = (0.5, 0.25, 0.25)
    report = run(tmp_path, timeless, task="tests.distill.sampletasks:Lines", seeds=1, split=shares, split_by="hour")
    assert report.data["boundaries"] is None
    assert sum(report.data["rows"].values()) == table.num_rows
    other = run(tmp_path, timeless, task="tests.distill.sampletasks:Lines", seeds=1, split=shares, split_by="scheduled")
    assert other.id != report.id


@pytest.mark.accept
def test_a_loss_that_is_not_finite_stops(table: pa.Table, tmp_path: Path) -> None:
    notes: list[str] = []
    with pytest.raises(
        GateFailed,
        match=r"the first 64 rows: term labels: the value is nan; expected a finite value\. Check the labels",
    ):
        trained(tmp_path, table, "Broken", notes=notes)
    assert not any("teacher outputs" in note for note in notes)
    with pytest.raises(GateFailed, match=r"term labels: the value is nan; expected a finite value. Lower the"):
        trained(tmp_path, table, "BrokenLater", notes=notes)
    assert any("2,000 of 2,000" in note for note in notes)


def test_a_device_or_a_precision_that_is_missing_is_said(table: pa.Table, tmp_path: Path) -> None:
    profile = replace(PROFILE, device="cuda")
    if torch.cuda.is_available():
        assert trained(tmp_path, table, profile=profile).data["training"]["device"] == "cuda"
        assert resolve(replace(PROFILE, device="auto")).type == "cuda"
    else:
        notes: list[str] = []
        with pytest.raises(DependencyError, match=r'torch sees no CUDA device[\s\S]*Set device = "cpu"'):
            trained(tmp_path, table, profile=profile, notes=notes)
        assert not any("teacher outputs" in note for note in notes)
        assert resolve(replace(PROFILE, device="auto")).type == "cpu"
    profile = replace(PROFILE, precision="bf16")
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert trained(tmp_path, table, profile=profile).data["training"]["precision"] == "bf16"
    else:
        with pytest.raises(DependencyError, match='Set precision = "fp32"'):
            trained(tmp_path, table, profile=profile)
