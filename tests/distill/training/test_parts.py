"""A batch that is divided has the loss and the gradient of the whole batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from isthmus.distill.restore import create_task
from isthmus.distill.tasks.task import Task, TeacherBatch
from isthmus.distill.training.parts import Parts, losses
from isthmus.distill.training.studentstep import StudentStep
from isthmus.features.errors import ConfigurationError
from tests.distill.dividing import TASKS, Together, gradients
from tests.distill.support import material, training_set
from tests.distill.training.test_loop import launched

NEAR: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize("kind", TASKS)
def test_the_parts_of_a_batch_give_its_loss_and_gradient(kind: str) -> None:
    task = TASKS[kind]()
    whole = gradients(task, 1)
    for accumulation in (2, 4):
        torch.testing.assert_close(gradients(task, accumulation), whole, **NEAR)


@pytest.mark.accept
@pytest.mark.slowest
def test_two_processes_give_the_loss_and_gradient_of_one(tmp_path: Path) -> None:
    with launched(tmp_path, "", str(tmp_path / "result"), module="tests.distill.dividing") as both:
        said, _ = both.communicate(timeout=900)
        assert both.returncode == 0, said
    found = [load_file(tmp_path / f"result.{rank}") for rank in (0, 1)]
    for kind, create in TASKS.items():
        whole = gradients(create(), 1)
        for accumulation in (1, 2):
            for tensors in found:
                for key, value in whole.items():
                    torch.testing.assert_close(tensors[f"{kind}/{accumulation}/{key}"], value, **NEAR)


class Rows:
    """The rows of a task, with the teacher's answers."""

    def __init__(self, task: Task) -> None:
        self.task, self.teacher = task, task.teacher()

    def __len__(self) -> int:
        return len(self.task.material.table)

    def __getitem__(self, rows: Tensor) -> TeacherBatch:
        inputs, labels = self.task.batch(rows)
        answers = self.teacher.ask(self.task.asked(rows.numpy()))
        return TeacherBatch(inputs, labels, {key: torch.as_tensor(value) for key, value in answers.items()})


def together(kind: str = "Together") -> Task:
    return create_task(material(training_set(60), task=f"tests.distill.dividing:{kind}"))


TOGETHER = together()


@given(batch=st.integers(3, 60), accumulation=st.integers(2, 70))
@settings(max_examples=30)
def test_losses_that_compare_rows_see_the_whole_batch(batch: int, accumulation: int) -> None:
    found = []
    for parts in (Parts(torch.arange(batch), 1), Parts(torch.arange(batch), accumulation)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            student, objective = TOGETHER.student(), TOGETHER.objective()
        module, values = nn.ModuleList([student, objective]), dict[str, Tensor]()
        for loss, terms in losses(StudentStep(TOGETHER, student, objective), student, Rows(TOGETHER), parts, 0.5):
            loss.backward()  # type: ignore[no-untyped-call]
            values = {name: values.get(name, torch.tensor(0.0)) + value for name, value in terms.items()}
        found.append({**values, **{name: weights.grad for name, weights in module.named_parameters()}})
    torch.testing.assert_close(*found, **NEAR)


class Normed(nn.Module):
    """Units that are dropped and normalized over a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))

    def forward(self, numbers: Tensor) -> dict[str, Any]:
        vector = self.layers(numbers)
        return {"value": vector.sum(1), "vector": vector, "states": [vector[:, None, [0, 0, 1, 1, 2, 3]]]}


def test_both_passes_drop_the_same_units_and_batch_norm_counts_once() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        student, objective = Normed(), TOGETHER.objective()
        other = Normed()
        other.load_state_dict(student.state_dict())
        rows, batch = Rows(TOGETHER), Rows(TOGETHER)[torch.arange(20)]

        torch.manual_seed(1)
        parts = [other(part) for part in torch.split(batch.inputs[0], 5)]  # with the graph of all parts
        joined: dict[str, Any] = {key: torch.cat([part[key] for part in parts]) for key in ("value", "vector")}
        joined["states"] = [torch.cat([part["states"][0] for part in parts])]
        objective(joined, batch.teacher, batch.labels, 0.5)[0].backward()
        drawn = torch.rand(3)

        torch.manual_seed(1)
        for loss, _ in losses(
            StudentStep(TOGETHER, student, objective), student, rows, Parts(torch.arange(20), 4), 0.5
        ):
            loss.backward()  # type: ignore[no-untyped-call]
        assert torch.equal(torch.rand(3), drawn)  # the next step draws other numbers
    for ours, theirs in zip(student.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **NEAR)
    torch.testing.assert_close(student.state_dict(), other.state_dict(), **NEAR)


class Summed(Together):
    def student(self) -> nn.Module:
        class Mean(nn.Linear):
            def forward(self, numbers: Tensor) -> Any:
                return {"value": super().forward(numbers).mean()}

        return Mean(2, 1)


def test_an_output_that_is_not_per_row_is_refused_with_a_way_out() -> None:
    task = create_task(material(training_set(60), task="tests.distill.training.test_parts:Summed"))
    student = task.student()
    step = StudentStep(task, student, task.objective())
    with pytest.raises(
        ConfigurationError, match=r"output: shape \(\) for 10 rows; expected a row for each row"
    ) as raised:
        next(losses(step, student, Rows(task), Parts(torch.arange(20), 2), 0.5))
    assert "accumulation" in raised.value.remedy


@pytest.mark.parametrize("rows", [1, 5, 7])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_processes_have_each_row_once(rows: int, accumulation: int) -> None:
    def shares() -> Iterator[Parts]:
        return (Parts(torch.arange(rows), accumulation, 3, rank) for rank in range(3))

    counted = [row for parts in shares() if not parts.empty for part in parts.indexes for row in part.tolist()]
    assert counted == list(range(rows))
    for parts in shares():
        for part, place in zip(parts.indexes, parts.slices(), strict=True):
            assert torch.equal(torch.arange(rows)[place], part)
