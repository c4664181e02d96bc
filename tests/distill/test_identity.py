"""What a student is and how it is judged: only a change of the first trains again."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from isthmus.distill.distillation import JUDGED_ANEW, DistillationReport
from isthmus.distill.export.export import export
from isthmus.distill.identity import EXPORTING, JUDGING, code
from isthmus.features.errors import ContractMismatch
from tests.distill.conftest import SERVING
from tests.distill.support import material, run

SOURCE = """
import torch
from torch.nn.functional import mse_loss
from isthmus.distill.losses.objective import Objective, Term
from tests.distill.sampletasks import Shaped

SHARE = 0.9

def told(found, wanted):
    return float(((found - wanted) ** 2).mean())

def turned(numbers):
    return numbers

class Judged(Shaped):
    tolerance = {"fp32": 1e-5, "int8": 0.5}

    def __init__(self, material):
        super().__init__(material)
        self.slices = ["hour"]
        self.golden = 4
        self.scale = 1.0

    def objective(self):
        return Objective({
            "labels": Term(mse_loss, SHARE, input="student.value", target="labels"),
            "teacher": Term(mse_loss, 0.1, input="student.value", target="teacher.value"),
        })

    def quality(self, answers, rows, teacher):
        return {"error": self._error(answers, rows), "scaled": self.scale}

    def _error(self, answers, rows):
        return told(torch.from_numpy(answers["value"]), self.wanted[torch.from_numpy(rows)])

    def batch(self, rows):
        batch = super().batch(turned(rows))
        return batch._replace(inputs=(self._fed(rows),))

    def _fed(self, rows):
        return self.numbers[rows] * self.scale

    def feeds(self, rows):
        return {"numbers": self._fed(torch.from_numpy(rows)).numpy()}

    def sliced(self, rows):
        return self.material.table.select(self.slices).take(rows)
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function from changes of the source to the name of the module that has it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*changes: tuple[str, str]) -> str:
        text = SOURCE
        for old, new in changes:
            assert text.count(old) >= 1
            text = text.replace(old, new, 1)
        name = f"judged_{tmp_path.name.rpartition('-')[2]}_{len([*tmp_path.glob('judged_*.py')])}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    return write


@pytest.mark.parametrize(
    ("old", "new", "trains", "reports"),
    [
        ('"int8": 0.5}', '"int8": 0.6}', False, False),
        ("self.golden = 4", "self.golden = 5", False, False),
        ("** 2).mean()", "** 2).mean() + 0", False, True),
        ('answers["value"]', 'answers["value"] + 0', False, True),
        ('["hour"]', '["weekend"]', False, True),
        ("take(rows)", "take(rows + 0)", False, True),
        ("self._fed(torch.from_numpy(rows))", "self._fed(torch.from_numpy(rows + 0))", False, True),
        ("SHARE = 0.9", "SHARE = 0.8", True, True),
        ("0.1, input", "0.2, input", True, True),
        ("return numbers\n", "return numbers + 0\n", True, True),
        ("* self.scale", "* 2", True, True),
        ("self.scale = 1.0", "self.scale = 2.0", True, True),
        ("class Judged(Shaped):", "class Judged(Shaped):\n    metric = 'scaled'\n", True, True),
        ("return self.numbers[rows] *", "return getattr(self, 'numbers')[rows] *", True, True),
        ("return batch._replace", "self.feeds(rows.numpy())\n        return batch._replace", True, True),
    ],
)
def test_code_counts_where_it_is_used(written: Any, old: str, new: str, trains: bool, reports: bool) -> None:
    kinds = [importlib.import_module(written(*changes)).Judged for changes in ([], [(old, new)])]
    assert (code(kinds[0], JUDGING) != code(kinds[1], JUDGING)) is trains
    assert (code(kinds[0], EXPORTING) != code(kinds[1], EXPORTING)) is reports


def test_what_training_reaches_by_any_way_is_part_of_it(written: Any) -> None:
    """`batch` calls `feeds`, or a member whose name is not known."""
    for way in (
        "self.feeds(rows.numpy())",
        "getattr(self, 'feeds')(rows.numpy())",
        "getattr(self, 'fe' + 'eds')(rows)",
    ):
        reached = ("return batch._replace", f"{way}\n        return batch._replace")
        changed = ('{"numbers": self._fed', '{"numbers": 0 + self._fed')
        kinds = [importlib.import_module(written(*changes)).Judged for changes in ([reached], [reached, changed])]
        assert code(kinds[0], JUDGING) != code(kinds[1], JUDGING)


