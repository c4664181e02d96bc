"""Creates the task of a declaration, loads trained students, and computes their identities."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from isthmus.distill.causal.models import import_function
from isthmus.distill.causal.task import CausalTask
from isthmus.distill.declaration import EXPORTING, JUDGING, Distillation, Predictor, Tabular
from isthmus.distill.image.embedding import ImageEmbeddingTask
from isthmus.distill.image.picture import PictureTask
from isthmus.distill.image.task import IMAGES, ImageTask
from isthmus.distill.labels import Binary, attributes
from isthmus.distill.language.causal import Causal
from isthmus.distill.language.image import Image, Picture
from isthmus.distill.language.text import Embedding, Text
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.tabular.student import read_preparation, read_record, unreadable
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tabular.users.sources import digest as file_digest
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.text.embedding import EmbeddingTask
from isthmus.distill.text.task import TextTask
from isthmus.features.contract.schema import sha256
from isthmus.features.definition import codehash
from isthmus.features.errors import ConfigurationError, ContractMismatch, Problem, one_of
from isthmus.transforms.preparation.steps import described

REPORT = "report.json"

_TASKS: dict[type, type[Task]] = {Tabular: TabularTask, Text: TextTask, Image: ImageTask, Causal: CausalTask}
_UNLABELED: dict[tuple[type, type], type[Task]] = {
    (Text, Embedding): EmbeddingTask, (Image, Embedding): ImageEmbeddingTask, (Image, Picture): PictureTask,
}  # fmt: skip
"""Tasks of what a `Text` or an `Image` predicts instead of the spine's label."""


@dataclass(frozen=True, eq=False)
class Restored:
    """A trained student with its task, loaded for evaluation or export: in eval mode, on the CPU, without gradients.

    `contract` is the hash of the contract (schema of the features) with which the student was trained.
    """

    task: Task
    student: nn.Module
    id: str
    contract: str


def create_task(material: Material) -> Task:
    """Create the `Task` object of a distillation from its declaration and training set.

    May import the user's modules, and load a teacher or a tokenizer. Raise a ConfigurationError if one of them cannot
    be loaded, or if the declaration does not fit the task, for example sets an option of `shape` that the task lacks.
    Raise a DataError if the training set does not fit the task, and a DependencyError if a package is missing.
    """
    kind = task_class(material.declaration)
    require_shape(kind, material.declaration.shape, material.declaration.where)
    return kind(material)


def task_class(declared: Distillation) -> type[Task]:
    if isinstance(declared.task, str):
        module, _, name = declared.task.partition(":")
        where = f"{declared.where}: task"
        try:
            named = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise ConfigurationError(where, [Problem(declared.task, f"cannot be imported ({error})")]) from error
        if not (isinstance(named, type) and issubclass(named, Task)):
            problem = Problem(declared.task, f"is {named!r}", "a subclass of isthmus.distill.tasks.task.Task")
            raise ConfigurationError(where, [problem])
        return named
    kind = type(declared.task)
    return _UNLABELED.get((kind, type(getattr(declared.task, "predicts", None))), _TASKS[kind])


def require_shape(task: Task | type[Task], names: Iterable[str], where: str) -> None:
    if unknown := [name for name in names if name not in task.shape]:
        expected = one_of(task.shape) if task.shape else "a task with a `shape`"
        problems = [Problem(f"shape {name!r}", "is not in the task's `shape`", expected) for name in unknown]
        raise ConfigurationError(where, problems)


def restore(material: Material, folder: Path, weights: str = "student") -> Restored:
    """Load a trained student with its task, to evaluate or export the student.

    `material` has the current declaration and training set. `folder` is the student's folder, which `distill` wrote.
    `weights` is "student", or "control" for the same network trained without the teacher.

    Raises:
        ContractMismatch: training set, label, inputs, split, shape or task have changed since training. Contract,
            settings and profile may have changed.
        DataError: a file is missing or damaged.
    """
    try:
        report = json.loads((folder / REPORT).read_bytes())
        before, identity, contract = report["made_of"], str(report["id"]), str(report["contract"])
        trained_on = str(before["training_set"])
    except (OSError, ValueError, LookupError) as error:
        raise unreadable(folder / REPORT, error) from error
    where = f"student {identity} of {material.declaration.name}"
    if trained_on != material.training_set:
        raise ContractMismatch(where, f"was trained on training set {trained_on}", expected=material.training_set,
                               remedy="run `isthmus distill`")  # fmt: skip
    if isinstance(material.declaration.task, Tabular):
        preparation = read_record(folder).preparation
        material = replace(material, learn=lambda _plan, _before: preparation)
    elif isinstance(material.declaration.task, Text):
        material = replace(material, learn=lambda _plan, _before: read_preparation(folder))
    task = create_task(material)
    if not same_training(before, task):
        raise ContractMismatch(
            where,
            "its declaration has changed since it was trained",
            expected="the same split, inputs and task",
            remedy="run `isthmus distill`",
        )
    record = folder / IMAGES
    same = not isinstance(task, ImageTask) or (record.is_file() and record.read_bytes() == task.files(identity)[IMAGES])
    if not same:
        raise ContractMismatch(where, "images or labels have changed since it was trained", expected="the same pixels",
                               remedy="run `isthmus distill`")  # fmt: skip
    return Restored(task, _load(task, folder / f"{weights}.safetensors"), identity, contract)


