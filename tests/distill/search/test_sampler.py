"""The next student of a search, and what may be declared of one."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from isthmus.distill.declaration import Search
from isthmus.distill.reports.searchpage import search_page
from isthmus.distill.restore import restore
from isthmus.distill.search.sampler import RANDOM, StudentTrial, propose
from isthmus.distill.search.trials import front
from isthmus.distill.settings import Settings
from isthmus.features.errors import (
    ConfigurationError,
    ContractMismatch,
    DataError,
)
from tests.distill.conftest import make_package
from tests.distill.sampletasks import Line
from tests.distill.searching import FP32, INT8, front_naively, searched, students
from tests.distill.support import declaration, material, run


@given(hnp.arrays(np.float64, st.tuples(st.integers(0, 30), st.integers(1, 4)), elements=st.integers(-3, 3)))
def test_the_front_is_what_nothing_beats(points: np.ndarray[Any, Any]) -> None:
    assert front(points).tolist() == front_naively(points).tolist()


def test_the_front_of_few_points() -> None:
    points = np.array([[1, 3], [2, 2], [3, 1], [3, 3], [2, 2], [-np.inf, 9]])
    assert front(points).tolist() == [True, True, True, False, True, True]


SIZES = {"width": 6, "depth": 3, "precision": 2}


def cost(place: tuple[int, ...]) -> StudentTrial:
    """Wide and deep is good, slow and large; what is wider than the fourth is over the budget."""
    width, depth, precision = place
    if width > 3:
        return StudentTrial(place, None, {"bytes": (width - 3) / 3})
    return StudentTrial(place, (-width - 0.3 * depth + 0.1 * precision, 1.0 + width * depth, 4.0 * width - precision))


def test_every_place_is_tried_once_and_always_in_the_same_order() -> None:
    orders = []
    for _ in range(2):
        known: list[StudentTrial] = []
        while (place := propose(known, SIZES, 7)) is not None:
            known.append(cost(place))
        orders.append([one.place for one in known])
    assert orders[0] == orders[1]
    assert len(orders[0]) == len(set(orders[0])) == 6 * 3 * 2
    assert propose([], SIZES, 7) != propose([], SIZES, 8)


def test_after_the_first_few_the_budget_is_kept_to_more_often() -> None:
    inside = []
    for seed in range(12):
        known: list[StudentTrial] = []
        for _ in range(RANDOM + 6):
            place = propose(known, SIZES, seed)
            assert place is not None
            known.append(cost(place))
        inside.append([one.values is not None for one in known])
    drawn, chosen = np.mean([found[:RANDOM] for found in inside]), np.mean([found[RANDOM:] for found in inside])
    assert drawn == pytest.approx(4 / 6, abs=0.12)
    assert chosen > drawn + 0.15


def test_where_nothing_keeps_to_the_budget_less_is_tried() -> None:
    known: list[StudentTrial] = []
    for _ in range(RANDOM + 12):
        place = propose(known, SIZES, 3)
        assert place is not None
        known.append(StudentTrial(place, None, {"p99": place[0] + 1.0}))
    widths = [one.place[0] for one in known]
    assert np.mean(widths[RANDOM:]) < np.mean(range(6)) - 0.5


def test_where_something_failed_says_nothing_of_what_is_beside_it() -> None:
    places = [(width, depth, 0) for width in (0, 2, 3) for depth in range(3)]
    for seed in range(5):
        told = {
            propose([*map(cost, places), *(StudentTrial((at, 1, 1), None) for at in failed)], SIZES, seed)
            for failed in ((0, 1), (2, 3), (4, 5))
        }
        assert len(told) == 1


@given(st.lists(st.sampled_from(["good", "over", "failed"]), max_size=14), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_whatever_came_of_it_something_new_is_proposed(states: list[str], seed: int) -> None:
    known: list[StudentTrial] = []
    for state in states:
        place = propose(known, SIZES, seed)
        assert place is not None
        assert all(0 <= at < size for at, size in zip(place, SIZES.values(), strict=True))
        assert place not in {one.place for one in known}
        over = {"p99": 0.5} if state == "over" else {}
        known.append(StudentTrial(place, (0.0, 1.0, float(len(known))) if state == "good" else None, over))
    assert propose(known, SIZES, seed) == propose(known, SIZES, seed)


@pytest.mark.parametrize(
    ("task", "of", "words"),
    [
        ("a:B", {"shape": {}}, "search: shape: {}; expected at least one name with values"),
        ("a:B", {"trials": 0}, "search: trials: 0; expected at least 1"),
        ("a:B", {"most_bytes": 0}, "search: most_bytes: 0; expected at least 1"),
        ("a:B", {"seed": -1}, "search: seed: -1; expected 0 to"),
        ("a:B", {"shape": {"units": 3}}, "search: shape 'units': 3; expected a sequence of values"),
        ("a:B", {"shape": {"units": "12"}}, "search: shape 'units': '12'; expected a sequence of values"),
        ("a:B", {"shape": {"units": ()}}, r"search: shape 'units': \(\); expected a sequence of values"),
        ("a:B", {"shape": {"units": (float("nan"),)}}, r"shape 'units': \(nan,\); expected numbers, truth values"),
        ("a:B", {"shape": {"units": ({1},)}}, r"shape 'units': \(\{1\},\); expected numbers, truth values"),
        ("a:B", {"shape": {"units": ((1,), [1])}}, r"shape 'units': \(\(1,\), \[1\]\); expected each value once"),
        (
            "a:B",
            {"shape": {"precision": (1, 2)}},
            r"shape 'precision': is set in \[profiles.serving\]; expected another",
        ),
        ("a:B", {"shape": {"units": (1, 2, 1)}}, r"shape 'units': \(1, 2, 1\); expected each value once"),
        ("a:B", {"settings": Settings(batch=0)}, "search: batch: 0; expected at least 1"),
        ("a:B", {"settings": Settings(steps=1, gate="auc")}, "search: gate: 'auc'; expected None: the task's"),
        (
            None,
            {"shape": {"hidden": (1,)}},
            "shape 'hidden': is not part of the shape of a Tabular's student; expected",
        ),
        (None, {"shape": {"width": (0,)}}, r"shape 'width': \(0,\); expected whole numbers of at least 1"),
        (None, {"shape": {"depth": (1.5,)}}, r"shape 'depth': \(1.5,\); expected whole numbers of at least 1"),
    ],
)
def test_what_is_wrong_in_a_search_is_said(task: str | None, of: dict[str, Any], words: str) -> None:
    declared = Search(**{"shape": {"width": range(1, 4)}, **of})
    problems = declaration(search=declared, **({} if task is None else {"task": task})).problems()
    assert any(re.search(words, str(problem)) for problem in problems), list(map(str, problems))


def test_a_search_is_right() -> None:
    declared = Search(shape={"width": range(8, 65, 8), "depth": [1, 2]}, most_bytes=100_000)
    assert declaration(search=declared).problems() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"of": {"shape": {"width": (1, 2)}}}, "shape 'width': is not in the task's `shape`; expected one of"),
        (
            {"task": "tests.distill.sampletasks:Exact"},
            "serving: precision: int8; expected a precision that the task has: fp32",
        ),
        ({"search": None}, r"search: is not declared; expected Distillation\(search"),
        ({"trials": 0}, "trials: 0; expected at least 1"),
        (
            {"task": "tests.distill.sampletasks:Lines"},
            "'units': is not in the task's `shape`; expected a task with",
        ),
        (
            {"shape": {"width": 3}},
            "distillation late: shape 'width': is not in the task's `shape`; expected one of",
        ),
    ],
)
def test_what_cannot_be_searched_is_said_before_a_teacher_is_asked(
    few: pa.Table, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    notes: list[str] = []
    with pytest.raises(ConfigurationError, match=words):
        searched(tmp_path, few, INT8, told=notes.append, **changes)
    assert notes == []


def test_the_layers_of_a_table_are_declared_in_one_place() -> None:
    (problem,) = declaration(shape={"width": 3}).problems()
    assert str(problem).endswith("shape: {'width': 3}; expected no shape: set the layers of a Tabular with `hidden`")


@pytest.mark.accept
def test_a_table_is_searched_by_width_and_depth(few: pa.Table, tmp_path: Path) -> None:
    shape = {"width": (4, 8), "depth": (1, 2)}
    # The student's weights and its texts' embeddings are less than ten trees.
    changes: dict[str, Any] = {"task": declaration(teacher_rounds=60).task, "of": {"shape": shape}}
    report = searched(tmp_path, few, FP32, trials=4, **changes)
    tried = students(report)
    assert [one.status for one in tried] == ["trained"] * 4, [one.why for one in tried]
    best = tried[report.data["recommended"]]
    hidden = {(4, 1): "(4,)", (4, 2): "(4, 2)", (8, 1): "(8,)", (8, 2): "(8, 4)"}
    chosen = hidden[best.shape["width"], best.shape["depth"]]
    assert report.data["lines"] == {"definitions.py": f"task=Tabular(hidden={chosen})"}
    assert len({one.parameters for one in tried}) == 4


def test_what_was_found_is_declared_and_trained(few: pa.Table, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"task": "tests.distill.sampletasks:Shaped", "seeds": 1, "epochs": 1}
    report = run(tmp_path, few, shape={"units": 5}, **changes)
    assert report.data["models"]["student"]["parameters"] == sum(one.numel() for one in Line(5).parameters())
    again = restore(material(few, shape={"units": 5}, **changes), report.path)
    assert again.task.shape == {"units": 5, "layers": (1,)}
    with pytest.raises(ContractMismatch, match="its declaration has changed"):
        restore(material(few, **changes), report.path)


@pytest.mark.accept
def test_a_precision_that_a_task_lacks_is_said(few: pa.Table, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"task": "tests.distill.sampletasks:Exact", "seeds": 1, "epochs": 1}
    trained = run(tmp_path, few, **changes)
    with pytest.raises(ConfigurationError, match="precision: int8; expected a precision that the task has: fp32"):
        make_package(trained.path, few, tmp_path / "packages", INT8, **changes)


def test_a_page_is_of_a_search() -> None:
    with pytest.raises(DataError, match="format None; expected format 1"):
        search_page({})
    with pytest.raises(DataError, match="missing required field"):
        search_page({"format": 1})
