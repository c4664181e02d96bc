import subprocess
import sys

import pytest

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
        soft_weight=1.1,
        split=(0.5, 0.5, 0.5),
        seed=-1,
    )
    assert [problem.where.split(": ")[1] for problem in wrong.problems()] == [
        "teacher_rounds",
        "teacher_learning_rate",
        "hidden",
        "dropout",
        "learning_rate",
        "weight_decay",
        "temperature",
        "soft_weight",
        "split",
        "seed",
    ]


@pytest.mark.parametrize("module", ["isthmus.distill", "isthmus.distill.declaration", "isthmus.features.manifest"])
def test_no_learning_library_is_imported(module: str) -> None:
    heavy = "{'torch', 'sklearn', 'onnx', 'onnxruntime'}"
    script = f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
