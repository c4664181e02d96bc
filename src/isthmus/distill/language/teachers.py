"""Teachers of the user's own, as a declaration names them: code, a model in a file, or outputs computed elsewhere."""

import importlib
import math
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from isthmus.features.definition.failure import type_problems
from isthmus.features.errors import Problem

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
FORMS = (
    'a TeacherFunction or "module:function", a Pretrained, an Onnx, a TeacherOutputs, or a list of these and of pairs '
    "with a weight"
)
_FIXED = "a relative path within the project"


@dataclass(frozen=True)
class TeacherFunction:
    """A teacher that a function of yours builds: scikit-learn, XGBoost, LightGBM, torch, or calls to a service.

    The function takes either nothing, and returns a trained model, or the features and labels of the training part, and
    returns a model that it has fitted to them. A model has `predict_proba`, `decision_function` or `predict`, or is a
    torch module or a function. It is called with a pandas DataFrame that has a column per feature of the teacher's
    service (docs/teachers.md). The function is only called if outputs are missing in the cache.

    Attributes:
        function: "module:function", in a module next to the definitions.
        files: files that the function reads, relative to the project. Another content is another teacher.
        version: text that you change when the model changes in a way that code and files do not show, such as a model
            behind a service.
        missing: treatment of rows for which the model answers NaN or None: "refuse", or "labels" to learn them from
            labels alone.
    """

    function: str
    _: KW_ONLY
    files: Sequence[str] = ()
    version: str = ""
    missing: Literal["refuse", "labels"] = "refuse"

    def problems(self, where: str) -> list[Problem]:
        if wrong := _misset(self, where):
            return wrong
        wrong = [] if FUNCTION.fullmatch(self.function) else [Problem(where, repr(self.function), '"module:function"')]
        return wrong + [Problem(f"{where}: files", repr(file), _FIXED) for file in self.files if not within(file)]


@dataclass(frozen=True)
class Onnx:
    """A teacher in ONNX format, run by ONNX Runtime.

    Each input of the model has the name of a feature of the teacher's service, with shape (n,) or (n, 1). A model with
    a single input of shape (n, features) gets the features as float32 numbers, in the order of the service.

    Attributes:
        path: the model's file, relative to the project.
        output: name of the output to use; None if the model has only one output of floating-point numbers.
        gives: meaning of the output: "probabilities", "logits" or "values". None if the output has one of these
            names; a model for a Number or a Rank gives "values".
        classes: names of the classes in the order of the output; None for a Binary label, whose second class is 1.
        missing: treatment of rows for which the model answers NaN: "refuse", or "labels" to learn them from labels
            alone.
    """

    path: str
    _: KW_ONLY
    output: str | None = None
    gives: Literal["probabilities", "logits", "values"] | None = None
    classes: Sequence[str] | None = None
    missing: Literal["refuse", "labels"] = "refuse"

    def problems(self, where: str) -> list[Problem]:
        if wrong := _misset(self, where):
            return wrong
        wrong = [] if within(self.path) else [Problem(f"{where}: path", repr(self.path), _FIXED)]
        if self.gives not in (None, "probabilities", "logits", "values"):
            wrong.append(Problem(f"{where}: gives", repr(self.gives), '"probabilities", "logits", "values" or None'))
        return wrong


@dataclass(frozen=True)
class TeacherOutputs:
    """Outputs of a teacher that ran elsewhere, such as on a cluster or as a hosted language model.

    The file has the spine's join keys and `event_timestamp`, with the types of the spine, and one column of outputs:

    * `probabilities`: the probability of a 1, or a list with a number per class;
    * `logits`: the same as logits;
    * `log_probabilities` with `classes`: lists of the k most likely classes; the other classes share what is left;
    * `values`: a number, for a Number or a Rank; for an Embedding a list, the vector of an image.

    Attributes:
        path: a Parquet or CSV file, or a folder of Parquet files, relative to the project.
        classes: names of the classes in the order of the lists; None for a Binary label, and for `log_probabilities`.
        missing: treatment of training rows that the file lacks, or whose output is null or NaN: "refuse", or "labels"
            to learn them from labels alone.
    """

    path: str
    _: KW_ONLY
    classes: Sequence[str] | None = None
    missing: Literal["refuse", "labels"] = "refuse"

    def problems(self, where: str) -> list[Problem]:
        if wrong := _misset(self, where):
            return wrong
        return [] if within(self.path) else [Problem(f"{where}: path", repr(self.path), _FIXED)]


