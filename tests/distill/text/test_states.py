"""Losses of the pooled states of a teacher and a student that is cut from it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from isthmus import Bag, Classes, Pretrained, PrunedEncoder, Settings, Text
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.text.task import TextTask
from isthmus.distill.training.studentrun import train_student
from isthmus.distill.training.teacheroutputs import complete_outputs
from isthmus.features.progress import silent
from isthmus.losses import Term, cosine, hard_targets, soft_targets
from tests.distill.text.support import HERE, bert, material, notes

SCORES = [
    Term(hard_targets, 0.3, student="student.logits", labels="labels"),
    Term(partial(soft_targets, temperature=2.0), 0.7, student="student.logits", teacher="teacher.logits"),
]
STATES = Term(cosine, 3.0, student="student.state", teacher="teacher.state")
WHOLE = PrunedEncoder(layers=(0,))
TEXT = Text(teacher=Pretrained("bert"), column="body", student=WHOLE, tokens=16, dropout=0.0)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return notes(300)


@pytest.fixture(scope="module")
def root(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    bert(folder / "bert", table, steps=20)
    return folder


def test_a_student_that_keeps_everything_has_its_teachers_states(table: pa.Table, root: Path) -> None:
    task = TextTask(material(table, root, TEXT))
    assert [*task.objective().terms] == ["labels", "soft", "states"]
    rows = task.material.parts.test
    student = task.student()
    outputs = student(*task.batch(torch.from_numpy(rows)).inputs)
    asked = task.teacher().ask(rows)
    assert asked.keys() == {"logits", "state"}
    torch.testing.assert_close(outputs["state"], asked["state"], atol=1e-5, rtol=0)
    assert outputs["logits"].shape == asked["logits"].shape
    assert isinstance(student.eval()(*task.batch(torch.from_numpy(rows)).inputs), torch.Tensor)
    weighted = TextTask(material(table, root, replace(TEXT, class_weight="balanced")))
    assert [*weighted.objective().terms] == ["labels", "soft"]
    assert weighted.teacher().keys == ("logits",)


def test_states_are_learned(table: pa.Table, root: Path, tmp_path: Path) -> None:
    settings = Settings(epochs=3, batch=32, learning_rate=1e-2)

    def trained(terms: Sequence[Term]) -> tuple[torch.Tensor, OutputCache]:
        text = replace(TEXT, student=PrunedEncoder(layers=(0,), heads=1, rank=4), objective=terms)
        task, states = TextTask(material(table, root, text)), list[torch.Tensor]()
        outputs, _ = complete_outputs(task, task.teacher(), np.arange(len(table)), tmp_path, silent)
        student = task.student()
        train_student(task, student, task.objective(), outputs, settings, tmp_path / str(len(terms)), silent)
        student.get_submodule("network.state").register_forward_hook(lambda *called: states.append(called[2]))
        student.eval()(*task.batch(torch.from_numpy(task.material.parts.test)).inputs)
        return states[0].detach(), outputs

    near, outputs = trained([*SCORES, STATES])
    wanted = outputs[material(table, root).parts.test]["state"]
    usual, without = trained(SCORES)
    assert "state" not in without[0]
    assert cosine(near, wanted) < 0.5 * cosine(usual, wanted)


@pytest.mark.parametrize(("changes", "message"), [
    ({"student": Bag()}, "cosine: teacher='teacher.state'; expected one of labels, student.logits, teacher.logits"),
    ({"teacher": [Pretrained("bert"), f"{HERE}:knowing"]}, "cosine: student='student.state'; expected one of"),
    ({"objective": [STATES]}, 'expected a term with student.logits'),
])  # fmt: skip
def test_states_that_cannot_be_compared_are_refused(
    table: pa.Table, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    text = replace(TEXT, **{"objective": [*SCORES, STATES], "predicts": Classes(), **changes})
    problems = " ".join(map(str, material(table, tmp_path, text).declaration.problems()))
    assert message in problems