@pytest.fixture
def steps() -> Iterator[list[int]]:
    """A number for each step of an optimizer."""
    taken: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    yield taken
    handle.remove()


def test_a_correction_of_the_judging_trains_nothing(
    written: Any, table: pa.Table, tmp_path: Path, steps: list[int]
) -> None:
    notes: list[str] = []

    def distilled(*changes: tuple[str, str], **more: Any) -> tuple[DistillationReport, int]:
        notes.clear()
        steps.clear()
        task = f"{written(*changes)}:Judged"
        return run(tmp_path, table, task=task, seeds=2, epochs=1, notes=notes, **more), len(steps)

    def packed(report: DistillationReport, *changes: tuple[str, str]) -> Any:
        return export(
            material(table, task=f"{written(*changes)}:Judged", seeds=2, epochs=1), report.path, tmp_path / "packages",
            contract={"views": {}}, profile=SERVING, cache=tmp_path / "cache",
        )  # fmt: skip

    # A metric that raises loses nothing, and another call goes on with what was trained.
    broken = ('"scaled": self.scale}', '"scaled": 1 / (len(rows) - len(self.material.parts.test))}')
    with pytest.raises(ZeroDivisionError):
        distilled(broken)
    assert len(steps) == 4 * 22
    first, taken = distilled()
    assert taken == 0
    assert JUDGED_ANEW in " ".join(notes)
    assert distilled()[0].trained is False
    weights = {name: (first.path / f"{name}.safetensors").read_bytes() for name in ("student", "control")}

    # Corrections of what is measured.
    for change in (('["hour"]', '["weekend"]'), ('"scaled": self.scale}', '"scaled": 2.0}')):
        other, taken = distilled(change)
        assert (taken, other.id != first.id) == (0, True)
        assert {name: (other.path / f"{name}.safetensors").read_bytes() for name in weights} == weights
    assert other.data["models"]["student"]["quality"]["scaled"] == 2.0

    # Of an export setting the package alone; of figures, after they were measured again.
    assert packed(first).path.exists()
    assert packed(first, ('"int8": 0.5}', '"int8": 0.6}')).path.exists()
    with pytest.raises(
        ContractMismatch, match=r"judges a student has changed.*Run `isthmus distill`: it measures them"
    ):
        packed(first, ('"scaled": self.scale}', '"scaled": 2.0}'))
    assert len(steps) == 0

    # What the weights depend on, and what is asked for.
    assert distilled(("SHARE = 0.9", "SHARE = 0.8"))[1] == 4 * 22
    assert distilled(("SHARE = 0.9", "SHARE = 0.8"), again=True)[1] == 4 * 22


def test_the_best_seed_is_that_of_the_metric_of_today(written: Any, table: pa.Table, tmp_path: Path) -> None:
    turned = ("return told(", "return -told(")
    by_error = run(tmp_path, table, task=f"{written()}:Judged", seeds=3, epochs=1)
    anew = run(tmp_path, table, task=f"{written(turned)}:Judged", seeds=3, epochs=1)
    last = {one["seed"]: one["quality"]["error"] for one in by_error.data["runs"] if one["model"] == "student"}
    assert {one["seed"]: -one["quality"]["error"] for one in anew.data["runs"] if one["model"] == "student"} == last
    assert anew.data["shipped"] != by_error.data["shipped"]


KILLED = """
import os, signal, sys
import {module}
from tests.distill.support import run, training_set
from pathlib import Path
if sys.argv[2] == "kill":
    from isthmus.distill import distillation
    def killing(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    distillation.report = killing
from torch.optim.optimizer import register_optimizer_step_post_hook
taken = []
register_optimizer_step_post_hook(lambda *_: taken.append(1))
run(Path(sys.argv[1]), training_set(), task="{module}:Judged", seeds=1, epochs=1)
print("steps", len(taken))
"""


@pytest.mark.accept
def test_a_kill_between_training_and_judging_goes_on_with_judging(written: Any, tmp_path: Path) -> None:
    module = written()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    done = [
        subprocess.run(
            [sys.executable, "-c", KILLED.format(module=module), str(tmp_path / "all"), how],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )
        for how in ("kill", "go on")
    ]  # fmt: skip
    assert [one.returncode for one in done] == [-9, 0], done[1].stderr
    assert "steps 0" in done[1].stdout
