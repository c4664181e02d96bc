"""Tasks of other kinds than tables and lines, to the end; what does not fit is said before a step."""

import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.gates import Gate
from isthmus.distill.tasks.split import split_table
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from tests.distill.kinds import Convolved, Twice
from tests.distill.support import run, training_set

FEW = training_set(600)
ALL_BUT_ONE = len(split_table(FEW, (0.7, 0.1, 0.2)).train) - 1


@pytest.fixture(scope="module")
def few() -> pa.Table:
    return FEW


def trained(folder: Path, table: pa.Table, kind: str, **changes: Any) -> DistillationReport:
    return run(folder, table, task=f"tests.distill.kinds:{kind}", **{"seeds": 1, "epochs": 1, **changes})


@pytest.mark.accept
@pytest.mark.slowest
def test_layers_are_learned_from_what_is_kept(few: pa.Table, tmp_path: Path) -> None:
    report = trained(tmp_path, few, "Projected").data
    assert report["agreement"]["student"].keys() == {"agreement", "kl"}
    rows = {one["model"]: report["training"]["rows"] / 2 for one in report["runs"]}
    # Of a row of the student: 2 to 4, 4 to 4 and 4 to 5 numbers, forward and twice backward, not for the input; and of
    # the projection 4 to 32, which the control does not have.
    own, projection = 2 * (3 * (8 + 16 + 20) - 8), 2 * 3 * 4 * 32
    assert report["training"]["flops"] == rows["student"] * (own + projection) + rows["control"] * own
    assert trained(tmp_path, few, "Later").data["training"]["flops"] == report["training"]["flops"]


def test_the_largest_classes_are_compared(few: pa.Table, tmp_path: Path) -> None:
    report = trained(tmp_path, few, "Largest").data
    assert report["agreement"]["student"].keys() == {"agreement"}
    assert 0 <= report["agreement"]["student"]["agreement"] <= 1


@pytest.mark.parametrize(("kind", "module"), [("Shared", Twice()), ("Images", Convolved(3))])
def test_weights_are_kept_however_they_lie(few: pa.Table, tmp_path: Path, kind: str, module: torch.nn.Module) -> None:
    found = trained(tmp_path, few, kind)
    module.load_state_dict(load_file(found.path / "student.safetensors"))


@pytest.mark.accept
@pytest.mark.slowest
def test_a_measure_without_a_value_is_not_known(few: pa.Table, tmp_path: Path) -> None:
    report = trained(tmp_path, few, "Unknown", seeds=2).data
    assert report["models"]["student"]["quality"]["rare"] is None
    assert report["models"]["student"]["intervals"].keys() == {"accuracy"}
    images = trained(tmp_path, few, "Images").data
    assert images["models"]["teacher"]["quality"]["psnr"] is None
    # Of an endless way no share can be gone.
    assert images["gap_closed"] is None
    assert images["taught"]["value"] > 0
    assert trained(tmp_path, few, "Dark").data["agreement"]["student"] == {"cosine": None}


def test_a_row_without_a_finite_answer_is_named(few: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"student of seed 0, output logits: row \d+ of the training set is nan"):
        trained(tmp_path, few, "Infinite")


def test_a_full_disk_at_the_end_is_said(few: pa.Table, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def told(text: str) -> None:
        if text.startswith("control-0 done"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (128, before[1]))

    try:
        with pytest.raises(DependencyError, match=r"student \w+ cannot be written: .*Make room there"):
            trained(tmp_path, few, "Classes", told=told)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    notes: list[str] = []
    trained(tmp_path, few, "Classes", notes=notes)
    assert any(note.startswith("control-0, is trained already") for note in notes), notes


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("Nameless", {}, r"student: outputs: 2 outputs without names; expected one for each of logits"),
        ("Relieved", {}, r"control: weight of labels: 0 at step 1 of \d+[\s\S]*a weight at every step"),
        ("Neighbors", {"batch": 2}, r"term soft: similarities: batch: 2 rows; expected at least 3"),
        (
            "Neighbors",
            {"batch": ALL_BUT_ONE},
            r"smallest batch of an epoch, 1 rows: term soft: similarities: batch: 1 rows[\s\S]*Change batch",
        ),
        (
            "Normed",
            {"batch": ALL_BUT_ONE},
            r"smallest batch of an epoch, 1 rows: Expected more than 1 value per channel[\s\S]*Change batch",
        ),
        ("Classes", {"gates": [Gate("student.auc", 0.5)]}, r"gate: 'student.auc'; expected one of"),
        ("Classes", {"gates": [Gate("pupil.accuracy", 0.5)]}, r"gate: 'pupil.accuracy'; expected one of"),
    ],
)
def test_what_does_not_fit_is_said_before_a_step(
    few: pa.Table, tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    notes: list[str] = []
    with pytest.raises(ConfigurationError, match=words):
        trained(tmp_path, few, kind, notes=notes, **changes)
    assert not any("epoch" in note for note in notes)


def test_neighbors_are_found_in_whole_batches(few: pa.Table, tmp_path: Path) -> None:
    for gate in ("student.p99_us", "teacher.accuracy", "student.kl"):
        report = trained(tmp_path, few, "Neighbors", gates=[Gate(gate, 0.0)]).data
        assert report["training"]["steps"] > 0
