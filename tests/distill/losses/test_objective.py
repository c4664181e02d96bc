import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isthmus.features.errors import ConfigurationError, GateFailed
from isthmus.losses import (
    HiddenStates,
    Objective,
    Perceptual,
    Schedule,
    Term,
    cosine,
    hard_targets,
    hinge_generator,
    soft_targets,
    top_k_targets,
)
from tests.distill.losses.support import NAN, seeded

SOFT = Term(partial(soft_targets, temperature=2.0), 0.7, student="student.logits", teacher="teacher.logits")
LABELS = Term(hard_targets, Schedule(0, 1), student="student.logits", labels="labels")
SAME = Term(cosine, student="student.embedding", teacher="teacher.embedding")


def outputs(seed: int, *, width: int = 4, layers: int = 2, classes: int = 3) -> dict[str, Any]:
    return {
        "logits": seeded(2, classes, seed=seed).float().requires_grad_(),
        "embedding": seeded(2, 5, seed=seed).float().requires_grad_(),
        "hidden": [seeded(2, 3, width, seed=seed + n).float().requires_grad_() for n in range(layers)],
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }


STUDENT, TEACHER = outputs(0), outputs(10, width=6, layers=3)
CLASSES = torch.tensor([0, 2])


def everything() -> Objective:
    hidden = HiddenStates({0: 0, 1: 2}, student_widths=[4, 4], teacher_widths=[6, 6, 6])
    return Objective(
        {
            "soft": SOFT,
            "labels": LABELS,
            "hidden": Term(
                hidden,
                Schedule(1, 0, "cosine"),
                student="student.hidden",
                teacher="teacher.hidden",
                mask="student.mask",
            ),
            # torch has methods of these names.
            "keys": Term(cosine, 0.5, student="student.embedding", teacher="teacher.embedding"),
            "forward": Term(hinge_generator, 0.1, fake="student.logits"),
        }
    )


@pytest.mark.parametrize("progress", [0.25, 0.5])
def test_the_total_is_the_weighted_sum_of_the_terms(progress: float) -> None:
    objective = everything()
    objective.check(STUDENT, TEACHER, CLASSES)
    total, terms = objective(STUDENT, TEACHER, CLASSES, progress)
    weights = {"soft": 0.7, "labels": progress, "hidden": (1 + math.cos(math.pi * progress)) / 2}
    weights |= {"keys": 0.5, "forward": 0.1}
    assert list(terms) == list(weights)
    assert total.item() == pytest.approx(sum(weights[name] * value.item() for name, value in terms.items()))
    assert terms["soft"].item() == pytest.approx(
        soft_targets(STUDENT["logits"], TEACHER["logits"], temperature=2.0).item()
    )
    assert terms["labels"].item() == pytest.approx(hard_targets(STUDENT["logits"], CLASSES).item())
    assert total.requires_grad
    assert not any(value.requires_grad for value in terms.values())


def test_a_term_of_weight_zero_is_not_computed() -> None:
    poisoned = {**TEACHER, "logits": torch.full((2, 3), NAN)}
    soft = Term(
        partial(soft_targets, temperature=2.0), Schedule(0, 1), student="student.logits", teacher="teacher.logits"
    )
    total, terms = Objective({"soft": soft, "same": SAME})(STUDENT, poisoned, None, 0.0)
    assert list(terms) == ["same"]
    assert total.item() == pytest.approx(terms["same"].item())
    with pytest.raises(ConfigurationError, match=r"every weight is 0 at progress 0\.0"):
        Objective({"soft": soft})(STUDENT, poisoned, None, 0.0)


def foreign(student: Tensor, teacher: list[Tensor]) -> Tensor:
    """A loss of somebody who forgot to detach the teacher."""
    return (student.sum() - sum(state.sum() for state in teacher)) ** 2


