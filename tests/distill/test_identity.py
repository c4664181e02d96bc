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

from isthmus.distill.declaration import EXPORTING, JUDGING
from isthmus.distill.distillation import JUDGED_ANEW, DistillationReport
from isthmus.distill.export.export import export
from isthmus.distill.restore import code_description
from isthmus.features.errors import ContractMismatch
from tests.distill.conftest import SERVING
from tests.distill.support import PROFILE, material, run

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


CHANGES = [
    ('"int8": 0.5}', '"int8": 0.6}', ""),
    ("self.golden = 4", "self.golden = 5", ""),
    ("** 2).mean()", "** 2).mean() + 0", "reports"),
    ('answers["value"]', 'answers["value"] + 0', "reports"),
    ('["hour"]', '["weekend"]', "reports"),
    ("take(rows)", "take(rows + 0)", "reports"),
    ("self._fed(torch.from_numpy(rows))", "self._fed(torch.from_numpy(rows + 0))", "reports"),
    ("SHARE = 0.9", "SHARE = 0.8", "trains"),
    ("0.1, input", "0.2, input", "trains"),
    ("return numbers\n", "return numbers + 0\n", "trains"),
    ("* self.scale", "* 2", "trains"),
    ("self.scale = 1.0", "self.scale = 2.0", "trains"),
    ("class Judged(Shaped):", "class Judged(Shaped):\n    metric = 'scaled'\n", "trains"),
    ("return batch._replace", "self.feeds(rows.numpy())\n        return batch._replace", "trains"),
]
ALONE = ("from tests.distill.sampletasks import Shaped", "from isthmus.distill.tasks.task import Task as Shaped")


def test_code_counts_where_it_is_used(written: Any) -> None:
    def digests(*changes: tuple[str, str]) -> tuple[Any, Any]:
        kind = importlib.import_module(written(ALONE, *changes)).Judged
        return code_description(kind, JUDGING), code_description(kind, EXPORTING)

    before = digests()
    for old, new, counts in CHANGES:
        after = digests((old, new))
        found = [part for part, one, other in zip(("trains", "reports"), before, after, strict=True) if one != other]
        assert found == {"": [], "reports": ["reports"], "trains": ["trains", "reports"]}[counts], (old, new)


def test_what_training_reaches_by_any_way_is_part_of_it(written: Any) -> None:
    """`batch` calls `feeds`, or a member whose name is not known."""
    changed = ('{"numbers": self._fed', '{"numbers": 0 + self._fed')
    for way in ("self.feeds(rows)", "getattr(self, 'feeds')(rows)", "getattr(self, 'fe' + 'eds')(rows)"):
        reached = ("return batch._replace", f"{way}\n        return batch._replace")
        kinds = [
            importlib.import_module(written(ALONE, *changes)).Judged for changes in ([reached], [reached, changed])
        ]
        assert code_description(kinds[0], JUDGING) != code_description(kinds[1], JUDGING)


REACHED = """
import operator
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tasks.task import Task
from torch.utils.data import Dataset

def picked(task, name):
    return getattr(task, name)

def times(factor):
    return lambda function: lambda *given: function(*given) * factor

class Judged({base}):
    SCALE = 1.0

    def quality(self, answers, rows, teacher):
        return {{"error": self._fed(rows) * self.SCALE}}

    def _fed(self, rows):
        return rows * 3

    {member}
"""


@pytest.mark.parametrize(
    ("base", "member"),
    [
        ("Task", "def objective(self, weight=SCALE): return weight"),
        ("Task", "shape = {'width': SCALE}"),
        ("Task", "batch = times(SCALE)(Task.batch)"),
        ("Task", "@times(SCALE)\n    def batch(self, rows): return rows"),
        ("Task", "scale = property(_fed)\n\n    def batch(self, rows): return self.scale"),
        ("Task", "_inputs = _fed\n\n    def batch(self, rows): return self._inputs(rows)"),
        ("Task", "def batch(self, rows): return picked(self, '_f' + 'ed')(rows)"),
        ("Task", "def batch(self, rows): return operator.attrgetter('_f' + 'ed')(self)(rows)"),
        ("Task", "def batch(self, rows): return rows * vars(type(self))['SC' + 'ALE']"),
        ("Task", "def batch(self, rows): return [*map(getattr, [self], ['_f' + 'ed'])]"),
        ("Task", "def batch(self, rows): return eval('self._f' + 'ed')(rows)"),
        ("Task", "def __init__(self, material): self.model = self._fed(material)"),
        ("TabularTask", "_answer = SCALE"),
        ("Dataset, Task", "pass"),
    ],
)
def test_what_a_class_or_its_base_reaches_is_part_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, member: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = REACHED.format(base=base, member=member)
    kinds = []
    for n, source in enumerate((text, text.replace("1.0", "2.0").replace("rows * 3", "rows * 4"))):
        name = f"reached_{abs(hash((base, member)))}_{n}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        kinds.append(importlib.import_module(name).Judged)
    assert code_description(kinds[0], JUDGING) != code_description(kinds[1], JUDGING)


