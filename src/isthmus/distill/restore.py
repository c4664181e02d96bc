"""The task of a declaration, and a trained student with its task."""

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

from isthmus.distill.causal.task import CausalTask
from isthmus.distill.declaration import Distillation, Tabular
from isthmus.distill.identity import trained_alike
from isthmus.distill.language.causal import Causal
from isthmus.distill.tabular.student import read_record, unreadable
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tasks.task import Material, Task
from isthmus.features.errors import ConfigurationError, ContractMismatch, Problem, one_of

REPORT = "report.json"


@dataclass(frozen=True, eq=False)
class Restored:
    """A trained student, in eval mode, on the CPU, without gradients; `contract` is the hash of its training's."""

    task: Task
    student: nn.Module
    id: str
    contract: str


def create_task(material: Material) -> Task:
    """The task that a declaration names.

    Raises:
        ConfigurationError: there is no such task, or it lacks a name of the declared shape.
        DataError: the table lacks what the task needs.
    """
    kind = task_class(material.declaration)
    require_shape(kind, material.declaration.shape, material.declaration.where)
    return kind(material)


def task_class(declared: Distillation) -> type[Task]:
    """The class of the task that a declaration names; a ConfigurationError if there is none."""
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
    return CausalTask if isinstance(declared.task, Causal) else TabularTask


def require_shape(task: Task | type[Task], names: Iterable[str], where: str) -> None:
    """Raises a ConfigurationError with each name that is not in a task's `shape`."""
    if unknown := [name for name in names if name not in task.shape]:
        expected = one_of(task.shape) if task.shape else "a task that has a `shape`"
        problems = [Problem(f"shape {name!r}", "the student is not created with it", expected) for name in unknown]
        raise ConfigurationError(where, problems)


def restored(material: Material, folder: Path, weights: str = "student") -> Restored:
    """A student with its fitted preparation; the contract and the profile may differ from those of its training.

    Raises:
        ContractMismatch: it was trained on other rows, or as another declaration.
        DataError: it cannot be read.
    """
    try:
        report = json.loads((folder / REPORT).read_bytes())
        before, identity, contract = report["made_of"], str(report["id"]), str(report["contract"])
        learned = str(before["training_set"])
    except (OSError, ValueError, LookupError) as error:
        raise unreadable(folder / REPORT, error) from error
    where = f"student {identity} of {material.declaration.name}"
    if learned != material.training_set:
        raise ContractMismatch(where, f"learned from training set {learned}", expected=material.training_set,
                               remedy="run `isthmus distill`")  # fmt: skip
    if isinstance(material.declaration.task, Tabular):
        preparation = read_record(folder).preparation
        material = replace(material, learn=lambda _plan, _before: preparation)
    task = create_task(material)
    if not trained_alike(before, task):
        raise ContractMismatch(
            where,
            "what is declared of it has changed since it was trained",
            expected="the same split, inputs and task",
            remedy="run `isthmus distill`",
        )
    return Restored(task, _load(task, folder / f"{weights}.safetensors"), identity, contract)


def require_readable(task: Task, folder: Path, weights: Iterable[str]) -> dict[str, Any]:
    """The report of a student, after reading everything that `restored` needs for each name in `weights`.

    Raises a DataError if something cannot be read.
    """
    try:
        report: dict[str, Any] = msgspec.json.decode((folder / REPORT).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise unreadable(folder / REPORT, error) from error
    if isinstance(task.material.declaration.task, Tabular):
        read_record(folder)
    for name in task.files(folder.name):
        if not (folder / name).is_file():
            raise unreadable(folder / name, FileNotFoundError("there is none"))
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
