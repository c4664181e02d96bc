"""Weights of rows: a row of weight 2 counts like two rows, a row of weight 0 like none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_sample_weight
from torch import Tensor

from isthmus.distill.declaration import Tabular
from isthmus.distill.labels import Classes, Number, Rank
from isthmus.distill.restore import create_task, provenance
from isthmus.distill.tabular.kinds.weights import row_weights
from isthmus.distill.tabular.task import TabularTask
from isthmus.features.definition.spec import Entity, Field, RequestSource, Spine
from isthmus.features.errors import DataError
from isthmus.features.types import Float64, Int64, String
from isthmus.losses import (
    absolute_errors,
    binary_hard_targets,
    binary_soft_targets,
    hard_targets,
    soft_targets,
    squared_errors,
)
from tests.distill.labelled import labelled, material_of
from tests.distill.losses.support import seeded
from tests.distill.support import run, training_set

ROWS = 60
WEIGHTS = st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any)


def soft(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda student, wanted, **more: loss(student, wanted, temperature=2.0, **more)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "hard": (hard_targets, lambda n: (seeded(n, 3), torch.arange(n) % 3)),
    "soft": (soft(soft_targets), lambda n: (seeded(n, 3), seeded(n, 3, seed=1))),
    "binary hard": (binary_hard_targets, lambda n: (seeded(n), torch.arange(n).double() % 2)),
    "binary soft": (soft(binary_soft_targets), lambda n: (seeded(n), seeded(n, seed=1))),
    "squared": (squared_errors, lambda n: (seeded(n), seeded(n, seed=1))),
    "absolute": (absolute_errors, lambda n: (seeded(n), seeded(n, seed=1))),
}


@pytest.mark.parametrize("name", LOSSES)
@given(weights=WEIGHTS, data=st.data())
def test_a_weight_is_a_number_of_rows(name: str, weights: list[int], data: st.DataObject) -> None:
    loss, draw = LOSSES[name]
    (student, wanted), counts = draw(len(weights)), torch.tensor(weights)
    student.requires_grad_()
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(weights), max_size=len(weights))))
    masks = [{}, {}] if name == "hard" else [{"mask": mask}, {"mask": mask.repeat_interleave(counts)}]
    found = loss(student, wanted, weights=counts.double(), **masks[0])
    repeated = loss(student.repeat_interleave(counts, 0), wanted.repeat_interleave(counts, 0), **masks[1])
    torch.testing.assert_close(found, repeated)
    torch.testing.assert_close(*(torch.autograd.grad(each, student)[0] for each in (found, repeated)))


def test_weights_of_0_alone_give_no_loss() -> None:
    student = seeded(4).requires_grad_()
    found = squared_errors(student, seeded(4, seed=1), weights=torch.zeros(4))
    assert found == 0
    assert not torch.autograd.grad(found, student)[0].any()


def task(kind: str, weights: Any = None, **changes: Any) -> TabularTask:
    table = labelled(kind, ROWS)
    if weights is not None:
        table, changes = table.append_column("weight", [weights]), {"weight": "weight", **changes}
    found = create_task(material_of(kind, table, **changes))
    assert isinstance(found, TabularTask)
    return found


@pytest.mark.parametrize("kind", ["binary", "classes", "several", "number"])
def test_student_and_control_learn_a_row_of_weight_2_as_two_rows(kind: str) -> None:
    weights = np.random.default_rng(0).integers(0, 3, ROWS)
    plain, weighed, rows = task(kind), task(kind, weights.astype(np.float64)), torch.arange(20)
    repeated = rows.repeat_interleave(torch.from_numpy(weights[:20]))
    key = plain.keys[0]
    shape = (20, 3) if kind in ("classes", "several") else (20,)
    student, teacher = (seeded(*shape, seed=seed).float() for seed in (0, 1))
    student.requires_grad_()
    for alone in (False, True):
        found = []
        for of, places in ((weighed, rows), (plain, repeated)):
            objective = of.objective().without_teacher() if alone else of.objective()
            assert objective is not None
            outputs = ({key: tensor[places]} for tensor in (student, teacher))
            loss, _ = objective(*outputs, of.batch(places).labels, 0.0)
            found.append([loss, *torch.autograd.grad(loss, student)])
        torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_balanced_classes_have_the_same_weight() -> None:
    for kind in ("binary", "classes"):
        found = task(kind, class_weight="balanced")
        train, labels = found.material.parts.train, found.batch(torch.arange(ROWS)).labels
        assert labels is not None
        classes, weights = labels[train, 0].numpy(), labels[train, 1].numpy()
        np.testing.assert_allclose(weights, compute_sample_weight("balanced", classes), rtol=1e-6)
        declared, table = Tabular(weight="weight", class_weight="balanced"), pa.table({"weight": np.arange(ROWS)})
        both = row_weights(table, declared, labels[:, 0].long().numpy(), train)
        assert both is not None
        np.testing.assert_allclose(np.bincount(classes.astype(int), both[train]), both[train].sum() / len({*classes}))


def test_boosting_learns_with_the_weights() -> None:
    table = training_set(600)
    table = table.append_column("weight", [np.where(table["late"], 9.0, 1.0)])
    first, plain = (create_task(material_of("binary", table, weight=weight)) for weight in ("weight", None))
    rows = first.material.parts.test
    means = [float(of.teacher().ask(rows)["logits"].mean()) for of in (first, plain)]
    assert means[0] > means[1] + 1
    assert first.teacher().fingerprint() != plain.teacher().fingerprint()
    assert provenance(first) != provenance(plain)


@pytest.mark.accept
def test_balanced_students_find_rare_rows(tmp_path: Path) -> None:
    table = training_set(600)
    rare = (table["secret"].to_numpy() + table["late"].to_numpy() > 1.6).astype(np.int64)
    table = table.set_column(table.column_names.index("late"), "late", pa.array(rare))
    found = run(tmp_path, table, seeds=1, epochs=3, class_weight="balanced").data
    assert found["models"]["student"]["quality"].keys() == found["models"]["control"]["quality"].keys()
    assert found["id"] != run(tmp_path, table, seeds=1, epochs=3).data["id"]


@pytest.mark.parametrize(("weights", "message"), [
    (pa.array([1.0, None] * (ROWS // 2)), "column weight: 30 nulls; expected a value in every row"),
    ([1.0, -0.5] * (ROWS // 2), "weight weight: 30 of 60 rows are wrong, such as row 1: -0.5; expected numbers from 0"),
    ([1.0, float("nan")] * (ROWS // 2), "30 of 60 rows are wrong, such as row 1: nan"),
    ([1.0, 1e39] * (ROWS // 2), r"such as row 1: 1e\+39; expected numbers from 0, finite in float32"),
    ([0] * ROWS, r"weight weight: 0 in all \d+ rows of the train part; expected a row above 0"),
    (["heavy"] * ROWS, "weight weight: .*heavy.*; expected numbers from 0"),
])  # fmt: skip
def test_wrong_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task("binary", pa.array(weights))
    with pytest.raises(DataError, match="training set: no column weight"):
        create_task(material_of("binary", labelled("binary", ROWS), weight="weight"))


def test_a_class_without_weight_cannot_be_balanced() -> None:
    late = labelled("binary", ROWS)["late"].to_numpy().astype(np.float64)
    with pytest.raises(DataError, match="weight weight: 0 in all rows of a class in the train part"):
        task("binary", late, class_weight="balanced")


def test_weights_are_declared_of_a_number_in_the_spine() -> None:
    request = RequestSource("asked", [Field("importance", Float64), Field("note", String)])
    spine = Spine("flights", [Entity("query", join_keys={"query": Int64})], Field("late", Int64), [], request)
    assert not Tabular(weight="importance", class_weight="balanced").spine_problems("x", spine)
    for name in ("note", "late", "nowhere"):
        (problem,) = Tabular(weight=name).spine_problems("x", spine)
        assert (problem.where, problem.found, problem.expected) == ("x: weight", repr(name), "one of importance, query")
    bare = Spine("flights", [], Field("late", Int64), [])
    assert "request field" in Tabular(weight="importance").spine_problems("x", bare)[0].expected


@pytest.mark.parametrize(("declared", "place"), [
    (Tabular(label=Rank(within="query"), weight="importance"), "weight"),
    (Tabular(label=Number(), class_weight="balanced"), "class_weight"),
    (Tabular(label=Classes(), class_weight="even"), "class_weight"),  # type: ignore[arg-type]
    (Tabular(label=Classes(several=True), class_weight="balanced"), "class_weight"),
    (Tabular(weight=3), "weight"),  # type: ignore[arg-type]
])  # fmt: skip
def test_weights_that_do_not_suit_the_label_are_refused(declared: Tabular, place: str) -> None:
    assert [problem.where for problem in declared.problems("x")] == [f"x: {place}"]
