"""Tasks of every kind, and the gradient of their first step; as a script, in each process: `RESULT [KIND...]`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isthmus.distill.language.teachers import TeacherFunction
from isthmus.distill.losses.embeddings import similarities
from isthmus.distill.losses.hidden import HiddenStates
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.restore import create_task
from isthmus.distill.settings import Settings
from isthmus.distill.tasks.task import Task
from isthmus.distill.teachers.function import FunctionTeacher
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.training.studentrun import train_student
from isthmus.distill.training.teacheroutputs import open_outputs
from tests.distill.causal import support as causal
from tests.distill.labelled import labelled, material_of
from tests.distill.sampletasks import Lines
from tests.distill.support import material, training_set
from tests.distill.tiny import cpu


class Vectors(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(2, 6), nn.Dropout(dropout), nn.Linear(6, 4)

    def forward(self, numbers: Tensor) -> dict[str, Any]:
        hidden = self.drop(self.first(numbers).tanh())
        vector = self.last(hidden)
        return {
            "value": vector.sum(1),
            "vector": vector,
            "states": [hidden[:, None]],
            "constant": torch.ones(len(vector)),
        }


class Together(Lines):
    """Its losses compare the rows of a batch, and one has weights of its own."""

    keys: Sequence[str] = ("value", "vector", "states", "constant")
    dropout = 0.0

    def teacher(self) -> Teacher:
        def ask(numbers: Tensor) -> dict[str, Tensor]:
            vector = torch.cat([numbers.sin(), numbers.cos(), numbers], 1)
            return {"value": vector.sum(1), "vector": vector, "states": vector[:, None, None]}

        return FunctionTeacher(ask, ["value", "vector", "states"], name="vectors")

    def student(self) -> nn.Module:
        return Vectors(self.dropout)

    def objective(self) -> Objective:
        def own(question: Tensor, passage: Tensor) -> Tensor:
            return cross_entropy(question @ passage.T / 0.5, torch.arange(len(question)))

        def near(student: Tensor, teacher: Tensor) -> Tensor:
            return similarities(student, teacher, temperature=0.5)

        states = HiddenStates({0: 0}, student_widths=[6], teacher_widths=[6])
        wide = HiddenStates({0: 0}, student_widths=[6], teacher_widths=[6])
        wide.projections["0"] = nn.Linear(6, 6, bias=False)
        return Objective({
            "labels": Term(mse_loss, input="student.value", target="labels"),
            "own": Term(own, 0.3, question="student.vector", passage="student.vector"),
            "near": Term(near, student="student.vector", teacher="teacher.vector"),
            "states": Term(states, student="student.states", teacher="teacher.states"),
            "wide": Term(wide, student="student.states", teacher="teacher.states"),
        })  # fmt: skip


class Dropped(Together):
    dropout = 0.5


def known(rows: Any) -> Any:
    """Answer only a third of the rows."""
    return np.where(rows["hour"].to_numpy() < 8, 0.8, np.nan)


ABSTAINS = TeacherFunction("tests.distill.dividing:answered", missing="labels")
DELAYED = TeacherFunction("tests.distill.dividing:delayed", missing="labels")


def answered() -> Callable[[Any], Any]:
    return known


def delayed() -> Callable[[Any], Any]:
    return lambda rows: [["delayed"] if hour < 12 else [] if hour < 16 else None for hour in rows["hour"]]


def _table(kind: str, **changes: Any) -> Task:
    table = labelled(kind, 400)
    weights = np.random.default_rng(3).integers(0, 4, len(table)).astype(np.float64)
    return create_task(material_of(kind, table.append_column("weight", [weights]), dropout=0.0, **changes))


def _causal(**changes: Any) -> Task:
    return create_task(causal.material(context=24, **changes))


TAUGHT: Mapping[str, Any] = {"teacher": f"{causal.HERE}:teacher", "shape": causal.SHAPE}
TASKS: Mapping[str, Callable[[], Task]] = {
    "binary": lambda: _table("binary"),
    "binary, few answers": lambda: _table("binary", teacher=ABSTAINS),
    "binary, few answers, weights": lambda: _table("binary", teacher=ABSTAINS, weight="weight"),
    "classes": lambda: _table("classes"),
    "classes, balanced": lambda: _table("classes", class_weight="balanced", weight="weight"),
    "several": lambda: _table("several"),
    "several, few answers, weights": lambda: _table("several", teacher=DELAYED, weight="weight"),
    "number": lambda: _table("number"),
    "number, weights": lambda: _table("number", weight="weight"),
    "rank": lambda: _table("rank"),
    "causal, base": _causal,
    "causal, top k": lambda: _causal(**TAUGHT, top_k=8),
    "causal, all logits": lambda: _causal(**TAUGHT, top_k=None, divergence="jsd"),
    "together": lambda: create_task(material(training_set(200), task="tests.distill.dividing:Together")),
}


def gradients(task: Task, accumulation: int, batch: int = 30) -> dict[str, Tensor]:
    """Return the gradient of each weight in the first step, and the "loss"."""
    found: dict[str, Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for n, weights in enumerate(group["params"]):
                found.setdefault(f"{n}", weights.grad.clone())

    settings = Settings(steps=1, batch=batch, accumulation=accumulation)
    rows = np.arange(task.material.table.num_rows)
    handle = register_optimizer_step_pre_hook(keep)
    try:
        with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder:
            torch.manual_seed(3)
            student, objective = task.student(), task.objective()
            outputs = open_outputs(task, task.teacher(), rows, Path(folder) / "cache", lambda *_: None)
            run = train_student(task, student, objective, outputs, settings, Path(folder) / "run", lambda *_: None)
    finally:
        handle.remove()
    return {**found, "loss": torch.tensor(run.state.history[0]["loss"], dtype=torch.float64)}


def main() -> None:
    result, *kinds = sys.argv[1:]
    tensors: dict[str, torch.Tensor] = {}
    for kind in kinds or TASKS:
        task = TASKS[kind]()
        for accumulation in (1, 2):
            tensors |= {f"{kind}/{accumulation}/{key}": of for key, of in gradients(task, accumulation).items()}
    save_file(tensors, f"{result}.{cpu().process_index}")


if __name__ == "__main__":
    main()
