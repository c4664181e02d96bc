"""The task of a declaration: made for a training, and again for the student that came of it."""

import dataclasses
import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from isthmus.distill.declaration import Distillation, Tabular
from isthmus.distill.student import read_record
from isthmus.distill.tabular import TabularTask
from isthmus.distill.task import Material, Task
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.features.contract import sha256
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, Problem
from isthmus.transforms import steps

REPORT = "report.json"


@dataclass(frozen=True, eq=False)
class Restored:
    """A student that was trained.

    Attributes:
        task: its task.
        student: it, in eval mode, on the CPU, and without gradients.
        id: of it.
    """

    task: Task
    student: nn.Module
    id: str


def made(material: Material) -> Task:
    """The task that a declaration names.

    Raises:
        ConfigurationError: there is no such task.
        DataError: the table does not hold what the task needs.
    """
    return _class(material.declaration)(material)


def restored(material: Material, folder: Path) -> Restored:
    """A student as it was trained: what its preparation learned is not learned again.

    Args:
        material: what it was trained with; only `profile` may have changed since.
        folder: of the student.

    Raises:
        ContractMismatch: it was trained with something else.
        DataError: it cannot be read.
    """
    try:
        report = json.loads((folder / REPORT).read_bytes())
        before, identity = report["made_of"], str(report["id"])
    except (OSError, ValueError, LookupError) as error:
        raise _unreadable(folder / REPORT, error) from error
    now = origins(material)
    for name, found in now.items():
        if before.get(name) != found:
            raise ContractMismatch(
                f"student {identity} of {material.declaration.name}",
                f"was trained with {name} {str(before.get(name))[:12]}",
                expected=f"{name} {str(found)[:12]}",
                remedy="run training-set and distill again",
            )
    if isinstance(material.declaration.task, Tabular):
        kept = read_record(folder).preparation
        material = replace(material, learn=lambda _plan, _before: kept)
    task = made(material)
    if before["kind"] != sha256(described(task)):
        raise ContractMismatch(
            f"student {identity} of {material.declaration.name}",
            "what is declared of it has changed since it was trained",
            expected="the same split, inputs and task",
            remedy="run `isthmus distill`",
        )
    file = folder / "student.safetensors"
    try:
        with torch.random.fork_rng(devices=[]):
            student = task.student()
        student.load_state_dict(load_file(file))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _unreadable(file, error) from error
    return Restored(task, student.eval().requires_grad_(requires_grad=False), identity)


def origins(material: Material) -> dict[str, str]:
    """What a student was trained with, by name."""
    return {"contract": material.contract, "training set": material.training_set}


def described(task: Task) -> dict[str, Any]:
    """All that a task is, and what it is about, as plain data."""
    material, declared = task.material, task.material.declaration
    kind: Any = fingerprint(type(task))
    if isinstance(declared.task, Tabular):
        plan = declared.task.plan(material.student_inputs)
        numbers = {name: [steps.described(step) for step in chain] for name, chain in plan.numbers.items()}
        kind = {
            **dataclasses.asdict(replace(declared.task, preparation={})),
            "preparation": {**numbers, **{name: steps.described(text) for name, text in plan.texts.items()}},
        }
    return {
        **origins(material),
        "task": kind,
        "label": material.label,
        "inputs": [[item.name, item.dtype.name] for item in material.student_inputs],
        "split": [*declared.split, declared.split_by],
    }


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
            where, [Problem(declaration.task, f"is {found!r}", "a subclass of isthmus.distill.task.Task")]
        )
    return found


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(str(file), f"cannot be read: {error}", expected="a trained student", remedy="run distill again")
