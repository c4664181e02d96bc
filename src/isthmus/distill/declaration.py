"""The declaration of a distillation: inputs of each model, training of the student, and the gates it must pass."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from isthmus.distill.gates import OVERALL, Gate, bound_problems, have_limits
from isthmus.distill.labels import Binary, Calibration, Label, Monitor, Rank, can_balance
from isthmus.distill.language.causal import GAIN, REGRESSION, UNSHAPED, Causal
from isthmus.distill.language.image import Image
from isthmus.distill.language.objective import DeclaredTerm, objective_problems
from isthmus.distill.language.teachers import DeclaredTeacher, abstains, teacher_problems
from isthmus.distill.language.text import Text
from isthmus.distill.settings import TrainingSettings, failed_checks
from isthmus.features.definition.failure import type_problems
from isthmus.features.definition.spec import OWNER, FeatureService, Spine, is_owner
from isthmus.features.errors import Problem, one_of
from isthmus.features.types import DataType, String, element_names
from isthmus.transforms.preparation.steps import Embed, Encoding, Impute, Standardize, Step

if TYPE_CHECKING:
    # Definitions must not import third-party libraries.
    from isthmus.features.profiles import TrainingProfile

DEFAULT: tuple[Step, ...] = (Standardize(), Impute(0.0))

TABLES = TrainingSettings(learning_rate=2e-3, weight_decay=1e-2)
"""Default settings for the student of a `Tabular`."""
LEAST_STEPS = 800
"""Minimum training steps for a `Tabular`, a `Text` or an `Image` if neither its settings nor the profile set epochs."""

ONNX_RUNTIME, EXECUTORCH, LITERT, COREML = RUNTIMES = ("onnxruntime", "executorch", "litert", "coreml")

EXPORTING = frozenset({
    "tolerance", "tolerances", "rounding", "quantized", "golden", "compared", "max_sizes", "padded", "graph_rows",
    "graph_batches", "network", "writer", "figures", "core", "core_feeds", "expected", "case", "edges", "cases",
    "replies", "row_inputs", "shipped",
})  # fmt: skip
"""Members of a `Task` that affect only the package."""

JUDGING = EXPORTING | {
    "quality", "score", "agreement", "measures", "measured", "sliced", "about", "pipeline", "references", "leaks",
    "line", "model", "feeds", "files",
}  # fmt: skip
"""Members of a `Task` that affect only the report and the package. All other members may affect the weights."""


class _Input(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DataType: ...
    @property
    def size(self) -> int | None: ...


class Plan(NamedTuple):
    """How to prepare each input, by its name: the steps of each number and the encoding of each text."""

    numbers: Mapping[str, Sequence[Step]]
    texts: Mapping[str, Encoding]


@dataclass(frozen=True, kw_only=True)
class Tabular:
    """Predict a label from a row of features: gradient boosting, or a teacher of your own, teaches a small network.

    Attributes:
        label: `Binary`, `Classes`, `Number` or `Rank`.
        teacher: "module:function" or a `TeacherFunction`, an `Onnx`, a `TeacherOutputs`, or a list of these and of
            pairs (teacher, weight), whose weighted mean teaches. None for gradient boosting on the training part.
        calibration: calibration of the student's probabilities: `Temperature`, `Isotonic` or None.
        weight: column of the spine with the weight of each row in the losses and in the gradient boosting: a join key
            or a request field; not for a `Rank`. Metrics and calibration count each row once. None for equal weights.
        class_weight: "balanced" for weights that give the classes of a `Binary` or `Classes` the same sum of weights in
            the training part; None to weigh no classes.
        hidden: widths of the student's hidden layers, first to last.
        dropout: share of hidden units dropped in a training step.
        temperature: temperature of the distillation loss; higher values soften the teacher's probabilities.
        soft_weight: weight of the teacher's term in the loss; the label term gets 1 - soft_weight. With 1, the student
            learns from the teacher alone, and the control from the labels.
        objective: terms of `isthmus.losses`, which replace the losses of label and teacher (docs/transfer.md).
        teacher_rounds: number of trees in the gradient boosting.
        teacher_learning_rate: weight of each tree.
        preparation: maps an input, or a pattern of inputs with * and ?, to the steps of a number or the encoding of a
            text. The first matching pattern counts; by default numbers are standardized and texts embedded.
    """

    label: Label = field(default_factory=Binary)
    teacher: "DeclaredTeacher | str | Sequence[DeclaredTeacher | str | tuple[DeclaredTeacher | str, float]] | None" = (
        None
    )
    calibration: Calibration | None = None
    weight: str | None = None
    class_weight: Literal["balanced"] | None = None
    hidden: Sequence[int] = (64, 32)
    dropout: float = 0.1
    temperature: float = 2.0
    soft_weight: float = 0.7
    objective: Sequence[DeclaredTerm] | None = None
    teacher_rounds: int = 40
    teacher_learning_rate: float = 0.2
    preparation: Mapping[str, Sequence[Step] | Encoding] = field(default_factory=dict)

    def plan(self, inputs: Sequence[_Input]) -> Plan:
        """Return how to prepare each of the student's inputs for the network, to be fitted to the training part.

        An input uses the first entry of `preparation` that matches its name, or else the default for its type: numbers
        are standardized, and texts are embedded.
        """
        numbers: dict[str, tuple[Step, ...]] = {}
        texts: dict[str, Encoding] = {}
        for item in inputs:
            declared = next((how for name, how in self.preparation.items() if fnmatchcase(item.name, name)), None)
            if item.dtype == String:
                texts[item.name] = Embed() if declared is None or isinstance(declared, Sequence) else declared
            else:
                steps = tuple(declared) if isinstance(declared, Sequence) else DEFAULT
                numbers |= dict.fromkeys(element_names(item.name, item.size), steps)
        return Plan(numbers, texts)

    def preparation_problems(self, where: str, inputs: Sequence[_Input]) -> list[Problem]:
        """Check `preparation` against the inputs of the student; return a list of problems, [] if it is valid.

        An entry is a problem if its value is invalid, if it matches no input, or if it does not suit the type of an
        input. `where` names the declaration in the messages.
        """
        problems = []
        for pattern, how in self.preparation.items():
            place = f"{where}: preparation of {pattern!r}"
            matches = [item for item in inputs if fnmatchcase(item.name, pattern)]
            if not matches:
                names = one_of(item.name for item in inputs)
                problems.append(Problem(place, "no input of the student has this name", names))
            steps = isinstance(how, Sequence) and not isinstance(how, str)
            if not (isinstance(how, Encoding) or (steps and all(isinstance(step, Step) for step in how))):
                problems.append(Problem(place, repr(how), "a list of Log1p, Clip, Impute and Standardize, or "
                                        "Embed, OneHot, Ordinal or Hashed"))  # fmt: skip
                continue
            parts = how if isinstance(how, Sequence) else [how]
            problems += [Problem(place, repr(part), misfit) for part in parts if (misfit := part.valid_values_hint())]
            for item in matches:
                if (item.dtype == String) == steps:
                    kind = "a String, which takes an encoding" if steps else f"of type {item.dtype}, which takes steps"
                    expected = "Embed, OneHot, Ordinal or Hashed" if steps else "a list of steps"
                    problems.append(Problem(place, f"{item.name} is {kind}", expected))
        return problems

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: ", ("label", "teacher", "objective", "calibration", "preparation")):
            return wrong
        checks = [
            ("hidden", all(width >= 1 for width in self.hidden), "widths of at least 1"),
            ("dropout", 0 <= self.dropout < 1, "at least 0, less than 1"),
            ("temperature", 0 < self.temperature < math.inf, "more than 0"),
            ("soft_weight", 0 < self.soft_weight <= 1, "more than 0, at most 1"),
            ("teacher_rounds", self.teacher_rounds >= 1, "at least 1"),
            ("teacher_learning_rate", 0 < self.teacher_learning_rate <= 1, "more than 0, at most 1"),
        ]
        taught = teacher_problems(self.teacher, f"{where}: teacher")
        if not taught and isinstance(self.label, Rank) and abstains(self.teacher):
            expected = '"refuse": a Rank is learned from whole groups of answers'
            taught = [Problem(f"{where}: teacher: missing", '"labels"', expected)]
        if not taught and self.soft_weight == 1 and abstains(self.teacher):
            expected = '"refuse", or a soft_weight below 1: with 1, the student does not learn from labels'
            taught = [Problem(f"{where}: teacher: missing", '"labels"', expected)]
        if not isinstance(self.label, Label):
            checks.append(("label", False, "Binary, Classes, Number or Rank"))
            return [*failed_checks(self, where, checks), *taught]
        known = isinstance(self.calibration, Calibration) and isinstance(self.label, self.calibration.labels)
        fits = self.calibration is None or known
        checks.append(
            ("calibration", fits, f"None, or a calibration for {self.label}, which predicts {self.label.gives}")
        )
        balances = self.class_weight == "balanced" and can_balance(self.label)
        checks.append(
            ("class_weight", self.class_weight is None or balances, '"balanced", for one class per row, or None')
        )
        weighs = self.weight is None or not isinstance(self.label, Rank)
        checks.append(("weight", weighs, "None: the loss of a Rank compares the rows of a group"))
        problems = [*failed_checks(self, where, checks), *taught, *self.label.problems(f"{where}: label")]
        return problems or objective_problems(self, where)

    def spine_problems(self, where: str, spine: Spine) -> list[Problem]:
        """Check the label against the spine (the table of training examples); return a list of problems, [] if it fits.

        It is a problem if the type of the label column does not suit the kind of label, if the spine lacks the column
        that `Rank.within` names, or if the column that `weight` names is missing or not numeric. `where` names the
        declaration in the messages.
        """
        return self.label.spine_problems(where, spine, self.weight) if isinstance(self.label, Label) else []


Predictor = Tabular | Text | Image
"""Tasks with the label of the spine."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The students that `isthmus model search` trains to find good, fast and small ones for this machine.

    `[profiles.serving]` limits a student's p99 and memory and sets its precision. With precision "fastest"
    or "smallest", the precision is searched too.

    Attributes:
        shape: values to try for names of the task's `shape`. Order them so that neighbors are similar, since the search
            moves along them. A `Tabular` has `width`, the width of the first hidden layer, and `depth`, the number of
            layers; each layer is half as wide as the one before. An `Image` has the attributes of its student.
        trials: number of students to train.
        settings: training settings of the students, for example shorter ones; None for those of the distillation.
        most_bytes: largest model file in ORT format, in bytes; None for any size.
        seed: seed of the search.
    """

    shape: Mapping[str, Sequence[Any]]
    trials: int = 30
    settings: TrainingSettings | None = None
    most_bytes: int | None = None
    seed: int = 0

    def problems(self, where: str, task: Predictor | Causal | str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        checks = [
            ("shape", bool(self.shape), "at least one name with values"),
            ("trials", self.trials >= 1, "at least 1"),
            ("most_bytes", self.most_bytes is None or self.most_bytes >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**32, "0 to 2**32 - 1"),
        ]
        problems = failed_checks(self, where, checks)
        for name, values in self.shape.items():
            place = f"{where}: shape {name!r}"
            if name == "precision":
                problems.append(Problem(place, "is set in [profiles.serving]", "another name"))
            elif not isinstance(values, Sequence) or isinstance(values, str) or not len(values):
                problems.append(Problem(place, repr(values), "a sequence of values"))
            elif not all(map(_plain, values)):
                problems.append(Problem(place, repr(values), _PLAIN_VALUES))
            elif len(set(map(json.dumps, values))) < len(values):  # as in the search file
                problems.append(Problem(place, repr(values), "each value once"))
            elif isinstance(task, Tabular) and name not in LAYERS:
                problems.append(Problem(place, "is not part of the shape of a Tabular's student", one_of(LAYERS)))
            elif isinstance(task, Tabular) and not all(type(value) is int and value >= 1 for value in values):
                problems.append(Problem(place, repr(values), "whole numbers of at least 1"))
            elif isinstance(task, Image):
                problems += task.shape_problems(place, values, name)
        return problems


LAYERS = ("width", "depth")
"""Names in the shape of a `Tabular`'s student, for a search."""

