"""The declaration of a distillation: which features each model sees, how the student learns, and what it must reach."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from isthmus.distill.settings import TrainingSettings
from isthmus.features.contract.contract import one_of
from isthmus.features.definition.spec import FeatureService, Spine
from isthmus.features.errors import Problem
from isthmus.features.types import DataType, String
from isthmus.transforms.preparation.steps import Embed, Impute, Standardize, Step, Text

if TYPE_CHECKING:
    # Definitions import no third-party library.
    from isthmus.features.profiles import TrainingProfile

DEFAULT: tuple[Step, ...] = (Standardize(), Impute(0.0))
"""What is done to a number, unless something else is declared."""

TABLES = TrainingSettings(learning_rate=2e-3, weight_decay=1e-2)
"""How a student is trained if nothing is declared."""


ONNX_RUNTIME, EXECUTORCH = "onnxruntime", "executorch"


class Named(Protocol):
    """An input: its name and its type."""

    @property
    def name(self) -> str:
        """Its column."""

    @property
    def dtype(self) -> DataType:
        """Its type."""


class Plan(NamedTuple):
    """What is done to each input: the steps of the numbers, and what is made of the texts."""

    numbers: Mapping[str, Sequence[Step]]
    texts: Mapping[str, Text]


@dataclass(frozen=True, kw_only=True)
class Tabular:
    """The task of answering yes or no from a row of features: gradient boosting teaches a small network.

    Attributes:
        hidden: width of the student's hidden layers, first to last.
        dropout: share of hidden units left out in a training step.
        temperature: T of the distillation loss; larger softens the teacher's probabilities.
        soft_weight: share of the teacher's term in the loss; 0 learns from the labels alone.
        teacher_rounds: trees of the gradient boosting.
        teacher_learning_rate: weight of each tree.
        preparation: what is done to the student's inputs: input, or pattern of inputs with * and ?, to the steps of a
            number or to what is made of a text. The first pattern that fits counts; for others, numbers are
            standardized and texts embedded.
    """

    hidden: Sequence[int] = (64, 32)
    dropout: float = 0.1
    temperature: float = 2.0
    soft_weight: float = 0.7
    teacher_rounds: int = 40
    teacher_learning_rate: float = 0.2
    preparation: Mapping[str, Sequence[Step] | Text] = field(default_factory=dict)

    def plan(self, inputs: Sequence[Named]) -> Plan:
        """What is done to each input of the student."""
        numbers: dict[str, tuple[Step, ...]] = {}
        texts: dict[str, Text] = {}
        for item in inputs:
            chosen = next((how for name, how in self.preparation.items() if fnmatchcase(item.name, name)), None)
            if item.dtype == String:
                texts[item.name] = Embed() if chosen is None or isinstance(chosen, Sequence) else chosen
            else:
                numbers[item.name] = tuple(chosen) if isinstance(chosen, Sequence) else DEFAULT
        return Plan(numbers, texts)

    def misfits(self, where: str, inputs: Sequence[Named]) -> list[Problem]:
        """What in the preparation does not fit the student's inputs."""
        problems = []
        for pattern, how in self.preparation.items():
            place = f"{where}: preparation of {pattern!r}"
            found = [item for item in inputs if fnmatchcase(item.name, pattern)]
            if not found:
                problems.append(
                    Problem(place, "no input of the student has such a name", one_of(i.name for i in inputs))
                )
            steps = isinstance(how, Sequence) and not isinstance(how, str)
            if not (isinstance(how, Text) or (steps and all(isinstance(step, Step) for step in how))):
                problems.append(Problem(place, repr(how), "a list of Log1p, Clip, Impute and Standardize, or one of "
                                        "Embed, OneHot, Ordinal and Hashed"))  # fmt: skip
                continue
            several = how if isinstance(how, Sequence) else [how]
            problems += [Problem(place, repr(one), one.misfit()) for one in several if one.misfit()]
            for item in found:
                if (item.dtype == String) == steps:
                    kind = "a text, which has no steps" if steps else f"of type {item.dtype}, which has no words"
                    expected = "Embed, OneHot, Ordinal or Hashed" if steps else "a list of steps"
                    problems.append(Problem(place, f"{item.name} is {kind}", expected))
        return problems

    def problems(self, where: str) -> list[Problem]:
        """Everything wrong in the values, one entry each."""
        checks = [
            ("hidden", all(width >= 1 for width in self.hidden), "widths of at least 1"),
            ("dropout", 0 <= self.dropout < 1, "at least 0, less than 1"),
            ("temperature", 0 < self.temperature < math.inf, "more than 0"),
            (
                "soft_weight",
                0 < self.soft_weight < 1,
                "more than 0, less than 1: the control learns without the teacher",
            ),
            ("teacher_rounds", self.teacher_rounds >= 1, "at least 1"),
            ("teacher_learning_rate", 0 < self.teacher_learning_rate <= 1, "more than 0, at most 1"),
        ]
        return _problems(self, where, checks)