def require_readable(task: Task, folder: Path, weights: Iterable[str]) -> dict[str, Any]:
    """Check that all files of a trained student can be read, so that it need not be trained again; return its report.

    `folder` is the student's folder. `weights` has the names of weight files without extension: "student", "control".
    Raise a DataError if a file is missing or damaged.
    """
    try:
        report: dict[str, Any] = msgspec.json.decode((folder / REPORT).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise unreadable(folder / REPORT, error) from error
    if isinstance(task.material.declaration.task, Tabular):
        read_record(folder)
    for name in task.files(folder.name):
        if not (folder / name).is_file():
            raise unreadable(folder / name, FileNotFoundError("file not found"))
    for name in weights:
        _load(task, folder / f"{name}.safetensors")
    return report


def _load(task: Task, file: Path) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]):
            student = task.finished(task.student())
        student.load_state_dict(load_file(file))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise unreadable(file, error) from error
    return student.eval().requires_grad_(requires_grad=False)


def training_identity(task: Task, settings: TrainingSettings, outputs: str) -> str:
    """Return a digest of everything on which the trained weights of all seeds depend, in 12 hexadecimal digits.

    It names the folder of the training runs, so that finished runs are used again. It covers the rows and their split,
    inputs, label, shape, the metric that selects the weights, settings, seeds, profile, and the versions of Isthmus and
    torch. It does not cover members of the task that affect only report or package (`JUDGING`). `outputs` identifies
    the teacher's outputs: the name of their folder in the cache.
    """
    metric = [task.metric, task.more]
    return _identity(task, settings, outputs, {"training": provenance(task)["training"], "metric": metric})


def student_identity(task: Task, settings: TrainingSettings, outputs: str) -> str:
    return _identity(task, settings, outputs, legacy_origins(provenance(task)))


def _identity(task: Task, settings: TrainingSettings, outputs: str, made_of: dict[str, Any]) -> str:
    material = task.material
    return sha256({
        "contract": material.contract,
        "made_of": made_of,
        "seeds": [material.declaration.seed, material.declaration.seeds],
        "settings": settings.identity(),
        "outputs": outputs,
        "profile": material.profile.identity(),
        "versions": [version("isthmus"), torch.__version__],
    })[:12]  # fmt: skip


def provenance(task: Task) -> dict[str, str]:
    """Return digests of a task's training set and code, which show later whether a student must be trained again.

    A student's report stores them as `made_of`. `training_set` identifies the training set. `kind`, `training` and
    `report` are digests of label, inputs, split, shape and code: `kind` of all code of the task, `training` of the code
    that training uses, and `report` of the code that training or report use.
    """
    return origins_of(type(task), task.material)


def origins_of(kind: type, material: Any) -> dict[str, str]:
    """Return the digests of `provenance` without a `Task` object, for callers that have not loaded the training set.

    `kind` is the task class. `material` needs only the attributes declaration, label, student_inputs and training_set.
    """
    declared = material.declaration
    where = f"{declared.where}: student"
    kinds: dict[str, Any] = {"kind": fingerprint(kind)}
    if isinstance(declared.task, Tabular):
        plan = declared.task.plan(material.student_inputs)
        numbers = {name: [described(step) for step in chain] for name, chain in plan.numbers.items()}
        preparation = {**numbers, **{name: described(text) for name, text in plan.texts.items()}}
        kinds = {"kind": {**_options(declared.task), **_terms(declared.task), "preparation": preparation}}
    elif isinstance(declared.task, Causal):
        # The identity of the outputs covers base and teacher.
        base = declared.task.student
        digest = None if base is None else fingerprint(import_function(base, where))
        kinds = {"kind": {"causal": declared.task.identity(), "student": digest}}
    elif isinstance(declared.task, Text):
        new = declared.task.student
        digest = fingerprint(import_function(new, where)) if isinstance(new, str) else None
        kinds = {"kind": {"text": declared.task.identity(), "student": digest, **_terms(declared.task)}}
        if (start := declared.task.start) is not None:
            kinds["kind"]["start"] = file_digest(material.root / start)
    elif isinstance(declared.task, Image):
        functions = [fingerprint(import_function(name, where)) for name in declared.task.student_functions]
        kinds = {"kind": {"image": declared.task.identity(), "functions": functions, **_terms(declared.task)}}
    else:
        kinds |= {"training": code_description(kind, JUDGING), "report": code_description(kind, EXPORTING)}
    device = declared.student.device
    about = {
        # Leave this out without a device, so that those students keep their identity.
        **({} if device is None else {"ages": device.identity()}),
        "label": material.label,
        "inputs": [[item.name, item.dtype.name, item.size][: 2 + bool(item.size)] for item in material.student_inputs],
        "split": [*declared.split, declared.split_by],
        **({"shape": dict(declared.shape)} if declared.shape else {}),
    }
    digests = {name: sha256({**about, "task": kind}) for name, kind in kinds.items()}
    same = dict.fromkeys(("training", "report"), digests["kind"])
    return {"training_set": material.training_set, **same, **digests}


