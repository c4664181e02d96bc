"""The task of a declaration: made for a training, and again for the student that came of it."""

import dataclasses
import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from isthmus.distill.declaration import Distillation, Tabular
from isthmus.distill.tabular.student import read_record
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.features.contract.contract import one_of, sha256
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, Problem
from isthmus.transforms.preparation.steps import described

REPORT = "report.json"


@dataclass(frozen=True, eq=False)
class Restored:
    """A student that was trained.

    Attributes:
        task: its task.
        student: it, in eval mode, on the CPU, and without gradients.
        id: of it.
        contract: hash of the one that it was trained under.
    """

    task: Task
    student: nn.Module
    id: str
    contract: str


def create_task(material: Material) -> Task:
    """The task that a declaration names.

    Raises:
        ConfigurationError: there is no such task, or what is declared of its shape it does not have.
        DataError: the table does not hold what the task needs.
    """
    kind, declared = _class(material.declaration), material.declaration
    require_shape(kind, declared.shape, declared.where)
    return kind(material)


def require_shape(task: Task | type[Task], names: Iterable[str], where: str) -> None:
    """Refuses what a task's student is not made with.

    Raises:
        ConfigurationError: there are such names.
    """
    if beyond := [name for name in names if name not in task.shape]:
        expected = one_of(task.shape) if task.shape else "a task that has a `shape`"
        problems = [Problem(f"shape {name!r}", "the student is not made with it", expected) for name in beyond]
        raise ConfigurationError(where, problems)


def restored(material: Material, folder: Path, weights: str = "student") -> Restored:
    """A student as it was trained: what its preparation learned is not learned again.

    Args:
        material: what it was trained with; the contract may have changed since, and the profile.
        folder: of the student.
        weights: "control" gives the one that learned without the teacher.

    Raises:
        ContractMismatch: it was trained on other rows, or as another declaration.
        DataError: it cannot be read.
    """
    try:
        report = json.loads((folder / REPORT).read_bytes())
        before, identity, contract = report["made_of"], str(report["id"]), str(report["contract"])
        learned = str(before["training_set"])
    except (OSError, ValueError, LookupError) as error:
        raise _unreadable(folder / REPORT, error) from error
    where = f"student {identity} of {material.declaration.name}"
    if learned != material.training_set:
        raise ContractMismatch(where, f"learned from training set {learned}", expected=material.training_set,
                               remedy="run `isthmus distill`")  # fmt: skip
    if isinstance(material.declaration.task, Tabular):
        kept = read_record(folder).preparation
        material = replace(material, learn=lambda _plan, _before: kept)
    task = create_task(material)
    if before != origins(task):
        raise ContractMismatch(
            where,
            "what is declared of it has changed since it was trained",
            expected="the same split, inputs and task",
            remedy="run `isthmus distill`",
        )
    return Restored(task, _weighed(task, folder / f"{weights}.safetensors"), identity, contract)


def require_readable(task: Task, folder: Path, weights: Iterable[str]) -> dict[str, Any]:
    """The report of a student that lies in a folder with all that `restored` reads there.

    Args:
        task: its task.
        folder: of the student.
        weights: names of the models that it must have.

    Raises:
        DataError: something cannot be read.
    """
    try:
        report: dict[str, Any] = msgspec.json.decode((folder / REPORT).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise _unreadable(folder / REPORT, error) from error
    if isinstance(task.material.declaration.task, Tabular):
        read_record(folder)
    for name in task.files(folder.name):
        if not (folder / name).is_file():
            raise _unreadable(folder / name, FileNotFoundError("there is none"))
    for name in weights:
        _weighed(task, folder / f"{name}.safetensors")
    return report


def _weighed(task: Task, file: Path) -> nn.Module:
    """A student with the weights of a file."""
    try:
        with torch.random.fork_rng(devices=[]):
            student = task.student()
        student.load_state_dict(load_file(file))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _unreadable(file, error) from error
    return student.eval().requires_grad_(requires_grad=False)


def origins(task: Task) -> dict[str, str]:
    """What a student is of: its training set, and a digest of the task and of what it is about."""
    material, declared = task.material, task.material.declaration
    kind: Any = fingerprint(type(task))
    if isinstance(declared.task, Tabular):
        plan = declared.task.plan(material.student_inputs)
        numbers = {name: [described(step) for step in chain] for name, chain in plan.numbers.items()}
        kind = {
            **dataclasses.asdict(replace(declared.task, preparation={})),
            "preparation": {**numbers, **{name: described(text) for name, text in plan.texts.items()}},
        }
    about = {
        "task": kind,
        "label": material.label,
        "inputs": [[item.name, item.dtype.name] for item in material.student_inputs],
        "split": [*declared.split, declared.split_by],
        **({"shape": dict(declared.shape)} if declared.shape else {}),
    }
    return {"training_set": material.training_set, "kind": sha256(about)}


def _class(declaration: Distillation) -> type[Task]:
    if isinstance(declaration.task, Tabular):
        return TabularTask
    module, _, name = declaration.task.partition(":")
    where = f"{declaration.where}: task"
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigurationError(where, [Problem(declaration.task, f"cannot be imported ({error})")]) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigurationError(
            where, [Problem(declaration.task, f"is {found!r}", "a subclass of isthmus.distill.tasks.task.Task")]
        )
    return found


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(str(file), f"cannot be read: {error}", expected="a trained student", remedy="run distill again")