@dataclass(frozen=True)
class Pretrained:
    """A teacher that is a fine-tuned model of the transformers library, which reads texts, or the images of an `Image`.

    The model has a classification head, a regression head with one number, or for an `Embedding` any head or none. Its
    tokenizer or image processor is in the same folder. Weights are read from safetensors, and no code next to them
    runs.

    Attributes:
        source: folder with `config.json`, `model.safetensors` and the tokenizer or `preprocessor_config.json`, relative
            to the project; `package:NAME/FOLDER` in an installed Python package; or the name of a repository on the
            Hugging Face hub.
        column: feature of the teacher's service that holds the text; None for the only String, and for an `Image`.
        classes: names of the classes in the order of the logits; None for the names in the model's configuration.
        revision: commit, tag or branch of a repository on the hub. Only a commit never changes.
        tokens: tokens of a text that the model reads; None for as many as it can.
    """

    source: str
    _: KW_ONLY
    column: str | None = None
    classes: Sequence[str] | None = None
    revision: str | None = None
    tokens: int | None = None
    missing: ClassVar[Literal["refuse"]] = "refuse"

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: ", ("_",)):
            return wrong
        wrong = [] if within(self.source) else [Problem(f"{where}: source", repr(self.source), f"{_FIXED}, or a name")]
        if self.tokens is not None and self.tokens < 1:
            wrong.append(Problem(f"{where}: tokens", repr(self.tokens), "at least 1, or None"))
        return wrong


DeclaredTeacher = TeacherFunction | Pretrained | Onnx | TeacherOutputs


def teachers(declared: Any) -> list[tuple[DeclaredTeacher, float]]:
    """Return the teachers of a `teacher` argument with their weights; "module:function" becomes a TeacherFunction.

    Call it only if `teacher_problems` finds no problem. Returns [] for None, which selects the task's own teacher.
    """
    if declared is None:
        return []
    items = declared if isinstance(declared, Sequence) and not isinstance(declared, str) else [declared]
    pairs = [item if isinstance(item, tuple) else (item, 1.0) for item in items]
    return [(TeacherFunction(function=one) if isinstance(one, str) else one, float(weight)) for one, weight in pairs]


def abstains(declared: Any) -> bool:
    """Return True if a teacher of a `teacher` argument may leave rows without an answer (`missing="labels"`)."""
    return any(teacher.missing == "labels" for teacher, _ in teachers(declared))


def teacher_problems(declared: Any, where: str) -> list[Problem]:
    """Return a problem for each invalid part of a task's `teacher` argument."""
    if declared is None:
        return []
    several = isinstance(declared, Sequence) and not isinstance(declared, str)
    if several and not declared:
        return [Problem(where, "an empty list", f"None, {FORMS}")]
    problems, weights = [], []
    for number, item in enumerate(declared if several else [declared]):
        place = f"{where} {number + 1}" if several else where
        one, weight = item if isinstance(item, tuple) and len(item) == 2 and several else (item, 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            problems.append(Problem(f"{place}: weight", repr(weight), "a finite number of at least 0"))
        else:
            weights.append(weight)
        if isinstance(one, str):
            one = TeacherFunction(function=one)
        if isinstance(one, DeclaredTeacher):
            problems += one.problems(place)
        else:
            problems.append(Problem(place, repr(one)[:200], FORMS))
    if not problems and not any(weights):
        problems.append(Problem(f"{where}: weights", "0 for each teacher", "a weight above 0"))
    return problems


def function_of(name: str) -> Any:
    """Return what "module:function" names; raise an ImportError or an AttributeError if it does not exist."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _misset(declared: "TeacherFunction | Onnx | TeacherOutputs", where: str) -> list[Problem]:
    if wrong := type_problems(declared, f"{where}: ", ("_",)):
        return wrong
    if declared.missing in ("refuse", "labels"):
        return []
    return [Problem(f"{where}: missing", repr(declared.missing), '"refuse" or "labels"')]


def within(path: str) -> bool:
    parts = re.split(r"[/\\]", path)
    return bool(path) and not path.startswith(("/", "\\")) and ".." not in parts and "\0" not in path