def test_the_teacher_gets_no_gradient_even_from_a_loss_that_would_give_one() -> None:
    teacher = outputs(10, width=6, layers=3)
    terms = {**everything().terms, "foreign": Term(foreign, student="student.embedding", teacher="teacher.hidden")}
    Objective(terms)(STUDENT, teacher, CLASSES, 0.5)[0].backward()
    assert STUDENT["embedding"].grad is not None
    assert all(tensor.grad is None for tensor in [teacher["logits"], teacher["embedding"], *teacher["hidden"]])


def test_the_optimizer_gets_the_projections_and_nothing_of_the_teacher_s() -> None:
    frozen = nn.Sequential(nn.Conv2d(1, 2, 1)).eval().requires_grad_(False)
    seen = Term(Perceptual(frozen, ["0"]), student="student.image", teacher="teacher.image")
    objective = Objective({**everything().terms, "seen": seen})
    assert {tuple(parameter.shape) for parameter in objective.parameters()} == {(6, 4)}
    assert len(list(objective.parameters())) == 2
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    student, teacher = ({**given, "image": torch.randn(1, 1, 2, 2)} for given in (STUDENT, TEACHER))
    values = []
    for _ in range(5):
        total, terms = objective(student, teacher, CLASSES, 0.1)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        values.append(terms["hidden"].item())
    assert values[-1] < values[0]


def test_its_state_is_saved_and_restored() -> None:
    ours, theirs = everything(), everything()
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == [f"term hidden.loss.projections.{n}.weight" for n in (0, 1)]
    assert ours(STUDENT, TEACHER, CLASSES, 0.3)[0].item() == theirs(STUDENT, TEACHER, CLASSES, 0.3)[0].item()


def test_the_check_names_everything_that_is_missing_or_does_not_fit() -> None:
    student = {key: value for key, value in STUDENT.items() if key not in ("embedding", "mask")}
    with pytest.raises(ConfigurationError) as refusal:
        everything().check(student, outputs(10, width=6, layers=2, classes=7))
    problems = {problem.where: (problem.found, problem.expected) for problem in refusal.value.problems}
    assert problems == {
        "term soft: soft targets: teacher": ("classes 7", "3, as in student"),
        "term labels: outputs: labels": ("there are no labels", "labels"),
        "term hidden: outputs: mask": ("student has hidden, logits", "mask"),
        "term keys: outputs: student": ("student has hidden, logits", "embedding"),
    }


def test_the_check_refuses_a_loss_that_is_no_scalar() -> None:
    each = Term(lambda student: student, student="student.logits")
    with pytest.raises(ConfigurationError, match=r"term each: the loss returns shape \(2, 3\); expected a scalar"):
        Objective({"each": each}).check(STUDENT, TEACHER)


def test_a_step_says_of_which_term_its_outputs_are_missing() -> None:
    with pytest.raises(
        ConfigurationError, match="term same: outputs: student: student has no outputs; expected embedding"
    ):
        Objective({"same": SAME})({}, TEACHER, None, 0)
    with pytest.raises(ConfigurationError, match=r"term soft: soft targets: teacher: empty: shape \(0, 3\)"):
        Objective({"soft": SOFT})(STUDENT, {"logits": torch.zeros(0, 3)}, None, 0)


@pytest.mark.parametrize("value", [NAN, math.inf])
def test_the_term_that_is_not_finite_is_named(value: float) -> None:
    student = {**STUDENT, "embedding": torch.full((2, 5), value)}
    with pytest.raises(GateFailed, match=r"term same: the value is (nan|inf); expected a finite value"):
        Objective({"soft": SOFT, "same": SAME})(student, TEACHER, None, 0)


def test_a_sum_that_overflows_is_named_too() -> None:
    huge = Term(lambda student: student.sum() * 0 + 3e38, student="student.logits")
    with pytest.raises(GateFailed, match="objective: the weighted sum overflows"):
        Objective({"a": huge, "b": Term(huge.loss, student="student.logits")})(STUDENT, TEACHER, None, 0)


