"""Objectives of declared terms: the default losses written out are the default, and what cannot work is refused."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, huber_loss, mse_loss

from isthmus.distill.declaration import Tabular
from isthmus.distill.distillation import distill
from isthmus.distill.labels import Classes, Number
from isthmus.distill.language.teachers import TeacherFunction
from isthmus.distill.language.text import Bag, Text
from isthmus.distill.losses.objective import Objective
from isthmus.distill.restore import create_task, provenance
from isthmus.distill.tabular.kinds.terms import over_known_rows
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tasks.task import Material
from isthmus.features.errors import ConfigurationError
from isthmus.losses import (
    Term,
    binary_hard_targets,
    binary_soft_targets,
    hard_targets,
    similarities,
    soft_targets,
    squared_errors,
)
from tests.distill.labelled import labelled, material_of
from tests.distill.losses.support import seeded
from tests.distill.tabular.test_userteachers import unlabeled
from tests.distill.text import support as texts

ROWS = 60
HARD: Mapping[str, Callable[..., Tensor]] = {
    "binary": binary_hard_targets, "classes": hard_targets, "several": binary_hard_targets, "number": squared_errors
}  # fmt: skip
SOFT: Mapping[str, Callable[..., Tensor]] = {
    "binary": partial(binary_soft_targets, temperature=2.0), "classes": partial(soft_targets, temperature=2.0),
    "several": partial(binary_soft_targets, temperature=2.0), "number": squared_errors,
}  # fmt: skip
LABELS = {"binary": "labels", "classes": "labels", "several": "labels", "number": "wanted"}
TAUGHT = {"binary": "teacher", "classes": "teacher", "several": "teacher", "number": "wanted"}
KEYS = {"binary": "logits", "classes": "logits", "several": "logits", "number": "value"}
ABSTAINS = TeacherFunction("tests.distill.userteachers:abstains", missing="labels")


def written_out(kind: str) -> list[Term]:
    """The terms of the default objective."""
    student, teacher = f"student.{KEYS[kind]}", f"teacher.{KEYS[kind]}"
    return [
        Term(HARD[kind], 1 - 0.7, student=student, **{LABELS[kind]: "labels"}),
        Term(SOFT[kind], 0.7, student=student, **{TAUGHT[kind]: teacher}),
    ]


def loss_and_slope(objective: Objective, kind: str, labels: Any) -> list[Tensor]:
    shape = (20, 3) if kind in ("classes", "several") else (20,)
    student, teacher = (seeded(*shape, seed=seed).float() for seed in (0, 1))
    student.requires_grad_()
    outputs = {KEYS[kind]: teacher, "answered": torch.arange(20) % 3 > 0}
    loss, _ = objective({KEYS[kind]: student}, outputs, labels, 0.0)
    return [loss, *torch.autograd.grad(loss, student)]


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("changes", [{}, {"weight": "weight"}, {"teacher": ABSTAINS}, {"some": True},
                                     {"some": True, "teacher": ABSTAINS, "weight": "weight"}],
                         ids=["plain", "weights", "few answers", "few labels", "all"])  # fmt: skip
def test_the_default_losses_written_out_are_the_default(kind: str, changes: dict[str, Any]) -> None:
    table = labelled(kind, ROWS).append_column("weight", [np.arange(ROWS) % 3.0])
    changes = dict(changes)
    if changes.pop("some", False):
        changes.setdefault("teacher", "tests.distill.userteachers:service")
        table = unlabeled(table, 0.3)
    usual, other = (
        create_task(material_of(kind, table, **changes, objective=terms)) for terms in (None, written_out(kind))
    )
    labels = usual.batch(torch.arange(20)).labels
    torch.testing.assert_close(labels, other.batch(torch.arange(20)).labels, equal_nan=True)
    for alone in (False, True):
        objectives = [task.objective().without_teacher() if alone else task.objective() for task in (usual, other)]
        expected, found = (loss_and_slope(each, kind, labels) for each in objectives if each is not None)
        assert expected[1].abs().sum() > 0
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rows_without_a_label_or_an_answer_do_not_reach_a_loss_of_ones_own() -> None:
    seen: list[tuple[int, ...]] = []

    def noted(input: Tensor, target: Tensor) -> Tensor:  # noqa: A002 - as torch names them
        seen.append(tuple(target.shape))
        assert target.isfinite().all()
        return mse_loss(input, target)

    table = unlabeled(labelled("number", ROWS), 0.3)
    terms = [Term(noted, input="student.value", target=source) for source in ("labels", "teacher.value")]
    task = create_task(material_of("number", table, teacher=ABSTAINS, objective=terms))
    labels = task.batch(torch.arange(20)).labels
    assert labels is not None
    assert [*task.objective().terms] == ["noted", "noted 2"]
    loss_and_slope(task.objective(), "number", labels)
    assert seen == [(int(labels.isfinite().sum()),), (13,)]
    nothing, _ = task.objective()(
        {"value": torch.ones(3, requires_grad=True)}, {"value": torch.ones(3), "answered": torch.zeros(3)},
        torch.full((3,), torch.nan), 0.0,
    )  # fmt: skip
    nothing.backward()
    assert nothing == 0


def trained(of: Material, folder: Path) -> Mapping[str, Any]:
    return distill(of, folder=folder / "models", cache=folder / "cache", runs=folder / "runs").data


def test_a_student_learns_from_declared_terms_and_its_control_from_labels(tmp_path: Path) -> None:
    ranked = [Term(mse_loss, input="student.score", target="teacher.score")]
    found = trained(material_of("rank", labelled("rank"), seeds=1, objective=ranked), tmp_path)
    terms = {run["model"]: {"mse_loss", "labels"} & {*run["history"][-1]} for run in found["runs"]}
    assert terms == {"student": {"mse_loss"}, "control": {"labels"}}


@pytest.mark.accept
def test_a_text_learns_from_declared_terms(tmp_path: Path) -> None:
    def both(logits: Tensor, taught: Tensor, labels: Tensor) -> Tensor:
        return soft_targets(logits, taught, temperature=1.5) + hard_targets(logits, labels) / 9

    term = Term(both, logits="student.logits", taught="teacher.logits", labels="labels")
    text = Text(teacher=f"{texts.HERE}:knowing", objective=[term], student=Bag(vocabulary=200, width=8))
    found = trained(texts.material(texts.notes(), tmp_path, text), tmp_path)
    assert found["models"]["student"]["quality"]["accuracy"] > 0.7
    assert {run["model"]: "both" in run["history"][-1] for run in found["runs"]} == {"student": True, "control": False}


def test_the_identity_of_a_student_has_the_code_and_the_options_of_its_terms() -> None:
    def one(input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        return (input - target).square().mean()

    def other(input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        return (input - target).abs().mean()

    sources, table = {"input": "student.value", "target": "teacher.value"}, labelled("number", ROWS)
    objectives: list[list[Term] | None] = [
        None, [Term(one, **sources)], [Term(one, **sources)], [Term(other, **sources)], [Term(one, 0.5, **sources)],
        [Term(one, input="student.value", target="labels")], [Term(partial(huber_loss, delta=1.0), **sources)],
        [Term(partial(huber_loss, delta=2.0), **sources)],
    ]  # fmt: skip
    tasks = [create_task(material_of("number", table, objective=terms)) for terms in objectives]
    found = [provenance(task)["training"] for task in tasks]
    assert found[1] == found[2]
    assert len({*found}) == len(found) - 1


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, student: Tensor) -> Tensor:
        return (student * self.scale).sum()


SOFT_TERM = Term(SOFT["binary"], student="student.logits", teacher="teacher.logits")
PLAIN = Term(mse_loss, input="student.logits", target="labels")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"objective": []}, "objective: []; expected a list of Term"),
        ({"objective": SOFT_TERM}, "expected a list of Term, from isthmus.losses"),
        ({"objective": [mse_loss]}, "expected a list of Term, from isthmus.losses"),
        ({"objective": [Term(mse_loss, input="student.logits", target="teacher.value")]},
         "objective, mse_loss: target='teacher.value'; expected one of labels, student.logits, teacher.logits"),
        ({"objective": [Term(mse_loss, input="student.logits", target="teacher.logits")], "label": Number()},
         "input='student.logits'; expected one of labels, student.value, teacher.value"),
        ({"objective": [Term(mse_loss, input="teacher.logits", target="labels")]}, "no argument from the student"),
        ({"objective": [Term(Wide(), student="student.logits")]}, "Wide: a loss with parameters"),
        ({"objective": [PLAIN], "weight": "w"}, "mse_loss: a loss without weights; expected the argument weights"),
        ({"objective": [PLAIN], "class_weight": "balanced", "label": Classes()}, "mse_loss: a loss without weights"),
        ({"objective": [PLAIN], "temperature": 3.0}, "objective, temperature: has no effect beside terms"),
        ({"objective": [PLAIN], "soft_weight": 0.5}, "objective, soft_weight: has no effect beside terms"),
        ({"objective": [SOFT_TERM], "teacher": ABSTAINS}, 'objective, teacher: missing="labels"; expected a term with'),
    ],
)  # fmt: skip
def test_terms_that_cannot_work_are_refused_when_they_are_declared(changes: dict[str, Any], problem: str) -> None:
    assert problem in "; ".join(map(str, Tabular(**changes).problems("task")))
    if not isinstance(changes.get("label"), Number | None):
        return
    text = {"teacher": "module:function", **{name: of for name, of in changes.items() if name != "label"}}
    predicts = changes.get("label", Classes())
    assert problem in "; ".join(map(str, Text(predicts=predicts, **text).problems("task")))


def test_a_loss_that_does_not_fit_the_outputs_is_refused_before_a_step(tmp_path: Path) -> None:
    terms: Sequence[Term] = [Term(binary_cross_entropy_with_logits, input="student.logits", target="labels")]
    of = material_of("classes", labelled("classes"), objective=terms)
    assert not of.declaration.problems()
    with pytest.raises(ConfigurationError, match=r"term binary_cross_entropy_with_logits: the loss raises ValueError"):
        trained(of, tmp_path)


def test_a_teacher_keeps_its_outputs_when_the_objective_changes() -> None:
    table: pa.Table = labelled("number", ROWS)
    tasks = [TabularTask(material_of("number", table, objective=terms)) for terms in (None, written_out("number"))]
    first, second = (task.teacher().fingerprint() for task in tasks)
    assert first == second


def test_a_loss_that_compares_rows_skips_batches_with_too_few() -> None:
    student, teacher = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    term = Term(partial(similarities, temperature=0.1), student="student.logits", teacher="teacher.logits")
    known = over_known_rows(Objective({"near": term}), labels=False, answers=True)
    for answered in (0, 1, 2, 3, 4):
        rows = torch.arange(4) < answered
        loss = known({"logits": student}, {"logits": teacher, "answered": rows.float()}, None, 0.0)[0]
        assert (loss.item() > 0) == (answered >= 3)
    with pytest.raises(ConfigurationError, match="2 rows; expected at least 3"):
        known({"logits": student[:2]}, {"logits": teacher[:2], "answered": torch.ones(2)}, None, 0.0)