def test_the_class_of_a_factory_or_of_a_second_statement_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    start = "from isthmus.distill.tasks.task import Task\n"
    once = "class Judged(Task):\n    def objective(self): return {}\n"
    texts = {
        "factory": "def made(n):\n    class Judged(Task):\n        at_once = n\n    return Judged\nJudged = made({})\n",
        "second": once.format(1) + once.format("{}"),
    }
    for name, text in texts.items():
        for n in (1, 2):
            (tmp_path / f"{name}_{n}.py").write_text(start + text.format(n))
        importlib.invalidate_caches()
        one, other = (code_description(importlib.import_module(f"{name}_{n}").Judged, JUDGING) for n in (1, 2))
        assert one != other, name


@pytest.fixture
def steps() -> Iterator[list[int]]:
    """A number for each step of an optimizer."""
    taken: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    yield taken
    handle.remove()


@pytest.fixture
def distilled(written: Any, table: pa.Table, tmp_path: Path, steps: list[int]) -> Any:
    """Returns a function from changes of the source to the report and the number of steps that it took."""

    def distill(*changes: tuple[str, str], **more: Any) -> tuple[DistillationReport, int]:
        steps.clear()
        task = f"{written(*changes)}:Judged"
        return run(tmp_path, table, PROFILE, task=task, epochs=1, **{"seeds": 1, **more}), len(steps)

    return distill


BROKEN = ('"scaled": self.scale}', '"scaled": 1 / (len(rows) - len(self.material.parts.test))}')
SCALED = ('"scaled": self.scale}', '"scaled": 2.0}')


@pytest.mark.accept
def test_a_metric_that_raises_after_the_training_loses_nothing(distilled: Any, steps: list[int]) -> None:
    with pytest.raises(ZeroDivisionError):
        distilled(BROKEN)
    assert len(steps) == 2 * 22
    notes: list[str] = []
    report, taken = distilled(notes=notes)
    assert (report.trained, taken) == (True, 0)
    assert JUDGED_ANEW in " ".join(notes)
    assert sum("is trained already, to step" in note for note in notes) == 2


@pytest.mark.accept
@pytest.mark.slowest
def test_a_correction_of_the_judging_trains_nothing(
    distilled: Any, written: Any, table: pa.Table, tmp_path: Path, steps: list[int]
) -> None:
    def packed(*changes: tuple[str, str]) -> Path:
        return export(
            material(table, task=f"{written(*changes)}:Judged", seeds=1, epochs=1), first.path, tmp_path / "packages",
            contract={"views": {}}, profile=SERVING, cache=tmp_path / "cache",
        ).path  # fmt: skip

    first, taken = distilled()
    assert taken == 2 * 22
    weights = {name: (first.path / f"{name}.safetensors").read_bytes() for name in ("student", "control")}
    for change in (('["hour"]', '["weekend"]'), SCALED):
        other, taken = distilled(change)
        assert (taken, other.id != first.id) == (0, True)
        assert {name: (other.path / f"{name}.safetensors").read_bytes() for name in weights} == weights
    assert other.data["models"]["student"]["quality"]["scaled"] == 2.0
    # Of an export setting the package alone; of figures, after they were measured again.
    assert packed().exists()
    assert packed(('"int8": 0.5}', '"int8": 0.6}')).exists()
    with pytest.raises(
        ContractMismatch, match=r"an earlier version of the task's code.*Run `isthmus distill`: it measures"
    ):
        packed(SCALED)
    assert len(steps) == 0
    # What the weights depend on, and what is asked for.
    learning = ("SHARE = 0.9", "SHARE = 0.8")
    assert distilled(learning)[1] == distilled(learning, again=True)[1] == 2 * 22


@pytest.mark.accept
def test_the_best_seed_is_that_of_the_metric_of_today(distilled: Any) -> None:
    first, _ = distilled(seeds=3)
    other, taken = distilled(("return told(", "return -told("), seeds=3)
    assert taken == 0
    assert other.data["shipped"] != first.data["shipped"]


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