@pytest.mark.parametrize("weight", [NAN, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(weight: float) -> None:
    with pytest.raises(ConfigurationError, match=r"weight: .*; expected a finite number"):
        Term(cosine, weight, student="student.embedding", teacher="teacher.embedding")
    late = Term(cosine, lambda _: weight, student="student.embedding", teacher="teacher.embedding")
    with pytest.raises(ConfigurationError, match=r"term late: weight: at progress 0\.5: .*; expected a finite number"):
        Objective({"late": late})(STUDENT, TEACHER, None, 0.5)


@pytest.mark.parametrize("progress", [-0.1, 1.1, NAN])
def test_a_progress_beyond_the_training_is_refused(progress: float) -> None:
    with pytest.raises(ConfigurationError, match=r"progress: .*; expected 0 to 1"):
        Objective({"same": SAME})(STUDENT, TEACHER, None, progress)


LINEAR = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        (
            soft_targets,
            {"student": "student.logits", "teacher": "teacher.logits"},
            "with the loss soft_targets: .*missing a required .*'temperature'",
        ),
        (
            soft_targets,
            {"student": "student.logits", "teacher": "teacher.logits", "temperature": 2.0},
            r"temperature: 2\.0; expected \"student\.KEY\".*bind options of the loss with functools\.partial",
        ),
        (torch.dist, {"input": "student.logits", "other": "teacher.logits"}, "arguments: no signature found"),
        (cosine, {"student": "student.logits", "labels": "labels"}, "arguments: .*'teacher'"),
        (cosine, {"student": "logits", "teacher": "teacher.logits"}, "student: 'logits'; expected \"student.KEY\""),
        (LINEAR, {"input": "student."}, "input: 'student.'; expected"),
        (LINEAR, {"input": "labels.a"}, "input: 'labels.a'; expected"),
        (partial(LINEAR), {"input": "student.logits"}, "Linear inside a function; expected the module itself"),
        (LINEAR.forward, {"input": "student.logits"}, "Linear inside a function; expected the module itself"),
        (HiddenStates({0: 0}, student_widths=[2], teacher_widths=[2]), {"student": "student.hidden"}, "'teacher'"),
    ],
)
def test_a_term_that_cannot_work_is_refused(
    loss: Callable[..., Tensor], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Term(loss, **arguments)


def test_an_objective_of_nothing_or_with_a_dot_in_a_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="terms: none; expected at least one"):
        Objective({})
    with pytest.raises(ConfigurationError, match=r"term 'a.b': a dot in the name"):
        Objective({"a.b": SAME})


def test_a_student_learns_from_a_teacher_of_whom_only_the_largest_probabilities_were_kept() -> None:
    torch.manual_seed(0)
    teacher, student = nn.Linear(6, 8), nn.Linear(6, 8)
    rows = torch.randn(256, 6)
    with torch.no_grad():
        probabilities, indexes = (3 * teacher(rows) / 2).softmax(-1).topk(4)
    objective = Objective(
        {
            "top": Term(
                partial(top_k_targets, temperature=2.0),
                student="student.logits",
                probabilities="teacher.probabilities",
                indexes="teacher.indexes",
            ),
            "form": Term(
                partial(soft_targets, temperature=2.0), 0.1, student="student.logits", teacher="teacher.logits"
            ),
        }
    )
    optimizer = torch.optim.Adam([*student.parameters(), *objective.parameters()], lr=0.05)
    kept = {"probabilities": probabilities, "indexes": indexes, "logits": 3 * teacher(rows)}
    for step in range(100):
        total, _ = objective({"logits": student(rows)}, kept, None, step / 100)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    agreement = (student(rows).argmax(-1) == indexes[:, 0]).float().mean()
    assert agreement > 0.95
    assert all(parameter.grad is None for parameter in teacher.parameters())