MEASURED = ("lift_kept", "age_cost")
"""Figures that a `Tabular` adds; `age_cost` only if a device keeps its inputs."""


_PLAIN_VALUES = "numbers, truth values, texts, and tuples of them"


def _is_in_json(number: object) -> bool:
    """Return True for a plain int or float. A manifest cannot store a NumPy number, and a boolean is not a number."""
    return type(number) in (int, float)


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True)
class Distillation:
    """A teacher, a student, and how the student learns.

    Attributes:
        name: unique name within the project; also the model's name and the prefix of its package folder.
        spine: the examples and their label.
        teacher: features the teacher sees; may use everything the server has.
        student: features the student sees; only what the device has when it predicts. If the service has `device`, the
            student is trained on the ages that its stored features may have there, and measured at the greatest age.
        task: the kind of model: a `Tabular`, a `Text`, an `Image`, a `Causal`, or your own `Task` as "module:Class", in
            a module next to the definitions that only training imports.
        settings: training settings of student and control; None also takes the batch size from `[profiles.training]`.
            Without epochs or steps, the profile's epochs count; without those, there are four epochs, but at least 800
            steps for a `Tabular`, a `Text` or an `Image`.
        split: shares of the training, validation and test parts, in order of event time.
        split_by: column of the training set whose equal values stay in one part, for rows without times; not for a
            `Tabular`.
        seeds: number of students to train, each with its own initial weights, row order and dropout. For each
            student, a control is trained: the same student without the teacher.
        seed: first seed.
        shape: values for names of the task's `shape`, for the student of a `Causal` or of your own task.
        search: students that `isthmus model search` trains.
        gates: requirements for packaging. By default the teacher must help, and the student of a `Tabular` must keep 95
            % of the reference's lift over chance; a `Causal` with a `base` must gain on the domain and may lose at most
            1 % elsewhere.
        runtimes: runtimes of the package: "onnxruntime", which gates and budgets are measured in, and optionally
            "executorch", "litert" and "coreml", for models that they support (docs/packages.md).
        stale: answer of a device whose stored features are missing or older than the student's service allows: a
            number, or the name of another distillation whose student reads no stored features. None: the device gives
            no answer.
        description: text for reports and pages.
        owner: who is responsible for the model, an email address or "team:NAME".
        bounds: gates checked after packaging, also as checks in Dagster. `isthmus model attribute` checks bounds on a
            stage and a measure, such as "staleness.auc" (docs/attribution.md). `isthmus answers monitor` checks
            bounds on recorded predictions once their labels are known, such as "production.auc" (docs/production.md). A
            deployment that breaks a bound on its loss against the package before it, such as "lost.auc", is rolled
            back. `isthmus deploy` checks bounds on what devices measured, such as "device.p99_us" (docs/packages.md).
        monitor: rules for matching recorded predictions with labels that become known later.
    """

    name: str
    spine: Spine
    teacher: FeatureService
    student: FeatureService
    task: Predictor | Causal | str = field(default_factory=Tabular)
    settings: TrainingSettings | None = None
    split: tuple[float, float, float] = (0.7, 0.1, 0.2)
    split_by: str | None = None
    seeds: int = 3
    seed: int = 0
    gates: Sequence[Gate] | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)
    search: Search | None = None
    runtimes: Sequence[str] = (ONNX_RUNTIME,)
    stale: float | str | None = None
    description: str = ""
    owner: str = ""
    bounds: Sequence[Gate] = ()
    monitor: Monitor = Monitor()  # noqa: RUF009 - immutable

    @property
    def where(self) -> str:
        return f"distillation {self.name}"

    @property
    def label(self) -> Label | None:
        """The kind of label, such as `Binary()`; None if the task has no valid label."""
        label = self.task.label if isinstance(self.task, Predictor) else None
        return label if isinstance(label, Label) else None

    @property
    def kind(self) -> str:
        """The kind of model, in reports and packages: "tabular", "text", "image", "causal", or your "module:Class"."""
        return self.task if isinstance(self.task, str) else type(self.task).__name__.lower()

    @property
    def required(self) -> Sequence[Gate]:
        """The gates (limits on metrics) that a student must pass to be packaged: `gates`, or the task's defaults."""
        if self.gates is not None:
            return self.gates
        if isinstance(self.task, Causal) and self.task.base is not None:
            return (Gate(GAIN, at_least=0.0), Gate(REGRESSION, at_most=0.01))
        helped = Gate("taught", at_least=0.0)
        return (helped, Gate("lift_kept", at_least=0.95)) if isinstance(self.task, Tabular) else (helped,)

    def preparation_problems(self, inputs: Sequence[_Input]) -> list[Problem]:
        """Check `preparation` of a `Tabular` against the student's inputs; return a list of problems, [] if valid.

        Used to check a project before training. Also returns [] for every other kind of task.
        """
        return self.task.preparation_problems(self.where, inputs) if isinstance(self.task, Tabular) else []

    def problems(self) -> list[Problem]:
        # `checks` below covers the type of the task.
        wrong = type_problems(self, f"{self.where}: ", ("task", "stale", "owner"))
        for gate in () if wrong else (*self.required, *self.bounds):
            wrong += type_problems(gate, f"{self.where}: gate, ", ("at_least", "at_most"))
        if wrong:
            return wrong
        tabular, three_shares = isinstance(self.task, Tabular), len(self.split) == 3 and min(self.split) > 0
        built_in = isinstance(self.task, Predictor | Causal)
        named = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", self.name)
        own_task = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", str(self.task))
        label = self.label or Binary()
        fixed = "no shape: set the layers of a Tabular with `hidden`" if tabular else ""
        fixed = UNSHAPED if isinstance(self.task, Causal) and not self.task.shaped else fixed
        fixed = "no shape: set `student` of the task" if isinstance(self.task, Text | Image) else fixed
        checks = [
            ("name", bool(named), "a letter, then letters, digits, - or _"),
            ("task", built_in or bool(own_task), 'a Tabular, a Text, an Image, a Causal, or "module:Class"'),
            ("split", three_shares and math.isclose(sum(self.split), 1), "three shares above 0 whose sum is 1"),
            ("split_by", self.split_by is None or not tabular, "None: a Tabular is always split by time"),
            ("seeds", self.seeds >= 1, "at least 1"),
            ("seed", 0 <= self.seed < 2**32, "0 to 2**32 - 1"),
            (
                "student",
                tabular or self.student.device is None,
                "a service without `device`: only a Tabular can learn from the older features of a device",
            ),
            (
                "stale",
                self.stale is None or self.student.device is not None,
                "None: the student's service has no `device`",
            ),
            (
                "stale",
                isinstance(self.stale, str | None) or (_is_in_json(self.stale) and label.is_possible(self.stale)),
                f"{label.gives}, or a distillation" if label.is_possible(0) else "a distillation",
            ),
            ("shape", not (self.shape and fixed) and _plain([*self.shape.values()]), fixed or _PLAIN_VALUES),
            ("gates", have_limits(self.required), "at_least or at_most in each, finite numbers"),
            ("bounds", have_limits(self.bounds), "at_least or at_most in each, finite numbers"),
            ("owner", is_owner(self.owner), OWNER),
            (
                "runtimes",
                ONNX_RUNTIME in self.runtimes and {*self.runtimes} <= {*RUNTIMES},
                f'"{ONNX_RUNTIME}", alone or with any of ' + ", ".join(f'"{name}"' for name in RUNTIMES[1:]),
            ),
            (
                "runtimes",
                not isinstance(self.task, Causal) or {*self.runtimes} <= {ONNX_RUNTIME, EXECUTORCH},
                f'"{ONNX_RUNTIME}", alone or with "{EXECUTORCH}": other runtimes cannot grow a cache',
            ),
        ]
        problems = [*failed_checks(self, self.where, checks), *bound_problems(self.where, self.label, self.bounds)]
        problems += self.monitor.problems(f"{self.where}: monitor", self.spine)
        if isinstance(self.task, Tabular):
            problems += [*self.task.problems(self.where), *self.gate_problems(MEASURED)]
            problems += self.task.spine_problems(self.where, self.spine)
        if isinstance(self.task, Text | Image):
            problems += [*self.task.problems(self.where), *self.gate_problems(self.task.measured)]
            problems += self.task.spine_problems(self.where, self.spine)
        if isinstance(self.task, Causal):
            problems += self.task.problems(self.where, tuple(gate.metric for gate in self.gates or ()))
            problems += [*self.gate_problems(self.task.measured), *self.task.spine_problems(self.where, self.spine)]
        if self.search is not None:
            place = f"{self.where}: search"
            problems += [*self.search.problems(place, self.task), *self._misset(self.search.settings, place)]
        return problems + self._misset(self.settings, self.where)

    def gate_problems(self, measured: Sequence[str]) -> list[Problem]:
        """Return a problem for each required gate whose metric the report of a student will not have.

        `measured` has the names of the task's own results; "taught" and "gap_closed" are known for every task. Metrics
        with a dot, such as "student.auc", are not checked here, because only the finished report shows them.
        """
        known = (*OVERALL, *measured)
        names = [gate.metric for gate in self.required if "." not in gate.metric and gate.metric not in known]
        expected = f"{one_of(known)}, or a model and its figure, such as student.p99_us"
        return [Problem(f"{self.where}: gate", repr(name), expected) for name in names]

    def _misset(self, settings: TrainingSettings | None, where: str) -> list[Problem]:
        if not isinstance(settings, TrainingSettings):
            return []  # None, or a wrong type that is already reported
        wrong = replace(self._timed(settings), gate="the task's").problems(where)
        if settings.gate is not None:
            wrong.append(Problem(f"{where}: gate", repr(settings.gate), "None: the task's metric decides"))
        return wrong

    def training_settings(self, profile: "TrainingProfile", rows: int) -> TrainingSettings:
        """Return the settings with which a student and its control (a student without the teacher) are trained.

        Uses the declared `settings`, or defaults with the batch size of `profile`. If neither epochs nor steps are set,
        the epochs come from the profile, which defaults to four. If the profile sets none, a `Tabular` gets enough
        epochs for at least 800 steps on `rows`, the number of training rows.
        """
        return self._timed(self.settings or replace(TABLES, batch=profile.batch), profile, rows)

    def search_settings(self, profile: "TrainingProfile", rows: int) -> TrainingSettings:
        """Return the settings with which a search trains its students: `search.settings`, or else `training_settings`.

        If neither epochs nor steps are set, they come from `profile` and from `rows`, the number of training rows, as
        in `training_settings`.
        """
        settings = None if self.search is None else self.search.settings
        if settings is None:
            return self.training_settings(profile, rows)
        return self._timed(settings, profile, rows)

    def _timed(
        self, settings: TrainingSettings, profile: "TrainingProfile | None" = None, rows: int = 1
    ) -> TrainingSettings:
        settings = self.task.with_base_rate(settings) if isinstance(self.task, Causal) else settings
        if settings.epochs or settings.steps:
            return settings
        if profile is None or profile.epochs or not isinstance(self.task, Predictor):
            return replace(settings, epochs=1 if profile is None else profile.passes)
        least = math.ceil(LEAST_STEPS / math.ceil(rows / settings.batch))
        return replace(settings, epochs=max(profile.passes, least))
