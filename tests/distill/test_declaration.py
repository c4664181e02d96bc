import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from isthmus.distill.declaration import LEAST_STEPS, TABLES
from isthmus.distill.gates import Gate, check_figures
from isthmus.features.profiles import TrainingProfile
from tests.distill.support import declaration


def test_the_defaults_are_right() -> None:
    assert declaration().problems() == []


def test_all_wrong_values_are_reported_at_once() -> None:
    wrong = declaration(
        teacher_rounds=0,
        teacher_learning_rate=0,
        hidden=(0,),
        dropout=1.0,
        learning_rate=float("nan"),
        weight_decay=-1,
        temperature=0,
        soft_weight=1.5,
        split=(0.5, 0.5, 0.5),
        seeds=0,
        seed=-1,
        gates=[Gate("taught")],
    )
    assert [problem.where.split(": ")[1] for problem in wrong.problems()] == [
        "split",
        "seeds",
        "seed",
        "gates",
        "hidden",
        "dropout",
        "temperature",
        "soft_weight",
        "teacher_rounds",
        "teacher_learning_rate",
        "learning_rate",
        "weight_decay",
    ]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"split": 0.5}, "split: 0.5; expected a list, each item a number"),
        (
            {"gates": Gate("taught", at_least=0)},
            "gates: Gate(metric='taught', at_least=0, at_most=None); expected a lis",
        ),
        ({"gates": ["taught"]}, "gates: ['taught']; expected a list, each item a Gate or None"),
        ({"gates": [Gate("taught", at_least=math.nan)]}, "gates: [Gate(metric='taught', at_least=nan, at_most=None)];"),
        ({"settings": "fast"}, "settings: 'fast'; expected a TrainingSettings or None"),
        ({"seeds": "3"}, "seeds: '3'; expected a whole number"),
        ({"runtimes": "litert"}, "runtimes: 'litert'; expected a list, each item a text"),
        ({"hidden": 16}, "hidden: 16; expected a list, each item a whole number"),
        ({"soft_weight": "0.9"}, "soft_weight: '0.9'; expected a number"),
        ({"epochs": "ten"}, "epochs: 'ten'; expected a whole number or None"),
    ],
)
def test_a_value_of_another_type_is_named(values: dict[str, Any], problem: str) -> None:
    (found,) = declaration(**values).problems()
    assert str(found).startswith(f"distillation late: {problem}")


def test_without_gates_the_teacher_must_help_and_tables_keep_their_lift() -> None:
    helped, kept = Gate("taught", at_least=0.0), Gate("lift_kept", at_least=0.95)
    assert declaration().required == (helped, kept)
    assert declaration(task="search.task:Search").required == (helped,)
    assert declaration(gates=[]).required == []


def test_a_gate_about_nothing_is_named() -> None:
    misspelt = [Gate("tuaght", at_least=0), Gate("lift_kept", at_least=0), Gate("student.auc", at_least=0)]
    (problem,) = declaration(gates=misspelt).problems()
    expected = "one of age_cost, gap_closed, lift_kept, taught, or a model and its figure, such as student.p99_us"
    assert str(problem) == f"distillation late: gate: 'tuaght'; expected {expected}"
    # What a task of one's own adds is known where it is imported.
    assert declaration(gates=misspelt, task="search.task:Search").problems() == []


def test_a_task_is_named_by_module_and_class() -> None:
    assert declaration(task="search.task:Search").problems() == []
    (problem,) = declaration(task="search.py").problems()
    assert (
        str(problem)
        == "distillation late: task: 'search.py'; expected a Tabular, a Text, an Image, a Causal, or \"module:Class\""
    )


def test_a_table_is_split_by_time() -> None:
    assert declaration(task="search:Search", split_by="question").problems() == []
    (problem,) = declaration(split_by="carrier").problems()
    assert "split_by: 'carrier'; expected None: a Tabular is always split by time" in str(problem)


def test_the_profile_says_how_long_where_the_declaration_does_not() -> None:
    profile = TrainingProfile(epochs=7, batch=32)
    assert declaration(settings=None).training_settings(profile, 1000) == replace(TABLES, epochs=7, batch=32)
    assert declaration(batch=16).training_settings(profile, 1000).epochs == 7
    assert declaration(batch=16).training_settings(profile, 1000).batch == 16
    assert declaration(steps=5).training_settings(profile, 1000).epochs is None
    # If no one says how long, few rows are read more often.
    usual = TrainingProfile()
    for rows, epochs in ((10, 800), (3600, 200), (229_000, 4), (10**7, 4)):
        found = declaration(settings=None).training_settings(usual, rows)
        assert (found.epochs, found.total(rows) >= LEAST_STEPS) == (epochs, True)
    assert usual.identity() == TrainingProfile(epochs=4).identity()


def test_the_metric_of_the_task_is_the_gate_of_the_training() -> None:
    assert declaration(patience=2).problems() == []
    (problem,) = declaration(gate="loss", patience=2).problems()
    assert str(problem) == "distillation late: gate: 'loss'; expected None: the task's metric decides"


@pytest.mark.parametrize(
    ("value", "holds"), [(0.7, True), (0.69, False), (0.8, True), (0.81, False), (None, False), (float("nan"), False)]
)
def test_a_gate_holds_to_its_bounds(value: float | None, holds: bool) -> None:
    gate = Gate("student.auc", at_least=0.7, at_most=0.8)
    (result,) = check_figures({"student.auc": value, "control.auc": 0.75}, [gate, Gate("taught", at_least=0)])
    assert (result.metric, result.at_least, result.at_most, result.holds) == ("student.auc", 0.7, 0.8, holds)


@pytest.mark.parametrize("module", ["isthmus.distill", "isthmus.distill.declaration", "isthmus.package.manifest"])
def test_no_learning_library_is_imported(module: str) -> None:
    heavy = "{'torch', 'sklearn', 'onnx', 'onnxruntime'}"
    script = f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
