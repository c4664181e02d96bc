"""Distillations by several real processes, and what ends them."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from isthmus.distill.restore import restore
from isthmus.distill.tasks.answers import student_answers
from isthmus.distill.training.processes import joined, table_digest
from isthmus.features.errors import DependencyError
from isthmus.features.profiles import TrainingProfile
from tests.distill.launching import WAIT_SECONDS, answers, launched, ranks
from tests.distill.support import material, run, training_set

ADAPTED: dict[str, Any] = {"task": "tests.distill.launching:Adapted", "seeds": 1, "gates": []}
STEPS: dict[str, Any] = {"steps": 100, "evaluate_every": 1, "dropout": 0.0, "seeds": 1}


def losses(report: Any, model: str) -> list[float]:
    (training,) = [part for part in report["runs"] if part["model"] == model]
    return [entry["loss"] for entry in training["history"]]


@pytest.mark.accept
@pytest.mark.parametrize("shard", [False, True])
def test_two_processes_train_the_student_of_one(tmp_path: Path, shard: bool) -> None:
    two = tmp_path / "two"
    with launched(two, rows=2000, shard=shard, **STEPS) as lines:
        first, second = answers(two, lines).values()
    alone = run(tmp_path / "one", training_set(2000), **STEPS)
    for model in ("student", "control"):
        np.testing.assert_allclose(losses(first, model), losses(alone.data, model), atol=1e-5, rtol=0)
    auc = first["models"]["student"]["quality"]["auc"]
    assert abs(auc - alone.data["models"]["student"]["quality"]["auc"]) < 1e-3
    assert (first.pop("leads"), second.pop("leads")) == (True, False)
    assert first == second
    assert first["id"].endswith("-p2")
    assert (first["id"] == f"{alone.id}-p2") == (not shard)
    half = first["training"]
    assert half["processes"] == [2]
    assert half["device_hours"] == pytest.approx(2 * half["seconds"] / 3600, rel=1e-3)
    assert first["runs"][0]["processes"] == {"2": 100}
    with launched(two, rows=2000, shard=shard, **STEPS) as lines:
        assert [each["trained"] for each in answers(two, lines).values()] == [False, False]


@pytest.mark.accept
@pytest.mark.parametrize("shard", [False, True])
def test_a_loss_with_weights_of_its_own_is_learned_and_a_network_is_asked_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: bool
) -> None:
    asked, two, changes = tmp_path / "asked", tmp_path / "two", {**ADAPTED, "epochs": 5}
    asked.mkdir()
    monkeypatch.setenv("ASKED", str(asked))
    with launched(two, shard=shard, clip=1.0, **changes) as lines:
        first = answers(two, lines)[0]
    monkeypatch.delenv("ASKED")
    calls = [[*map(int, (asked / str(rank)).read_text().split())] for rank in (0, 1)]
    counts = [sum(rows for rows in of if rows > 1) for of in calls]
    assert sum(counts) < 400 + 50  # each row once, a few twice to check the teacher
    assert 150 < counts[1] <= 200
    assert (len(calls[0]) == len(calls[1])) == shard  # both run each block of a sharded teacher
    alone = run(tmp_path / "one", training_set(400), clip=1.0, **changes)
    np.testing.assert_allclose(losses(first, "student"), losses(alone.data, "student"), atol=1e-5, rtol=0)
    for model in ("student", "control"):
        found = load_file(two / "models" / first["id"] / f"{model}.safetensors")
        for name, value in load_file(alone.path / f"{model}.safetensors").items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.accept
@pytest.mark.slowest
def test_processes_with_batch_norm_validate_the_student_that_is_kept(tmp_path: Path) -> None:
    changes = {**ADAPTED, "task": "tests.distill.launching:AdaptedNormed", "epochs": 3}
    with launched(tmp_path, **changes) as lines:
        first = answers(tmp_path, lines)[0]
    best = min(entry["validation_error"] for entry in first["runs"][0]["history"])
    # The same weights, measured again by one process.
    given = material(training_set(400), **changes)
    restored = restore(given, tmp_path / "models" / first["id"])
    rows = given.parts.validation
    found = student_answers(restored.task, restored.student, rows, torch.device("cpu"))
    assert restored.task.quality(found, rows, found)["error"] == pytest.approx(best, rel=1e-5)


@pytest.mark.accept
@pytest.mark.parametrize(("killed", "then", "shard"), [
    (0, 2, False), (1, 3, True), pytest.param(1, 1, False, marks=pytest.mark.slowest),
    pytest.param(1, 3, False, marks=pytest.mark.slowest), pytest.param(0, 1, True, marks=pytest.mark.slowest),
])  # fmt: skip
def test_a_training_goes_on_after_a_kill_with_any_number_of_processes(
    tmp_path: Path, killed: int, then: int, shard: bool
) -> None:
    two = tmp_path / "two"
    changes: dict[str, Any] = {
        "checkpoint_steps": 10,
        "seeds": 1,
        "batch": 66,
        "steps": 300,
        "evaluate_every": 10,
        "dropout": 0.0,
        "shard": shard,
    }
    with launched(two, rows=1000, **changes) as lines:
        next(line for line in lines if "student-0, step 50 of" in line)
        ranks(two)[killed].kill()
        said = answers(two, lines)
    assert all(each["error"] == "LostProcessError" for each in said.values())  # if the launcher left time to say so
    assert not (two / "models").exists()
    with launched(two, then, rows=1000, **changes) as lines:
        next(line for line in lines if "student-0, goes on after step" in line)
        report = answers(two, lines)[0]
    steps = report["runs"][0]["processes"]
    assert {*steps} == {"2", str(then)}
    assert sum(steps.values()) == 300
    assert report["training"]["processes"] == sorted({2, then})
    del changes["shard"]
    alone = run(tmp_path / "alone", training_set(1000), **changes).data
    reached, wanted = (of["models"]["student"]["quality"]["auc"] for of in (report, alone))
    assert abs(reached - wanted) < 0.001


@pytest.mark.accept
def test_a_process_that_sees_other_rows_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with launched(tmp_path, more=1) as lines:
        said = answers(tmp_path, lines)
    for each in said.values():
        assert each["error"] == "DataError"
        assert "rank 1 of 2 on " in each["where"]
        assert "sees other inputs than rank 0" in each["found"]
        assert "rows " in each["found"]
    assert len(said) == 2
    assert not (tmp_path / "models").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.accept
def test_a_folder_that_is_not_shared_is_noticed_before_the_training(tmp_path: Path) -> None:
    with launched(tmp_path, folders=["a", "b"]) as lines:
        said = answers(tmp_path, lines)
    assert "rank 1 does not see 400 outputs of the teacher" in said[1]["found"]
    assert said[1]["expected"] == "a folder that all processes share"
    assert not [*tmp_path.glob("*/models")]
    assert not [*tmp_path.glob("*/runs/*/*/*")]


@pytest.mark.accept
@pytest.mark.parametrize(("stops", "shard"), [
    ("student-0, epoch 2", False), ("student-0, epoch 2", True),
    pytest.param("reference done", False, marks=pytest.mark.slowest),
])  # fmt: skip
def test_a_process_that_hangs_ends_the_others_in_time(tmp_path: Path, stops: str, shard: bool) -> None:
    with launched(tmp_path, stops=stops, shard=shard) as lines:
        next(line for line in lines if stops in line)
        began = time.monotonic()
        ((rank, said),) = answers(tmp_path, lines).items()
        assert time.monotonic() - began < WAIT_SECONDS + 30 + 10  # the launcher waits 30 s before it kills
    assert (rank, said["error"]) == (1, "LostProcessError")
    assert "rank 0 of 2" in said["found"]
    assert "the same command goes on" in said["remedy"]
    assert not (tmp_path / "models").exists()


@pytest.mark.accept
def test_a_batch_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    with launched(tmp_path, batch=66, accumulation=2) as lines:
        said = answers(tmp_path, lines)
    for each in said.values():
        assert each["error"] == "ConfigurationError"
        assert (
            "66 rows cannot be divided among 2 processes with accumulation 2; expected a multiple of 4" in each["found"]
        )
    assert said
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("size", ["2", "two"])
def test_processes_without_a_launcher_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(DependencyError, match=f"the {size} processes cannot connect: .*torchrun or .*unset WORLD_SIZE"):
        run(tmp_path, training_set())


def test_an_empty_variable_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    with joined(TrainingProfile(), "here") as processes:
        assert processes.count == 1


def test_a_table_has_the_digest_of_its_values() -> None:
    table = training_set(50)
    parts = pa.concat_tables([pa.concat_tables([training_set(7), table]).slice(7)]).combine_chunks()
    assert table_digest(parts) == table_digest(table.combine_chunks())
    changed = table.set_column(2, "late", pa.array([1 - table["late"][0].as_py(), *table["late"].to_pylist()[1:]]))
    assert table_digest(changed) != table_digest(table)