@dataclass(frozen=True)
class Gate:
    """What a student must reach to be packaged.

    Attributes:
        metric: a figure of its report: "taught" (what the teacher adds to the metric of the task), "gap_closed" (the
            share of the way from the control to the teacher), one that the task adds, or a model and one of its
            figures, such as "student.auc" or "student.p99_us".
        at_least: the least that passes.
        at_most: the most that passes.
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """Which students `isthmus search` tries, to find those that are good, fast and small on this machine.

    What a student may take is said by `[profiles.serving]`: its p99, its memory, and its precision, which is searched,
    too, where that is "fastest".

    Attributes:
        shape: of the student: names of its task's `shape`, each with the values to try. Values next to each other
            should be alike: the search goes along them. Of a `Tabular` these are `width`, of the first hidden layer,
            and `depth`: each layer is half as wide as the one before.
        trials: how many students are tried.
        settings: how each is trained, if not as the distillation says: shorter, say.
        most_bytes: of a model file in ORT format; None for any.
        seed: of the choice.
    """

    shape: Mapping[str, Sequence[Any]]
    trials: int = 30
    settings: TrainingSettings | None = None
    most_bytes: int | None = None
    seed: int = 0

    def problems(self, where: str, task: "Tabular | str") -> list[Problem]:
        """Everything wrong in the values, one entry each."""
        checks = [
            ("shape", bool(self.shape), "at least one name with values"),
            ("trials", self.trials >= 1, "at least 1"),
            ("most_bytes", self.most_bytes is None or self.most_bytes >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**32, "0 to 2**32 - 1"),
        ]
        found = _problems(self, where, checks)
        for name, values in self.shape.items():
            place = f"{where}: shape {name!r}"
            if name == "precision":
                found.append(Problem(place, "is what [profiles.serving] says", "another name"))
            elif not isinstance(values, Sequence) or isinstance(values, str) or not len(values):
                found.append(Problem(place, repr(values), "a sequence of values"))
            elif not all(map(_plain, values)):
                found.append(Problem(place, repr(values), "numbers, truth values, texts, and tuples of them"))
            elif len(set(map(json.dumps, values))) < len(values):  # as the file of a search has them
                found.append(Problem(place, repr(values), "each value once"))
            elif isinstance(task, Tabular) and name not in LAYERS:
                found.append(Problem(place, "is nothing of a Tabular's student", one_of(LAYERS)))
            elif isinstance(task, Tabular) and not all(type(value) is int and value >= 1 for value in values):
                found.append(Problem(place, repr(values), "whole numbers of at least 1"))
        return found


LAYERS = ("width", "depth")
"""What is searched of a `Tabular`'s student."""

OVERALL = ("taught", "gap_closed")
"""Figures of a report that are of no single model, whatever the task is."""

MEASURED = ("lift_kept",)
"""What the report of a `Tabular` adds to them."""