def legacy_origins(made_of: dict[str, str]) -> dict[str, str]:
    return {key: made_of[key] for key in ("training_set", "kind")}


def same_training(before: dict[str, Any], task: Task, part: str = "training") -> bool:
    """Return True if a trained student is still valid for `task`: its training set and its task are unchanged.

    `before` is `made_of` in the student's report. Compares label, inputs, split, shape and the code that training uses.
    With `part="report"`, also compares the code that the report uses. If `before` has no digest for `part`, as in
    reports of earlier versions, compares all code of the task. Does not compare settings, seeds and profile.
    """
    now = provenance(task)
    return before.get("training_set") == now["training_set"] and (
        before.get("kind") == now["kind"] or before.get(part) == now[part]
    )


@lru_cache
def code_description(kind: type, without: frozenset[str]) -> Any:
    """Describe the code of a task class as plain data, to detect by a hash whether it has changed.

    `kind` is the task class; its bases that the user wrote are included. Includes the members that Isthmus uses and
    that are not in `without`, and all members that included code uses. Leaves out nothing if the code accesses
    attributes by computed names, if a class has a decorator or a metaclass, or if a base class comes from an installed
    package.
    """
    users = [each for each in kind.__mro__ if codehash.is_user_code(each)]
    ours = [each for each in kind.__mro__ if each.__module__.startswith("isthmus.")]
    libraries = [fingerprint(each) for each in kind.__mro__ if each not in users and each is not object]
    trees = [codehash.class_tree(each) for each in users]
    own = {name for tree in trees for node in tree.body for name in _names(node)}
    own |= {name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assign) for name in _set(node)}
    called = {name for each in ours for name in (*dir(each), *re.findall(r"self\.(\w+)", inspect.getsource(each)))}
    reached = {name for name in own if name in called - without or name.startswith("__")}
    if any(tree.decorator_list or tree.keywords for tree in trees) or not {*kind.__mro__} <= {
        *users, *ours, *Task.__mro__
    }:  # fmt: skip
        reached = own
    while more := _mentioned(own - reached, text := _described(users, own - reached)):
        reached |= more
    return [text, libraries]


def _described(kinds: Sequence[type], without: Collection[str]) -> str:
    parts = []
    for kind in kinds:
        tree = codehash.class_tree(kind)
        body = [node for node in tree.body if not (_names(node) and _names(node) <= {*without})]
        tree.body = [_Unset(without).visit(node) for node in body] or [ast.Pass()]
        parts += [codehash.described(tree, kind, kinds), [f".{name}" for name in _read(tree)]]
    return json.dumps(parts)


def _mentioned(names: Collection[str], text: str) -> set[str]:
    unknown = r"getattr(?!\([\w.]+, '\w+'[,)])"
    computed = rf"{unknown}|attrgetter|methodcaller|getmembers|(vars|dir)\(|__dict__|(?<![.\w])(eval|exec)\("
    if re.search(computed, text):
        return {*names}
    return {*names} & {name for pair in re.findall(r"\.(\w+)|'(\w+)'", text) for name in pair}


def _read(tree: ast.ClassDef) -> list[str]:
    parts = [
        part
        for node in tree.body
        for part in ([*node.decorator_list, node.args] if isinstance(node, ast.FunctionDef) else [node])
    ]
    return sorted({inner.id for part in parts for inner in ast.walk(part) if isinstance(inner, ast.Name)})


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names if len(names) == len(targets) else set()


def _set(node: ast.Assign) -> set[str]:
    names = {
        target.attr
        for target in node.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    return names if len(names) == len(node.targets) else set()


class _Unset(ast.NodeTransformer):
    """Removes assignments to some attributes of `self`: a task may set a tolerance in `__init__`."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = {*names}

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node  # its `self` is not the task

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        calls = [part for part in ast.walk(node.value) if isinstance(part, ast.Call | ast.NamedExpr)]
        effects = any(isinstance(part, ast.NamedExpr) or "self" in ast.unparse(part) for part in calls)
        return ast.Pass() if _set(node) and _set(node) <= self.names and not effects else node


def _options(task: Tabular) -> dict[str, Any]:
    options = dataclasses.asdict(replace(task, preparation={}, teacher=None, objective=None))
    del options["teacher"], options["objective"]  # covered by the identity of the outputs and by `_terms`
    for name in ("weight", "class_weight"):
        if options[name] is None:
            del options[name]
    for name, usual in (("label", Binary()), ("calibration", None)):
        value = getattr(task, name)
        del options[name]
        if value != usual:
            options[name] = {"kind": type(value).__name__, **attributes(value)}
    return options


def _terms(task: Predictor) -> dict[str, Any]:
    return {} if task.objective is None else {"objective": [fingerprint(term) for term in task.objective]}