def _plain(value: Any) -> bool:
    """Whether a value stands in JSON as it is."""
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True)
class Distillation:
    """A teacher, a student and how the one learns from the other.

    Attributes:
        name: unique within the project; the name of the model and the start of its package folder.
        spine: the examples and their label.
        teacher: what the teacher sees: everything the server has.
        student: what the student sees: only what the device has when it predicts.
        task: what kind of models they are: a `Tabular`, or where a `Task` of your own is, "module:Class", in a module
            beside the definitions; it is imported where models are trained only.
        settings: how student and control are trained; if it names neither epochs nor steps, as many epochs as
            `[profiles.training]` says. None also takes the batch from there, with the settings of `TABLES`.
        split: shares of the training, validation and test parts, in order of event time.
        split_by: a column of the training set whose values are divided among the parts instead, each with all its
            rows; for rows without times, and only with a task of your own.
        seeds: how many students and controls are trained, each with weights, order of rows and dropout of its own.
        seed: the first of the seeds.
        shape: of the student of a task of your own: values for names of its task's `shape`.
        search: which other students `isthmus search` tries.
        gates: what the student must reach to be packaged. None: the teacher helped, and of tables 95 % of the
            reference's lift over chance is kept.
        runtimes: what the package has a model for: "onnxruntime", which gates and budgets are measured in, and
            "executorch", where that can have the model (docs/packages.md).
        description: for people.
    """

    name: str
    spine: Spine
    teacher: FeatureService
    student: FeatureService
    task: Tabular | str = field(default_factory=Tabular)
    settings: TrainingSettings | None = None
    split: tuple[float, float, float] = (0.7, 0.1, 0.2)
    split_by: str | None = None
    seeds: int = 3
    seed: int = 0
    gates: Sequence[Gate] | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    search: Search | None = None
    runtimes: Sequence[str] = (ONNX_RUNTIME,)
    description: str = ""

    @property
    def where(self) -> str:
        """The distillation, for messages."""
        return f"distillation {self.name}"

    @property
    def required(self) -> Sequence[Gate]:
        """What the student must reach, declared or not."""
        if self.gates is not None:
            return self.gates
        helped = Gate("taught", at_least=0.0)
        return (helped, Gate("lift_kept", at_least=0.95)) if isinstance(self.task, Tabular) else (helped,)

    def misfits(self, inputs: Sequence[Named]) -> list[Problem]:
        """What of the task does not fit the student's inputs."""
        return self.task.misfits(self.where, inputs) if isinstance(self.task, Tabular) else []

    def problems(self) -> list[Problem]:
        """Everything wrong in the values, one entry each."""
        checks = [
            (
                "name",
                bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", self.name)),
                "a letter, then letters, digits, - or _",
            ),
            (
                "task",
                isinstance(self.task, Tabular) or bool(re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", str(self.task))),
                'a Tabular, or "module:Class"',
            ),
            (
                "split",
                len(self.split) == 3 and all(share > 0 for share in self.split) and math.isclose(sum(self.split), 1),
                "three shares above 0 whose sum is 1",
            ),
            (
                "split_by",
                self.split_by is None or not isinstance(self.task, Tabular),
                "None: what prepares a table is learned from the rows before a time",
            ),
            ("seeds", self.seeds >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**32, "0 to 2**32 - 1"),
            (
                "shape",
                not (self.shape and isinstance(self.task, Tabular)) and _plain([*self.shape.values()]),
                "nothing: the layers of a Tabular are its `hidden`"
                if isinstance(self.task, Tabular)
                else "numbers, truth values, texts, and tuples of them",
            ),
            (
                "gates",
                all(gate.at_least is not None or gate.at_most is not None for gate in self.required),
                "at_least or at_most in each",
            ),
            (
                "runtimes",
                ONNX_RUNTIME in self.runtimes and {*self.runtimes} <= {ONNX_RUNTIME, EXECUTORCH},
                f'("{ONNX_RUNTIME}",) or ("{ONNX_RUNTIME}", "{EXECUTORCH}")',
            ),
        ]
        found = _problems(self, self.where, checks)
        if isinstance(self.task, Tabular):
            found += [*self.task.problems(self.where), *self.misnamed(MEASURED)]
        if self.search is not None:
            place = f"{self.where}: search"
            found += [*self.search.problems(place, self.task), *self._misset(self.search.settings, place)]
        return found + self._misset(self.settings, self.where)

    def misnamed(self, measured: Sequence[str]) -> list[Problem]:
        """Gates about no single model whose names no report has.

        Args:
            measured: what the task adds to a report.
        """
        known = (*OVERALL, *measured)
        names = [gate.metric for gate in self.required if "." not in gate.metric and gate.metric not in known]
        expected = f"{one_of(known)}, or a model and one of its figures, as student.p99_us"
        return [Problem(f"{self.where}: gate", repr(name), expected) for name in names]

    def _misset(self, settings: TrainingSettings | None, where: str) -> list[Problem]:
        if settings is None:
            return []
        wrong = replace(self._timed(settings, 1), gate="the task's").problems(where)
        if settings.gate is not None:
            wrong.append(Problem(f"{where}: gate", repr(settings.gate), "None: the task's metric decides"))
        return wrong

    def training_settings(self, profile: "TrainingProfile") -> TrainingSettings:
        """How student and control are trained under a profile."""
        return self._timed(self.settings or replace(TABLES, batch=profile.batch), profile.epochs)

    def search_settings(self, profile: "TrainingProfile") -> TrainingSettings:
        """How the students of a search are trained under a profile."""
        chosen = None if self.search is None else self.search.settings
        return self.training_settings(profile) if chosen is None else self._timed(chosen, profile.epochs)

    def _timed(self, settings: TrainingSettings, epochs: int) -> TrainingSettings:
        return settings if settings.epochs or settings.steps else replace(settings, epochs=epochs)


def _problems(declared: Any, where: str, checks: Sequence[tuple[str, bool, str]]) -> list[Problem]:
    return [
        Problem(f"{where}: {key}", repr(getattr(declared, key)), expected) for key, good, expected in checks if not good
    ]
